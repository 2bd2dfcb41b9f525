"""When the chosen tensors are copied out, released, and brought back. Pure: gaps in, moves out.

Policy `autovm` (thesis 3.3.2): copy out after the last forward use (Listing 3.2); prefetch late, so that the copy just
hides behind the ops before the use (Listing 3.3), or, with run times unknown, as early as memory allows (Listing 3.4);
prefetches run in the order of the uses they serve (Figures 3.4, 3.5). A release waits for its copy, so it comes as late
as memory allows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from graph_passes.analysis.memory.elements import let_go
from graph_passes.analysis.memory.simulate import Link, Move, are_there, by_position, recomputing_peak, usage_under
from graph_passes.analysis.memory.timeline import Gap, Timeline
from graph_passes.passes.offload.options import RECOMPUTING, OffloadOptions

EARLY = 100  # a copy that begins before its tensor's last use is of a budget's hundredth at least: else it gains little
SLACK = 1.2  # copies are planned to take this much longer than bytes over bandwidth: run times vary


def tight(timeline: Timeline, gap: Gap, options: OffloadOptions) -> Move:
    """The move that keeps a tensor out for the whole gap."""
    copy_after = gap.last
    if options.copy_start == "produced":
        buffer = timeline.buffers[gap.buffer]
        for use in reversed((buffer.start, *buffer.uses)):  # back to where it last came into memory, at the latest
            if use <= gap.last and copy_after - use <= 1:
                copy_after = use
        copy_after = max([copy_after, *(position for position in buffer.written if position <= gap.last)])
    return Move(gap.buffer, gap.last, timeline.before(copy_after), gap.last + 1, gap.next, gap.next)


def one_layer_ahead(timeline: Timeline, gap: Gap, layers: Sequence[int]) -> Move:
    """vDNN's timing: release when the layer is done, prefetch while the layer before in the backward pass runs."""
    # The k-th layer from the turn runs backward at about the mirror image of its forward position.
    ahead = [2 * timeline.turn - layer for layer in layers]
    prefetch = max((p for p in ahead if gap.last + 1 < p <= gap.next), default=gap.next)
    return Move(gap.buffer, gap.last, timeline.before(gap.last), gap.last + 1, prefetch, gap.next)


def in_order(timeline: Timeline, moves: Iterable[Move]) -> list[Move]:
    """Moves as they are put into the graph: at ops that can be ordered, and sorted, since that decides which tensor is
    allocated first at one position. So a tensor leaves earlier and comes back later: it never takes more memory."""
    found = [move if move.recomputed else _at_ordered(timeline, move) for move in moves]
    return sorted(found, key=lambda move: (move.release, move.prefetch))


def _at_ordered(timeline: Timeline, move: Move) -> Move:
    release, prefetch = timeline.before(move.release), timeline.after(move.prefetch)
    same = (release, prefetch) == (move.release, move.prefetch)
    return move if same else replace(move, release=release, prefetch=prefetch)


def place(
    timeline: Timeline,
    gaps: Sequence[Gap],
    link: Link,
    budget: int,
    options: OffloadOptions,
    timed: bool,
    again: Collection[Gap] | None = None,
    queue: Sequence[Gap] = (),
) -> list[Move]:
    """Start from every tensor out for its whole gap, then spend the memory that is left on hiding the copies.

    Args:
        timeline, gaps, link, budget, options: the step, and what moves.
        timed: whether run times were measured.
        again: those of `gaps` that chains end; None: where a chain is faster than a copy, if the policy recomputes.
        queue: the order of the copies out; none: by the ops that they follow.
    """
    return hidden(timeline, tightest(timeline, gaps, link, budget, options, again), link, options, timed, queue)


@dataclass(frozen=True, eq=False)
class Tightest:
    """Every tensor out for its whole gap.

    Attributes:
        recomputed: the moves that chains end.
        copies: the others.
        room: bytes that are left at each position.
        budget: bytes.
    """

    recomputed: list[Move]
    copies: list[Move]
    room: npt.NDArray[np.int64]
    budget: int


