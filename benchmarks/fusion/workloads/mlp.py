"""The multilayer perceptron of TensorFlow-Examples, which has no activations, with Adam."""

from __future__ import annotations

import itertools

import tensorflow as tf

from benchmarks.fusion.workloads.workload import Source, Workload

BATCH = 100
SIZES = (784, 256, 256, 10)


def make() -> Workload:
    """A training step."""
    source = Source()
    kernels = [source.normal(*shape) for shape in itertools.pairwise(SIZES)]
    biases = [source.normal(size) for size in SIZES[1:]]
    optimizer = tf.compat.v1.train.AdamOptimizer(0.001)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for kernel, bias in zip(kernels, biases, strict=True):
                x = x @ kernel + bias
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, x))
        optimizer.apply_gradients(zip(tape.gradient(loss, source.variables), source.variables, strict=True))
        return loss

    inputs = (source.uniform(BATCH, SIZES[0]), source.one_hot(BATCH, SIZES[-1]))
    return Workload(step, inputs, source.variables, optimizer.variables)
