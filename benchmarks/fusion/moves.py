"""Inputs moved by one unit in the last place: as far as sums in another order may lead."""

from __future__ import annotations

import numpy as np

MOVES = 25  # ways in which inputs are moved


def next_numbers(values: np.ndarray, way: float | None = None) -> np.ndarray:
    """Each number of floating point, moved to a next one; integers stay.

    Args:
        values: of any dtype.
        way: infinity, of either sign, that all move towards; else a whole number, by which each moves up or down at
            random; None: away from zero.
    """
    if values.dtype.kind != "f":
        return values
    if way is None:
        towards = values
    elif np.isinf(way):
        towards = np.full_like(values, way)
    else:
        towards = np.random.default_rng(int(way)).random(values.shape) - 0.5
    return np.nextafter(values, np.copysign(np.inf, towards).astype(values.dtype))
