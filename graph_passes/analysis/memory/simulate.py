"""Replay a plan on a timeline: when everything runs, what it waits for, what is in memory. Makes reports' predictions.

Three resources run side by side, each in order: the compute stream, the copies out, the copies in. The compute stream
waits at a release until the copy out has ended, and at a first use until the copy in has. What is recomputed instead of
copied costs the time of its chain's ops once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from graph_passes.analysis.memory.elements import let_go, made_again
from graph_passes.analysis.memory.timeline import Gap, Timeline

T = TypeVar("T")


@dataclass(frozen=True)
class Move:
    """One buffer's way out and back, in positions of the timeline.

    Attributes:
        buffer: index into `Timeline.buffers`.
        last: position of the last use before.
        copy_after: the copy out starts once this position has run. It may be earlier than `last`, since a copy only
            reads, or later, where other copies go first.
        release: the buffer is freed before this position runs; last < release, and copy_after < release.
        prefetch: the buffer is allocated again, and its copy in starts, before this position runs.
        next: position of the first use after; release <= prefetch <= next.
        recomputed: whether the buffer is recomputed before `next`, by its chain of ops, instead of copied.
    """

    buffer: int
    last: int
    copy_after: int
    release: int
    prefetch: int
    next: int
    recomputed: bool = False

    @property
    def gap(self) -> Gap:
        """The stretch in which the buffer is away."""
        return Gap(self.buffer, self.last, self.next)


class Padding(NamedTuple):
    """Bytes taken before the op at a position runs, and given back after: what it allocates goes elsewhere."""

    position: int
    nbytes: int


@dataclass(frozen=True)
class Link:
    """Bytes a second out of and into device memory."""

    offload: float
    prefetch: float


@dataclass(frozen=True)
class SimulatedStep:
    """What a step does under a plan.

    Attributes:
        seconds: when the last op ends.
        stall: seconds the compute stream waits for copies.
        peak: the most bytes in use.
        peak_at: the position of the peak.
    """

    seconds: float
    stall: float
    peak: int
    peak_at: int


def usage_under(timeline: Timeline, moves: Sequence[Move], paddings: Sequence[Padding] = ()) -> npt.NDArray[np.int64]:
    """Bytes in use at each position when `moves` are made, and `paddings` are taken."""
    usage = timeline.usage - timeline.within((move.buffer, move.release, move.prefetch) for move in moves)
    usage -= let_go(timeline, moves)
    again = [(move, chain) for move in moves if move.recomputed and (chain := timeline.chain(move.gap))]
    for move, chain in again:
        for source in set(chain.sources).difference(timeline.elements):  # those that would be gone by then
            usage[timeline.end(timeline.buffers[source]) + 1 : move.next + 1] += timeline.buffers[source].nbytes
    for move in moves:
        if move.recomputed:
            usage[move.next] = max(usage[move.next], recomputing_peak(timeline, usage, move))
    for padding in paddings:
        usage[padding.position] += padding.nbytes
    return usage


def by_position(items: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    """(position, item) pairs as a table: the items of each position, in their order."""
    found: dict[int, list[T]] = {}
    for position, item in items:
        found.setdefault(position, []).append(item)
    return found


def uncounted_under(timeline: Timeline, moves: Sequence[Move]) -> npt.NDArray[np.int64]:
    """Bytes at each position that the device's allocator does not count when `moves` are made."""
    small = [move for move in moves if timeline.buffers[move.buffer].allocation < timeline.counted]
    away = timeline.within((move.buffer, move.release, move.prefetch) for move in small)
    return timeline.uncounted - away - let_go(timeline, moves, below=timeline.counted)


def uncounted(timeline: Timeline, moves: Sequence[Move], paddings: Sequence[Padding] = ()) -> int:
    """Bytes of the predicted peak that the device's allocator does not count: what to add to its own."""
    usage = usage_under(timeline, moves, paddings)
    return int(usage.max(initial=timeline.base) - (usage - uncounted_under(timeline, moves)).max(initial=0))


def are_there(sources: Iterable[int], position: int, away: Mapping[int, Sequence[Move | Gap]]) -> bool:
    """Whether these buffers are in memory before `position`.

    Args:
        sources: indices of buffers that are alive then.
        position: of the op that a chain runs before.
        away: for each buffer, the stretches in which it is away.
    """
    return not any(gap.last < position <= gap.next for source in sources for gap in away.get(source, ()))


