"""What `tfmem.optimize(step)` does on a GPU, with no option: the step is stitched, behind its first calls."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem

PATIENCE = 90.0  # seconds until it has to be decided


class Net:
    """A layer with layer normalisation, trained by momentum."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.weights = tf.Variable(rng.normal(size=(64, 48)).astype(np.float32) / 8)
        self.scale = tf.Variable(tf.ones([48]))
        self.velocity = [tf.Variable(tf.zeros_like(each)) for each in (self.weights, self.scale)]
        self.step = tf.function(self.run)

    def run(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.nn.gelu(x @ self.weights)
            mean, variance = tf.nn.moments(y, [1], keepdims=True)
            loss = tf.reduce_mean(tf.square((y - mean) * tf.math.rsqrt(variance + 1e-3) * self.scale - 0.5))
        variables = [self.weights, self.scale]
        for variable, velocity, gradient in zip(variables, self.velocity, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(velocity.assign(0.9 * velocity + 0.01 * gradient))
        return loss


@pytest.mark.usefixtures("float32_products")
def test_a_step_is_stitched(tmp_path: Any) -> None:
    plain, net = Net(), Net()
    step = tfmem.optimize(net.step, cache_directory=str(tmp_path))
    x = tf.constant(np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32))
    end = time.monotonic() + PATIENCE
    while True:
        np.testing.assert_allclose(step(x), plain.step(x), rtol=1e-4)
        report = tfmem.report(step)
        if not report.fusion.startswith("not decided") or time.monotonic() > end:
            break
    assert report.fusion.startswith(("stitched", "left unchanged: stitched it took")), report.fusion
    assert report.regions
    for _ in range(20):
        np.testing.assert_allclose(step(x), plain.step(x), rtol=1e-4)


def test_with_a_budget_it_is_as_well() -> None:
    step = tfmem.optimize(Net().step, memory_budget="1GiB", cache_directory="")
    step(tf.zeros([32, 64]))
    assert tfmem.report(step).fusion
