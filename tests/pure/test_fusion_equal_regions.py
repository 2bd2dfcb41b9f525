"""Regions that are equal but for names are planned once, and each as it would be by itself."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from graph_passes.graph.ir import Graph, TensorId
from graph_passes.passes.fuse.partition import partition as module
from graph_passes.passes.fuse.partition.partition import Partition, partition_graph
from graph_passes.passes.fuse.partition.signature import Signatures
from tests.fusion_graphs import UNIT, Nodes, graphs

LAYERS = 4


class Each(Signatures):
    """No two patterns are equal, so each region is planned."""

    def __call__(self, members: Any) -> Any:
        return tuple(members)


def layers(last: int) -> tuple[Nodes, Graph]:
    """Layers of three nodes with an op between them that no region holds; the last layer makes `last` bytes."""
    made = Nodes()
    x = made.add("Opaque", size=3000)
    for layer in range(LAYERS):
        size = last if layer == LAYERS - 1 else 3000
        one = made.add("Elementwise", x, size=size)
        other = made.add("Rows", one, size=size)
        x = made.add("Opaque", made.add("Elementwise", one, other, size=size), size=3000)
    return made, made.graph()


def planned(graph: Graph, op_patterns: Any) -> Partition:
    return partition_graph(graph, op_patterns, UNIT)


def each_planned(graph: Graph, op_patterns: Any) -> Partition:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Signatures", Each)
        return planned(graph, op_patterns)


@pytest.fixture(name="regions")
def fixture_regions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The regions that were planned, by their nodes."""
    found: list[tuple[str, ...]] = []
    schedule = module.schedule_region

    def noted(scorer: Any, *given: Any) -> Any:
        found.append(scorer.region.names)
        return schedule(scorer, *given)

    monkeypatch.setattr(module, "schedule_region", noted)
    return found


@pytest.mark.parametrize(("last", "count"), [(3000, 1), (6000, 2)], ids=["equal", "of other sizes"])
def test_equal_regions_are_planned_once(last: int, count: int, regions: list[tuple[str, ...]]) -> None:
    nodes, graph = layers(last)
    once = planned(graph, nodes.op_patterns)
    assert len(once.regions) == LAYERS
    assert len(regions) == count
    assert each_planned(graph, nodes.op_patterns) == once
    assert len(regions) == count + LAYERS
    members = [name for region in once.regions for name in region.members]
    assert len(members) == len(set(members)) == 3 * LAYERS


def twice(graph: Graph) -> Graph:
    """The graph and a copy of it, as two replicas would be."""

    def tensor(each: TensorId) -> TensorId:
        return TensorId(f"{each.node}_1", each.index)

    copies = [
        replace(
            node,
            name=f"{node.name}_1",
            inputs=list(map(tensor, node.inputs)),
            control=[f"{name}_1" for name in node.control],
        )
        for node in graph
    ]
    return Graph([*graph, *copies], {**graph.specs, **{tensor(each): spec for each, spec in graph.specs.items()}})


@given(graphs())
def test_any_two_replicas_are_planned_as_each_would_be(made: Any) -> None:
    one, op_patterns = made
    graph = twice(one)
    patterns = {**op_patterns, **{f"{name}_1": each for name, each in op_patterns.items()}}
    assert planned(graph, patterns) == each_planned(graph, patterns)


def test_a_signature_takes_time_in_proportion_to_its_pattern() -> None:
    """To look at the whole pattern for each of its tensors took 25 s of a graph of 27,000 ops."""

    def seconds(count: int) -> float:
        made = Nodes()
        x = made.add("Opaque")
        members = [x := made.add("Elementwise", x) for _ in range(count)]
        signatures = Signatures(made.graph())
        signatures(members)  # what ops and tensors are is found once
        began = time.process_time()
        for _ in range(3):
            signatures(members)
        return time.process_time() - began

    assert seconds(16_000) < 16 * max(seconds(2_000), 2e-3)
