"""Runs programs over tensors on the CPU, by their tile programs: what the tests of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from custom_ops.load import load

Array = NDArray[Any]


def run(text: str, axes: Sequence[int], inputs: Sequence[Array], *outputs: tuple[str, Sequence[int]]) -> list[Array]:
    """The program's outputs; of each its dtype and shape are given. One thread finds the same as three."""
    library, read = load(), [np.asarray(i, order="C") for i in inputs]
    prepared = library.prepare_program(text, axes, [array.shape for array in read])
    results = []
    for threads in (1, 3):
        arrays = [np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype) for dtype, shape in outputs]
        for array in arrays:
            array.view(np.uint8).fill(0xA5) if array.ndim and array.size else None  # whoever forgets a number is seen
        prepared.run(read, arrays, threads)
        results.append(arrays)
    for one, three in zip(*results, strict=True):
        assert one.tobytes() == three.tobytes()
    return results[0]
