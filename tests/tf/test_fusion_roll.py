"""Tensors whose dimensions are turned, within regions: values and gradients are TensorFlow's to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import optimized, require_stitched


@pytest.mark.parametrize(
    ("shape", "shift", "axis"), [((5, 7), [2, -3], [0, 1]), ((3, 1, 9), [10], [2]), ((33,), [-1], [0])]
)
def test_turned_windows_and_their_gradients(shape: tuple[int, ...], shift: list[int], axis: list[int]) -> None:
    """To the bit, -0.0 and what is no number, too; as windows of a Swin Transformer are turned, and back."""

    def run(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = tf.roll(x * 2.0, shift, axis) * y
        return made, tape.gradient(made, x)

    plain, step = tf.function(run), optimized(tf.function(run))
    x, y = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    x.flat[:4] = np.nan, np.inf, -np.inf, -0.0
    for found, expected in zip(step(x, y), plain(x, y), strict=True):
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))
    require_stitched(step, "Roll")


def test_a_roll_by_a_number_that_is_no_constant_is_tensorflows() -> None:
    plain, step = (tf.function(lambda x, by: tf.roll(tf.tanh(x) * 2.0, by, 0) + x) for _ in range(2))
    step, x = optimized(step), tf.reshape(tf.range(12.0), [4, 3])
    for by in (1, -2, 9):
        np.testing.assert_allclose(step(x, tf.constant(by)), plain(x, tf.constant(by)), 1e-6)
    kernels = [each for region in tfmem.report(step).regions for each in region.steps if each.kind == "kernel"]
    assert "Roll" not in [op for each in kernels for _, op in each.ops]
