"""Fusion of steps of several replicas: regions within a device, no cycle through collectives, equal kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.dependences import dependences
from graph_passes.analysis.op_pattern import NodePattern, OpPattern, patterns_of
from graph_passes.analysis.peers import is_collective, meetings, united_order, waits_for_itself
from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.passes.fuse.equal_kernels import behind_sums, needed_by_updates
from graph_passes.passes.fuse.partition.canonical_order import CanonicalOrder
from graph_passes.passes.fuse.partition.partition import partition_graph
from graph_passes.passes.fuse.plan import Needs, plan_fusion
from graph_passes.refusals import Reason
from tests.fusion_graphs import UNIT
from tests.spmd_graphs import Spmd, device, steps, training_step

NET = Spmd((2, 3, 1, 2, 4), (0, 0, 0, 1, 2), 2, 2)


def patterned(graph: Graph, alone: frozenset[int] = frozenset()) -> dict[str, NodePattern]:
    """Patterns under which what is no constant may be in a region, but for nodes with a last digit in `alone`."""
    outside = NodePattern(OpPattern.OPAQUE, Reason.STATEFUL(op="op"))
    found = {}
    for number, node in enumerate(graph):
        operands = tuple(range(len(node.inputs)))
        if node.op == "Const":
            found[node.name] = NodePattern(OpPattern.CONSTANT, Reason.CONSTANTS())
        elif number % 10 in alone:
            found[node.name] = replace(outside, operands=operands)
        else:
            found[node.name] = NodePattern(OpPattern.ELEMENTWISE, operands=operands)
    return found


def edited(graph: Graph, sets: Iterable[tuple[str, ...]]) -> Graph:
    """The graph with one node in place of each set; what it waits for and who waits for it, as control edges."""
    owner = {name: f"region{number}" for number, members in enumerate(sets) for name in members}
    made: dict[str, Node] = {}
    for node in graph:
        name = owner.get(node.name, node.name)
        before = {owner.get(each, each) for each in graph.predecessors(node)} - {name}
        if name == node.name:
            inputs = node.inputs if is_collective(node) else []
            given = [TensorId(owner.get(each.node, each.node)) for each in inputs]
            made[name] = Node(name, node.op, given, sorted(before), device=node.device, outputs=1)
        else:
            waited = sorted(before | set(made[name].control if name in made else ()))
            made[name] = Node(name, "Region", [], waited, device=node.device, outputs=1)
    return Graph(made.values(), {}, graph.constants)


def planned(graph: Graph, patterns: Mapping[str, NodePattern]) -> list[tuple[str, ...]]:
    return [region.members for region in partition_graph(graph, patterns, UNIT).regions]


@settings(max_examples=60)
@given(
    net=steps(),
    edges=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=4),
    alone=st.frozensets(st.integers(0, 9), max_size=4),
)
def test_regions_lie_in_a_lane_and_close_no_cycle(
    net: Spmd, edges: list[tuple[int, int]], alone: frozenset[int]
) -> None:
    graph = training_step(net)
    names = list(graph.nodes)
    for first, second in edges:  # among lanes, too
        before, after = names[first % len(names)], names[second % len(names)]
        if before != after and before not in graph[after].control and graph[after].op != "Const":
            graph.add_control(after, before)
            try:
                closed = waits_for_itself(graph)
            except GraphError:  # a cycle of the graph alone
                closed = (after,)
            if closed:
                graph.remove_control(after, before)
    regions = planned(graph, patterned(graph, alone))
    for members in regions:
        assert len({graph[name].device for name in members}) == 1
        assert not any(is_collective(graph[name]) for name in members)
    assert waits_for_itself(edited(graph, regions)) == ()


def across() -> Graph:
    """A step in which a value leaves a device through a collective and comes back from its peer."""
    nodes: list[Node] = []
    constants: dict[str, np.ndarray] = {}

    def add(name: str, op: str, inputs: Iterable[str], lane: int) -> None:
        nodes.append(Node(name, op, [TensorId(each) for each in inputs], device=device(lane), outputs=1))

    for lane in range(2):
        add(f"x{lane}", "Placeholder", [], lane)
        for what, value in {"size": 2, "key": 1, "instance": 7, "token": 7}.items():
            add(f"{what}{lane}", "Const", [], lane)
            constants[f"{what}{lane}"] = np.array(value, np.int32)
    for number in range(4):
        add(f"a{number}", "Exp", [f"a{number - 1}" if number else "x0"], 0)
    for lane, read in enumerate(("a3", "x1")):
        scalars = [f"{what}{lane}" for what in ("size", "key", "instance", "token")]
        add(f"c{lane}", "CollectiveReduceV2", [read, *scalars], lane)
    add("back", "Exp", ["c1"], 1)
    for number in range(4):
        add(f"b{number}", "Mul", ["a0", f"b{number - 1}" if number else "back"], 0)
    specs = {TensorId(n.name): TensorSpec("int32" if n.op == "Const" else "float32", 4, (64,)) for n in nodes}
    return Graph(nodes, specs, constants)


def test_a_path_may_come_back_through_a_peer() -> None:
    graph = across()
    regions = planned(graph, patterns_of(graph))
    assert sorted(map(sorted, regions)) == [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"]]
    assert waits_for_itself(edited(graph, [tuple(name for members in regions for name in members)]))


def test_a_collective_stands_behind_what_its_peer_waits_for() -> None:
    graph = across()
    order = united_order(graph, meetings(graph))
    assert order.index("a3") < min(order.index("c0"), order.index("c1"))
    graph.add_control("a0", "back")
    with pytest.raises(GraphError, match="the step waits for itself through or before"):
        united_order(graph, meetings(graph))


def test_nothing_is_fused_where_collectives_have_no_order() -> None:
    graph = across()
    graph.constants.clear()
    found = partition_graph(graph, patterns_of(graph), UNIT)
    assert not found.regions
    why = found.reasons["a0"]
    assert why.reason is Reason.COLLECTIVES
    assert "no constant group key" in str(why)


def of_updates() -> Graph:
    """A step that sums gradients, updates two variables in each lane, and counts steps in one lane for both."""
    nodes: list[Node] = []

    def add(name: str, op: str, inputs: Iterable[str], lane: int, outputs: int = 1) -> None:
        read = [TensorId(each.partition(":")[0], int(each.partition(":")[2] or 0)) for each in inputs]
        nodes.append(Node(name, op, read, device=device(lane), outputs=outputs))

    for lane in range(2):
        for name in ("x", "w0", "w1", "count", "size", "key", "token", "rate"):
            add(f"{name}/{lane}", "Placeholder", [], lane)
        add(f"c/{lane}", "CollectiveReduceV2", [f"{n}/{lane}" for n in ("x", "size", "key", "key", "token")], lane)
        add(f"split/{lane}", "Split", [f"c/{lane}"], lane, outputs=2)
        for number in (1, 0) if lane else (0, 1):  # listed otherwise in another lane
            add(f"m{number}/{lane}", "Mul", [f"split/{lane}:{number}", f"rate/{lane}"], lane)
            add(f"u{number}/{lane}", "AssignSubVariableOp", [f"w{number}/{lane}", f"m{number}/{lane}"], lane, outputs=0)
    add("one", "Exp", ["x/0"], 0)
    for lane in range(2):
        add(f"counted/{lane}", "AssignVariableOp", [f"count/{lane}", "one"], lane, outputs=0)
    resources = {"w0", "w1", "count", "token"}
    specs = {
        TensorId(node.name, index): TensorSpec(
            "resource" if node.name.partition("/")[0] in resources else "float32", 4, (64,)
        )
        for node in nodes
        for index in range(node.outputs)
    }
    return Graph(nodes, specs, {f"{n}/{lane}": np.array(2, np.int32) for n in ("size", "key") for lane in range(2)})


def test_what_updates_depend_on_in_their_own_lane_alone() -> None:
    graph = of_updates()
    found = behind_sums(graph, patterned(graph))
    mine = {"split", "rate", "w0", "w1", "m0", "m1", "u0", "u1", "count"}
    expected = {name for name in graph.nodes if name.replace("/0", "").replace("/1", "") in mine}
    assert found == expected


def test_what_any_update_depends_on_behind_collectives() -> None:
    """What lies before a collective, such as the inputs of its sum, may differ from that of other workers."""
    graph = of_updates()
    mine = {"split", "rate", "w0", "w1", "m0", "m1", "u0", "u1", "count", "counted", "one"}
    expected = {name for name in graph.nodes if name.replace("/0", "").replace("/1", "") in mine}
    assert needed_by_updates(graph) == expected | {"x/0"}


def test_equal_regions_have_equal_orders() -> None:
    """Whatever their nodes are called, and in whatever order the graph lists them."""
    graph = of_updates()
    patterns = patterned(graph)
    order = united_order(graph, meetings(graph))
    like = CanonicalOrder(graph, order, dependences(graph, patterns, order), meetings(graph))
    found = []
    for lane in range(2):
        members = [name for name in order if name[:2] in ("m0", "m1", "u0", "u1") and name.endswith(str(lane))]
        found.append([name.replace(f"/{lane}", "") for name in like(members)])
    assert found[0] == found[1]


class Given:
    """A source of one graph, of which nothing is fetched."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def read(self, inlined: object = None, functions: bool = True) -> Graph:
        return self.graph

    def keep(self, graph: Graph) -> set[str]:
        return set()


