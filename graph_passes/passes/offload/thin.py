"""Makes a plan that runs faster: drops moves that it does not need, and begins copies back earlier.

A repair may have made a move needless. And where memory is so tight that no plan made from scratch finds room for its
allocations, the one that moves everything may still be the one that runs: it moves too much, and hides no copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from graph_passes.analysis.memory.fragmentation import Room, first_failure, without_workspace
from graph_passes.analysis.memory.simulate import Move, duration, simulate, simulated
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.passes.offload.placement import in_order
from graph_passes.passes.offload.plan import OffloadPlan, chained

TRIES = 512  # changes that are replayed, at most
EARLIER = (64, 32, 16, 8, 4, 2, 1)  # ops by which a copy back may begin earlier, or a release come later


@lru_cache(maxsize=1 << 6)  # the same plans are thinned before each trial
def thinned(timeline: Timeline, plan: OffloadPlan, room: Room) -> OffloadPlan:
    """`plan` with every change that makes the step faster and still finds room; its paddings stay.

    Args:
        timeline: the step, as measured.
        plan: a plan for it that runs.
        room: what is free before the step.
    """
    # what the plan does not find room for on paper cannot be asked of what is made from it
    missed = without_workspace(timeline, plan.moves, room, plan.paddings)
    excused = range(len(timeline.steps)) if missed is None else missed
    limit = max(plan.budget, plan.after.peak)
    best, after, tries = list(plan.moves), simulate(timeline, plan.moves, plan.link, plan.paddings), 0

    def better(moves: Sequence[Move]) -> bool:
        nonlocal best, after, tries
        if tries == TRIES:
            return False
        took = duration(timeline, moves, plan.link)
        if took[0] >= after.seconds:
            return False
        outcome = simulated(timeline, moves, took, plan.paddings)
        if outcome.peak > limit:
            return False
        tries += 1
        if first_failure(timeline, moves, room, plan.paddings, excused=excused) is not None:
            return False
        best, after = list(moves), outcome
        return True

    for changes in (_left, _earlier, _later):
        for move in sorted(plan.moves, key=lambda move: timeline.buffers[move.buffer].nbytes, reverse=True):
            current = next((one for one in best if one.gap == move.gap), None)
            if current is None or current.recomputed:
                continue
            for changed in changes(current):
                moves = [one for one in best if one is not current] + ([changed] if changed else [])
                if better(in_order(timeline, moves)):
                    break
    ordered = chained(timeline, best, plan.budget, plan.paddings)
    return replace(plan, moves=tuple(best), after=after, ordered=ordered)


def _left(move: Move) -> Iterator[Move | None]:
    """The buffer stays."""
    yield None


def _earlier(move: Move) -> Iterator[Move]:
    for ops in EARLIER:
        if move.prefetch - ops >= move.release:
            yield replace(move, prefetch=move.prefetch - ops)


def _later(move: Move) -> Iterator[Move]:
    for ops in EARLIER:
        if move.release + ops < move.prefetch:
            yield replace(move, release=move.release + ops)
