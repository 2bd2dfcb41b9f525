"""Kernels of several replicas: mirrored variables stay equal to the bit, since equal kernels compute them. Pure.

    GPU:0    c0 -> {scale, update}       Two kernels of one formula may round differently. So what updates a variable is
    GPU:1    c1 -> {scale}, {update}     fused in both lanes or in none.

What lies before a collective, or before another sum over lanes, may differ: all lanes get the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from custom_ops.fusion.region import Call, Kernel, Region
from custom_ops.fusion.text import to_text
from graph_passes.analysis.op_pattern import NodePattern, OpPattern
from graph_passes.analysis.peers import is_collective, meeting_nodes
from graph_passes.graph.ir import Graph, Node
from graph_passes.graph.ops import READS


def behind_sums(graph: Graph, known: Mapping[str, NodePattern]) -> set[str]:
    """Names of the nodes that updates of some lanes depend on, and those of other lanes do not.

    The search ends at collectives. What all lanes depend on is computed once, and copied.

    Args:
        graph: the graph.
        known: the patterns of its nodes.
    """
    lanes, met = _lanes(graph), meeting_nodes(graph)
    updates = [
        node for node in graph if node.device in lanes and node.name not in met and _may_write(graph, known, node)
    ]
    needed: Counter[str] = Counter()
    for lane in lanes:
        own = [node.name for node in updates if node.device == lane]
        needed.update(graph.reached(own, lambda node: [each.node for each in node.inputs if each.node not in met]))
    copies = {
        node.name
        for node in updates
        if node.op == "AssignVariableOp" and needed[node.inputs[-1].node] in (0, len(lanes))
    }
    return {name for name, count in needed.items() if count < len(lanes)} - copies


def needed_by_updates(graph: Graph) -> set[str]:
    """Names of the nodes that updates of variables depend on, and of the updates; the search ends at collectives.

    What takes a variable or another resource counts as an update, unless it is known to read.
    """
    met = meeting_nodes(graph)
    updates = [node.name for node in graph if node.op not in READS and node.name not in met and _takes(graph, node)]
    return graph.reached(updates, lambda node: [each.node for each in node.inputs if each.node not in met])


def unequal(graph: Graph, regions: Mapping[str, tuple[Sequence[str], Region]]) -> set[str]:
    """Names of the regions of one lane that have no equal in another.

    Args:
        graph: the graph.
        regions: of what `behind_sums` gave: the members of each, and what it computes.
    """
    counts: dict[str, Counter[str]] = {lane: Counter() for lane in _lanes(graph)}
    kernels = {name: kernel_text(region) for name, (_, region) in regions.items()}
    lost = set()
    for name, (members, _) in regions.items():
        lane = next((graph[member].device for member in members if graph[member].device), "")
        if lane in counts:
            counts[lane][kernels[name]] += 1
        else:
            lost.add(name)
    return lost | {name for name, kernel in kernels.items() if len({found[kernel] for found in counts.values()}) > 1}


def _lanes(graph: Graph) -> set[str]:
    """The devices of replicas: those of collectives, if there are any."""
    return {node.device for node in graph if is_collective(node)} or {node.device for node in graph if node.device}


def _may_write(graph: Graph, known: Mapping[str, NodePattern], node: Node) -> bool:
    """Whether the node may write a variable."""
    return _takes(graph, node) and known[node.name].pattern is not OpPattern.READ


def _takes(graph: Graph, node: Node) -> bool:
    """Whether the node takes a variable, or another resource."""
    specs = (graph.specs.get(tensor) for tensor in node.inputs)
    return any(spec is not None and spec.dtype == "resource" for spec in specs)


def kernel_text(region: Region) -> str:
    """The region's text without the names of what it stands for."""
    steps = (replace(step, members=()) if isinstance(step, Kernel | Call) else step for step in region.steps)
    return to_text(replace(region, steps=tuple(steps)))
