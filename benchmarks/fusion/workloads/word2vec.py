"""The skip-gram model of TensorFlow-Examples: noise-contrastive loss, sparse updates."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.fusion.workloads.workload import Source, Workload

BATCH = 128
VOCABULARY = 50000
SIZE = 200
SAMPLED = 64


def make() -> Workload:
    """A training step. Both tables lie where the step runs; the original pins the embeddings to the CPU."""
    source = Source()
    embeddings, weights = source.normal(VOCABULARY, SIZE), source.normal(VOCABULARY, SIZE)
    biases = source.zeros(VOCABULARY)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)

    @tf.function
    def step(words: tf.Tensor, contexts: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            embedded = tf.nn.embedding_lookup(embeddings, words)
            negatives = tf.random.log_uniform_candidate_sampler(contexts, 1, SAMPLED, True, VOCABULARY, seed=0)
            losses = tf.nn.nce_loss(weights, biases, contexts, embedded, SAMPLED, VOCABULARY, sampled_values=negatives)
            loss = tf.reduce_mean(losses)
        optimizer.apply_gradients(zip(tape.gradient(loss, source.variables), source.variables, strict=True))
        return loss

    words, contexts = source.integers(0, VOCABULARY, [BATCH]), source.integers(0, VOCABULARY, [BATCH, 1])
    return Workload(step, (words, tf.cast(contexts, tf.int64)), source.variables, optimizer.variables, draws=True)
