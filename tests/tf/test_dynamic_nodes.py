"""Graphs of nodes that Python made, as integers."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import examples
from tfmem import dynamic
from tfmem.dynamic.batch import flatten, from_roots
from tfmem.dynamic.extension import flatten_nodes, node_maker

INTEGERS = st.integers(-(2**31), 2**31 - 1)


def defined(roots: Sequence[dynamic.Node]) -> tuple[list[int], list[int], list[int]]:
    """What `flatten` gives, in Python."""
    kinds: list[int] = []
    children: list[int] = []
    arguments: list[int] = []
    known: dict[int, int] = {}
    waiting = list(reversed(roots))
    while waiting:
        current = waiting[-1]
        if id(current) in known:
            waiting.pop()
            continue
        missing = [child for child in current[1] if id(child) not in known]
        if missing:
            missing.reverse()
            waiting += missing
            continue
        waiting.pop()
        known[id(current)] = len(kinds)
        kinds.append(current[0])
        children += [known[id(child)] for child in current[1]]
        arguments += current[2]
    return kinds, children, arguments


@st.composite
def graphs(draw: Any) -> list[dynamic.Node]:
    """Roots of a graph in which nodes are shared."""
    made: list[dynamic.Node] = []
    for _ in range(draw(st.integers(1, 12))):
        count = draw(st.integers(0, min(3, len(made))))
        children = tuple(draw(st.sampled_from(made)) for _ in range(count))
        made.append(dynamic.Node(draw(st.integers(0, 9)), children, tuple(draw(st.lists(INTEGERS, max_size=2)))))
    return draw(st.lists(st.sampled_from(made), min_size=1, max_size=3))


@settings(max_examples=examples(300))
@given(graphs())
def test_they_come_as_they_are_defined(roots: list[dynamic.Node]) -> None:
    """A root that was met before is a node already."""
    assert flatten(*roots) == defined(roots)


@settings(max_examples=examples(50))
@given(st.lists(graphs(), max_size=4))
def test_a_batch_has_a_row_for_each(examples: list[list[dynamic.Node]]) -> None:
    batch = from_roots(examples)
    for row, roots in enumerate(examples):
        assert [part.to_list()[row] for part in batch] == list(defined(roots))
    assert batch.kinds.nrows() == len(examples)


def test_a_long_chain_takes_no_stack() -> None:
    node = dynamic.Node(0, (), ())
    for _ in range(200_000):
        node = dynamic.Node(1, (node,), (5,))
    kinds, children, arguments = flatten(node)
    assert (kinds[:2], children[:2], len(kinds), len(arguments)) == ([0, 1], [0, 1], 200_001, 200_000)
    while node.children:  # Python's tuples would be freed one within the other
        node = node.children[0]


def test_integers_of_other_types() -> None:
    assert flatten(dynamic.Node(np.int64(3), [], [np.int32(4), True])) == ([3], [], [4, 1])


@pytest.mark.parametrize(
    ("node", "error", "words"),
    [
        ((1, ((2, ()),), ()), TypeError, "a node is expected"),
        ((1, (7,), ()), TypeError, "7 stands where a node is expected"),
        ((1, 7, ()), TypeError, "not iterable"),
        ((1, (), (1.5,)), TypeError, "integer"),
        ((1, (), (2**31,)), OverflowError, "does not fit into 32 bits"),
        (("leaf", (), ()), TypeError, "integer"),
    ],
)
def test_what_is_no_graph_is_an_error(node: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        flatten_nodes([[node]])
    assert flatten(dynamic.Node(0, (), ())) == ([0], [], [])


def test_nothing_is_kept() -> None:
    kinds = [1_000_000 + number for number in range(3)]  # separate objects
    leaf = dynamic.Node(kinds[0], (), ())
    root = dynamic.Node(kinds[1], [leaf, leaf], (kinds[2],))
    before = [sys.getrefcount(each) for each in (*kinds, leaf, root)]
    for _ in range(5):
        assert flatten(root) == (kinds[:2], [0, 0], kinds[2:])
        with pytest.raises(dynamic.DynamicError, match="7 stands where a node is expected"):
            flatten(dynamic.Node(0, (root, 7), ()))
    assert [sys.getrefcount(each) for each in (*kinds, leaf, root)] == before


class Own(dynamic.Node):
    """The type of nodes of one handle."""

    __slots__ = ()


FORMS = {
    "leaf": (0, 0, 2),
    "pair": (1, 2, 3),
    "any/1": (2, 1, 1),
    "any/3": (3, 3, 3),
    "any": {1: (2, 1, 1), 3: (3, 3, 3)},
}


class RefusedError(Exception):
    """No such node."""


def refused(kind: Any, values: int) -> RefusedError:
    return RefusedError(kind, values)


MAKE = node_maker(Own, FORMS, refused)


def node_of(kind: Any, given: tuple[Any, ...]) -> Any:
    """None where there is no such node."""
    try:
        return MAKE(kind, *given)
    except RefusedError as error:
        return None if error.args == (kind, len(given)) else error


def defined_node(kind: str, given: tuple[Any, ...]) -> dynamic.Node | None:
    """What `node_of` gives, in Python."""
    form = FORMS.get(kind)
    if isinstance(form, dict):
        form = form.get(len(given))
    if form is None or len(given) != form[2]:
        return None
    return Own(form[0], given[: form[1]], given[form[1] :])


@settings(max_examples=examples(300))
@given(st.data())
def test_a_program_makes_the_nodes_that_are_defined(data: Any) -> None:
    """Kinds, numbers of values, children and integers are drawn; where a node is refused, both refuse it."""
    made: list[dynamic.Node] = []
    expected: list[dynamic.Node] = []
    for _ in range(data.draw(st.integers(1, 20))):
        kind = data.draw(st.sampled_from([*FORMS, "none"]))
        children = [
            data.draw(st.integers(0, len(made) - 1)) for _ in range(data.draw(st.integers(0, 3)) if made else 0)
        ]
        integers = tuple(data.draw(st.lists(INTEGERS, max_size=2)))
        node = node_of(kind, (*(made[child] for child in children), *integers))
        other = defined_node(kind, (*(expected[child] for child in children), *integers))
        assert node == other
        if node is not None and other is not None:
            assert type(node) is Own
            made.append(node)
            expected.append(other)
    whole: dict[int, int] = {}  # graphs: nodes above nodes, with integers; by identity their positions
    for number, node in enumerate(made):
        if all(id(child) in whole for child in node.children) and all(type(each) is int for each in node.arguments):
            whole[id(node)] = number
    places = list(whole.values())
    assert flatten(*(made[at] for at in places), own=Own) == flatten(*(expected[at] for at in places), own=Own)


@pytest.mark.parametrize(
    ("own", "forms", "kind", "given", "error"),
    [
        (int, FORMS, "leaf", (1, 2), TypeError),
        (Own, {"leaf": (0, 0)}, "leaf", (), ValueError),
        (Own, {"leaf": (0, 0, "2")}, "leaf", (1, 2), TypeError),
    ],
)
def test_what_makes_no_node_is_an_error(own: Any, forms: Any, kind: Any, given: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        node_maker(own, forms, refused)(kind, *given)
    assert node_of([], ()) is None


def test_a_kind_comes_first_and_may_be_named() -> None:
    make = node_maker(Own, {"none": (4, 0, 0)}, refused)
    assert make(kind="none") == make("none") == (4, (), ())
    for args, keywords in (((), {}), ((), {"name": "none"}), (("none",), {"kind": "none"})):
        with pytest.raises(TypeError, match="node takes a kind"):
            make(*args, **keywords)
    with pytest.raises(ZeroDivisionError):
        node_maker(Own, FORMS, lambda *_: 1 // 0)("leaf")


def test_made_nodes_are_freed_at_once() -> None:
    value = 1_234_567
    before = sys.getrefcount(value)
    node = node_of("leaf", (value, value))
    for _ in range(100_000):
        node = node_of("any", (node,))
    while node.children:  # Python's tuples would be freed one within the other
        node = node.children[0]
    del node
    assert sys.getrefcount(value) == before


def test_the_collector_follows_nodes_that_may_be_in_a_cycle() -> None:
    leaf = node_of("leaf", (1, 2))
    tree = node_of("pair", (leaf, leaf, 5))
    assert not any(map(gc.is_tracked, (leaf, tree, tree.children, tree.arguments)))
    held: list[Any] = []
    cycle = node_of("any", (held,))
    held.append(cycle)
    above = node_of("any", (cycle,))
    assert gc.is_tracked(cycle)
    assert gc.is_tracked(above)
    assert gc.is_tracked(node_of("any", (np.int64(1),)))
    held.clear()
