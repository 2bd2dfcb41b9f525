"""What a `RecurrentPlan` does to a graph; makes no choice."""

from __future__ import annotations

from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import NewNode, Rewrite
from graph_passes.passes.recurrent.match import Match, RecurrentNode, RecurrentPlan


def recurrent_rewrites(plan: RecurrentPlan, _: Graph) -> list[Rewrite]:
    """The matches as what is done to the graph, each with its match's name."""
    return [_rewrite(plan, match) for match in plan.matches]


def _rewrite(plan: RecurrentPlan, match: Match) -> Rewrite:
    first = match.launches[0].name  # a gradient's launch comes later, and no op waits for that alone
    nodes = tuple(_node(plan, node) if isinstance(node, RecurrentNode) else node for node in match.nodes)
    return Rewrite(match.name, nodes, match.rewired, replaced=match.removed, successor=first, renamed=match.renamed)


def _node(plan: RecurrentPlan, launch: RecurrentNode) -> NewNode:
    kernels = plan.kernels.get(launch.name)
    return launch.node(plan.precision, kernels.programs if kernels else ())