def tightest(
    timeline: Timeline,
    gaps: Sequence[Gap],
    link: Link,
    budget: int,
    options: OffloadOptions,
    again: Collection[Gap] | None = None,
) -> Tightest:
    """Where `place` starts; for its arguments see there."""
    moves = [tight(timeline, gap, options) for gap in gaps]
    if again is not None:
        wanted = [move.gap in again for move in moves]
    elif options.policy in RECOMPUTING:
        wanted = [timeline.recomputing(gap) < timeline.nbytes(gap) / link.prefetch for gap in gaps]
    else:
        wanted = [False for _ in gaps]
    every = _recomputed(timeline, moves, wanted, budget)
    # What a moved list takes along comes back with it, so memory that elements let go is not spent.
    room = budget - usage_under(timeline, every) - np.maximum(0, let_go(timeline, every))
    copies = [move for move in every if not move.recomputed]
    return Tightest([move for move in every if move.recomputed], copies, room, budget)


def hidden(
    timeline: Timeline,
    start: Tightest,
    link: Link,
    options: OffloadOptions,
    timed: bool,
    queue: Sequence[Gap] = (),
) -> list[Move]:
    """The moves of `start`, with memory that is left spent on hiding their copies; for its arguments see `place`."""
    room = start.room.copy()
    queued = _queued(timeline, start, queue)
    moves = _release_late(timeline, queued, link, room)
    if options.prefetch == "late" or (options.prefetch == "auto" and timed):
        return start.recomputed + _prefetch_late(timeline, moves, link, room)
    return start.recomputed + _prefetch_early(timeline, moves, room)


def _queued(timeline: Timeline, start: Tightest, queue: Sequence[Gap]) -> list[tuple[Move, int]]:
    """The copies in the order in which they leave, each with the position after which it can begin."""
    ordered = sorted(start.copies, key=lambda move: (move.copy_after, move.last))
    if not queue:
        return [(move, move.copy_after) for move in ordered]
    place_of = {gap: place for place, gap in enumerate(queue)}
    ends = sorted((gap.last, place) for gap, place in place_of.items())
    first = list(accumulate((place for _, place in reversed(ends)), min, initial=len(queue)))
    places = dict[Gap, float]()
    for move in ordered:  # one that the queue does not name goes before those of it that are read later
        later = len(ends) - bisect_right(ends, move.last, key=itemgetter(0))
        places[move.gap] = place_of.get(move.gap, first[later] - 0.5)
    return [(move, _final(timeline, move, start)) for move in sorted(ordered, key=lambda move: places[move.gap])]


def is_early(timeline: Timeline, gap: Gap, budget: int) -> bool:
    """Whether the copy of a gap may begin before the gap does."""
    buffer = timeline.buffers[gap.buffer]
    is_list = bool(buffer.holders or buffer.element)  # when a list is copied decides which of its elements go along
    return EARLY * buffer.nbytes >= budget and not is_list


def _final(timeline: Timeline, move: Move, start: Tightest) -> int:
    """The position after which a copy out can begin: the content is final, and in memory."""
    if not is_early(timeline, move.gap, start.budget):
        return move.copy_after
    buffer, moves = timeline.buffers[move.buffer], start.recomputed + start.copies
    came = [other.next for other in moves if other.buffer == move.buffer and other.next <= move.last]
    written = [position for position in buffer.written if position <= move.last]
    return min(move.copy_after, timeline.after(max([buffer.start, *came, *written])))


def _recomputed(timeline: Timeline, moves: Sequence[Move], wanted: Sequence[bool], budget: int) -> list[Move]:
    """The moves, those that are wanted so recomputed, as far as what they are made from stays and memory allows."""
    if not any(wanted):
        return list(moves)
    marked, away = [], by_position((move.buffer, move) for move in moves)
    for move, is_wanted in zip(moves, wanted, strict=True):
        chain = timeline.chain(move.gap)
        there = chain is not None and are_there(chain.sources, move.next, away)
        marked.append(replace(move, recomputed=is_wanted and there))
    usage = usage_under(timeline, [replace(move, recomputed=False) for move in marked])
    marked = [
        replace(move, recomputed=move.recomputed and recomputing_peak(timeline, usage, move) <= budget)
        for move in marked
    ]
    over = np.flatnonzero((usage_under(timeline, marked) > budget) & (usage <= budget))
    if not over.size:
        return marked
    # what chains keep for them is too much there
    return [replace(move, recomputed=move.recomputed and not _keeps(timeline, move, over)) for move in marked]


