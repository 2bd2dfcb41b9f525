"""Vectors of chosen numbers of another vector: what slices, transposes, stacks and broadcasts come to."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from custom_ops.dynamic.node_code import Builder, Instruction
from custom_ops.errors import DynamicError

MOST = 256  # parts of a vector that are put together


def runs_of(positions: np.ndarray[Any, Any]) -> list[tuple[int, int, bool]]:
    """The parts of which numbers at these positions consist: the first, how many, and whether it is one repeated."""
    found: list[tuple[int, int, bool]] = []
    first, count, step = int(positions[0]), 1, 0
    for before, position in zip(positions.tolist(), positions[1:].tolist(), strict=False):
        if position - before in (0, 1) and (count == 1 or position - before == step):
            step, count = position - before, count + 1
            continue
        found.append((first, count, count > 1 and step == 0))
        first, count, step = position, 1, 0
    return [*found, (first, count, count > 1 and step == 0)]


def pick(builder: Builder, place: int, positions: np.ndarray[Any, Any]) -> int:
    """The vector of these numbers of another.

    Raises:
        DynamicError: it is none, or consists of too many parts.
    """
    if not positions.size:
        raise DynamicError("it gives no number at all; expected at least one")
    found = runs_of(positions)
    if len(found) > MOST:
        raise DynamicError(
            f"it puts {positions.size} numbers together from {len(found)} parts of a vector; expected at most {MOST}: "
            "choose an order in which what belongs together is contiguous"
        )
    parts = [
        repeated(builder, builder.slice(place, first, 1), count) if same else builder.slice(place, first, count)
        for first, count, same in found
    ]
    return builder.concat(*parts)


def repeated(builder: Builder, place: int, count: int) -> int:
    """A vector that has a number `count` times."""
    if builder.width(place) == count and builder.code[place].op != "constant":
        return place
    return builder.add(Instruction("broadcast", count, (place,)))


def table_of(builder: Builder, numbers: np.ndarray[Any, Any]) -> int:
    """A constant vector."""
    groups = [(value, len(list(same))) for value, same in groupby(numbers.tolist(), key=float.hex)]
    if len(groups) > MOST:
        raise DynamicError(
            f"a constant has {len(groups)} different parts; expected at most {MOST}: make it a parameter"
        )
    parts = [repeated(builder, builder.constant(float.fromhex(value)), count) for value, count in groups]
    return builder.concat(*parts)


def is_contiguous(positions: np.ndarray[Any, Any]) -> bool:
    """Whether each number is the one behind the number before it."""
    return bool((np.diff(positions.ravel()) == 1).all())