def recomputing_peak(timeline: Timeline, usage: npt.NDArray[np.int64], move: Move) -> int:
    """Bytes in use while the buffer of `move` is recomputed, right before the op that reads it.

    Args:
        timeline: the step.
        usage: bytes in use when ops run.
        move: a move.
    """
    before = usage[move.next] - timeline.made[move.next] - timeline.workspace[move.next]
    chain = timeline.chain(move.gap)
    if chain is None:
        return int(before)
    held = zip(chain.ops, chain.held, strict=True)
    most = max(nbytes + timeline.steps[position].workspace for position, nbytes in held)
    return int(before) - timeline.buffers[move.buffer].nbytes - made_again(timeline, move.gap) + most


def simulate(timeline: Timeline, moves: Sequence[Move], link: Link, paddings: Sequence[Padding] = ()) -> SimulatedStep:
    """Run the step on paper.

    Args:
        timeline: the step.
        moves: the plan's moves, any order.
        link: bandwidths; both directions run at once.
        paddings: the plan's paddings; they cost no time.
    """
    return simulated(timeline, moves, duration(timeline, moves, link), paddings)


def simulated(
    timeline: Timeline, moves: Sequence[Move], took: tuple[float, float], paddings: Sequence[Padding] = ()
) -> SimulatedStep:
    """See `simulate`; `took` is the `duration` of the step."""
    usage = usage_under(timeline, moves, paddings)
    peak_at = int(usage.argmax()) if len(usage) else 0
    return SimulatedStep(*took, int(usage.max(initial=timeline.base)), peak_at)


_RELEASED, _FETCHED, _AWAITED, _RUN, _COPIED = range(5)  # what happens at one position, in this order


def duration(timeline: Timeline, moves: Sequence[Move], link: Link) -> tuple[float, float]:
    """Seconds that the step takes under `moves`, and seconds of these that it waits for copies."""
    return run_through(timeline, moves, link)[:2]


def run_through(timeline: Timeline, moves: Sequence[Move], link: Link) -> tuple[float, float, dict[int, float]]:
    """See `duration`; and the seconds that the step waits at the release of each move, by the move's place."""
    waits: dict[int, float] = {}
    events: list[tuple[int, int, int]] = []  # position, what happens, and to which move
    again: dict[int, float] = {}
    for index, move in enumerate(moves):
        if move.recomputed:
            again[move.next] = again.get(move.next, 0) + timeline.recomputing(move.gap)
            events.append((move.next, _RUN, index))
        else:
            events.append((move.copy_after, _COPIED, index))
            events.append((move.release, _RELEASED, index))
            events.append((move.prefetch, _FETCHED, index))
            events.append((move.next, _AWAITED, index))
    events.sort()

    now = out_free = in_free = stall = 0.0
    copied = [0.0] * len(moves)
    arrived = [0.0] * len(moves)
    nbytes = [timeline.buffers[move.buffer].nbytes for move in moves]
    begins, ran, at = timeline.moments, 0, -1  # how many ops ran; the position of the latest event

    def run(position: int) -> float:
        return begins[position + 1] - begins[position] + again.get(position, 0.0)

    for position, what, index in events:
        if position != at:
            if ran <= at:
                now, ran = now + run(at), at + 1
            now += begins[position] - begins[ran]  # between them ops just run
            at = position
        if what == _RELEASED:
            if copied[index] > now:
                waits[index] = copied[index] - now
                stall += waits[index]
                now = copied[index]
        elif what == _FETCHED:
            in_free = arrived[index] = max(now, in_free, copied[index]) + nbytes[index] / link.prefetch
        elif what == _AWAITED:
            if arrived[index] > now:
                stall += arrived[index] - now
                now = arrived[index]
        else:
            if ran <= at:
                now, ran = now + run(at), at + 1
            if what == _COPIED:
                out_free = copied[index] = max(now, out_free) + nbytes[index] / link.offload
    if ran <= at:
        now, ran = now + run(at), at + 1
    now += begins[-1] - begins[ran]
    return now, stall, waits
