"""Checks of what a user gives: each returns the value in the form that the rest of the program expects, or raises."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from numbers import Integral, Real
from typing import Any, NoReturn

import numpy as np

from custom_ops.machine import SHARED_MEMORY
from graph_passes.errors import OptionsError

LARGEST = (1 << 62) - 1  # of what becomes a 64-bit attribute of an op, so that sums of two still fit
_SHOWN = 100  # characters of a wrong value


def shown(value: object) -> str:
    """`value` as a message quotes it: on one line, cut where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the object's own code, or an int with thousands of digits
        text = f"<a {type(value).__name__}>"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """
    Raises:
        OptionsError: always.
    """
    raise OptionsError(f"{name}={shown(value)}: expected {expected}")


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is none of `choices`."""
    if not isinstance(value, str) or value not in choices:
        refuse(name, value, f"one of {', '.join(choices)}")


def whole(name: str, value: Any, least: int = 0, most: int = LARGEST) -> int:
    """A whole number, NumPy's too, but no bool."""
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        limit = f" and at most {most:,}" if isinstance(value, Integral) and int(value) > most else ""
        refuse(name, value, f"a whole number of {least} or more{limit}")
    return int(value)


def number(name: str, value: Any) -> float:
    """A finite number of 0 or more."""
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) < inf:
        refuse(name, value, "a number of 0 or more")
    return float(value)


def truth(name: str, value: Any) -> bool:
    """True or False, NumPy's too; nothing that merely counts as one of them."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    refuse(name, value, "True or False")


def instance(name: str, value: object, wanted: type) -> None:
    """Refuse what is no `wanted`."""
    if not isinstance(value, wanted):
        refuse(name, value, f"a tfmem.{wanted.__name__}(...)")


def text(name: str, value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        refuse(name, value, "a text")
    return str(value)


def directory(name: str, value: Any, otherwise: str = "") -> str:
    """A path as a text; whether it is there is seen where it is used.

    Args:
        name: of the option.
        value: a text or an `os.PathLike`.
        otherwise: what else is allowed, for the message.
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or "\0" in path:
        refuse(name, value, f"the path of a directory{otherwise}")
    return path


def names(name: str, value: Any, of: str = "tensors or ops") -> tuple[str, ...]:
    """Names of tensors or ops, "a" or "a:0"."""
    for item in series(name, value, f"a list of names of {of}"):
        if not isinstance(item, str) or not re.fullmatch(r"\^?[^:^]+(:[0-9]{1,9})?", item):
            refuse(name, item, f'names of {of}, as "loss" or "loss:0"')
    return tuple(value)


def shapes(name: str, value: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by name."""
    expected = 'shapes by input name, {"images": (64, 224, 224, 3)}'
    if not isinstance(value, Mapping):
        refuse(name, value, expected)
    found = {}
    for key, dims in value.items():
        if not isinstance(key, str) or not key:
            refuse(name, key, expected)
        if isinstance(dims, str | bytes) or not isinstance(dims, Iterable):
            refuse(f"{name}[{key!r}]", dims, "a tuple of whole numbers")
        found[key] = tuple(whole(f"{name}[{key!r}]", dim) for dim in dims)
    return found


def architectures(name: str, value: Any, oldest: int) -> tuple[str, ...]:
    """Compute capabilities from `oldest` on, as ("sm_80", "sm_90")."""
    names = series(name, value, 'compute capabilities, as ("sm_80", "sm_90")')
    known = [f"sm_{arch}" for arch in sorted(SHARED_MEMORY) if arch >= oldest]
    for each in names:
        one_of(name, each, known)
    return names


def capabilities(names: Iterable[str]) -> tuple[int, ...]:
    """Compute capabilities as numbers, ascending: 90 for "sm_90"."""
    return tuple(sorted({int(name.removeprefix("sm_")) for name in names}))


def series(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """Several values, in a list or the like."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        refuse(name, value, expected)
    return tuple(value)
