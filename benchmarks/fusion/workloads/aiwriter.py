"""Dialogue by a sequence-to-sequence network: two LSTMs read 30 tokens, two with Bahdanau's attention write 20."""

from __future__ import annotations

import tensorflow as tf

from benchmarks.fusion.workloads.layers import Dense, LstmState, lstm
from benchmarks.fusion.workloads.workload import Source, Workload

LAYERS = 2
UNITS = 512
READ = 30
WRITTEN = 20
VOCABULARY = 20000


def make() -> Workload:
    """Inference, of one sequence: the tokens that are written, and the logits of the last one."""
    source = Source()
    embeddings = source.normal(VOCABULARY, UNITS)

    def layer(inputs: int) -> Dense:
        return Dense.draw(source, inputs + UNITS, 4 * UNITS)

    encoder = [layer(UNITS) for _ in range(LAYERS)]
    decoder = [layer(2 * UNITS), layer(UNITS)]  # the first reads what was attended to, too
    of_memory, of_query, attended, head = (
        Dense.draw(source, UNITS, UNITS, bias=False),
        Dense.draw(source, UNITS, UNITS, bias=False),
        Dense.draw(source, 2 * UNITS, UNITS, bias=False),
        Dense.draw(source, UNITS, VOCABULARY),
    )
    direction = source.normal(UNITS, scale=UNITS**-0.5)

    @tf.function
    def step(tokens: tf.Tensor) -> tuple[tf.Tensor, ...]:
        table, scorer = embeddings.read_value(), direction.read_value()
        reader, writer = [each.read() for each in encoder], [each.read() for each in decoder]
        ask, attend, logits_of = of_query.read(), attended.read(), head.read()

        states = [(tf.zeros([1, UNITS]), tf.zeros([1, UNITS]))] * LAYERS
        outputs = []
        for x in tf.split(tf.gather(table, tokens), READ):
            states = stacked(x, states, reader)
            outputs.append(states[-1][1])
        memory = tf.concat(outputs, 0)
        keys = of_memory(memory)

        attention, token = tf.zeros([1, UNITS]), tf.zeros([1], tf.int64)
        written = []
        for _ in range(WRITTEN):
            states = stacked(tf.concat([tf.gather(table, token), attention], 1), states, writer)
            output = states[-1][1]
            scores = tf.reduce_sum(scorer * tf.tanh(keys + ask(output)), 1)
            context = tf.reduce_sum(tf.nn.softmax(scores)[:, None] * memory, 0, keepdims=True)
            attention = attend(tf.concat([output, context], 1))
            logits = logits_of(attention)
            token = tf.argmax(logits, 1)
            written.append(token)
        return tf.concat(written, 0), logits

    return Workload(step, (source.integers(0, VOCABULARY, [READ]),), source.variables)


def stacked(x: tf.Tensor, states: list[LstmState], layers: list[Dense]) -> list[LstmState]:
    """A step of several LSTMs, one over the other."""
    new = []
    for layer, state in zip(layers, states, strict=True):
        new.append(lstm(x, state, layer.kernel, layer.bias))
        x = new[-1][1]
    return new
