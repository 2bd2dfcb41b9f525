"""Runs an example with the tfmem that is installed, or with the checkout's if none is.

    python examples tree_lstm --help        # from anywhere; `python -m examples.tree_lstm` takes the checkout's

Python looks for modules in the checkout first where it is started there, and the checkout may hold no op library.
"""

import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    """Run the example that the first argument names."""
    programs = (file for file in FOLDER.glob("[a-z]*.py") if "__main__" in file.read_text())
    names = sorted(file.stem for file in programs)
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"usage: python examples NAME [ARGUMENT ...]; there are: {', '.join(names)}")
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() not in (FOLDER, FOLDER.parent)]
    sys.path.append(str(FOLDER.parent))  # behind what is installed
    del sys.argv[0]
    runpy.run_module(f"examples.{sys.argv[0]}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
