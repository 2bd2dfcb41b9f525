"""Cumulative sums within regions: values and gradients are TensorFlow's, and close to those of float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.fusion_lowering import Lowered
from tests.tf.stitched_steps import optimized, require_stitched, stitched_ops

SHAPES = [((3, 7), 1), ((33, 5, 2), 1), ((128,), 0), ((1, 9), 0), ((4, 1), -1), ((5, 31, 3), -3)]


def cumulated(x: Any, axis: int, exclusive: bool, reverse: bool) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        made = tf.cumsum(x * 2, axis, exclusive=exclusive, reverse=reverse)
    return made, tape.gradient(made, x, tf.sin(tf.cast(made, x.dtype)))


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_values_and_gradients(shape: tuple[int, ...], axis: int, exclusive: bool, reverse: bool) -> None:
    plain, step = (tf.function(lambda x: cumulated(x, axis, exclusive, reverse)) for _ in range(2))
    step = optimized(step)
    x = np.random.default_rng(0).normal(size=shape)
    exact = cumulated(tf.constant(x), axis, exclusive, reverse)
    given = tf.constant(x.astype(np.float32))
    for found, expected, true in zip(step(given), plain(given), exact, strict=True):
        np.testing.assert_allclose(found, expected, 1e-4, 1e-4)
        np.testing.assert_allclose(found, true, 1e-4, 1e-4)
    require_stitched(step, "Cumsum")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_a_rule_is_tensorflows(dtype: Any) -> None:
    """Also sliced, transposed, and read elsewhere; integers wrap."""
    x = np.random.default_rng(0).normal(size=(6, 10)) * (2.0**28 if np.dtype(dtype).kind == "i" else 1.0)
    lowered = Lowered(lambda x: (tf.transpose(tf.cumsum(x, 1))[2:], tf.cumsum(x, 0, True) + x), x.astype(dtype))
    for found, expected in zip(lowered.run(), lowered.expected(), strict=True):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-5)


def test_what_is_not_finite_reaches_later_results_alone() -> None:
    x = np.array([[1, np.nan, 2, 3], [-np.inf, 1, 2, np.inf], [0.5, np.inf, 1, 2], [-0.0, -0.0, -0.0, 1]], np.float32)
    for reverse in (False, True):
        plain, step = (tf.function(lambda x, turn=reverse: tf.cumsum(x + 0.0, 1, reverse=turn) * 1.0) for _ in range(2))
        np.testing.assert_array_equal(optimized(step)(x), plain(x))


def test_long_ones_stay_tensorflows() -> None:
    step = optimized(tf.function(lambda x: tf.cumsum(tf.tanh(x), 1) * 2))
    step(tf.ones([3, 129]))
    report = tfmem.report(step)
    assert "Cumsum" not in [
        op for region in report.regions for s in region.steps if s.kind == "kernel" for _, op in s.ops
    ]
    assert "Tanh" in stitched_ops(report)
