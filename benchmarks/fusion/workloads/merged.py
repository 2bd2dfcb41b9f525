"""Workloads whose products of one operand, queries, keys and values, are one product by their own author.

Either the weights are one variable, which no pass can make of three without a copy, or three that each step joins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import tensorflow as tf

from benchmarks.fusion.workloads import nmt, rokid
from benchmarks.fusion.workloads.layers import Attention, Dense
from benchmarks.fusion.workloads.workload import Source, Workload


@dataclass(frozen=True)
class JoinedAttention(Attention):
    """Weights of queries, keys and values lie side by side in one variable, and those of keys and values in another."""

    of_itself: Dense
    of_memory: Dense

    @classmethod
    def draw(cls, source: Source, size: int, heads: int, bias: bool) -> JoinedAttention:
        """Both, of which a layer uses one."""
        query, output = (Dense.draw(source, size, size, bias) for _ in range(2))
        joined = (Dense.draw(source, size, count * size, bias) for count in (3, 2))
        return cls(query, query, query, output, heads, *joined)

    def projections(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        queries, keys, values = tf.split(self.of_itself(x), 3, 1)
        return queries, keys, values

    def memory(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        keys, values = tf.split(self.of_memory(x), 2, 1)
        return keys, values


@dataclass(frozen=True)
class CopiedAttention(Attention):
    """Each step puts the weights side by side."""

    def projections(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        queries, keys, values = tf.split(joined(self.query, self.key, self.value)(x), 3, 1)
        return queries, keys, values

    def memory(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        keys, values = tf.split(joined(self.key, self.value)(x), 2, 1)
        return keys, values


def joined(*parts: Dense) -> Dense:
    """One layer from copies of several layers' weights."""
    biases = [part.bias for part in parts if part.bias is not None]
    return Dense(tf.concat([part.kernel for part in parts], 1), tf.concat(biases, 0) if biases else None)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "nmt": partial(nmt.make, JoinedAttention),
    "nmt_copied": partial(nmt.make, CopiedAttention),
    "rokid": partial(rokid.make, JoinedAttention),
    "rokid_copied": partial(rokid.make, CopiedAttention),
}
