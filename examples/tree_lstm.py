"""Sentiment of sentences by a binary Tree-LSTM (Tai et al. 2015), trained with `tfmem.dynamic`.

python -m examples.tree_lstm
python -m examples.tree_lstm --train trees/train.txt --test trees/dev.txt --hidden 128
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from examples import trees
from tfmem import dynamic

CLASSES = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="a file of trees to train on; none: made ones")
    parser.add_argument("--test", type=Path, help="a file of trees to test with; none: every tenth of the others")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--embedding", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=2000, help="how many to make")
    parser.add_argument("--curve", type=Path, help="a picture of the loss")
    return parser.parse_args()


class TreeLSTM:
    """Its parameters, and what a word and a pair of phrases compute."""

    def __init__(self, words: int, embedding: int, hidden: int, seed: int = 0) -> None:
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
            optimizer=dynamic.Adam(0.003),
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

    def node(self, tree: trees.Tree, vocabulary: dict[str, int]) -> dynamic.Node:
        """Of a tree; a word that is not known is word 0."""
        if len(tree) == 2:
            return self.handle.node("leaf", vocabulary.get(tree[1], 0), tree[0])
        left, right = (self.node(child, vocabulary) for child in tree[1:])
        return self.handle.node("pair", left, right, tree[0])


def words_of(tree: trees.Tree) -> list[str]:
    return [tree[1]] if len(tree) == 2 else [word for child in tree[1:] for word in words_of(child)]


def accuracy(net: TreeLSTM, batches: list[dynamic.Batch], labels: list[np.ndarray]) -> float:
    """How many roots get their label."""
    right = [
        np.mean(np.argmax(tf.gather(net.handle.forward(b).outputs[0], b.kinds.row_limits() - 1), 1) == label)
        for b, label in zip(batches, labels, strict=True)
    ]
    return float(np.mean(right))


def main() -> None:
    args = arguments()
    train = trees.read(args.train) if args.train else trees.made(args.sentences)
    test = trees.read(args.test) if args.test else train[::10]
    train = train if args.test else [tree for number, tree in enumerate(train) if number % 10]
    vocabulary = {word: number for number, word in enumerate(sorted({w for t in train for w in words_of(t)}), start=1)}
    net = TreeLSTM(len(vocabulary) + 1, args.embedding, args.hidden)
    step = tf.function(
        lambda *batch: tf.reduce_mean(net.handle.step(dynamic.Batch(*batch)).losses),
        input_signature=[tf.RaggedTensorSpec([None, None], tf.int32)] * 3,
    )

    def batched(given: list[trees.Tree]) -> list[dynamic.Batch]:
        roots = [net.node(tree, vocabulary) for tree in given]
        return [net.handle.batch(roots[first : first + args.batch]) for first in range(0, len(roots), args.batch)]

    batches, tests = batched(train), batched(test)
    labels = [np.array([t[0] for t in test[i : i + args.batch]]) for i in range(0, len(test), args.batch)]
    losses: list[float] = []
    for epoch in range(args.epochs):
        order = np.random.default_rng(epoch).permutation(len(batches))
        progress = tqdm(order, desc=f"epoch {epoch + 1}", unit=" batches")
        losses += [float(step(*batches[number])) for number in progress]
        mean = np.mean(losses[-len(batches) :])
        print(f"epoch {epoch + 1}: loss {mean:.3f}, accuracy on held-out trees {accuracy(net, tests, labels):.3f}")
    if args.curve:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots()
        axes.plot(losses)
        axes.set(xlabel="step", ylabel="loss of a sentence")
        figure.savefig(args.curve)


if __name__ == "__main__":
    main()
