"""Sentiment of sentences by a recursive net, p = tanh(W [l; r] + b) (Socher et al. 2011), with `tfmem.dynamic`.

python -m examples.rvnn
python -m examples.rvnn --train trees/train.txt --test trees/dev.txt --hidden 128
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from examples import dynamic_training, tree_lstm
from tfmem import dynamic


class RvNN(tree_lstm.TreeNet):
    """Words and phrases are vectors of one width, `hidden`; each is classified by one softmax."""

    def __init__(
        self,
        words: int,
        embedding: int,
        hidden: int,
        seed: int = 0,
        optimizer: dynamic.SGD | dynamic.Adam = dynamic_training.OPTIMIZER,
    ) -> None:
        """`embedding` is not used: a word is a phrase."""
        glorot = tf.keras.initializers.GlorotUniform(seed)
        self.table = tf.Variable(tf.random.stateless_uniform([words, hidden], [seed, 1], -0.1, 0.1))
        self.pair = tf.Variable(glorot([hidden, 2 * hidden]))
        self.pair_bias = tf.Variable(tf.zeros([hidden]))
        self.output = tf.Variable(glorot([tree_lstm.CLASSES, hidden]))
        self.output_bias = tf.Variable(tf.zeros([tree_lstm.CLASSES]))
        kinds = {"leaf": dynamic.node(self.of_word), "pair": dynamic.node(self.of_pair, children=2)}
        self.handle = dynamic.specialize(
            [self.table, self.pair, self.pair_bias, self.output, self.output_bias],
            kinds,
            state=hidden,
            optimizer=optimizer,
        )

    def of_word(self, children, word, label):
        return self.result(dynamic.embedding_lookup(self.table, word), label)

    def of_pair(self, children, label):
        return self.result(dynamic.tanh(dynamic.affine(self.pair, dynamic.concat(children), self.pair_bias)), label)

    def result(self, p, label):
        logits = dynamic.affine(self.output, p, self.output_bias)
        return dynamic.Result(p, dynamic.sparse_softmax_cross_entropy(label, logits), logits)


def main(given: Sequence[str] | None = None) -> list[float]:
    return tree_lstm.train(RvNN, __doc__, given)


if __name__ == "__main__":
    main()
