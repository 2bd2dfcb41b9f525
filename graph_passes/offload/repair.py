"""Mends moves under which the step's bytes fit, but not every tensor in one piece (see `analysis.fragmentation`).

Best fit puts long-lived tensors (a weight's gradient, say) wherever there is room, and when all around them is free
again they lie in the middle of it. Such a tensor can move out of the way, come back sooner and so to another place, or
be put elsewhere to begin with, by filling the room where it would have gone while it is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from graph_passes.analysis.fragmentation import Failure, Filling, Held, Room, first_failure, replay
from graph_passes.analysis.simulate import Move, usage_under
from graph_passes.analysis.timeline import Gap, Timeline

SHORT = 1 << 13  # ops of a step whose replay takes milliseconds: there `PATIENCE` times as much is tried
PATIENCE = 4
REPAIRS = 8
TRIES = 48  # repairs that are replayed for each, at most
ISLANDS = 16  # tensors moved out of the way for it, at most: those that are just large enough, and the largest
WINDOWS = 8  # stretches of memory that are cleared for it, at most,
CLEARED = 8  # of so many tensors each
SOONER = (1, 2, 4, 8, 16, 32)  # ops by which a tensor may be brought back sooner for it

Build = Callable[[Sequence[Gap]], list[Move]]


@dataclass(frozen=True)
class Repairs:
    """What is done for the sake of contiguous room.

    Attributes:
        islands: what is moved out of the way, and the position that needs it.
        sooner: what is brought back sooner, and when.
        fillings: what keeps tensors from where best fit would put them.
    """

    islands: Mapping[Gap, int] = field(default_factory=dict)
    sooner: Mapping[Gap, int] = field(default_factory=dict)
    fillings: tuple[Filling, ...] = ()

    def moves(self, build: Build) -> list[Move]:
        """The moves with these repairs."""
        return in_order(self._mended(move) for move in build(tuple(self.islands)))

    def _mended(self, move: Move) -> Move:
        if move.remade:
            return move
        if move.gap in self.islands:
            move = replace(move, prefetch=min(move.next, max(move.prefetch, self.islands[move.gap] + 1)))
        if move.gap in self.sooner:
            move = replace(move, prefetch=max(move.release, min(move.prefetch, self.sooner[move.gap])))
        return move


def in_order(moves: Iterator[Move] | Sequence[Move]) -> list[Move]:
    """As they are put into the graph: it decides who is allocated first at one position."""
    return sorted(moves, key=lambda move: (move.release, move.prefetch))


def repaired(
    timeline: Timeline, build: Build, chosen: Sequence[Gap], budget: int, room: Room
) -> tuple[list[Move], tuple[Filling, ...]]:
    """Moves and fillings that find room, or come as far as repairs help.

    Args:
        timeline: the step.
        build: makes the moves of some gaps beside the chosen ones.
        chosen: the gaps that move anyway.
        budget: bytes that no repair may go over, if the moves it mends do not.
        room: where allocations have to find room.
    """
    done = Repairs()
    for workspace in (True, False):  # where not all can be had, tensors come before workspace
        done = _repaired(timeline, build, chosen, budget, room, done, workspace)
    return done.moves(build), done.fillings


def _repaired(
    timeline: Timeline,
    build: Build,
    chosen: Sequence[Gap],
    budget: int,
    room: Room,
    done: Repairs,
    workspace: bool,
) -> Repairs:
    """One repair after the other; an op whose workspace no repair makes room for goes without."""
    patience = _patience(timeline)
    excused = set() if workspace else set(range(len(timeline.steps)))
    for _ in range(REPAIRS * patience):
        moves = done.moves(build)
        failure, held = replay(timeline, moves, room, done.fillings, excused=excused)
        if failure is None:
            break
        reached, best = failure, None
        candidates = _candidates(timeline, done, moves, chosen, budget, room, failure, held, excused)
        for candidate in islice(candidates, TRIES * patience):
            further = first_failure(timeline, candidate.moves(build), room, candidate.fillings, excused=excused)
            if further is None or further.is_after(reached):
                best = candidate
            if further is None:
                break
            if further.is_after(reached):
                reached = further
        if best is not None:
            done = best
        elif failure.workspace:
            excused.add(failure.position)
        else:
            break
    return done


def _patience(timeline: Timeline) -> int:
    return PATIENCE if len(timeline.steps) <= SHORT else 1


def _candidates(
    timeline: Timeline,
    done: Repairs,
    moves: Sequence[Move],
    chosen: Sequence[Gap],
    budget: int,
    room: Room,
    failure: Failure,
    held: Sequence[Held],
    excused: Container[int],
) -> Iterator[Repairs]:
    most = max(budget, int(usage_under(timeline, moves).max()))
    yield from _cleared(timeline, done, moves, room, failure, held, excused, most)
    yield from _without_islands(timeline, done, chosen, failure)
    yield from _brought_sooner(timeline, done, moves, failure, most)


def _cleared(
    timeline: Timeline,
    done: Repairs,
    moves: Sequence[Move],
    room: Room,
    failure: Failure,
    held: Sequence[Held],
    excused: Container[int],
    most: int,
) -> Iterator[Repairs]:
    """What lies in a stretch of memory that would do is put to the end of the chunk it was cut from, or into another.

    It costs nothing: no byte is copied.
    """
    usage = usage_under(timeline, moves)
    stretches = [items for items in _stretches(held, failure.wanted) if len(items) <= CLEARED]
    stretches.sort(key=lambda items: sum(item.size for item in items))
    for stretch in stretches[: WINDOWS * _patience(timeline)]:
        for elsewhere in (False, True):
            fillings = done.fillings
            for buffer in [item.buffer for item in sorted(stretch, key=lambda item: item.filling.position)]:
                _, now = replay(timeline, moves, room, fillings, excused=excused, until=failure.position)
                for position, nbytes in [item.filling for item in now if item.buffer == buffer]:
                    left = nbytes - (0 if elsewhere else timeline.buffers[buffer].nbytes)
                    if left > 0 and usage[position] + left <= most:
                        fillings = (*fillings, Filling(position, left))
            if fillings != done.fillings:
                yield replace(done, fillings=fillings)


def _stretches(held: Sequence[Held], wanted: int) -> Iterator[list[Held]]:
    """What lies in each stretch of so many bytes that begins behind a buffer."""
    placed = sorted(held, key=lambda item: item.address)
    for index, first in enumerate(placed):
        start = placed[index - 1].end if index else first.address
        yield [item for item in placed[index:] if item.address < start + wanted]


def _without_islands(timeline: Timeline, done: Repairs, chosen: Sequence[Gap], failure: Failure) -> Iterator[Repairs]:
    """One more tensor out of the way where there was no room: the smallest that would do first, then the largest."""
    gone = {*chosen, *done.islands}

    def size(gap: Gap) -> int:
        return timeline.buffers[gap.buffer].nbytes

    around = [gap for gap in timeline.gaps() if gap.last < failure.position < gap.next and gap not in gone]
    around.sort(key=size)
    enough = [gap for gap in around if size(gap) >= failure.short]
    less = [gap for gap in around if size(gap) < failure.short]
    most = ISLANDS * _patience(timeline)
    for gap in (*enough[:most], *less[-most:]):
        yield replace(done, islands={**done.islands, gap: failure.position})


def _brought_sooner(
    timeline: Timeline, done: Repairs, moves: Sequence[Move], failure: Failure, most: int
) -> Iterator[Repairs]:
    """A large tensor that is back where there was no room, brought back sooner and so, perhaps, to a better place."""
    for index, move in enumerate(moves):
        buffer = timeline.buffers[move.buffer]
        there = failure.position - SOONER[-1] < move.prefetch <= failure.position <= timeline.end(buffer)
        if not there or move.remade or buffer.nbytes < failure.wanted >> 3:
            continue
        for ops in SOONER:
            if move.prefetch - ops < move.release:
                break
            changed = [*moves[:index], replace(move, prefetch=move.prefetch - ops), *moves[index + 1 :]]
            if usage_under(timeline, changed).max() <= most:
                yield replace(done, sooner={**done.sooner, move.gap: move.prefetch - ops})
