"""Steps whose batched products become one, and whose values are computed again: beside TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.report import STITCHED
from tests.tf.stitched_steps import optimized, stitched_ops

RATE = 0.1


def projected(variables: list[tf.Variable], adjoint: bool) -> Any:
    """A projection of `[batch, rows, 6]`, with its gradients."""

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.matmul(x, variables[0], transpose_b=adjoint)
            loss = tf.reduce_sum(tf.tanh(y) * y)
        gradients = tape.gradient(loss, [x, *variables])
        for variable, gradient in zip(variables, gradients[1:], strict=True):
            variable.assign_sub(RATE * gradient)
        return loss, y, gradients[0]

    return step


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("shape", [(4, 7, 6), (1, 7, 6), (3, 1, 6), (2, 3, 5, 6)])
def test_projections_and_their_gradients(shape, adjoint):
    source = np.random.default_rng(0)
    start = source.normal(size=(5, 6) if adjoint else (6, 5)).astype(np.float32)
    x = source.normal(size=shape).astype(np.float32)
    made = []
    for stitch in (False, True):
        variables = [tf.Variable(start)]
        step = tf.function(projected(variables, adjoint))
        step = optimized(step) if stitch else step
        outputs = [each.numpy() for _ in range(3) for each in step(tf.constant(x))]
        made.append([*outputs, variables[0].numpy()])
    report = tfmem.report(step)
    assert report.fusion.startswith(STITCHED)
    if shape[0] > 1 and not adjoint:
        assert "BatchMatMulV2" not in stitched_ops(report)
    for expected, found in zip(*made, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("batches", [(4, 2, 4), (1, 3, 0, 2)])
def test_batches_of_any_size(batches):
    start = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    found = []
    for stitch in (False, True):
        variables = [tf.Variable(start)]
        step = tf.function(projected(variables, False), input_signature=[tf.TensorSpec([None, 7, 6])])
        step = optimized(step) if stitch else step
        inputs = [np.random.default_rng(size).normal(size=(size, 7, 6)).astype(np.float32) for size in batches]
        found.append([each.numpy() for x in inputs for each in step(tf.constant(x))])
    for expected, made in zip(*found, strict=True):
        np.testing.assert_allclose(made, expected, rtol=2e-5, atol=2e-5)


def normalized(variables: list[tf.Variable]) -> Any:
    """Two convolutions with scales, each normalized over its batch: trained. (Biases are Grappler's on a CPU.)"""

    def layer(x: tf.Tensor, kernel: tf.Variable, scale: tf.Variable) -> tf.Tensor:
        x = tf.multiply(tf.nn.conv2d(x, kernel, 1, "SAME"), scale, name="scaled")
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        return tf.nn.relu((x - mean) * tf.math.rsqrt(variance + 1e-3))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = layer(layer(x, *variables[:2]), *variables[2:])
            loss = tf.reduce_mean(tf.square(y - 0.5))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(RATE * gradient)
        return loss

    return step


def test_a_scaled_convolution_is_scaled_again_for_the_gradient():
    source = np.random.default_rng(0)
    shapes = [(3, 3, 3, 8), (8,), (3, 3, 8, 8), (8,)]
    starts = [source.normal(size=shape).astype(np.float32) / 4 for shape in shapes]
    x = tf.constant(source.normal(size=(8, 64, 64, 3)).astype(np.float32))
    made = []
    for stitch in (False, True):
        variables = [tf.Variable(start) for start in starts]
        step = tf.function(normalized(variables))
        step = optimized(step) if stitch else step
        losses = [step(x).numpy() for _ in range(5)]
        made.append([*losses, *(variable.numpy() for variable in variables)])
    names = {name for region in tfmem.report(step).regions for each in region.steps for name, _ in each.ops}
    assert {"scaled/Mul", "scaled_1/Mul"} & names
    for expected, found in zip(*made, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)  # scales have gradients of nearly zero
