"""What a user may give to `tfmem.dynamic`, and what is an error: functions of nodes, optimizers, batches."""

from __future__ import annotations

import functools
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmem import dynamic

WIDTH = 4


def table() -> tf.Variable:
    return tf.Variable(np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH))


# ---- functions of nodes ----


class Scaled:
    def __init__(self, rows: tf.Variable) -> None:
        self.rows = rows

    def node(self, children, row, scale=2.0, *, shift=1.0):
        return dynamic.embedding_lookup(self.rows, row) * scale + shift

    def __call__(self, children, row, **options):
        return self.node(children, row, **options)


def scaled(rows, children, row, scale, /, shift):
    return dynamic.embedding_lookup(rows, row) * scale + shift


FUNCTIONS = {
    "defaults": lambda rows: Scaled(rows).node,
    "an object": Scaled,
    "keywords of a partial": lambda rows: functools.partial(Scaled(rows).node, scale=2.0, shift=1.0),
    "a first argument of a partial": lambda rows: functools.partial(
        lambda rows, children, row: Scaled(rows).node(children, row), rows
    ),
    "a keyword in the middle": lambda rows: functools.partial(
        lambda children, row, scale, shift=1.0: Scaled(rows).node(children, row, scale, shift=shift), scale=2.0
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", [dynamic.node, dynamic.trace])
def test_parameters_with_values_are_no_integer_arguments(name, kind, monkeypatch):
    rows = table()
    function = FUNCTIONS[name](rows)
    if kind is dynamic.trace:
        monkeypatch.setattr(dynamic, "embedding_lookup", tf.nn.embedding_lookup)
    assert kind(function).arguments == 1
    handle = dynamic.specialize([rows], {"row": kind(function)}, state=WIDTH)
    found = handle.forward([handle.node("row", 2)], states=True).states[0]
    np.testing.assert_array_equal(found[0], rows.numpy()[2] * 2 + 1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 1, "expected a parameter that takes the children"),
        (lambda children, *rows: 1, r"remove '\*rows', or give it a default"),
        (lambda children, *, row: 1, "remove 'row', or give it a default"),
        (functools.partial(lambda children, row, label: 1, row=1), "remove 'label', or give it a default"),
        (functools.partial(lambda children: 1, children=()), "expected a parameter that takes the children"),
        (7, "7 cannot be the function of a node: 7 is not a callable object"),
    ],
)
def test_what_is_no_function_of_a_node_is_an_error(function, words):
    with pytest.raises(dynamic.DynamicError, match=words):
        dynamic.specialize([table()], {"row": dynamic.node(function)}, state=WIDTH)


@pytest.mark.parametrize("kind", [lambda children, row: None, 7, None, "leaf"])
def test_what_is_no_kind_is_an_error(kind):
    with pytest.raises(dynamic.DynamicError, match=r"kind 'row' is .*; expected tfmem\.dynamic\.node\(\.\.\.\)"):
        dynamic.specialize([table()], {"row": kind}, state=WIDTH)


@pytest.mark.parametrize(
    "parameter", [lambda: np.ones([3, WIDTH]), lambda: tf.ones([3, WIDTH]), lambda: keras.Variable(np.ones([3, WIDTH]))]
)
def test_a_parameter_that_is_no_variable_is_an_error(parameter):
    with pytest.raises(dynamic.DynamicError, match=r"is no tf\.Variable; expected one, such as `weight\.value`"):
        dynamic.specialize([parameter()])


# ---- optimizers ----


@pytest.mark.parametrize(
    "optimizer",
    [lambda: "adam", lambda: dynamic.Adam, lambda: 0.1],
    ids=["name", "class", "rate"],
)
def test_another_optimizer_is_an_error_that_says_what_to_do(optimizer):
    with pytest.raises(
        dynamic.DynamicError, match=r"expected tfmem\.dynamic\.SGD.*gradients of Handle\.forward_backward"
    ):
        dynamic.specialize([table()], {}, optimizer=optimizer())


NUMBERS = {
    "nan": math.nan,
    "infinity": math.inf,
    "negative infinity": -math.inf,
    "infinite in float32": 1e39,
    "a function": lambda: 0.1,
    "a name": "0.1",
    "nothing": None,
    "a truth value": True,
    "an integer beyond all": 10**400,
}


@pytest.mark.parametrize("given", NUMBERS)
@pytest.mark.parametrize(
    ("rule", "field"),
    [
        *[(dynamic.SGD, "learning_rate"), (dynamic.SGD, "momentum"), (dynamic.Adam, "learning_rate")],
        *[(dynamic.Adam, "beta_1"), (dynamic.Adam, "beta_2"), (dynamic.Adam, "epsilon")],
    ],
)
def test_what_is_no_finite_number_is_an_error(rule, field, given):
    with pytest.raises(dynamic.DynamicError, match=rf"^{rule.__name__}\({field}=.*expected a finite number"):
        rule(**{field: NUMBERS[given]})


