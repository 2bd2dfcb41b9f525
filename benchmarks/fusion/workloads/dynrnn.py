"""The dynamic RNN of TensorFlow-Examples: an LSTM over sequences of several lengths, unrolled, with masks.

After its end a sequence keeps its state. `dynrnn_if` leaves that to TensorFlow 1's `static_rnn`.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from benchmarks.fusion.workloads.layers import lstm
from benchmarks.fusion.workloads.workload import Source, Workload

BATCH = 128
STEPS = 20
SHORTEST = 3
UNITS = 64
CLASSES = 2

# time by time, each [batch, 1]; lengths [batch]; kernel and bias; to outputs, time by time
Unrolled = Callable[[list[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor], list[tf.Tensor]]


def make() -> Workload:
    """A training step."""
    return made(masked)


def made(unrolled: Unrolled) -> Workload:
    """A training step around a layer."""
    source = Source()
    kernel, bias = source.normal(1 + UNITS, 4 * UNITS, scale=(1 + UNITS) ** -0.5), source.zeros(4 * UNITS)
    head, head_bias = source.normal(UNITS, CLASSES), source.normal(CLASSES)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.01)

    @tf.function
    def step(sequences: tf.Tensor, lengths: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = unrolled(tf.unstack(sequences, axis=1), lengths, kernel.read_value(), bias.read_value())
            outputs = tf.transpose(tf.stack(outputs), [1, 0, 2])
            last = tf.range(BATCH) * STEPS + (lengths - 1)
            logits = tf.gather(tf.reshape(outputs, [-1, UNITS]), last) @ head + head_bias
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, source.variables), source.variables, strict=True))
        return loss

    sequences, lengths = source.uniform(BATCH, STEPS, 1), source.integers(SHORTEST, STEPS + 1, [BATCH])
    return Workload(step, (sequences, lengths, source.one_hot(BATCH, CLASSES)), source.variables, optimizer.variables)


def masked(sequence: list[tf.Tensor], lengths: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> list[tf.Tensor]:
    """Every step computes every row, and those that have ended are put back."""
    cell = output = nothing = tf.zeros([BATCH, UNITS])
    outputs = []
    for time, x in enumerate(sequence):
        going_on = tf.expand_dims(time < lengths, 1)
        new_cell, new_output = lstm(x, (cell, output), kernel, bias)
        outputs.append(tf.where(going_on, new_output, nothing))
        cell, output = tf.where(going_on, new_cell, cell), tf.where(going_on, new_output, output)
    return outputs
