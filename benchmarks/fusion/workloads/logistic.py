"""Logistic regression, as in TensorFlow-Examples: softmax, an explicit logarithm, gradient descent."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.fusion.workloads.workload import Source, Workload

BATCH = 100
FEATURES = 784
CLASSES = 10


def make() -> Workload:
    """A training step."""
    source = Source()
    weights, bias = source.zeros(FEATURES, CLASSES), source.zeros(CLASSES)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            predicted = tf.nn.softmax(x @ weights + bias)
            loss = tf.reduce_mean(-tf.reduce_sum(y * tf.math.log(predicted), axis=1))
        gradients = tape.gradient(loss, source.variables)
        optimizer.apply_gradients(zip(gradients, source.variables, strict=True))
        return loss

    inputs = (source.uniform(BATCH, FEATURES), source.one_hot(BATCH, CLASSES))
    return Workload(step, inputs, source.variables, optimizer.variables)
