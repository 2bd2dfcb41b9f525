"""Decides which recurrences of a graph are swapped. Pure: a graph in, a `RecurrentPlan` out."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from graph_passes.ir import Graph
from graph_passes.recurrent.hoist import Names
from graph_passes.recurrent.loops import Loop, Unreadable, functional_loops, loops_out_of_reach, lowered_loops
from graph_passes.recurrent.match import RecurrentPlan, Unmatched
from graph_passes.recurrent.pairs import paired
from graph_passes.recurrent.swap import Swap, read_loop


def plan_recurrent(graph: Graph, keep: Collection[str] = ()) -> RecurrentPlan:
    """What to swap in `graph`, and what not and why.

    Args:
        graph: read with the bodies of its loops (`serde.from_graph_def(..., functions=True)`).
        keep: names of nodes that are fetched; they stay.
    """
    names = Names(graph)
    swaps: list[Swap] = []
    unmatched: list[Unmatched] = []
    for loop in _loops(graph):
        try:
            swaps.append(read_loop(graph, loop, names, keep))
        except Unreadable as reason:
            unmatched.append(Unmatched(loop.name, loop.carrier, str(reason)))
    for node, inner in loops_out_of_reach(graph):
        where = f"'{inner.name}' ({inner.op}) is in a function that it calls"
        unmatched.append(Unmatched(node.name, node.op, where + _why(node.op)))
    return RecurrentPlan(tuple(paired(graph, swaps, names)), tuple(unmatched))


def _why(op: str) -> str:
    if op in ("If", "StatelessIf"):
        return ", and whether it runs is decided by data"
    return "; the call could not be brought to the top level"


def _loops(graph: Graph) -> Iterator[Loop]:
    yield from functional_loops(graph)
    yield from lowered_loops(graph)
