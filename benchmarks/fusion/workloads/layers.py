"""Layers that several workloads share, written out in TensorFlow's ops."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from benchmarks.fusion.workloads.workload import Source

LstmState = tuple[tf.Tensor, tf.Tensor]  # cell and output, each [batch, units]


def lstm(x: tf.Tensor, state: LstmState, kernel: tf.Tensor, bias: tf.Tensor) -> LstmState:
    """A step of an LSTM with gates i, j, f, o and forget bias 1, as TensorFlow 1's `BasicLSTMCell` has it.

    Args:
        x: `[batch, inputs]`.
        state: before the step.
        kernel: `[inputs + units, 4 * units]`.
        bias: `[4 * units]`.
    """
    cell, output = state
    gates = tf.nn.bias_add(tf.concat([x, output], 1) @ kernel, bias)
    entering, candidate, forgetting, leaving = tf.split(gates, 4, 1)
    cell = cell * tf.sigmoid(forgetting + 1.0) + tf.sigmoid(entering) * tf.tanh(candidate)
    return cell, tf.tanh(cell) * tf.sigmoid(leaving)


@dataclass(frozen=True)
class Norm:
    """Layer normalisation over the last axis."""

    scale: tf.Variable
    shift: tf.Variable
    epsilon: float

    @classmethod
    def draw(cls, source: Source, size: int, epsilon: float) -> Norm:
        """One that changes neither mean nor variance yet."""
        return cls(source.ones(size), source.zeros(size), epsilon)

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        mean = tf.reduce_mean(x, -1, keepdims=True)
        centred = x - mean
        variance = tf.reduce_mean(tf.square(centred), -1, keepdims=True)
        return centred * tf.math.rsqrt(variance + self.epsilon) * self.scale + self.shift


@dataclass(frozen=True)
class Dense:
    """A product with a matrix, and a bias if there is one."""

    kernel: tf.Variable | tf.Tensor
    bias: tf.Variable | tf.Tensor | None

    @classmethod
    def draw(cls, source: Source, inputs: int, outputs: int, bias: bool = True) -> Dense:
        """A layer of random weights that keep the variance."""
        return cls(source.normal(inputs, outputs, scale=inputs**-0.5), source.zeros(outputs) if bias else None)

    def read(self) -> Dense:
        """This layer with its values, read once."""
        return Dense(self.kernel.read_value(), None if self.bias is None else self.bias.read_value())

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        product = x @ self.kernel
        return product if self.bias is None else product + self.bias


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention of several heads."""

    query: Dense
    key: Dense
    value: Dense
    output: Dense
    heads: int

    @classmethod
    def draw(cls, source: Source, size: int, heads: int, bias: bool) -> Attention:
        """Four square matrices."""
        return cls(*(Dense.draw(source, size, size, bias) for _ in range(4)), heads)

    def split(self, x: tf.Tensor, batch: int) -> tf.Tensor:
        """`[batch * length, size]` to `[batch, heads, length, size / heads]`."""
        return tf.transpose(tf.reshape(x, [batch, -1, self.heads, x.shape[-1] // self.heads]), [0, 2, 1, 3])

    def projections(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Queries, keys and values of `x`, all `[batch * length, size]`."""
        return self.query(x), self.key(x), self.value(x)

    def memory(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys and values of what is attended to."""
        return self.key(x), self.value(x)

    def __call__(self, queries: tf.Tensor, keys: tf.Tensor, values: tf.Tensor, batch: int = 1) -> tf.Tensor:
        """Attend with queries `[batch * length, size]` to split keys and values, of that batch or of 1."""
        size = queries.shape[-1]
        queries = self.split(queries, batch) * (size // self.heads) ** -0.5
        weights = tf.nn.softmax(tf.matmul(queries, keys, transpose_b=True))
        found = tf.transpose(tf.matmul(weights, values), [0, 2, 1, 3])
        return self.output(tf.reshape(found, [-1, size]))

    def over_itself(self, x: tf.Tensor) -> tf.Tensor:
        """Self-attention over one sequence, `[length, size]`."""
        queries, keys, values = self.projections(x)
        return self(queries, self.split(keys, 1), self.split(values, 1))


def positions(length: int, size: int) -> tf.Tensor:
    """Sines and cosines, `[length, size]`."""
    rates = tf.exp(-tf.math.log(1e4) * tf.range(0, size, 2, tf.float32) / size)
    angles = tf.range(length, dtype=tf.float32)[:, None] * rates
    return tf.concat([tf.sin(angles), tf.cos(angles)], 1)
