"""Integers of 64 bits in regions are exact: constants beyond 2^53, and what is computed with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.stitched_steps import optimized, require_stitched, stitched_ops

INT64 = tf.int64
MOST, LEAST = tf.int64.max, tf.int64.min
EXACT = 2**53 + 1  # which float64 does not hold
LONG = 20_000  # of what Grappler leaves to the step
X = np.array([1, 5, -7, 2**62 - 3, -(2**62) + 3, 0], np.int64)


def _int(value: int) -> tf.Tensor:
    return tf.constant(value, INT64)


CASES: dict[str, Callable[[tf.Tensor], Any]] = {
    "sum": lambda x: x * 2 + EXACT,
    "sentinel": lambda x: tf.where(x > 0, x + 1, MOST) - 1,
    "least": lambda x: tf.maximum(tf.where(x > 0, LEAST, x), x - 3),
    "hash": lambda x: x * 0x5851F42D4C957F2D + 1442695040888963407,
    "stamps": lambda x: (x + 1_732_665_600_123_456_789) * 3,
    "clip": lambda x: tf.clip_by_value(x + 1, -(2**60) - 1, 2**60 + 1),
    "one_hot": lambda x: tf.one_hot(tf.abs(x) % 6, 6, _int(EXACT), _int(-(2**60) - 1), dtype=INT64) + x[:, None],
    "pad": lambda x: tf.pad(x + 1, [[2, 3]], constant_values=EXACT) * 3,
    "fill": lambda x: (tf.fill([6], _int(2**55 + 1)) + x) * 3,
    "range": lambda x: tf.range(_int(2**60 + 1), _int(2**60 + LONG)) * 3 + x[0],
    "equal": lambda x: tf.equal(x + EXACT, EXACT + 1) | tf.equal(x, EXACT),
    "product": lambda x: tf.reduce_prod(x + EXACT),
    "maximum": lambda x: tf.reduce_max(tf.where(x > 0, x, LEAST) - EXACT),
    "argmin": lambda x: tf.argmin(tf.stack([x, x + 1], 1), 1) + x,
    "to_float64": lambda x: tf.cast(x + EXACT, tf.float64) * 2,
    "to_float32": lambda x: tf.cast(x + EXACT, tf.float32) * 2,
    "int32": lambda x: tf.where(tf.cast(x, tf.int32) > 0, tf.int32.min, tf.cast(x, tf.int32)) + tf.int32.max,
}


def step_of(name: str) -> tf.types.experimental.PolymorphicFunction:
    return tf.function(CASES[name], autograph=False, input_signature=[tf.TensorSpec([6], INT64)])


@pytest.mark.parametrize("name", CASES)
def test_constants_are_exact(name: str) -> None:
    stitched = optimized(step_of(name))
    found, expected = stitched(tf.constant(X)), step_of(name)(tf.constant(X))
    require_stitched(stitched)
    np.testing.assert_array_equal(found, expected)


def test_constants_of_uint64_are_exact() -> None:
    """A program computes none: TensorFlow's own kernels do, which a region calls."""
    x = tf.constant([1, 5, 2**64 - 3, 2**63 + 1], tf.uint64)

    def step(x: tf.Tensor) -> Any:
        large = tf.where(x * 2 > 7, x * 2 + (2**63 + 5), tf.uint64.max)
        return large, tf.cast(large, INT64) * 3 + EXACT, tf.pad(large, [[1, 1]], constant_values=2**63 + 7)

    stitched = optimized(tf.function(step))
    found, expected = stitched(x), tf.function(step)(x)
    assert "Mul" in stitched_ops(require_stitched(stitched))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
