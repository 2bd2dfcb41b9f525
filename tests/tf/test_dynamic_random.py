"""Nets with random kinds of nodes, on random graphs: the op against its definition in NumPy."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import dynamic_reference as reference
from tests.tiers import examples
from tfmem import dynamic

WIDTHS = (1, 3, 17)
WORDS, LABELS = 6, 3
UNARY = (dynamic.tanh, dynamic.sigmoid, dynamic.softmax, dynamic.negate, dynamic.sin)
BINARY = ("add", "subtract", "multiply", "squared_difference")


class Net:
    """Kinds of nodes that a seed says: one without children, and up to three with some."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        numbers = np.random.default_rng(seed)

        def variable(*shape: int) -> tf.Variable:
            return tf.Variable(numbers.normal(0, 0.6, shape).astype(np.float32))

        self.table = variable(WORDS, source.choice(WIDTHS))
        self.matrices = {(rows, columns): variable(rows, columns) for rows in WIDTHS for columns in WIDTHS}
        self.vectors = [variable(width) for width in WIDTHS]
        self.state = tuple(source.choice(WIDTHS) for _ in range(source.randint(1, 2)))
        self.children = [0, *(source.randint(1, 3) for _ in range(source.randint(1, 3)))]
        self.with_losses = [source.random() < 0.7 for _ in self.children]
        self.parameters = [self.table, *self.matrices.values(), *self.vectors]
        kinds = {
            str(number): dynamic.node(self.function(number, source.randrange(1 << 30)), children=count)
            for number, count in enumerate(self.children)
        }
        self.handle = dynamic.specialize(self.parameters, kinds, state=self.state)

    def function(self, number: int, seed: int):
        def node(children, word, label):
            source = random.Random(seed)  # the same in training and inference
            pool = [dynamic.embedding_lookup(self.table, number) for number in (word, label)]
            pool += map(dynamic.vector, self.vectors)
            pool += [vector for child in children for vector in (child if isinstance(child, tuple) else (child,))]
            for _ in range(source.randint(1, 8)):
                pool.append(self.step(source, pool))
            state = tuple(dynamic.tanh(self.projected(source.choice(pool[-4:]), width)) for width in self.state)
            logits = self.projected(pool[-1], LABELS)
            loss = dynamic.sparse_softmax_cross_entropy(label, logits) if self.with_losses[number] else None
            return dynamic.Result(state, loss, (logits,) if loss is not None else ())

        return node

    def projected(self, value, width: int):
        return dynamic.matvec(self.matrices[width, value.width], value)

    def step(self, source: random.Random, pool: list):
        value, other = source.choice(pool), source.choice(pool)
        match source.randrange(8):
            case 0 | 1:
                other = other if other.width in {1, value.width} else self.projected(other, value.width)
                return dynamic.elementwise(source.choice(BINARY), value, other)
            case 2:
                return source.choice(UNARY)(value)
            case 3:
                return self.projected(value, source.choice(WIDTHS))
            case 4:
                rows = source.choice(WIDTHS)
                return dynamic.matmul(value, self.matrices[value.width, rows])
            case 5:  # another product of a part of what was joined
                both = dynamic.concat([value, other])
                width = source.choice([width for width in WIDTHS if width <= both.width])
                first = source.randint(0, both.width - width)
                sizes = [size for size in (first, width, both.width - first - width) if size]
                return dynamic.split(both, sizes)[1 if first else 0]
            case 6:
                return dynamic.reduce_sum(value) * 0.3
            case _:
                return dynamic.dropout(value, 0.3)

    def graph(self, source: random.Random):
        """Kinds, children and arguments; nodes may have several parents, or none."""
        kinds, children, arguments = [], [], []
        for place in range(source.randint(1, 9)):
            kind = source.randrange(len(self.children)) if place else 0
            kinds.append(kind)
            children += [source.randrange(place) for _ in range(self.children[kind])]
            arguments += [source.randrange(WORDS), source.randrange(LABELS)]
        return kinds, children, arguments


@settings(max_examples=examples(40))
@given(st.integers(0, 1 << 30), st.integers(0, 1 << 40))
@example(136, 0)  # a product of one number is added to a vector
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_random_net_is_its_definition(seed, dropout):
    net = Net(seed)
    source = random.Random(seed + 1)
    examples = [net.graph(source) for _ in range(source.randint(1, 4))]
    spec, batch = net.handle.spec, net.handle.batch(examples)
    values = [parameter.numpy().astype(np.float64) for parameter in net.parameters]
    run = reference.Run(spec.parameters, spec.kinds, values, examples, dropout)
    outcome = net.handle.forward_backward(batch, seed=dropout)
    np.testing.assert_allclose(outcome.losses, run.losses, rtol=1e-4, atol=1e-5)
    expected = run.backward()
    for gradient, wanted in zip(outcome.gradients, expected, strict=True):
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), wanted, rtol=1e-3, atol=1e-4 * scale)
    # In inference nothing is dropped, and nothing is kept for a gradient.
    alone, kept = (net.handle.forward(batch, states=True, training=training) for training in (False, True))
    text = net.handle.text
    if "random " not in text:
        for one, other in zip(alone.states, kept.states, strict=True):
            np.testing.assert_array_equal(one, other)
    inference = net.handle._inference
    plain = reference.Run(inference.parameters, inference.kinds, values, examples)
    np.testing.assert_allclose(alone.losses, plain.losses, rtol=1e-4, atol=1e-5)
