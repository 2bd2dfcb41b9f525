"""Where the derivatives of elementwise ops are not finite, or do not exist: what their tests share."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.cell_builder import CellBuilder
from graph_passes.passes.recurrent.lower.elementwise_ops import lower

LARGEST, SMALLEST = 3.0e38, 1.2e-38
DENORMAL = 1e-40
VALUES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, 6.0, -6.0, 7.0, 20.0, -20.0, 95.0, -95.0]
VALUES += [1e-30, -1e-30, SMALLEST, -SMALLEST, 1e30, -1e30, LARGEST, -LARGEST, np.inf, -np.inf, np.nan]
FEW = [0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan]
UPSTREAM = [0.0, -0.0, 1.0, -2.5, 1e-30, LARGEST, np.inf, -np.inf, np.nan]


def points(op: str, count: int, dtype: str) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """Every combination of `count` arguments and an upstream gradient; in float32 denormals are among them.

    TensorFlow's gradient of ClipByValue goes to the upper bound where its value is the lower, if that is larger.
    """
    values, upstream = (FEW if count == 3 else VALUES), UPSTREAM
    if dtype == "float32":
        values, upstream = [*values, DENORMAL, -DENORMAL], [*upstream, DENORMAL]
    combined = np.array(list(product(*[values] * count, upstream)), dtype)
    if op == "ClipByValue":
        combined = combined[combined[:, 1] <= combined[:, 2]]
    if op == "Erf" and dtype == "float64":  # TensorFlow's is NaN at infinity, in float64 alone
        combined = combined[~np.isinf(combined[:, 0])]
    # TensorFlow's vectors and the numbers that fill none differ at denormals: all are to be in vectors.
    combined = np.resize(combined, (-(-len(combined) // 64) * 64, combined.shape[1]))
    *arguments, gradient = np.ascontiguousarray(combined.T)
    return arguments, gradient


def tame_points(op: str, count: int) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """The points of `points` in float32 where two correct implementations agree on what is finite."""
    arguments, gradient = points(op, count, "float32")
    tame = np.ones(len(gradient), bool)
    for array in arguments:
        size = np.abs(array)
        tame &= (size <= 7) | (size >= 1e30) | np.isnan(array)
        tame &= (size == 0) | (size >= 1e-30) | np.isnan(array)
    tame &= (gradient == 0) | (np.abs(gradient) >= 1e-30) | np.isnan(gradient)
    return [array[tame] for array in arguments], gradient[tame]


def cell_of(op: str, count: int, attrs: dict[str, Any]) -> Cell:
    """A TensorFlow op of the columns of a sequence as the output, and a state that has nothing to do with it."""
    builder = CellBuilder()
    columns = builder.sequence(count)
    state = builder.state()
    return builder.build([state], [[lower(builder, op, attrs, columns)]])


def different(found: Any, expected: Any, rtol: float, atol: float = SMALLEST) -> NDArray[Any]:
    """Where two arrays are neither both NaN, nor the same infinity, nor close to each other."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    with np.errstate(all="ignore"):
        close = np.abs(found - expected) <= rtol * np.abs(expected) + atol
    return np.flatnonzero(~((found == expected) | (np.isnan(found) & np.isnan(expected)) | close))
