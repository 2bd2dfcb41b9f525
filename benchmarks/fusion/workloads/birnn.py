"""The bidirectional RNN of TensorFlow-Examples: two LSTMs over the rows of an image, unrolled.

Only the last output is used. Of the backward layer that is its first step, so TensorFlow prunes the other 27.
"""

from __future__ import annotations

import tensorflow as tf

from benchmarks.fusion.workloads.layers import lstm
from benchmarks.fusion.workloads.workload import Source, Workload

BATCH = 128
STEPS = 28
FEATURES = 28
UNITS = 128
CLASSES = 10


def make() -> Workload:
    """A training step."""
    source = Source()
    shape = (FEATURES + UNITS, 4 * UNITS)
    kernels = [source.normal(*shape, scale=shape[0] ** -0.5) for _ in ("forward", "backward")]
    biases = [source.zeros(4 * UNITS) for _ in kernels]
    head, head_bias = source.normal(2 * UNITS, CLASSES), source.normal(CLASSES)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.001)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = tf.unstack(images, axis=1)
            outputs = []
            for kernel, bias, sequence in zip(kernels, biases, (rows, rows[::-1]), strict=True):
                outputs.append(unrolled(sequence, kernel.read_value(), bias.read_value()))
            forward, backward = outputs
            both = [tf.concat(pair, 1) for pair in zip(forward, backward[::-1], strict=True)]
            logits = both[-1] @ head + head_bias
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, source.variables), source.variables, strict=True))
        return loss

    inputs = (source.uniform(BATCH, STEPS, FEATURES), source.one_hot(BATCH, CLASSES))
    return Workload(step, inputs, source.variables, optimizer.variables)


def unrolled(sequence: list[tf.Tensor], kernel: tf.Tensor, bias: tf.Tensor) -> list[tf.Tensor]:
    """The outputs of an LSTM that begins with zeros."""
    state = tf.zeros([BATCH, UNITS]), tf.zeros([BATCH, UNITS])
    outputs = []
    for x in sequence:
        state = lstm(x, state, kernel, bias)
        outputs.append(state[1])
    return outputs
