"""What is done to a graph after Grappler before its regions are planned: batched products become one, and cheap values
are computed again instead of being stored."""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.analysis.op_pattern import patterns_of
from graph_passes.graph.flatten import FlatProduct, flat_product_rewrites, flat_products
from graph_passes.graph.ir import Graph
from graph_passes.graph.rewrite import Names, Rewrite
from graph_passes.graph.source import Source
from graph_passes.passes.fuse.plan import Needs
from graph_passes.passes.prepare.copies import Recomputed, recompute_rewrites, recomputed


@dataclass(frozen=True)
class Preparation:
    """What is done."""

    products: tuple[FlatProduct, ...]
    recomputed: tuple[Recomputed, ...]


def plan_preparation(source: Source, needs: Needs) -> tuple[Preparation, Graph]:
    """What is done to a graph, and the graph.

    Args:
        source: where the graph is.
        needs: those of planning its regions. Where a caller may run some of the graph without the rest, nothing is
            computed again: what it then waits for might not be wanted.
    """
    graph = source.read(functions=False)
    keep = source.keep(graph)
    again = recomputed(graph, patterns_of(graph), keep) if needs.roots is None else ()
    return Preparation(flat_products(graph, keep), again), graph


def preparation_rewrites(plan: Preparation, graph: Graph) -> list[Rewrite]:
    """What the plan says, product by product and value by value."""
    names = Names(graph)
    return [*flat_product_rewrites(plan.products, graph, names), *recompute_rewrites(plan.recomputed, graph, names)]
