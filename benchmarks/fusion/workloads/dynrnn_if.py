"""`dynrnn` by TensorFlow 1's `static_rnn`, which hides its steps in bodies of `If`: a step that no sequence reaches is
not computed, and one that all reach is not masked."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from benchmarks.fusion.workloads import dynrnn
from benchmarks.fusion.workloads.layers import LstmState, lstm
from benchmarks.fusion.workloads.workload import Workload


def make() -> Workload:
    """A training step."""
    return dynrnn.made(conditional)


@dataclass(frozen=True)
class Cell:
    """What `static_rnn` asks of a cell, without Keras's classes."""

    kernel: tf.Tensor
    bias: tf.Tensor
    state_size: tuple[int, int] = (dynrnn.UNITS, dynrnn.UNITS)
    output_size: int = dynrnn.UNITS

    def zero_state(self, batch_size: int, dtype: tf.DType) -> LstmState:
        return tf.zeros([batch_size, dynrnn.UNITS], dtype), tf.zeros([batch_size, dynrnn.UNITS], dtype)

    def __call__(self, x: tf.Tensor, state: LstmState) -> tuple[tf.Tensor, LstmState]:
        cell, output = lstm(x, state, self.kernel, self.bias)
        return output, (cell, output)


def conditional(sequence: list[tf.Tensor], lengths: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> list[tf.Tensor]:
    """The outputs of `static_rnn`."""
    outputs, _ = tf.compat.v1.nn.static_rnn(Cell(kernel, bias), sequence, dtype=tf.float32, sequence_length=lengths)
    return outputs
