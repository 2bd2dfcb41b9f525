"""What a `RecurrentPlan` does to a graph; makes no choice."""

from __future__ import annotations

from graph_passes.graph.ir import Graph
from graph_passes.graph.ops import READS
from graph_passes.graph.rewrite import NewNode, Rewrite
from graph_passes.passes.recurrent.match import Match, RecurrentNode, RecurrentPlan


def recurrent_rewrites(plan: RecurrentPlan, graph: Graph) -> list[Rewrite]:
    """The matches as what is done to the graph, each with its match's name."""
    return [_rewrite(plan, match, graph) for match in plan.matches]


def _rewrite(plan: RecurrentPlan, match: Match, graph: Graph) -> Rewrite:
    first = match.launches[0].name  # a gradient's launch comes later, and no op waits for that alone
    nodes = tuple(_node(plan, node) if isinstance(node, RecurrentNode) else node for node in match.nodes)
    return Rewrite(
        match.name, nodes, match.rewired, replaced=match.removed, order=_order(match, graph), successor=first,
        renamed=match.renamed,
    )  # fmt: skip


def _order(match: Match, graph: Graph) -> tuple[tuple[str, str], ...]:
    """What waited for a loop that read a variable, as an assignment does, waits for what reads it now.

    A read may stand behind the launch, as that of a projection of all steps does: waiting for the launch is not enough.
    """
    removed = set(match.removed)
    waiting = {name for old in removed for name in graph.waiting(graph[old])} - removed
    later = graph.reached(waiting, graph.successors)
    for node in match.nodes:
        if not later.isdisjoint((*(tensor.node for tensor in node.inputs), *node.control)):
            later.add(node.name)
    reads = (node.name for node in match.nodes if isinstance(node, NewNode) and node.op in READS)
    return tuple((name, read) for read in reads if read not in later for name in sorted(waiting))


def _node(plan: RecurrentPlan, launch: RecurrentNode) -> NewNode:
    kernels = plan.kernels.get(launch.name)
    return launch.node(plan.precision, kernels.programs if kernels else ())