@pytest.mark.parametrize(
    "make",
    [
        *[lambda: dynamic.SGD(-0.1), lambda: dynamic.SGD(momentum=1), lambda: dynamic.Adam(-1)],
        *[
            lambda: dynamic.Adam(beta_1=1 - 1e-9),
            lambda: dynamic.Adam(beta_2=-0.1),
            lambda: dynamic.Adam(epsilon=1e-50),
        ],
    ],
)
def test_a_number_out_of_range_is_an_error(make):
    with pytest.raises(dynamic.DynamicError, match=r"expected .* no negative learning rate"):
        make()


def test_numbers_of_other_types():
    assert dynamic.SGD(np.float32(0.5), momentum=0).rule == "sgd"
    assert dynamic.Adam(1, np.float64(0.5)).learning_rate == 1


# ---- batches ----


@pytest.fixture(scope="module")
def handle() -> dynamic.Handle:
    rows = table()
    kinds = {
        "leaf": dynamic.node(lambda children, row: dynamic.embedding_lookup(rows, row)),
        "next": dynamic.node(lambda children: dynamic.tanh(children[0]), children=1),
    }
    return dynamic.specialize([rows], kinds, state=WIDTH)


def deep(handle: dynamic.Handle, length: int = 3000) -> dynamic.Node:
    node = handle.node("leaf", 1)
    for _ in range(length):
        node = handle.node("next", node)
    return node


BATCHES = {
    "a number": lambda h: 7,
    "nothing": lambda h: None,
    "a text": lambda h: "abc",
    "a node": lambda h: h.node("leaf", 1),
    "a dict": lambda h: {"kind": [[0]], "children": [[]], "arguments": [[1]]},
    "numbers": lambda h: [1, 2, 3],
    "nothings": lambda h: [None],
    "a text in a list": lambda h: ["abc"],
    "an empty example": lambda h: [[]],
    "an example of two lists": lambda h: [([0], [])],
    "lists of something else": lambda h: [([0], [], ["a"])],
    "lists of lists": lambda h: [([0], [], [[1]])],
    "lists of nothing": lambda h: [([0], None, [1])],
    "integers that are too large": lambda h: [([0], [], [2**40])],
    "a tuple of nodes": lambda h: [(h.node("leaf", 1), h.node("leaf", 2))],
    "a node among lists": lambda h: [([0], [], [1]), [h.node("leaf", 1), 3]],
    "a text as a child": lambda h: [h.node("next", "leaf")],
    "a text as an argument": lambda h: [h.node("leaf", "word")],
    "a large argument": lambda h: [h.node("leaf", 2**40)],
    "an expression": lambda h: [dynamic.constant(1.0)],
    "a tensor": lambda h: tf.constant([1, 2]),
    "a deep graph as a child": lambda h: [h.node("next", (deep(h),))],
    "a deep graph as an argument": lambda h: [h.node("leaf", deep(h))],
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_is_none_is_an_error(handle, name):
    given = BATCHES[name](handle)
    for call in (handle.batch, handle.forward, handle.forward_backward):
        with pytest.raises(dynamic.DynamicError) as found:
            call(given)
        assert len(str(found.value)) < 500, name


@pytest.mark.parametrize("name", ["other", 0, None, ["leaf"]])
def test_a_node_of_no_kind_is_an_error(handle, name):
    with pytest.raises(dynamic.DynamicError, match=r"there is no kind of node .*; expected one of leaf, next"):
        handle.node(name, 1)


def test_a_recorded_batch_that_is_none_is_an_error():
    recorded = dynamic.specialize([table()])
    for given in (7, None, "abc", [7], [None], ["a"], dynamic.constant(1.0), [[dynamic.constant(1.0)]], [{}]):
        with pytest.raises(dynamic.DynamicError):
            recorded.batch(given)


@pytest.mark.parametrize("root", [lambda h: h.node("leaf", 1), deep])
def test_tensors_that_are_none_are_an_error(handle, root):
    node = root(handle)
    for given in ((node, node, node), (node,), node, (None, None, None)):
        with pytest.raises(dynamic.DynamicError, match=re.compile("a batch|the batch|integers|examples")):
            handle.forward(given)


def test_examples_of_other_types(handle):
    node, lists = handle.node("leaf", 1), (np.array([0]), [], range(1, 2))
    batch = handle.batch(iter([node, [node, node], lists]))
    assert batch.kinds.to_list() == [[0], [0], [0]]
    assert batch.arguments.to_list() == [[1], [1], [1]]
