"""A binary Tree-LSTM (Tai et al. 2015) as node kinds, and in plain TensorFlow; random trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfmem import dynamic

Tree = tuple  # (label, word) or (label, left, right)


@dataclass
class TreeLSTM:
    """Parameters of a Tree-LSTM with a label at each node."""

    words: int = 30
    width: int = 12
    hidden: int = 16
    classes: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)

        def variable(name: str, *shape: int) -> tf.Variable:
            return tf.Variable(random.normal(0, 0.3, shape).astype(np.float32), name=name)

        self.embedding = variable("embedding", self.words, self.width)
        self.leaf_kernel = variable("leaf_kernel", 3 * self.hidden, self.width)
        self.leaf_bias = variable("leaf_bias", 3 * self.hidden)
        self.kernel = variable("kernel", 5 * self.hidden, 2 * self.hidden)
        self.bias = variable("bias", 5 * self.hidden)
        self.output_kernel = variable("output_kernel", self.classes, self.hidden)
        self.output_bias = variable("output_bias", self.classes)

    @property
    def parameters(self) -> list[tf.Variable]:
        return [
            self.embedding,
            self.leaf_kernel,
            self.leaf_bias,
            self.kernel,
            self.bias,
            self.output_kernel,
            self.output_bias,
        ]

    def specialize(self, **options) -> dynamic.Handle:
        kinds = {"leaf": dynamic.node(self.leaf), "pair": dynamic.node(self.pair, children=2)}
        return dynamic.specialize(self.parameters, kinds, state=(self.hidden, self.hidden), **options)

    def leaf(self, children, word, label):
        gates = dynamic.affine(self.leaf_kernel, dynamic.embedding_lookup(self.embedding, word), self.leaf_bias)
        i, o, u = dynamic.split(gates, 3)
        c = dynamic.sigmoid(i) * dynamic.tanh(u)
        return self.result(dynamic.sigmoid(o) * dynamic.tanh(c), c, label)

    def pair(self, children, label):
        (left_h, left_c), (right_h, right_c) = children
        gates = dynamic.affine(self.kernel, dynamic.concat([left_h, right_h]), self.bias)
        i, f_left, f_right, o, u = dynamic.split(gates, 5)
        c = dynamic.sigmoid(i) * dynamic.tanh(u)
        c += dynamic.sigmoid(f_left) * left_c + dynamic.sigmoid(f_right) * right_c
        return self.result(dynamic.sigmoid(o) * dynamic.tanh(c), c, label)

    def result(self, h, c, label):
        logits = dynamic.affine(self.output_kernel, h, self.output_bias)
        loss = dynamic.sparse_softmax_cross_entropy(label, logits)
        return dynamic.Result(state=(h, c), loss=loss, outputs=logits)

    # ---- the same in TensorFlow ----

    def loss(self, tree: Tree) -> tf.Tensor:
        return self.walk(tree)[2]

    def walk(self, tree: Tree) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        if len(tree) == 2:
            gates = tf.linalg.matvec(self.leaf_kernel, tf.nn.embedding_lookup(self.embedding, tree[1])) + self.leaf_bias
            i, o, u = tf.split(gates, 3)
            c = tf.sigmoid(i) * tf.tanh(u)
            below = 0.0
        else:
            left_h, left_c, left_loss = self.walk(tree[1])
            right_h, right_c, right_loss = self.walk(tree[2])
            gates = tf.linalg.matvec(self.kernel, tf.concat([left_h, right_h], 0)) + self.bias
            i, f_left, f_right, o, u = tf.split(gates, 5)
            c = tf.sigmoid(i) * tf.tanh(u) + tf.sigmoid(f_left) * left_c + tf.sigmoid(f_right) * right_c
            below = left_loss + right_loss
        h = tf.sigmoid(o) * tf.tanh(c)
        logits = tf.linalg.matvec(self.output_kernel, h) + self.output_bias
        return h, c, below + tf.nn.sparse_softmax_cross_entropy_with_logits(tree[0], logits)

    def gradients(self, trees: list[Tree]) -> tuple[list[float], list[np.ndarray]]:
        with tf.GradientTape() as tape:
            losses = [self.loss(tree) for tree in trees]
            total = tf.add_n(losses)
        found = tape.gradient(total, self.parameters, unconnected_gradients="zero")
        return [float(loss) for loss in losses], [tf.convert_to_tensor(gradient).numpy() for gradient in found]


def random_tree(random: np.random.Generator, leaves: int, words: int = 30, classes: int = 5) -> Tree:
    label = int(random.integers(classes))
    if leaves == 1:
        return (label, int(random.integers(words)))
    left = int(random.integers(1, leaves))
    return (
        label,
        random_tree(random, left, words, classes),
        random_tree(random, leaves - left, words, classes),
    )


def random_trees(count: int, most: int = 12, seed: int = 0, **sizes) -> list[Tree]:
    random = np.random.default_rng(seed)
    return [random_tree(random, int(random.integers(1, most + 1)), **sizes) for _ in range(count)]


def nodes(handle: dynamic.Handle, tree: Tree) -> dynamic.Node:
    if len(tree) == 2:
        return handle.node("leaf", tree[1], tree[0])
    return handle.node("pair", nodes(handle, tree[1]), nodes(handle, tree[2]), tree[0])