def replicas(last: Sequence[str]) -> Graph:
    """Each lane computes, sums, computes again and updates a variable; the last op before the update is given."""
    nodes: list[Node] = []

    def add(name: str, op: str, inputs: Iterable[str], lane: int, outputs: int = 1) -> None:
        nodes.append(Node(name, op, [TensorId(each) for each in inputs], device=device(lane), outputs=outputs))

    for lane, op in enumerate(last):
        for name in ("x", "w", "size", "key", "token"):
            add(f"{name}/{lane}", "Placeholder", [], lane)
        for number, read in enumerate(("x", "a0", "a1", "a2")):
            add(f"a{number}/{lane}", "Exp", [f"{read}/{lane}"], lane)
        add(f"c/{lane}", "CollectiveReduceV2", [f"{n}/{lane}" for n in ("a3", "size", "key", "key", "token")], lane)
        for number, read in enumerate(("c", "b0", "b1")):
            add(f"b{number}/{lane}", "Exp", [f"{read}/{lane}"], lane)
        add(f"b3/{lane}", op, [f"b2/{lane}"], lane)
        add(f"u/{lane}", "AssignVariableOp", [f"w/{lane}", f"b3/{lane}"], lane, outputs=0)
    value = TensorSpec("float32", 4, (64,))
    specs = {
        TensorId(node.name): TensorSpec("resource", 4, (), value) if node.name[0] in "wt" else value
        for node in nodes
        if node.outputs
    }
    return Graph(nodes, specs, {f"{n}/{lane}": np.array(2, np.int32) for n in ("size", "key") for lane in range(2)})


def test_variables_are_updated_by_equal_regions_or_by_none() -> None:
    needs = Needs(UNIT, device(0), lambda node: b"", mirrored=True)
    found, _ = plan_fusion(Given(replicas(("Tanh", "Tanh"))), needs)
    assert sorted(region.schedule.members[0][0] for region in found.regions) == ["a", "a", "b", "b"]
    assert not found.kept
    found, _ = plan_fusion(Given(replicas(("Tanh", "Sin"))), needs)
    assert sorted(region.schedule.members[0][0] for region in found.regions) == ["a", "a"]
    assert [region.reason for region in found.kept] == [Reason.OTHER_REPLICA()] * 2
    found, _ = plan_fusion(Given(replicas(("Tanh", "Sin"))), replace(needs, mirrored=False))
    assert len(found.regions) == 4
