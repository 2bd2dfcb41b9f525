"""A net over trees: leaves have features, and inner nodes any number of children and a real-valued target."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfmem import dynamic

WIDTH, FEATURES, TARGETS = 13, 7, 3
RANDOM = np.random.default_rng(5)


class Net:
    """The weights of the net, and its inputs."""

    def __init__(self) -> None:
        draw = np.random.default_rng(1).normal
        self.encode = tf.Variable(draw(size=[FEATURES, WIDTH]).astype(np.float32), name="encode")
        self.combine = tf.Variable(draw(size=[WIDTH, WIDTH]).astype(np.float32) / 4, name="combine")
        self.decode = tf.Variable(draw(size=[WIDTH, TARGETS]).astype(np.float32), name="decode")
        self.features = dynamic.inputs(FEATURES, "features")
        self.targets = dynamic.inputs(TARGETS, "targets")

    @property
    def weights(self) -> list[tf.Variable]:
        return [self.encode, self.combine, self.decode]

    def specialize(self, **how: Any) -> dynamic.Handle:
        def leaf(children: Any, row: Any) -> Any:
            return tf.tanh(tf.linalg.matvec(self.encode, tf.gather(self.features, row), transpose_a=True))

        def inner(children: Any, target: Any) -> dynamic.Result:
            return self.inner(children, tf.gather(self.targets, target))

        kinds = {"leaf": dynamic.trace(leaf), "inner": dynamic.trace(inner, children=range(1, 5))}
        return dynamic.specialize([*self.weights, self.features, self.targets], kinds, state=WIDTH, **how)

    def inner(self, children: Any, target: Any) -> dynamic.Result:
        together = tf.stack(children)
        pooled = tf.reduce_mean(together, 0) + tf.reduce_max(together, 0)
        state = tf.tanh(tf.linalg.matvec(self.combine, pooled, transpose_a=True))
        found = tf.linalg.matvec(self.decode, state, transpose_a=True)
        return dynamic.Result(state=state, loss=tf.reduce_sum((found - target) ** 2))

    def loss(self, tree: Any, features: Any, targets: Any) -> Any:
        """The loss of a tree in plain TensorFlow: a leaf is its row, an inner node (row of its target, children)."""

        def visit(node: Any) -> Any:
            if isinstance(node, int):
                return tf.tanh(tf.linalg.matvec(self.encode, features[node], transpose_a=True)), 0.0
            number, *children = node
            states, losses = zip(*map(visit, children), strict=True)
            found = self.inner(states, targets[number])
            return found.state, found.loss + sum(losses)

        return visit(tree)[1]


TREES = [(0, 0, 1, (1, 2, 3, 4, 5)), (0, 2), (1, (0, 0, 1), 3, 2)]
ROWS = [RANDOM.normal(size=[count, FEATURES]).astype(np.float32) for count in (6, 3, 4)]
WANTED = [RANDOM.normal(size=[2, TARGETS]).astype(np.float32) for _ in TREES]


def node(handle: dynamic.Handle, tree: Any, first: int = 0, target: int = 0) -> dynamic.Node:
    if isinstance(tree, int):
        return handle.node("leaf", first + tree)
    return handle.node("inner", *(node(handle, each, first, target) for each in tree[1:]), target + tree[0])


def expected(net: Net, features: Any, targets: Any, over: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        tape.watch([features, targets])
        first, losses = 0, []
        for number, tree in enumerate(TREES):
            end = first + len(ROWS[number])
            losses.append(net.loss(tree, features[first:end], targets[2 * number : 2 * number + 2]))
            first = end
        total = tf.stack(losses)
    return total, tape.gradient(total, over, unconnected_gradients="zero")


def given() -> tuple[tf.Tensor, tf.Tensor]:
    return tf.constant(np.concatenate(ROWS)), tf.constant(np.concatenate(WANTED))


def batch(handle: dynamic.Handle, whole: bool) -> dynamic.Batch:
    """Arguments that count all rows, or those of their example."""
    starts = np.cumsum([0, *map(len, ROWS)])
    return handle.batch([node(handle, tree, int(starts[at]) * whole, 2 * at * whole) for at, tree in enumerate(TREES)])
