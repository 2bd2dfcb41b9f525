"""The order in which copies out leave. Pure: gaps in, an order out.

    ops            conv1  conv2  conv3   concat  conv4            conv4 needs room: what concat read has to leave,
    by last uses   [ a             ][ b            ][ concat   ]  and its copy waits behind those of a and b
    a better one   [ a             ][ concat   ][ b            ]  b has room to wait for its copy

The link sends one tensor after the other. By the ops that they follow (thesis, Listing 3.2) a tensor whose memory is
needed at once may wait behind others that could stay. So the copies for which the step waits longest are tried further
ahead. A copy only reads: it may begin once the content is final, long before the last use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graph_passes.analysis.memory.simulate import Link, Move, run_through, usage_under
from graph_passes.analysis.memory.timeline import Gap, Timeline
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.placement import Tightest, hidden, in_order

MOST_TRIES = 100  # orders of one selection
WAITS = 3  # moves that are tried further ahead: those for which the step waits longest
AHEAD = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # places that they are tried further ahead, beside the first of all
GAIN = 1e-4  # share of the step's time that another order has to save


@dataclass(frozen=True, eq=False)
class _Ordered:
    """An order of the copies, and what the step does under it.

    Attributes:
        seconds: that the step takes; infinity if it is over the budget.
        queue: the order.
        late: gaps of the moves for whose copy out the step waits, longest first.
    """

    seconds: float
    queue: tuple[Gap, ...]
    late: tuple[Gap, ...]


def best_order(
    timeline: Timeline, start: Tightest, link: Link, budget: int, options: OffloadOptions, timed: bool
) -> tuple[float, tuple[Gap, ...], int]:
    """Seconds that the step takes under the best order that was found, that order, and how many were tried.

    Args:
        timeline, start, link, budget, options: the step, and what moves.
        timed: whether run times were measured.
    """

    def ordered(queue: tuple[Gap, ...]) -> _Ordered:
        moves = in_order(timeline, hidden(timeline, start, link, options, timed, queue))
        seconds, _, waits = run_through(timeline, moves, link)
        over = int(usage_under(timeline, moves).max(initial=timeline.base)) > budget
        late = sorted(waits, key=lambda index: (-waits[index], index))
        return _Ordered(float("inf") if over else seconds, queue, tuple(moves[index].gap for index in late))

    by_use = sorted(start.copies, key=_place)
    plain, best, tries = ordered(()), ordered(tuple(move.gap for move in by_use)), 2
    while tries < MOST_TRIES:
        found = best
        for queue in _further_ahead(best):
            tries += 1
            found = min(found, ordered(queue), key=lambda each: each.seconds)
        if not found.seconds < best.seconds - GAIN * timeline.moments[-1]:
            break
        best = found
    best = min(best, plain, key=lambda each: each.seconds)
    return best.seconds, best.queue, tries


def _further_ahead(found: _Ordered) -> Iterator[tuple[Gap, ...]]:
    """The queue with one of the moves that the step waits for further ahead."""
    for gap in found.late[:WAITS]:
        at = found.queue.index(gap)
        for place in sorted({max(0, at - places) for places in (*AHEAD, at)} - {at}):
            queue = [*found.queue[:place], gap, *found.queue[place:at], *found.queue[at + 1 :]]
            yield tuple(queue)


def _place(move: Move) -> tuple[int, int]:
    return move.copy_after, move.last
