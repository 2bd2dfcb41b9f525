"""Translation by a Transformer (tensor2tensor's `transformer_base_v1`): the encoder, and one step of a beam search.

Layers are normalised after their sum. The decoder has keys and values of 32 tokens in a cache, for 4 beams.
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from benchmarks.fusion.workloads.layers import Attention, Dense, Norm, positions
from benchmarks.fusion.workloads.workload import Source, Workload

LAYERS = 6
SIZE = 512
HEADS = 8
INNER = 2048
VOCABULARY = 32000
LENGTH = 32  # of the source, and of what is translated already
BEAMS = 4
EPSILON = 1e-6


@dataclass(frozen=True)
class FeedForward:
    """Two layers with ReLU between them."""

    first: Dense
    second: Dense

    @classmethod
    def draw(cls, source: Source) -> FeedForward:
        """A feed-forward block with biases."""
        return cls(Dense.draw(source, SIZE, INNER), Dense.draw(source, INNER, SIZE))

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return self.second(tf.nn.relu(self.first(x)))


def make(form: type[Attention] = Attention) -> Workload:
    """Inference: scores of the 8 best continuations, which they are, and the cache after the step."""
    source = Source()
    embeddings = source.normal(VOCABULARY, SIZE, scale=SIZE**-0.5)

    def attention() -> Attention:
        return form.draw(source, SIZE, HEADS, bias=False)

    def norm() -> Norm:
        return Norm.draw(source, SIZE, EPSILON)

    encoder = [(attention(), norm(), FeedForward.draw(source), norm()) for _ in range(LAYERS)]
    decoder = [(attention(), norm(), attention(), norm(), FeedForward.draw(source), norm()) for _ in range(LAYERS)]
    places = positions(LENGTH + 1, SIZE)

    def encoded(tokens: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
        x = tf.gather(table, tokens) * SIZE**0.5 + places[:LENGTH]
        for attend, after_attention, feed_forward, after_feed_forward in encoder:
            x = after_attention(x + attend.over_itself(x))
            x = after_feed_forward(x + feed_forward(x))
        return x

    @tf.function
    def step(tokens: tf.Tensor, last: tf.Tensor, scores: tf.Tensor, cache: tf.Tensor) -> tuple[tf.Tensor, ...]:
        table = embeddings.read_value()
        memory = encoded(tokens, table)
        x = tf.gather(table, last) * SIZE**0.5 + places[LENGTH:]
        kept = []
        for layer, (attend, norm_1, look, norm_2, feed_forward, norm_3) in enumerate(decoder):
            queries, key, value = attend.projections(x)
            keys = tf.concat([cache[layer, 0], attend.split(key, BEAMS)], 2)
            values = tf.concat([cache[layer, 1], attend.split(value, BEAMS)], 2)
            kept.append(tf.stack([keys, values]))
            x = norm_1(x + attend(queries, keys, values, BEAMS))
            keys, values = (look.split(each, 1) for each in look.memory(memory))
            x = norm_2(x + look(look.query(x), keys, values, BEAMS))
            x = norm_3(x + feed_forward(x))
        logits = tf.matmul(x, table, transpose_b=True)
        totals = tf.nn.log_softmax(logits) + scores[:, None]
        best, which = tf.math.top_k(tf.reshape(totals, [-1]), 2 * BEAMS)
        return best, which // VOCABULARY, which % VOCABULARY, tf.stack(kept)

    inputs = (
        source.integers(0, VOCABULARY, [LENGTH]),
        source.integers(0, VOCABULARY, [BEAMS]),
        -source.uniform(BEAMS),
        source.gaussian(LAYERS, 2, BEAMS, HEADS, LENGTH, SIZE // HEADS),
    )
    return Workload(step, inputs, source.variables)
