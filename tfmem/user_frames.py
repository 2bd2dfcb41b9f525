"""The line of a traceback that the user wrote, for errors and reports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LIBRARIES = ("tensorflow", "keras", "tf_keras", "tfmem", "custom_ops", "numpy")  # whose lines say nothing to a user
_GENERATED = "__autograph_generated_file"


def innermost(frames: Sequence[Any]) -> Any | None:
    """The innermost frame of a file that no library has, or None.

    Args:
        frames: the outermost first, each with `filename`.
    """
    roots = [Path(sys.modules[name].__file__ or "").parent for name in _LIBRARIES if name in sys.modules]
    for frame in reversed(frames):
        path = Path(frame.filename)
        is_file = _GENERATED not in path.name and not frame.filename.startswith("<")
        if is_file and not any(path.is_relative_to(root) for root in roots):
            return frame
    return None
