"""The lines of the user's code that errors name."""

from __future__ import annotations

import functools
import inspect
import linecache
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from custom_ops.errors import DynamicError
from tfmem.user_frames import innermost


def line_in(frames: Sequence[Any]) -> str:
    """The innermost line of the user's; empty if there is none."""
    frame = innermost(frames)
    return _shown(frame.filename, frame.lineno) if frame else ""


def named(name: str, function: Callable[..., Any], error: DynamicError) -> DynamicError:
    """An error that names the kind, and the line of the function that an expression or a result is written in."""
    text = str(error)
    if not text.startswith("kind '"):
        text = f"kind '{name}': {text}"
    if not text.endswith("]"):
        text += _line_of(function, error)
    return DynamicError(text)


def _line_of(function: Callable[..., Any], error: DynamicError) -> str:
    """The line of the user's that raised an error; where it is an error of what the function returned, its first."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [number for number, frame in enumerate(frames) if frame.filename == code.co_filename]
    return line_in(frames[inside[-1] :]) if inside else _shown(code.co_filename, code.co_firstlineno)


def _shown(file: str, number: int | None) -> str:
    text = linecache.getline(file, number or 0).strip()
    return f" [{file}:{number}{f': {text}' if text else ''}]"
