"""Random ops of a step that is planned for each size of its batch, without running it first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.memory_in_use import in_use

IMAGES = np.random.default_rng(1).normal(size=(32, 16, 16, 3)).astype(np.float32)
SIZES = (32, 31, 30, 16, 32, 16)


def losses(**options: Any) -> tuple[list[float], Any]:
    """The losses of a step with dropout by a seeded op; TensorFlow relaxes its shapes after the first call."""
    tf.random.set_seed(3)
    random = np.random.default_rng(5)
    shapes = (3, 3, 3, 16), (3, 3, 16, 16)
    weights = [tf.Variable(0.1 * random.normal(size=shape).astype(np.float32)) for shape in shapes]

    @tf.function(reduce_retracing=True)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.nn.dropout(x, 0.3)
            for weight in weights:
                y = tf.nn.relu(tf.nn.conv2d(y, weight, 1, "SAME"))
            loss = tf.reduce_mean(y**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.01 * gradient)
        return loss

    run = tfmem.optimize(step, cache_directory="", **options) if options else step
    return [float(run(tf.constant(IMAGES[:size]))) for size in SIZES], run


@pytest.mark.parametrize("observe", [False, True])
def test_all_sizes_of_a_batch_draw_from_one_stream(observe: bool) -> None:
    expected, _ = losses()
    found, step = losses(memory_budget=in_use() + 2_200_000, observe=observe)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    report = tfmem.report(step)
    assert report.transfers or report.splits, report
