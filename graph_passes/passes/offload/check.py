"""Faults of a plan that could not be put into a graph, in the order of its control chain. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from graph_passes.analysis.memory.simulate import Move, are_there, by_position
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.passes.offload.plan import OffloadPlan


def faults(timeline: Timeline, plan: OffloadPlan) -> list[str]:
    """Why `plan` cannot be carried out on `timeline`, in words; empty if it can."""
    return [*_control_faults(timeline, plan), *_move_faults(timeline, plan)]


def _control_faults(timeline: Timeline, plan: OffloadPlan) -> Iterator[str]:
    ordered = frozenset(plan.ordered)
    if any(later <= earlier for earlier, later in pairwise(plan.ordered)):
        yield "the control chain does not ascend"
    if beyond := [position for position in plan.ordered if not 0 <= position < len(timeline.steps)]:
        yield f"the control chain goes through position {beyond[0]} of {len(timeline.steps)} ops"
    if outside := sorted(timeline.unordered & ordered):
        yield f"the control chain goes through '{timeline.steps[outside[0]].node}', which no control edge may go to"
    for padding in plan.paddings:
        if padding.position not in ordered:
            yield f"{padding.nbytes:,} bytes of padding at position {padding.position}, outside the control chain"


def _move_faults(timeline: Timeline, plan: OffloadPlan) -> Iterator[str]:
    ordered, gaps = frozenset(plan.ordered), frozenset(timeline.gaps())
    away = by_position((move.buffer, move) for move in plan.moves)
    for gap, times in Counter(move.gap for move in plan.moves).items():
        if times > 1:
            yield f"{times} moves of '{timeline.buffers[gap.buffer].tensor}' between positions {gap.last}, {gap.next}"
    for move in plan.moves:
        tensor = f"'{timeline.buffers[move.buffer].tensor}'"
        if move.gap not in gaps:
            yield f"{tensor} is read between positions {move.last} and {move.next}, or cannot be moved"
        if outside := sorted(_moments(move) - ordered):
            yield f"{tensor} is to be moved at position {outside[0]}, outside the control chain"
        if move.recomputed:
            chain = timeline.chain(move.gap)
            if chain is None or not are_there(chain.sources, move.next, away):
                yield f"{tensor} is to be recomputed before position {move.next} from what is not there"
        elif not max(move.copy_after, move.last) < move.release <= move.prefetch <= move.next:
            yield (
                f"{tensor} is copied after position {move.copy_after}, read at {move.last}, released before "
                f"{move.release}, brought back before {move.prefetch} and read at {move.next}: not in this order"
            )


def _moments(move: Move) -> set[int]:
    """The positions that something is put at."""
    return {move.next} if move.recomputed else {move.copy_after, move.release, move.prefetch, move.next}
