"""Whole steps of training as one region each: what is fetched, and what the variables hold, is TensorFlow's."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.fusion.region import Assign, Kernel
from tests.tf.fusion_steps import Step

draws = np.random.default_rng


def values(*shape, seed=0, scale=1.0):
    return draws(seed).normal(scale=scale, size=shape).astype("float32")


def same(step: Step, rtol=1e-5, atol=1e-6):
    found, held = step.run()
    expected, given = step.expected()
    for ours, theirs in zip([*found, *held], [*expected, *given], strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)


def trained(loss, variables, optimizer):
    """A step of training."""

    def step(*arguments):
        with tf.GradientTape() as tape:
            value = loss(*arguments)
        optimizer(tape.gradient(value, variables), variables)
        return value

    return step


def descent(gradients, variables):
    for gradient, variable in zip(gradients, variables, strict=True):
        tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=0.1, delta=gradient)


def test_logistic_regression() -> None:
    weights, bias = tf.Variable(values(20, 10, scale=0.1)), tf.Variable(tf.zeros([10]))

    def loss(x, y):
        predicted = tf.nn.softmax(x @ weights + bias)
        return tf.reduce_mean(-tf.reduce_sum(y * tf.math.log(predicted), axis=1))

    labels = np.eye(10, dtype="float32")[draws(1).integers(0, 10, 30)]
    step = Step(trained(loss, [weights, bias], descent), [values(30, 20), labels], [weights, bias])
    kernels = [each for each in step.lowered.region.steps if isinstance(each, Kernel)]
    assert len(kernels) == 3  # what needs no product; softmax, loss and gradient, with the bias; the weights
    assert sum(isinstance(each, Assign) for each in step.lowered.region.steps) == 2
    for _ in range(3):
        same(step)


def test_a_layer_norm_with_its_gradient_is_one_kernel() -> None:
    scale, offset = tf.Variable(values(8, seed=1)), tf.Variable(values(8, seed=2))

    def loss(x):
        mean = tf.reduce_mean(x, -1, keepdims=True)
        variance = tf.reduce_mean(tf.math.squared_difference(x, mean), -1, keepdims=True)
        y = (x - mean) * tf.math.rsqrt(variance + 1e-3) * scale + offset
        return tf.reduce_sum(tf.nn.gelu(y))

    step = Step(trained(loss, [scale, offset], descent), [values(6, 5, 8)], [scale, offset])
    (kernel,) = [each for each in step.lowered.region.steps if isinstance(each, Kernel)]
    assert kernel.program.axes == (30, 8)
    same(step, 1e-4, 1e-5)


def attention(x, kernels):
    query, key, value = (tf.transpose(tf.reshape(x @ each, [4, 6, 2, 8]), [0, 2, 1, 3]) for each in kernels[:3])
    scores = tf.nn.softmax(tf.matmul(query, key, transpose_b=True) / np.sqrt(8.0))
    mixed = tf.reshape(tf.transpose(tf.matmul(scores, value), [0, 2, 1, 3]), [4, 6, 16])
    return mixed @ kernels[3]


def test_attention() -> None:
    kernels = [tf.Variable(values(16, 16, seed=seed, scale=0.3)) for seed in range(4)]
    step = trained(lambda x: tf.reduce_mean(tf.square(attention(x, kernels))), kernels, descent)
    same(Step(step, [values(4, 6, 16, seed=9)], kernels), 1e-4, 1e-5)


def lstm(x, kernel, bias):
    state = carry = tf.zeros([4, 8])
    for part in tf.unstack(x, axis=1):
        gates = tf.concat([part, state], 1) @ kernel + bias
        enter, new, forget, out = tf.split(gates, 4, 1)
        carry = carry * tf.sigmoid(forget + 1.0) + tf.sigmoid(enter) * tf.tanh(new)
        state = tf.tanh(carry) * tf.sigmoid(out)
    return state


def test_an_unrolled_lstm() -> None:
    kernel, bias = tf.Variable(values(13, 32, scale=0.3)), tf.Variable(tf.zeros([32]))
    step = trained(lambda x: tf.reduce_mean(lstm(x, kernel, bias)), [kernel, bias], descent)
    same(Step(step, [values(4, 3, 5, seed=9)], [kernel, bias]), 1e-4, 1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "keras adam"])
def test_a_perceptron_with_adam(optimizer) -> None:
    shapes = [(12, 16), (16,), (16, 5), (5,)]
    weights = [tf.Variable(values(*shape, seed=seed, scale=0.3)) for seed, shape in enumerate(shapes)]
    slots = [tf.Variable(tf.zeros(shape)) for shape in shapes for _ in range(2)]
    count = tf.Variable(1.0)

    def adam(gradients, variables):
        count.assign_add(1.0)
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            first, second = slots[2 * place : 2 * place + 2]
            if optimizer == "adam":
                tf.raw_ops.ResourceApplyAdam(
                    var=variable.handle, m=first.handle, v=second.handle, beta1_power=0.9**count.read_value(),
                    beta2_power=0.999**count.read_value(), lr=0.01, beta1=0.9, beta2=0.999, epsilon=1e-7, grad=gradient,
                )  # fmt: skip
            else:
                first.assign_add((gradient - first) * 0.1)
                second.assign_add((tf.square(gradient) - second) * 0.001)
                variable.assign_sub(first * 0.01 / (tf.sqrt(second) + 1e-7))

    def loss(x, labels):
        hidden = tf.nn.relu(x @ weights[0] + weights[1])
        logits = hidden @ weights[2] + weights[3]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))

    labels = draws(3).integers(0, 5, 9).astype("int32")
    step = Step(trained(loss, weights, adam), [values(9, 12, seed=7), labels], [*weights, *slots, count])
    for _ in range(2):
        same(step, 1e-4, 1e-5)
