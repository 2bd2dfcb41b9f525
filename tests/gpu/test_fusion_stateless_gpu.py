"""Random numbers, and sums of segments, in kernels of regions, beside TensorFlow's own kernels. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import optimized, require_stitched

TYPES = ("float32", "float64", "float16", "bfloat16")

pytestmark = pytest.mark.usefixtures("first_gpu")


def both(function: Callable[..., Any], *arguments: Any, signature: Any = None) -> tuple[list[Any], list[Any]]:
    """What a function gives stitched, and unchanged, from two steps each: the second finds its launch made."""
    plain, step = (tf.function(function, input_signature=signature) for _ in range(2))
    step = optimized(step)
    results = [value for _ in range(2) for value in step(*arguments)]
    require_stitched(step)
    return results, [value for _ in range(2) for value in plain(*arguments)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(64, 1024), (33, 1027), (3, 5, 34), (70001,)])
def test_dropout_to_the_bit(dtype: str, shape: tuple[int, ...]) -> None:
    """Rows of whole groups of numbers, rows that begin within one, and one dimension."""

    def function(x: Any, seed: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            dropped = tf.nn.experimental.stateless_dropout(tf.abs(x), 0.3, seed=seed)
        return dropped, tape.gradient(dropped, x)

    x = tf.cast(tf.constant(np.random.default_rng(0).normal(size=shape)), dtype)
    for found, expected in zip(*both(function, x, tf.constant([5, 7])), strict=True):
        np.testing.assert_array_equal(tf.cast(found, tf.float64), tf.cast(expected, tf.float64))


def test_a_batch_whose_size_is_not_known() -> None:
    def function(x: Any, seed: Any) -> Any:
        dropped = tf.nn.experimental.stateless_dropout(tf.nn.relu(x), 0.5, seed=seed)
        return dropped, dropped + 1.0

    signature = [tf.TensorSpec([None, 24]), tf.TensorSpec([2], tf.int32)]
    for rows in (1, 7, 4096):
        x = tf.constant(np.random.default_rng(rows).normal(size=(rows, 24)).astype(np.float32))
        for found, expected in zip(*both(function, x, tf.constant([rows, 1]), signature=signature), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_mask_beside_a_softmax() -> None:
    def function(x: Any, incoming: Any, seed: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            dropped = tf.nn.experimental.stateless_dropout(tf.nn.softmax(x), 0.1, seed=seed)
        return dropped, tape.gradient(dropped, x, incoming)

    rng = np.random.default_rng(0)
    for columns in (1024, 1023):
        x, incoming = (tf.constant(rng.normal(size=(517, columns)).astype(np.float32)) for _ in range(2))
        results, expected = both(function, x, incoming, tf.constant([3, 4]))
        for found, other in zip(results, expected, strict=True):
            np.testing.assert_array_equal(found == 0, other == 0)
            np.testing.assert_allclose(found, other, 1e-5, 1e-7)


@pytest.mark.parametrize(("taken", "rows"), [(128, 1024), (5, 7), (4000, 3)])
def test_the_gradient_of_a_gather(taken: int, rows: int) -> None:
    """One region; negative ids and ids past the last segment count nowhere."""
    rng = np.random.default_rng(0)
    ids = tf.constant(rng.integers(-1, rows + 1, taken).astype(np.int32))
    data = tf.constant(rng.integers(-3, 4, (taken, 32)).astype(np.float32))  # sums are exact in any order

    def function(data: Any, ids: Any) -> Any:
        total = tf.math.unsorted_segment_sum(tf.nn.relu(data), ids, rows)
        return total, tf.exp(-tf.abs(total))

    results, expected = both(function, data, ids)
    for found, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(found, other, 1e-6, 1e-7)
    step = optimized(tf.function(function))
    step(data, ids)
    assert len(tfmem.report(step).regions) == 1
    require_stitched(step, "UnsortedSegmentSum")
