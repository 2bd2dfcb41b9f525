"""Nets of trees and graphs as users write them, in TensorFlow's ops, and an eager evaluation of the same functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmem import dynamic

Graph = list[tuple[str, tuple[int, ...], tuple[int, ...]]]  # of each node: kind, children, integer arguments


@dataclass
class Net:
    """A net with some graphs.

    Attributes:
        parameters: all variables, inputs too.
        kinds: functions, with their numbers of children.
        state: widths of a node's state.
        graphs: examples; a node comes behind its children.
        rows: what each input gets.
    """

    parameters: list[tf.Variable]
    kinds: Mapping[str, tuple[Callable[..., Any], Any]]
    state: Any
    graphs: Sequence[Graph]
    rows: Sequence[Any] = ()

    def specialize(self, **how: Any) -> dynamic.Handle:
        kinds = {name: dynamic.trace(function, children=children) for name, (function, children) in self.kinds.items()}
        return dynamic.specialize(self.parameters, kinds, state=self.state, **how)

    def batch(self, handle: dynamic.Handle) -> dynamic.Batch:
        examples = []
        for graph in self.graphs:
            nodes: list[Any] = []
            for kind, children, arguments in graph:
                nodes.append(handle.node(kind, *(nodes[child] for child in children), *arguments))
            examples.append(nodes)
        return handle.batch(examples)

    def eager(self) -> tuple[tf.Tensor, list[Any]]:
        """Losses and gradients, node by node."""
        for variable, rows in zip([each for each in self.parameters if _is_input(each)], self.rows, strict=True):
            variable.assign(rows)
        trained = [each for each in self.parameters if not _is_input(each)]
        with tf.GradientTape() as tape:
            losses = tf.stack([self.loss(graph) for graph in self.graphs])
        return losses, tape.gradient(losses, trained, unconnected_gradients="zero")

    def loss(self, graph: Graph) -> tf.Tensor:
        states: list[Any] = []
        total = tf.zeros([], self.parameters[0].dtype)
        for kind, children, arguments in graph:
            given = tuple(states[child] for child in children)
            found = self.kinds[kind][0](given, *(tf.constant(number) for number in arguments))
            result = found if isinstance(found, dynamic.Result) else dynamic.Result(found)
            states.append(result.state)
            total += 0 if result.loss is None else tf.reshape(result.loss, [])
        return total


def _is_input(variable: tf.Variable) -> bool:
    return variable.shape[0] is None


def made(seed: int, dtype: tf.DType, **shapes: Sequence[int]) -> list[tf.Variable]:
    draw = np.random.default_rng(seed).normal
    return [
        tf.Variable(tf.cast(draw(0, 0.5 / np.sqrt(shape[-1] / 4 + 1), shape), dtype), name=name)
        for name, shape in shapes.items()
    ]


def tree(random: np.random.Generator, leaf: Any, inner: Any, most: int) -> Graph:
    """A random tree; `leaf` and `inner` give a node for its children."""
    graph: Graph = []

    def grow(size: int) -> int:
        if size == 1:
            graph.append(leaf())
        else:
            parts = min(size, int(random.integers(2, most + 1)))
            graph.append(inner(tuple(grow(max(1, size // parts)) for _ in range(parts))))
        return len(graph) - 1

    grow(int(random.integers(2, 9)))
    return graph


def child_sum_tree_lstm(dtype: tf.DType) -> Net:
    """Sums over any number of children; features at leaves, and a real-valued target at each node."""
    width, features = 6, 5
    random = np.random.default_rng(0)
    gates, forget, below, read = made(
        1, dtype, gates=[3 * width, features], forget=[width, width], below=[3 * width, width], read=[1, width]
    )
    given, wanted = dynamic.inputs(features, "given", dtype), dynamic.inputs(1, "wanted", dtype)

    def cell(total: Any, kept: Any, target: Any) -> dynamic.Result:
        i, o, u = tf.split(total, 3)
        c = tf.sigmoid(i) * tf.tanh(u) + kept
        h = tf.sigmoid(o) * tf.tanh(c)
        error = tf.linalg.matvec(read, h) - tf.gather(wanted, target)
        return dynamic.Result(state=(h, c), loss=tf.reduce_sum(error**2))

    def leaf(children: Any, row: Any, target: Any) -> dynamic.Result:
        return cell(tf.linalg.matvec(gates, tf.gather(given, row)), tf.zeros([width], dtype), target)

    def inner(children: Any, target: Any) -> dynamic.Result:
        kept = tf.add_n([tf.sigmoid(tf.linalg.matvec(forget, h)) * c for h, c in children])
        return cell(tf.linalg.matvec(below, tf.add_n([h for h, _ in children])), kept, target)

    graphs = [
        tree(
            random,
            lambda: ("leaf", (), (int(random.integers(20)), int(random.integers(9)))),
            lambda children: ("inner", children, (int(random.integers(9)),)),
            4,
        )
        for _ in range(4)
    ]
    rows = [tf.cast(random.normal(size=[20, features]), dtype), tf.cast(random.normal(size=[9, 1]), dtype)]
    kinds = {"leaf": (leaf, 0), "inner": (inner, range(1, 5))}
    return Net([gates, forget, below, read, given, wanted], kinds, (width, width), graphs, rows)


def neural_tensor_net(dtype: tf.DType) -> Net:
    """Two children meet in a tensor of rank 3 (Socher et al. 2013)."""
    width, words, classes = 5, 12, 3
    random = np.random.default_rng(1)
    table, tensor, kernel, bias, read = made(
        2,
        dtype,
        table=[words, width],
        tensor=[width, 2 * width, 2 * width],
        kernel=[width, 2 * width],
        bias=[width],
        read=[classes, width],
    )

    def result(state: Any, label: Any) -> dynamic.Result:
        logits = tf.linalg.matvec(read, state)
        return dynamic.Result(
            state=state, loss=tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits)
        )

    def word(children: Any, number: Any, label: Any) -> dynamic.Result:
        return result(tf.tanh(tf.nn.embedding_lookup(table, number)), label)

    def pair(children: Any, label: Any) -> dynamic.Result:
        both = tf.concat(children, 0)
        met = tf.einsum("i,kij,j->k", both, tensor, both)
        return result(tf.tanh(met + tf.linalg.matvec(kernel, both) + bias), label)

    graphs = [
        tree(
            random,
            lambda: ("word", (), (int(random.integers(words)), int(random.integers(classes)))),
            lambda children: ("pair", children, (int(random.integers(classes)),)),
            2,
        )
        for _ in range(4)
    ]
    kinds = {"word": (word, 0), "pair": (pair, 2)}
    return Net([table, tensor, kernel, bias, read], kinds, width, graphs)


def graph_attention(dtype: tf.DType) -> Net:
    """Atoms attend to their neighbours with several heads, whose kernels are parameters of rank 3; two layers."""
    width, heads, depth, features = 6, 2, 3, 4
    random = np.random.default_rng(2)
    encode, query, key, value, join, read = made(
        3,
        dtype,
        encode=[width, features],
        query=[heads, width, depth],
        key=[width, heads, depth],
        value=[width, heads, depth],
        join=[heads, depth, width],
        read=[1, width],
    )
    given, wanted = dynamic.inputs(features, "given", dtype), dynamic.inputs(1, "wanted", dtype)

    def atom(children: Any, row: Any) -> Any:
        return tf.nn.relu(tf.linalg.matvec(encode, tf.gather(given, row)))

    def attend(children: Any) -> Any:
        own, together = children[0], tf.stack(children)
        asked = tf.einsum("d,hdk->hk", own, query)
        keys = tf.einsum("nd,dhk->nhk", together, key)
        values = tf.einsum("nd,dhk->nhk", together, value)
        weights = tf.nn.softmax(tf.einsum("hk,nhk->hn", asked, keys) / np.sqrt(depth))
        mixed = tf.einsum("hn,nhk->hk", weights, values)
        return own + tf.einsum("hk,hkd->d", mixed, join)

    def whole(children: Any, target: Any) -> dynamic.Result:
        found = tf.linalg.matvec(read, tf.reduce_mean(tf.stack(children), 0))
        return dynamic.Result(state=tf.reduce_max(tf.stack(children), 0), loss=(found[0] - wanted[target, 0]) ** 2)

    graphs, first = [], 0
    for target, size in enumerate((3, 4, 2)):
        bonds = [(at, int(random.integers(at))) for at in range(1, size)]
        graph: Graph = [("atom", (), (first + at,)) for at in range(size)]
        for layer in range(2):
            for at in range(size):
                near = sorted({b if a == at else a for a, b in bonds if at in (a, b)})
                graph.append(("attend", (layer * size + at, *(layer * size + each for each in near)), ()))
        graph.append(("whole", tuple(range(2 * size, 3 * size)), (target,)))
        graphs.append(graph)
        first += size
    rows = [tf.cast(random.normal(size=[first, features]), dtype), tf.cast(random.normal(size=[3, 1]), dtype)]
    kinds = {"atom": (atom, 0), "attend": (attend, range(2, 6)), "whole": (whole, range(2, 5))}
    return Net([encode, query, key, value, join, read, given, wanted], kinds, width, graphs, rows)


def message_passing(dtype: tf.DType) -> Net:
    """A GRU cell of Keras takes the sum of messages, which depend on the kind of bond (Gilmer et al. 2017)."""
    width, elements, bonds = 5, 6, 3
    random = np.random.default_rng(3)
    table, kernels, read = made(4, dtype, table=[elements, width], kernels=[bonds, width, width], read=[2, width])
    norm = keras.layers.LayerNormalization(dtype=dtype.name)
    cell = keras.layers.GRUCell(width, recurrent_initializer="glorot_uniform", dtype=dtype.name)
    norm.build([None, width])
    cell.build([None, width])

    def atom(children: Any, element: Any) -> Any:
        return tf.nn.embedding_lookup(table, element)

    def message(bond: int) -> Any:
        return lambda children: tf.nn.silu(tf.linalg.matvec(kernels[bond], children[0]))

    def update(children: Any) -> Any:
        own, *messages = children
        return cell(tf.add_n(messages)[None], [own[None]])[0][0]

    def whole(children: Any, label: Any) -> dynamic.Result:
        logits = tf.linalg.matvec(read, norm(tf.reduce_sum(tf.stack(children), 0)[None])[0])
        return dynamic.Result(loss=-tf.gather(tf.nn.log_softmax(logits), label), outputs=logits)

    graphs = []
    for size in (3, 2, 4):
        graph: Graph = [("atom", (), (int(random.integers(elements)),)) for _ in range(size)]
        now = list(range(size))
        edges = [(at, int(random.integers(at)), int(random.integers(bonds))) for at in range(1, size)]
        for _ in range(2):
            given: dict[int, list[int]] = {at: [] for at in range(size)}
            for a, b, bond in edges:
                for source, to in ((a, b), (b, a)):
                    graph.append((f"message{bond}", (now[source],), ()))
                    given[to].append(len(graph) - 1)
            now_is = []
            for at in range(size):
                graph.append(("update", (now[at], *given[at]), ()))
                now_is.append(len(graph) - 1)
            now = now_is
        graph.append(("whole", tuple(now), (int(random.integers(2)),)))
        graphs.append(graph)
    kinds = {"atom": (atom, 0), "update": (update, range(2, 6)), "whole": (whole, range(2, 5))}
    kinds |= {f"message{bond}": (message(bond), 1) for bond in range(bonds)}
    weights = [each.value for each in (*norm.trainable_weights, *cell.trainable_weights)]
    return Net([table, kernels, read, *weights], kinds, width, graphs)


def biaffine_parser(dtype: tf.DType) -> Net:
    """An LSTM over words; each word scores all as its head by a product of two states (Dozat and Manning 2017)."""
    width, words, score = 4, 10, 3
    random = np.random.default_rng(4)
    table, to_head, to_dependent, pairs, alone = made(
        5,
        dtype,
        table=[words, width],
        to_head=[score, width],
        to_dependent=[score, width],
        pairs=[score, score],
        alone=[score],
    )
    cell = keras.layers.LSTMCell(width, recurrent_initializer="glorot_uniform", dtype=dtype.name)
    cell.build([None, width])

    def start(children: Any) -> Any:
        return tf.zeros([width], dtype), tf.zeros([width], dtype)

    def word(children: Any, number: Any) -> Any:
        ((h, c),) = children
        _, (h, c) = cell(tf.nn.embedding_lookup(table, number)[None], [h[None], c[None]])
        return h[0], c[0]

    def arc(children: Any, head: Any) -> dynamic.Result:
        (own, _), *others = children
        dependent = tf.nn.relu(tf.linalg.matvec(to_dependent, own))
        heads = tf.nn.relu(tf.stack([tf.linalg.matvec(to_head, h) for h, _ in others]))
        scores = tf.einsum("nd,de,e->n", heads, pairs, dependent) + tf.linalg.matvec(heads, alone)
        return dynamic.Result(
            state=(own, own), loss=tf.nn.sparse_softmax_cross_entropy_with_logits(labels=head, logits=scores)
        )

    graphs = []
    for size in (3, 4):
        graph: Graph = [("start", (), ())]
        graph += [("word", (at,), (int(random.integers(words)),)) for at in range(size)]
        everyone = tuple(range(1, size + 1))
        graph += [("arc", (at, *everyone), (int(random.integers(size)),)) for at in everyone]
        graphs.append(graph)
    kinds = {"start": (start, 0), "word": (word, 1), "arc": (arc, range(4, 6))}
    weights = [each.value for each in cell.trainable_weights]
    return Net([table, to_head, to_dependent, pairs, alone, *weights], kinds, (width, width), graphs)


NETS: dict[str, Callable[[tf.DType], Net]] = {
    "child_sum_tree_lstm": child_sum_tree_lstm,
    "neural_tensor_net": neural_tensor_net,
    "graph_attention": graph_attention,
    "message_passing": message_passing,
    "biaffine_parser": biaffine_parser,
}
