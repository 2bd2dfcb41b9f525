"""Graphs and kinds that are longer than Python's stack, and whose values have many readers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.dynamic import spec
from tfmem import dynamic

ROWS, WIDTH, LENGTH = 5, 4, 100_000


@pytest.fixture(name="table")
def fixture_table() -> tf.Variable:
    return tf.Variable(np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH))


def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(ROWS, size=LENGTH)


def check(table: tf.Variable, outcome: dynamic.Outcome) -> None:
    """That the loss is the sum of all rows of a chain: float32 has these integers."""
    words = rows()
    assert outcome.losses[0] == table.numpy()[words].sum()
    counts = np.bincount(words, minlength=ROWS).astype(np.float32)
    np.testing.assert_array_equal(tf.convert_to_tensor(outcome.gradients[0]), np.tile(counts[:, None], WIDTH))


def test_a_chain_of_nodes(table: tf.Variable) -> None:
    def first(children, word):
        return dynamic.embedding_lookup(table, word)

    def more(children, word):
        return children[0] + dynamic.embedding_lookup(table, word)

    def last(children):
        return dynamic.Result(loss=dynamic.reduce_sum(children[0]))

    kinds = {"first": dynamic.node(first)}
    kinds |= {"more": dynamic.node(more, children=1), "last": dynamic.node(last, children=1)}
    handle = dynamic.specialize([table], kinds, state=WIDTH)
    words = rows().tolist()
    node = handle.node("first", words[0])
    for word in words[1:]:
        node = handle.node("more", node, word)
    check(table, handle.forward_backward([handle.node("last", node)]))


def test_a_chain_that_is_recorded(table: tf.Variable) -> None:
    words = rows().tolist()
    total = dynamic.embedding_lookup(table, words[0])
    for word in words[1:]:
        total = total + dynamic.embedding_lookup(table, word)
    check(table, dynamic.specialize([table]).forward_backward([dynamic.reduce_sum(total)]))


def run(table: tf.Variable, function) -> np.ndarray:
    """What a kind gives for the rows of a table of ones."""
    table.assign(tf.ones_like(table))
    handle = dynamic.specialize([table], {"row": dynamic.node(function)}, state=1)
    return handle.forward([handle.node("row", row) for row in range(ROWS)]).losses.numpy()


@pytest.mark.parametrize("both", [False, True])
def test_a_part_of_a_long_chain(table: tf.Variable, both: bool) -> None:
    """Where an op reads the one before twice, there are 2 ** 3000 ways to the first one."""

    def function(children, row):
        x = dynamic.embedding_lookup(table, row)
        for _ in range(3000):
            x = x * x if both else dynamic.negate(x)
        return dynamic.Result(loss=dynamic.reduce_sum(dynamic.split(x, 2)[1]))

    np.testing.assert_array_equal(run(table, function), np.full(ROWS, 2))


@pytest.mark.parametrize("both", [False, True])
def test_a_kind_uses_a_long_chain_that_was_recorded(table: tf.Variable, both: bool) -> None:
    x = dynamic.constant(1.0)
    for _ in range(3000):
        x = x * x if both else dynamic.negate(x)

    def function(children, row):
        return dynamic.Result(loss=dynamic.reduce_sum(dynamic.embedding_lookup(table, row) * x))

    np.testing.assert_array_equal(run(table, function), np.full(ROWS, WIDTH))


def test_many_parts_of_many_parts(table: tf.Variable) -> None:
    def function(children, row):
        parts = dynamic.split(dynamic.embedding_lookup(table, row), WIDTH)
        whole = dynamic.concat([dynamic.exp(part * (number / 100)) for part in parts for number in range(500)])
        return dynamic.Result(loss=dynamic.add_n([dynamic.log(part) for part in dynamic.split(whole, whole.width)]))

    np.testing.assert_allclose(run(table, function), np.full(ROWS, WIDTH * 500 * 499 / 200), rtol=1e-4)


def test_a_kind_that_is_too_long_is_an_error(table: tf.Variable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "MOST_PARTS", 100)

    def function(children, row):
        x = dynamic.embedding_lookup(table, row)
        for _ in range(100):
            x = dynamic.negate(x)
        return x

    with pytest.raises(dynamic.DynamicError, match=r"kind 'row' computes \d+ values in one section; expected at most"):
        dynamic.specialize([table], {"row": dynamic.node(function)}, state=WIDTH)
