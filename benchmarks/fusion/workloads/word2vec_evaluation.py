"""The evaluation of `word2vec`: how similar six words are to all others, by the cosine."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.fusion.workloads.word2vec import SIZE, VOCABULARY
from benchmarks.fusion.workloads.workload import Source, Workload

WORDS = 6
NEAREST = 8


def make() -> Workload:
    """Inference: how near the nearest are, the word itself among them, and which they are."""
    source = Source()
    embeddings = source.normal(VOCABULARY, SIZE)

    @tf.function
    def step(words: tf.Tensor) -> tuple[tf.Tensor, ...]:
        table = embeddings.read_value()
        chosen = tf.gather(table, words)
        chosen /= tf.sqrt(tf.reduce_sum(tf.square(chosen), 1, keepdims=True))
        table /= tf.sqrt(tf.reduce_sum(tf.square(table), 1, keepdims=True))
        return tuple(tf.math.top_k(tf.matmul(chosen, table, transpose_b=True), 1 + NEAREST))

    return Workload(step, (source.integers(0, VOCABULARY, [WORDS]),), source.variables)
