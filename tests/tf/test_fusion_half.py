"""Half types, end to end: elementwise arithmetic is TensorFlow's to the bit, sums are kept in float32 until the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.stitched_steps import optimized, require_stitched

HALVES = [tf.float16, tf.bfloat16]
STEP = {tf.float16: 2.0**-11, tf.bfloat16: 2.0**-8}  # half a unit in the last place, relative


def given(dtype: Any, shape: tuple[int, ...] = (64, 96)) -> Any:
    return tf.cast(tf.random.stateless_normal(shape, [1, 2]), dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_arithmetic_is_rounded_after_each_op(dtype: Any) -> None:
    @tf.function
    def step(x: Any, y: Any) -> Any:
        scaled = (x * 3.0 + y) / (tf.abs(y) + 0.5) - x * y
        chosen = tf.where(scaled > 0.25, tf.maximum(scaled, x), tf.minimum(y, scaled * scaled))
        return tf.nn.relu(chosen) - tf.sqrt(tf.abs(scaled)) * 0.1, tf.cast(chosen, tf.float32) * 3.0

    fused = optimized(step)
    x, y = given(dtype), given(dtype)[::-1]
    for found, expected in zip(fused(x, y), step(x, y), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(tf.cast(found, tf.float32).numpy(), tf.cast(expected, tf.float32).numpy())
    require_stitched(fused, "SelectV2", "Cast")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("axis", [0, 1, None])
def test_sums_are_as_exact_as_their_result_can_be(dtype: Any, axis: int | None) -> None:
    @tf.function
    def step(x: Any) -> Any:
        shifted = x * 0.5 + 1.0
        return tf.reduce_sum(shifted, axis), tf.reduce_mean(shifted, axis), tf.reduce_max(shifted, axis)

    fused = optimized(step)
    x = given(dtype, (500, 96))
    found = [tf.cast(each, tf.float64).numpy() for each in fused(x)]
    shifted = tf.cast(x * 0.5 + 1.0, tf.float64).numpy()
    exact = [shifted.sum(axis), shifted.mean(axis), shifted.max(axis)]
    for result, number in zip(found, exact, strict=True):
        np.testing.assert_allclose(result, number, 1.01 * STEP[dtype])
    require_stitched(fused, "Sum", "Mean", "Max")


@pytest.mark.parametrize("dtype", HALVES)
def test_softmax_is_as_exact_as_its_result_can_be(dtype: Any) -> None:
    @tf.function
    def step(x: Any) -> Any:
        return tf.nn.relu(tf.nn.softmax(x)), tf.abs(tf.nn.log_softmax(x))

    fused = optimized(step)
    x = given(dtype) * 3
    exact = tf.nn.softmax(tf.cast(x, tf.float64)).numpy()
    for found, number in zip(fused(x), (exact, np.abs(np.log(exact))), strict=True):
        np.testing.assert_allclose(tf.cast(found, tf.float64).numpy(), number, 1.01 * STEP[dtype], 2.0**-25)
    require_stitched(fused, "Softmax", "LogSoftmax")


@pytest.mark.parametrize("dtype", HALVES)
def test_layers_and_their_gradients(dtype: Any) -> None:
    """As far from the same in float32 as TensorFlow's own are, or less."""

    def step(x: Any, weights: Any, scale: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([weights, scale])
            hidden = tf.nn.gelu(x @ weights)
            mean, variance = tf.nn.moments(hidden, 1, keepdims=True)
            normal = (hidden - mean) * tf.math.rsqrt(variance + tf.cast(1e-3, x.dtype)) * scale
            loss = tf.reduce_mean(tf.nn.softmax(normal) * tf.cast(tf.range(32), x.dtype))
        return loss, *tape.gradient(loss, [weights, scale])

    plain = tf.function(step)
    fused = optimized(tf.function(step))
    halves = given(dtype), given(dtype, (96, 32)) * tf.cast(0.1, dtype), tf.ones([32], dtype)
    exact = plain(*(tf.cast(each, tf.float32) for each in halves))
    for found, expected, number in zip(fused(*halves), plain(*halves), exact, strict=True):
        assert found.dtype == dtype
        reference = number.numpy()
        room = 8 * STEP[dtype] * np.abs(reference).max()
        ours, theirs = (np.abs(tf.cast(each, tf.float32).numpy() - reference).max() for each in (found, expected))
        assert ours <= max(theirs, room), (ours, theirs, room)
    require_stitched(fused, "MatMul", "Softmax")
