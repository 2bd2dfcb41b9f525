"""A rewrite applied to a graph and to an editor, what is then dead, and what a StridedSlice takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graph_passes.errors import GraphError
from graph_passes.graph import slices
from graph_passes.graph.dead_code import dead_code, without_dead
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec, Use
from graph_passes.graph.ops import passed
from graph_passes.graph.rewrite import Names, NewNode, Rewrite, applied, apply_rewrites
from graph_passes.graph.verify import verify_graph


def tensor(name: str) -> TensorId:
    return TensorId(name)


def node(name: str, op: str, *inputs: str, **changes: Any) -> Node:
    return Node(name, op, [tensor(each) for each in inputs], outputs=changes.pop("outputs", 1), **changes)


def chain() -> Graph:
    """x -> a -> b -> result, and `waits` after b."""
    nodes = [node("x", "Placeholder"), node("a", "Relu", "x"), node("b", "Neg", "a"), node("result", "Exp", "b")]
    nodes.append(Node("waits", "NoOp", control=["b"]))
    return Graph(nodes, {tensor(name): TensorSpec("float32", 4, (2,)) for name in ("x", "a", "b", "result")})


def fused(name: str = "fused", reads: str = "x", old: str = "b", **changes: Any) -> Rewrite:
    values: dict[str, Any] = {
        "nodes": (NewNode(name, "Fused", (tensor(reads),)),),
        "rewired": ((tensor(old), tensor(name)),),
        "replaced": ("a", "b"),
        "successor": name,
    }
    return Rewrite(old, **(values | changes))


def test_a_rewrite_takes_the_place_of_nodes() -> None:
    graph = chain()
    apply_rewrites([fused()], graph)
    verify_graph(graph)
    assert [each.name for each in graph] == ["x", "result", "waits", "fused"]
    assert graph["result"].inputs == [tensor("fused")]
    assert graph["waits"].control == ["fused"]
    assert graph.specs[tensor("fused")].shape == (2,)


def test_a_later_rewrite_names_what_an_earlier_one_rewired() -> None:
    later = Rewrite("result", (NewNode("more", "More", (tensor("b"),)),), ((tensor("result"), tensor("more")),))
    graph = chain()
    apply_rewrites([fused(), later], graph)
    assert graph["more"].inputs == (graph["result"].inputs) == [tensor("fused")]


class Renaming:
    """An editor that chooses other names."""

    def __init__(self) -> None:
        self.edits: list[tuple[Any, ...]] = []

    def insert(self, name: str, op: str, inputs: Any, *_: Any) -> str:
        self.edits.append((op, *map(str, inputs)))
        return f"{name}_7"

    def rewire(self, node: str, index: int, source: TensorId) -> None:
        self.edits.append(("rewire", node, index, str(source)))

    def add_control(self, node: str, after: str) -> None:
        self.edits.append(("add", node, after))

    def remove_control(self, node: str, after: str) -> None:
        self.edits.append(("remove", node, after))


def test_an_editor_names_new_nodes_and_the_graph_stays() -> None:
    graph, editor = chain(), Renaming()
    rewrite = fused(
        inputs=((Use("result", 0), tensor("fused")),),
        order=(("fused", "x"),),
        renamed=(),
    )
    later = Rewrite("more", (NewNode("more", "More", (tensor("fused"),), control=("fused",)),))
    apply_rewrites([rewrite, later], graph, editor)
    assert editor.edits == [
        ("Fused", "x:0"),
        ("add", "fused_7", "x"),
        ("rewire", "result", 0, "fused_7:0"),
        ("rewire", "result", 0, "fused_7:0"),
        ("add", "waits", "fused_7"),
        ("remove", "waits", "b"),
        ("More", "fused_7:0"),
    ]
    assert "a" in graph.nodes


def test_what_is_fetched_by_name_keeps_it() -> None:
    graph = chain()
    apply_rewrites([fused(renamed=(("b", tensor("fused")),))], graph)
    assert (graph["b"].op, graph["b"].inputs) == ("Identity", [tensor("fused")])


def test_one_that_cannot_be_applied_costs_no_other() -> None:
    wrong = Rewrite("wrong", (NewNode("odd", "Odd", (tensor("nowhere"),)),))
    edited, errors = applied([wrong, fused()], chain(), verify_graph)
    assert "fused" in edited.nodes
    assert list(errors) == ["wrong"]
    assert isinstance(errors["wrong"], GraphError)


def test_of_those_that_do_not_go_together_the_first_stays() -> None:
    def not_both(edited: Graph) -> None:
        if {"one", "two"} <= edited.nodes.keys():
            raise ValueError("both")

    rewrites = [Rewrite(name, (NewNode(name, "Op", (tensor("x"),)),)) for name in ("one", "two", "three")]
    edited, errors = applied(rewrites, chain(), not_both)
    assert edited.nodes.keys() - chain().nodes.keys() == {"one", "three"}
    assert {name: str(error) for name, error in errors.items()} == {"two": "both"}


def again(**changes: Any) -> Rewrite:
    """A second x."""
    return Rewrite("again", (NewNode("again", "Identity", (tensor("x"),)),), **changes)


def test_a_later_rewrite_is_ordered_after_what_an_earlier_one_replaced() -> None:
    graph, editor = chain(), Renaming()
    rewrites = [fused(), again(order=(("again", "b"),))]
    apply_rewrites(rewrites, graph)
    verify_graph(graph)
    assert graph["again"].control == ["fused"]
    apply_rewrites(rewrites, chain(), editor)
    assert editor.edits[-1] == ("add", "again_7", "fused_7")


def test_what_replaced_a_node_waits_in_its_place() -> None:
    graph = chain()
    apply_rewrites([fused(), again(order=(("b", "again"),))], graph)
    assert graph["fused"].control == ["again"]


def test_what_replaced_a_reader_reads_in_its_place() -> None:
    graph, editor = chain(), Renaming()
    rewrites = [fused(), again(inputs=((Use("a", 0), tensor("again")), (Use("b", 0), tensor("again"))))]
    apply_rewrites(rewrites, graph)
    assert graph["fused"].inputs == [tensor("again")]  # b read what is no more
    apply_rewrites(rewrites, chain(), editor)
    assert editor.edits[-1] == ("rewire", "fused_7", 0, "again_7:0")


def test_a_tensor_stands_for_what_a_later_rewrite_put_in_the_place_of_its_own() -> None:
    graph = chain()
    same = Rewrite("a", rewired=((tensor("a"), tensor("x")),), replaced=("a",))
    other = Rewrite("x", (NewNode("other", "Other"),), ((tensor("x"), tensor("other")),))
    apply_rewrites([same, other, again(), fused("late", "a", replaced=("b",))], graph)
    verify_graph(graph)
    assert graph["again"].inputs == graph["late"].inputs == [tensor("other")]


def test_an_editor_moves_what_reads_or_waits_for_new_nodes_too() -> None:
    """What an earlier rewrite inserted waits for a node that a later one replaces, and no longer reads another."""
    editor = Renaming()
    waits = Rewrite("one", (NewNode("one", "One", (tensor("a"),), control=("b",)),))
    moves = again(inputs=((Use("one", 0), tensor("again")),))
    apply_rewrites([waits, moves, fused(replaced=("b",)), fused("more", "x", "a", replaced=("a",))], chain(), editor)
    assert [edit for edit in editor.edits if "one_7" in edit] == [
        ("rewire", "one_7", 0, "again_7:0"),
        ("add", "one_7", "fused_7"),
        ("remove", "one_7", "b"),
    ]


@pytest.mark.parametrize("reads", ["nowhere", "x"])
@pytest.mark.parametrize("place", [0, 41, 99])
def test_one_wrong_rewrite_of_many_takes_few_checks(reads: str, place: int) -> None:
    """A check imports the graph; one that cannot be edited is not even checked."""
    rewrites = [Rewrite(f"{number}", (NewNode(f"new{number}", "Op", (tensor("x"),)),)) for number in range(99)]
    rewrites.insert(place, Rewrite("wrong", (NewNode("odd", "Odd", (tensor(reads),)),)))
    checks: list[Graph] = []

    def check(edited: Graph) -> None:
        checks.append(edited)
        if "odd" in edited.nodes:
            raise GraphError("odd")

    edited, errors = applied(rewrites, chain(), check)
    assert list(errors) == ["wrong"]
    assert len(edited) == len(chain()) + 99
    assert len(checks) <= 15  # two for each time that a hundred is halved, and one


def test_names_are_fresh() -> None:
    names = Names(chain())
    assert [names.fresh("a"), names.fresh("a"), names.fresh("new")] == ["a_1", "a_2", "new"]


def dead(graph: Graph, *start: str, read: str = "x", keep: tuple[str, ...] = ()) -> set[str]:
    return dead_code(graph, start, [NewNode("new", "New", (tensor(read),))], {tensor("b"): tensor("new")}, keep)


def test_dead_code_is_what_only_the_dead_read_and_what_only_serves_them() -> None:
    assert dead(chain(), "b") == {"a", "b"}
    assert dead(chain(), "b", keep=("a",)) == {"b"}
    assert dead(chain(), "b", read="a") == {"b"}
    assert dead(chain(), "a", "b", read="a") == {"b"}  # what a new node reads stays


def test_effects_and_fetches_keep_what_they_read() -> None:
    nodes = [*chain().nodes.values(), node("print", "Print", "a", stateful=True), node("idle", "Neg", "a")]
    assert dead(Graph(nodes), "b") == {"b"}
    assert dead(Graph(nodes[:-2]), "b") == {"a", "b"}
    assert dead(Graph([*nodes[:-2], nodes[-1]]), "a", "b") == {"a", "b", "idle"}


def test_new_nodes_that_nobody_needs_go() -> None:
    new = [NewNode("one", "Op", (tensor("x"),)), NewNode("two", "Op", (tensor("one"),)), NewNode("three", "Op")]
    assert [each.name for each in without_dead(new, {"two"})] == ["one", "two"]


def test_what_a_tensor_is_a_copy_of() -> None:
    graph = Graph([node("x", "Placeholder"), node("many", "IdentityN", "x", "x", outputs=2)])
    assert passed(graph, TensorId("many", 1)) == tensor("x")


def strided(begin: Any, end: Any, step: Any, masks: dict[str, int]) -> Graph:
    values = {"begin": begin, "end": end, "step": step}
    nodes = [node("x", "Placeholder"), node("t", "Placeholder"), *(node(name, "Const") for name in values)]
    nodes.append(node("slice", "StridedSlice", "x", *values, attrs={f"{k}_mask": v for k, v in masks.items()}))
    return Graph(nodes, constants={name: np.array(value) for name, value in values.items()})


@pytest.mark.parametrize(
    ("begin", "end", "step", "masks"),
    [
        ([1], [3], [1], {}),
        ([0, 2], [0, 0], [1, 1], {"begin": 1, "end": 3}),
        ([-2, 0], [9, 0], [1, 2], {"end": 2, "begin": 2}),
        ([3, 0], [4, 4], [1, 1], {"shrink_axis": 1}),
        ([0, 3], [0, 4], [1, 1], {"begin": 1, "end": 1, "shrink_axis": 2}),
    ],
)
def test_a_strided_slice_takes_what_numpy_does(begin: Any, end: Any, step: Any, masks: dict[str, int]) -> None:
    graph = strided(begin, end, step, masks)
    axes = slices.axes(graph, graph["slice"])
    assert axes is not None
    x = np.arange(30).reshape(5, 6)
    taken: Any = tuple(axis.begin if axis.single else slice(axis.begin, axis.end, axis.step) for axis in axes)
    bits = [1 << place for place in range(len(begin))]
    wanted: Any = tuple(
        first
        if masks.get("shrink_axis", 0) & bit
        else slice(None if masks.get("begin", 0) & bit else first, None if masks.get("end", 0) & bit else last, by)
        for bit, first, last, by in zip(bits, begin, end, step, strict=True)
    )
    np.testing.assert_array_equal(x[taken], x[wanted])


def test_an_ellipsis_and_unknown_ends_are_not_told() -> None:
    for graph in (strided([0], [0], [1], {"ellipsis": 1}), strided([0], [0], [1], {})):
        if not graph["slice"].attrs:
            del graph.constants["end"]
        assert slices.axes(graph, graph["slice"]) is None


def test_a_new_axis_is_none_of_the_operands() -> None:
    graph = strided([0, 0], [0, 0], [1, 1], {"begin": 1, "end": 1, "new_axis": 2})
    axes = slices.axes(graph, graph["slice"])
    assert axes is not None
    assert [(axis.whole, axis.new) for axis in axes] == [(True, False), (False, True)]
