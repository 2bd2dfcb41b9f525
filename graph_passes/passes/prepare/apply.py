"""What a `PreparePlan` does to a graph; makes no choice."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.graph.flatten import flat_product_rewrites
from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import Names, Rewrite
from graph_passes.graph.writer import Writer
from graph_passes.passes.prepare.copies import Recomputed
from graph_passes.passes.prepare.plan import PreparePlan


def prepare_rewrites(plan: PreparePlan, graph: Graph) -> list[Rewrite]:
    """What the plan says, product by product and value by value."""
    names = Names(graph)
    return [*flat_product_rewrites(plan.products, graph, names), *recompute_rewrites(plan.recomputed, graph, names)]


def recompute_rewrites(plan: Sequence[Recomputed], graph: Graph, names: Names) -> list[Rewrite]:
    """Each node gets a second one for its late readers."""
    found = []
    for each in plan:
        node = graph[each.name]
        writer = Writer(names, each.name, node.device)
        again = writer.again(node, *node.inputs)
        readers = tuple((use, again) for use in each.late)
        found.append(Rewrite(each.name, tuple(writer.nodes), inputs=readers, order=((again.node, each.after),)))
    return found
