"""What the tests of TfmemRecurrent give to it, and how they compare what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from custom_ops.recurrent.cell import Cell
from tests.recurrent_cells import arguments


class Tensors(NamedTuple):
    """What a cell reads; the lists of several directions are concatenated."""

    sequences: list[Any]
    invariants: list[Any]
    vectors: list[Any]
    matrices: list[Any]
    states: list[Any]

    def map(self, function: Callable[[Any], Any]) -> Tensors:
        return Tensors(*([function(tensor) for tensor in tensors] for tensors in self))


def tensors_of(cell: Cell, units: int, time: int, batch: int, seed: int = 0, directions: int = 1) -> Tensors:
    """Random float64 numbers that fit `cell`."""
    parts = [arguments(cell, units, time, batch, seed + direction) for direction in range(directions)]
    return Tensors(*([array for part in kind for array in part] for kind in zip(*parts, strict=True)))


def rounded(tensors: Tensors, dtype: tf.DType) -> Tensors:
    """What is left of float64 numbers in `dtype`, as float64."""
    return tensors.map(lambda tensor: tf.cast(tf.cast(tensor, dtype), tf.float64).numpy())


def distance(found: Any, expected: Any) -> float:
    """The largest difference over the largest expected number; infinite if NaN or infinity are elsewhere."""
    found, expected = np.asarray(tf.cast(found, tf.float64)), np.asarray(expected)
    assert found.shape == expected.shape
    special = ~np.isfinite(expected)
    if not np.array_equal(np.where(special, found, 0), np.where(special, expected, 0), equal_nan=True):
        return np.inf
    if np.all(special):
        return 0.0
    found, expected = found[~special], expected[~special]
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))


def distances(found: Any, expected: Any) -> list[float]:
    """The distances of outputs and final states."""
    pairs = [pair for kinds in zip(found, expected, strict=True) for pair in zip(*kinds, strict=True)]
    return [distance(tensor, array) for tensor, array in pairs]


def in_dtype(tensors: Tensors, dtype: tf.DType) -> Tensors:
    return tensors.map(lambda tensor: tf.cast(tensor, dtype))
