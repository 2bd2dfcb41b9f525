"""Sentiment of sentences by a binary Tree-LSTM (Tai et al. 2015), trained with `tfmem.dynamic`.

python -m examples.tree_lstm
python -m examples.tree_lstm --train trees/train.txt --test trees/dev.txt --hidden 128
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from examples import dynamic_training, trees
from tfmem import dynamic

CLASSES = 5


class TreeNet:
    """A net over sentiment trees with a label at each node; subclasses say what a word and a pair of phrases compute,
    set `handle`, and have kinds of nodes "leaf" and "pair"."""

    handle: dynamic.Handle
    vocabulary: dict[str, int]

    def node(self, tree: trees.Tree, vocabulary: dict[str, int]) -> dynamic.Node:
        """The node of a tree; an unknown word is word 0."""
        if len(tree) == 2:
            return self.handle.node("leaf", vocabulary.get(tree[1], 0), tree[0])
        left, right = (self.node(child, vocabulary) for child in tree[1:])
        return self.handle.node("pair", left, right, tree[0])

    def graph(self, example: trees.Tree) -> dynamic.Node:
        """The graph of a tree, with the words of `vocabulary`."""
        return self.node(example, self.vocabulary)

    def labels(self, example: trees.Tree) -> list[int]:
        """The root's label."""
        return [example[0]]

    def answers(self, batch: dynamic.Batch) -> tf.Tensor:
        """The roots, which are the last nodes of their graphs."""
        return batch.kinds.row_limits() - 1


class TreeLSTM(TreeNet):
    """Its parameters, and what a word and a pair of phrases compute."""

    def __init__(
        self,
        words: int,
        embedding: int,
        hidden: int,
        seed: int = 0,
        optimizer: dynamic.SGD | dynamic.Adam = dynamic_training.OPTIMIZER,
    ) -> None:
        glorot = tf.keras.initializers.GlorotUniform(seed)
        self.table = tf.Variable(tf.random.stateless_uniform([words, embedding], [seed, 1], -0.1, 0.1))
        self.word = tf.Variable(glorot([3 * hidden, embedding]))
        self.word_bias = tf.Variable(tf.zeros([3 * hidden]))
        self.pair = tf.Variable(glorot([5 * hidden, 2 * hidden]))
        self.pair_bias = tf.Variable(tf.zeros([5 * hidden]))
        self.output = tf.Variable(glorot([CLASSES, hidden]))
        self.output_bias = tf.Variable(tf.zeros([CLASSES]))
        kinds = {"leaf": dynamic.node(self.of_word), "pair": dynamic.node(self.of_pair, children=2)}
        self.handle = dynamic.specialize(
            [self.table, self.word, self.word_bias, self.pair, self.pair_bias, self.output, self.output_bias],
            kinds,
            state=(hidden, hidden),
            optimizer=optimizer,
        )

    def of_word(self, children, word, label):
        gates = dynamic.affine(self.word, dynamic.embedding_lookup(self.table, word), self.word_bias)
        i, o, u = dynamic.split(gates, 3)
        return self.result(dynamic.sigmoid(i) * dynamic.tanh(u), o, label)

    def of_pair(self, children, label):
        (left_h, left_c), (right_h, right_c) = children
        gates = dynamic.affine(self.pair, dynamic.concat([left_h, right_h]), self.pair_bias)
        i, f_left, f_right, o, u = dynamic.split(gates, 5)
        kept = dynamic.sigmoid(f_left) * left_c + dynamic.sigmoid(f_right) * right_c
        return self.result(dynamic.sigmoid(i) * dynamic.tanh(u) + kept, o, label)

    def result(self, c, o, label):
        h = dynamic.sigmoid(o) * dynamic.tanh(c)
        logits = dynamic.affine(self.output, h, self.output_bias)
        return dynamic.Result((h, c), dynamic.sparse_softmax_cross_entropy(label, logits), logits)


def words_of(tree: trees.Tree) -> list[str]:
    return [tree[1]] if len(tree) == 2 else [word for child in tree[1:] for word in words_of(child)]


def train(net_class: type[TreeNet], description: str | None, given: Sequence[str] | None) -> list[float]:
    """Trains a net over trees as the command line says."""
    args = dynamic_training.options(description).parse_args(given)
    train, test = dynamic_training.data(args, trees.read, trees.made)
    vocabulary = dynamic_training.numbered([word for tree in train for word in words_of(tree)])
    net = net_class(len(vocabulary) + 1, args.embedding, args.hidden)  # type: ignore[call-arg]
    net.vocabulary = vocabulary
    return dynamic_training.fit(net, train, test, args, "trees")


def main(given: Sequence[str] | None = None) -> list[float]:
    return train(TreeLSTM, __doc__, given)


if __name__ == "__main__":
    main()
