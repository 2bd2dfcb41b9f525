"""Chains of memory-intensive ops on large tensors, where time is what bytes take: none of the paper's workloads is so.

On a GPU a tensor has a gigabyte, on a CPU, where they are only tried, 16 MB. `moved` counts each large input and output
once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.fusion.workloads.workload import Workload

COLUMNS = 1024
KEPT = 0.9
CALLS = 10  # timed together: a step of a millisecond would otherwise have the host's part in it


def rows() -> int:
    """Rows of a large tensor of `COLUMNS` columns."""
    return 1 << 18 if tf.config.list_physical_devices("GPU") else 1 << 12


def tensors(count: int) -> tuple[tf.Tensor, ...]:
    """Large ones, N(0, 1), drawn where they stay."""
    return tuple(tf.random.stateless_normal([rows(), COLUMNS], [0, place]) for place in range(count))


def workload(step: Any, inputs: int, outputs: int) -> Workload:
    """A workload with so many large inputs and outputs."""
    moved = (inputs + outputs) * rows() * COLUMNS * tf.float32.size
    return Workload(step, tensors(inputs), (), moved=moved, calls=CALLS)


def layer_norm_gradient() -> Workload:
    """Gradients of layer normalisation with respect to all that it has: one along rows, two along columns."""
    scale, shift = tf.ones([COLUMNS]), tf.zeros([COLUMNS])

    @tf.function
    def step(x: tf.Tensor, incoming: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            tape.watch([x, scale, shift])
            mean = tf.reduce_mean(x, -1, keepdims=True)
            variance = tf.reduce_mean(tf.square(x - mean), -1, keepdims=True)
            normal = (x - mean) * tf.math.rsqrt(variance + 1e-6) * scale + shift
        of_x, of_scale, of_shift = tape.gradient(normal, [x, scale, shift], incoming)
        return of_shift, of_scale, of_x

    return workload(step, 2, 1)


def softmax_dropout() -> Workload:
    """Softmax and dropout, as attention has them, and their gradient: from two tensors, two."""

    @tf.function
    def step(scores: tf.Tensor, incoming: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            tape.watch(scores)
            dropped = tf.nn.experimental.stateless_dropout(tf.nn.softmax(scores), 1 - KEPT, seed=[0, 1])
        gradient = tape.gradient(dropped, scores, incoming)
        return gradient[0, 0], dropped, gradient

    return workload(step, 2, 2)


def column_sums() -> Workload:
    """What gradients of a bias and of a scale are: sums over all rows."""

    @tf.function
    def step(incoming: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tf.reduce_sum(incoming, 0), tf.reduce_sum(incoming * x, 0)

    return workload(step, 2, 0)


def copy() -> Workload:
    """One large tensor into another."""

    @tf.function
    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        copied = tf.raw_ops.DeepCopy(x=x)
        return copied[0, 0], copied

    return workload(step, 1, 1)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "layer_norm_gradient": layer_norm_gradient,
    "softmax_dropout": softmax_dropout,
    "column_sums": column_sums,
    "copy": copy,
}
