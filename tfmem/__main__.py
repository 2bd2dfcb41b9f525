"""`python -m tfmem`, where the console script `tfmem` is not on the path."""

from __future__ import annotations

import sys

from tfmem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
