"""What the branches of a condition keep in lists, and what they need while they run: counted by hand."""

from __future__ import annotations

from graph_passes.analysis.memory.lists import ListSize, list_sizes
from graph_passes.graph.ir import Function, Graph, Node, TensorId
from tests.pure.test_lists import COSTS, KIB, LIST_SPEC, MIB, H, function


def test_branches_keep_what_the_larger_one_does() -> None:
    def branch(*kept: str) -> Function:
        nodes = [("tanh", "Tanh", ["h"], H), ("sin", "Sin", ["h"], H), ("kept", "OptionalFromValue", kept, LIST_SPEC)]
        return function({"h": H}, nodes, ["kept"])

    none = function({"h": H}, [("none", "OptionalNone", [], LIST_SPEC)], ["none"])
    nodes = [Node("x", "Placeholder", outputs=1), Node("if", "If", [TensorId("x")], outputs=1)]
    branches = {("if", "then_branch"): branch("tanh", "sin", "h"), ("if", "else_branch"): none}
    graph = Graph(nodes, {TensorId("x"): H, TensorId("if"): LIST_SPEC}, {}, branches)
    assert list_sizes(graph) == {TensorId("if"): ListSize(MIB, 512 * KIB)}  # h is the caller's
    assert COSTS.workspace(graph, graph["if"]) == MIB


def test_lists_that_are_read_together_hold_what_one_branch_keeps() -> None:
    """One branch runs, so a list that only the smaller one fills is empty while the larger one's are full."""

    def branch(op: str, filled: str, empty: str) -> Function:
        nodes = [
            (op, "Tanh", ["h"], H),
            (filled, "OptionalFromValue", [op], LIST_SPEC),
            (empty, "OptionalNone", [], LIST_SPEC),
        ]
        return function({"h": H}, nodes, ["one", "two"])

    def sizes(*readers: tuple[int, ...]) -> list[ListSize | None]:
        nodes = [Node("x", "Placeholder", outputs=1), Node("if", "If", [TensorId("x")], outputs=2)]
        nodes += [Node(f"reader{i}", "If", [TensorId("if", i) for i in reads]) for i, reads in enumerate(readers)]
        lists = [TensorId("if", 0), TensorId("if", 1)]
        branches = {("if", "then_branch"): branch("a", "one", "two"), ("if", "else_branch"): branch("b", "two", "one")}
        found = list_sizes(Graph(nodes, {TensorId("x"): H} | dict.fromkeys(lists, LIST_SPEC), {}, branches))
        return [found[each] for each in lists]

    full = ListSize(512 * KIB, 512 * KIB)
    assert sizes((0, 1)) == [full, ListSize()]
    assert sizes((0,), (1,)) == [full, full]  # one may live on when the other is gone


def test_a_buffer_that_two_lists_of_a_branch_hold_counts_once() -> None:
    nodes = [("tanh", "Tanh", ["h"], H), *((name, "OptionalFromValue", ["tanh"], LIST_SPEC) for name in ("one", "two"))]
    branches = {("if", part): function({"h": H}, nodes, ["one", "two"]) for part in ("then_branch", "else_branch")}
    lists = [TensorId("if", 0), TensorId("if", 1)]
    outer = [Node("x", "Placeholder", outputs=1), Node("if", "If", [TensorId("x")], outputs=2)]
    found = list_sizes(Graph(outer, {TensorId("x"): H} | dict.fromkeys(lists, LIST_SPEC), {}, branches))
    assert sum(size.nbytes for size in found.values() if size) == 512 * KIB


def test_results_of_a_branch_are_no_workspace() -> None:
    """What a branch returns is what its condition returns; a loop makes its results beside those of the step before."""
    body = function({"h": H}, [("tanh", "Tanh", ["h"], H), ("sin", "Sin", ["tanh"], H)], ["tanh", "sin"])
    for op, parts, needed in (("If", ("then_branch", "else_branch"), 0), ("While", ("body",), MIB)):
        nodes = [Node("x", "Placeholder", outputs=1), Node("call", op, [TensorId("x")], outputs=2)]
        specs = {TensorId("x"): H, TensorId("call"): H, TensorId("call", 1): H}
        graph = Graph(nodes, specs, {}, {("call", part): body for part in parts})
        assert COSTS.workspace(graph, graph["call"]) == needed, op


def test_what_a_branch_passes_on_takes_no_memory() -> None:
    """Both outputs of a Switch, and the values of an Optional, are in the memory of what they were given."""
    specs = {TensorId("h"): H, TensorId("list"): LIST_SPEC, TensorId("on", 1): H}
    specs |= dict.fromkeys(map(TensorId, ("on", "value", "tanh")), H)
    nodes = [
        Node("h", "Placeholder", outputs=1),
        Node("list", "Placeholder", outputs=1),
        Node("on", "Switch", [TensorId("h"), TensorId("h")], outputs=2),
        Node("value", "OptionalGetValue", [TensorId("list")], outputs=1),
        Node("tanh", "AddN", [TensorId("on"), TensorId("on", 1), TensorId("value")], outputs=1),
    ]
    body = Function(Graph(nodes, specs), ("h", "list"), (TensorId("tanh"),))
    outer = [Node("x", "Placeholder", outputs=1), Node("if", "If", [TensorId("x"), TensorId("x")])]
    graph = Graph(outer, {TensorId("x"): H}, {}, {("if", "then_branch"): body})
    assert COSTS.workspace(graph, graph["if"]) == 512 * KIB
