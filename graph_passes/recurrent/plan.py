"""Decides which recurrences of a graph are swapped. Pure: a graph in, a `RecurrentPlan` out."""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.ir import Graph
from graph_passes.recurrent.faults import attempt
from graph_passes.recurrent.loops import functional_loops, loops_out_of_reach, lowered_loops
from graph_passes.recurrent.match import RecurrentPlan, Unmatched
from graph_passes.recurrent.pairs import paired
from graph_passes.recurrent.swap import Swap, read_loop
from graph_passes.rewrite import Names


def plan_recurrent(graph: Graph, keep: Collection[str] = ()) -> RecurrentPlan:
    """What to swap in `graph`, and what not and why.

    Args:
        graph: read with the bodies of its loops (`serde.from_graph_def(..., functions=True)`).
        keep: names of nodes that are fetched; they stay.
    """
    names = Names(graph)
    swaps: list[Swap] = []
    unmatched: list[Unmatched] = []
    for kind, loops in (("loop", functional_loops), ("lowered loop", lowered_loops)):
        with attempt(unmatched, f"every {kind} from here on", kind):
            for loop in loops(graph):
                with attempt(unmatched, loop.name, loop.carrier):
                    swaps.append(read_loop(graph, loop, names, keep))
    for node, inner in loops_out_of_reach(graph):
        where = f"'{inner.name}' ({inner.op}) is in a function that it calls"
        unmatched.append(Unmatched(node.name, node.op, where + _why(node.op)))
    matches = paired(graph, swaps, names, unmatched)
    return RecurrentPlan(tuple(matches), tuple(unmatched))


def _why(op: str) -> str:
    if op in ("If", "StatelessIf"):
        return ", and whether it runs is decided by data"
    return "; the call could not be brought to the top level"
