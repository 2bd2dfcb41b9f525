"""Two matches over as many steps in opposite directions, with the same cell, share one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.rewrite import Names, NewNode
from graph_passes.passes.recurrent.faults import attempt
from graph_passes.passes.recurrent.match import Joinable, Match, RecurrentNode, Unmatched


def paired(graph: Graph, candidates: Sequence[Joinable], names: Names, unmatched: list[Unmatched]) -> list[Match]:
    """The matches of `candidates`, bidirectional ones joined; one that cannot even be looked at is added to
    `unmatched`."""
    waiting = list(candidates)
    matches: list[Match] = []
    while waiting:
        joinable = waiting.pop(0)
        with attempt(unmatched, joinable.match.name, joinable.match.carrier):
            partner = next((other for other in waiting if _fit(graph, joinable, other)), None)
            if partner is None:
                matches.append(joinable.match)
                continue
            forward, backward = sorted(
                (joinable.match, partner.match), key=lambda match: match.launches[0].directions[0].reverse
            )
            matches.append(_joined(forward, backward, names))
            waiting.remove(partner)
    return matches


def _fit(graph: Graph, one: Joinable, other: Joinable) -> bool:
    if any(len(match.launches) != 1 or match.counting for match in (one.match, other.match)):
        return False
    first, second = one.match.launches[0], other.match.launches[0]
    opposite = first.directions[0].reverse != second.directions[0].reverse
    kinds = [(each.cell, each.units, each.dtype, each.device, each.batch_major) for each in (first, second)]
    together = one.time == other.time and bool(one.batch & other.batch)
    return (
        opposite
        and kinds[0] == kinds[1]
        and together
        and not (_depends(graph, one.match, other.match) or _depends(graph, other.match, one.match))
    )


def _depends(graph: Graph, later: Match, earlier: Match) -> bool:
    """Whether `later` needs a result of `earlier`."""
    made = {old.node for old, _ in earlier.rewired} | set(earlier.removed)
    read = {tensor.node for node in later.nodes for tensor in node.inputs if tensor.node in graph.nodes}
    return not made.isdisjoint(graph.reached(read, graph.predecessors))


def _joined(forward: Match, backward: Match, names: Names) -> Match:
    first, second = forward.launches[0], backward.launches[0]
    launch = replace(
        first,
        name=names.fresh(f"{first.name}_both"),
        directions=(*first.directions, *second.directions),
        control=(*first.control, *second.control),
    )
    moved = first.results_in(launch) | second.results_in(launch, 1)
    before: list[NewNode | RecurrentNode] = []
    after: list[NewNode | RecurrentNode] = []
    for match in (forward, backward):
        place = match.nodes.index(match.launches[0])
        before += match.nodes[:place]
        after += [_reading(node, moved) for node in match.nodes[place + 1 :] if isinstance(node, NewNode)]
    return Match(
        name=f"{forward.name} and {backward.name}",
        carrier=forward.carrier,
        nodes=(*before, launch, *after),
        rewired=tuple((old, moved.get(new, new)) for old, new in (*forward.rewired, *backward.rewired)),
        renamed=tuple((name, moved.get(new, new)) for name, new in (*forward.renamed, *backward.renamed)),
        removed=tuple(dict.fromkeys((*forward.removed, *backward.removed))),
    )


def _reading(node: NewNode, moved: dict[TensorId, TensorId]) -> NewNode:
    return replace(node, inputs=tuple(moved.get(tensor, tensor) for tensor in node.inputs))