def _keeps(timeline: Timeline, move: Move, positions: npt.NDArray[np.int64]) -> bool:
    """Whether memory is used for a chain at one of `positions`, though nothing is made there."""
    chain = timeline.chain(move.gap)
    first = min((timeline.end(timeline.buffers[source]) for source in chain.sources), default=move.next) if chain else 0
    return bool(((first < positions) & (positions <= move.next)).any())


def _release_late(
    timeline: Timeline, queued: Sequence[tuple[Move, int]], link: Link, room: npt.NDArray[np.int64]
) -> list[Move]:
    """Put each release where its copy has ended, or as near as memory allows; takes what it uses from `room`.

    A copy begins after the one before it in the queue, unless its tensor could not wait for that in memory.
    """
    placed, free, last = [], 0.0, -1
    for move, earliest in queued:
        nbytes = timeline.buffers[move.buffer].nbytes
        begin, first = max(last, earliest), move.release
        if begin > move.last:
            first = timeline.after(begin + 1)
            if first >= move.prefetch or (room[move.release : first] < nbytes).any():
                begin, first = move.copy_after, move.release
        last = max(last, begin)
        free = max(free, timeline.begins[begin + 1]) + SLACK * nbytes / link.offload
        wanted = int(np.searchsorted(timeline.begins[:-1], free))
        limit = max(first, min(wanted, move.prefetch - 1))
        short = np.flatnonzero(room[move.release : limit] < nbytes)
        release = move.release + int(short[0]) if short.size else limit
        room[move.release : release] -= nbytes
        placed.append(replace(move, copy_after=begin, release=release))
    return placed


def _prefetch_late(timeline: Timeline, moves: Sequence[Move], link: Link, room: npt.NDArray[np.int64]) -> list[Move]:
    """Listing 3.3: the latest op that leaves time for the copy; one copy at a time, in the order of the uses."""
    wanted: dict[Move, int] = {}
    free, ordered = float("inf"), sorted(moves, key=_use)
    for move in reversed(ordered):
        deadline = min(timeline.begins[move.next], free)
        free = deadline - SLACK * timeline.buffers[move.buffer].nbytes / link.prefetch
        # the last op that begins no later than that
        wanted[move] = int(np.searchsorted(timeline.begins[:-1], free, side="right")) - 1
    return _prefetched(timeline, moves, wanted, room)


def _prefetch_early(timeline: Timeline, moves: Sequence[Move], room: npt.NDArray[np.int64]) -> list[Move]:
    """Listing 3.4: the earliest op since which the tensor fits beside every working set; first come, first served."""
    wanted = {move: timeline.turn + 1 if move.next > timeline.turn else 0 for move in moves}
    return _prefetched(timeline, moves, wanted, room)


def _prefetched(
    timeline: Timeline, moves: Sequence[Move], wanted: Mapping[Move, int], room: npt.NDArray[np.int64]
) -> list[Move]:
    """Each move with its prefetch at the position wanted or, where memory is short, later; in the order of the uses.

    Takes what it uses from `room`.
    """
    placed: list[Move] = []
    start = 0
    for move in sorted(moves, key=_use):
        nbytes = timeline.buffers[move.buffer].nbytes
        limit = min(move.prefetch, max(start, move.release, wanted[move]))
        short = np.flatnonzero(room[limit : move.prefetch] < nbytes)
        start = limit + int(short[-1]) + 1 if short.size else limit
        room[start : move.prefetch] -= nbytes
        placed.append(replace(move, prefetch=start))
    return placed


def _use(move: Move) -> tuple[int, int]:
    return move.next, move.last
