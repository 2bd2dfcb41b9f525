"""When the chosen tensors are copied out, released, and brought back. Pure: gaps in, moves out.

Policy `autovm` (thesis 3.3.2): copy out after the last forward use (Listing 3.2); prefetch late, so that the copy just
hides behind the ops before the use (Listing 3.3), or, with run times unknown, as early as memory allows (Listing 3.4);
prefetches run in the order of the uses they serve (Figures 3.4, 3.5). A release waits for its copy, so it comes as late
as memory allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from graph_passes.memory.simulate import Link, Move, recomputing_peak, usage_under
from graph_passes.memory.timeline import Gap, Timeline
from graph_passes.offload.options import OffloadOptions

SLACK = 1.2  # copies are planned to take this much longer than bytes over bandwidth: run times vary


def tight(timeline: Timeline, gap: Gap, options: OffloadOptions) -> Move:
    """Out for the whole gap."""
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
    """Moves as they are put into the graph: at ops that can be ordered, and sorted, for that decides who is allocated
    first at one position. A tensor leaves earlier for it, and comes back later: it never takes more memory."""
    found = [
        move
        if move.recomputed
        else replace(move, release=timeline.before(move.release), prefetch=timeline.after(move.prefetch))
        for move in moves
    ]
    return sorted(found, key=lambda move: (move.release, move.prefetch))


def place(
    timeline: Timeline, gaps: Sequence[Gap], link: Link, budget: int, options: OffloadOptions, timed: bool
) -> list[Move]:
    """Start from every tensor out for its whole gap, then spend the memory that is left on hiding the copies."""
    every = _remade(timeline, [tight(timeline, gap, options) for gap in gaps], link, budget, options)
    room = budget - usage_under(timeline, every)
    recomputed = [move for move in every if move.recomputed]
    moves = _release_late(timeline, [move for move in every if not move.recomputed], link, room)
    if options.prefetch == "late" or (options.prefetch == "auto" and timed):
        return recomputed + _prefetch_late(timeline, moves, link, room)
    return recomputed + _prefetch_early(timeline, moves, room)


def _remade(timeline: Timeline, moves: Sequence[Move], link: Link, budget: int, options: OffloadOptions) -> list[Move]:
    """Under `hybrid`, mark the moves that are cheaper to recompute; what they are made from must stay."""
    if options.policy != "hybrid":
        return list(moves)
    usage = usage_under(timeline, moves)
    moving = {move.buffer for move in moves}
    marked = []
    for move in moves:
        buffer = timeline.buffers[move.buffer]
        cheaper = timeline.steps[buffer.start].seconds < buffer.nbytes / link.prefetch
        there = move.next <= buffer.recompute_until and moving.isdisjoint(buffer.recompute_inputs)
        fits = recomputing_peak(timeline, usage, move) <= budget
        marked.append(replace(move, recomputed=buffer.recompute >= 0 and cheaper and there and fits))
    return marked


def _release_late(timeline: Timeline, moves: Sequence[Move], link: Link, room: npt.NDArray[np.int64]) -> list[Move]:
    """Put each release where its copy has ended, or as near as memory allows; takes what it uses from `room`."""
    placed, free = [], 0.0
    for move in sorted(moves, key=lambda move: (move.copy_after, move.last)):
        nbytes = timeline.buffers[move.buffer].nbytes
        free = max(free, timeline.begins[move.copy_after + 1]) + SLACK * nbytes / link.offload
        wanted = int(np.searchsorted(timeline.begins[:-1], free))
        release = move.release
        limit = max(release, min(wanted, move.prefetch - 1))
        short = np.flatnonzero(room[release:limit] < nbytes)
        end = release + int(short[0]) if short.size else limit
        room[release:end] -= nbytes
        release = end
        placed.append(replace(move, release=release))
    return placed


def _prefetch_late(timeline: Timeline, moves: Sequence[Move], link: Link, room: npt.NDArray[np.int64]) -> list[Move]:
    """Listing 3.3: the latest op that leaves time for the copy; one copy at a time, in the order of the uses."""
    ordered = sorted(moves, key=lambda move: (move.next, move.last))
    starts, free = [0.0] * len(ordered), float("inf")
    for index in reversed(range(len(ordered))):
        move = ordered[index]
        deadline = min(timeline.begins[move.next], free)
        free = starts[index] = deadline - SLACK * timeline.buffers[move.buffer].nbytes / link.prefetch
    placed: list[Move] = []
    earliest = 0
    for move, start in zip(ordered, starts, strict=True):
        # the last op that begins no later than `start`
        wanted = int(np.searchsorted(timeline.begins[:-1], start, side="right")) - 1
        limit = max(wanted, earliest, move.release)
        prefetch = _extend_back(move, limit, room, timeline.buffers[move.buffer].nbytes)
        earliest = prefetch
        placed.append(replace(move, prefetch=prefetch))
    return placed


def _prefetch_early(timeline: Timeline, moves: Sequence[Move], room: npt.NDArray[np.int64]) -> list[Move]:
    """Listing 3.4: the earliest op since which the tensor fits beside every working set; first come, first served."""
    placed: list[Move] = []
    earliest = 0
    for move in sorted(moves, key=lambda move: (move.next, move.last)):
        limit = max(earliest, move.release, timeline.turn + 1 if move.next > timeline.turn else 0)
        prefetch = _extend_back(move, limit, room, timeline.buffers[move.buffer].nbytes)
        earliest = prefetch
        placed.append(replace(move, prefetch=prefetch))
    return placed


def _extend_back(move: Move, limit: int, room: npt.NDArray[np.int64], nbytes: int) -> int:
    """The earliest position from `limit` on, back from the use, at which there is room; takes it."""
    prefetch = move.prefetch
    limit = min(limit, prefetch)
    short = np.flatnonzero(room[limit:prefetch] < nbytes)
    start = limit + int(short[-1]) + 1 if short.size else limit
    room[start:prefetch] -= nbytes
    return start
