"""Repairs moves under which the step's bytes fit, but not every tensor in one piece (see `memory.fragmentation`).

Best fit puts long-lived tensors (a weight's gradient, say) wherever there is room, and when all around them is free
again they lie in the middle of it. Such a tensor can move out of the way, or
be put elsewhere to begin with, by a padding allocation in the room where it would have gone while it is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import NamedTuple

from graph_passes.analysis.memory.fragmentation import SMALL, Failure, HeldBuffer, Room, first_failure, replay, rounded
from graph_passes.analysis.memory.simulate import Move, Padding, usage_under
from graph_passes.analysis.memory.timeline import Gap, Timeline
from graph_passes.passes.offload.placement import in_order

SHORT = 1 << 13  # ops of a step whose replay takes milliseconds: there `PATIENCE` times as much is tried
PATIENCE = 4
REPAIRS = 8
TRIES = 48  # repairs that are replayed for each, at most
MOST_EVICTED = 16  # tensors moved out of the way for it, at most: those that are just large enough, and the largest
WINDOWS = 8  # windows of memory that are cleared for it, at most,
CLEARED = 8  # of so many tensors each

Build = Callable[[Sequence[Gap]], list[Move]]


@dataclass(frozen=True)
class Repairs:
    """What is done for the sake of contiguous room.

    Attributes:
        evicted: what is moved out of the way, and the position that needs it.
        paddings: padding allocations, which keep tensors from where best fit would put them.
    """

    evicted: Mapping[Gap, int] = field(default_factory=dict)
    paddings: tuple[Padding, ...] = ()

    def moves(self, timeline: Timeline, build: Build) -> list[Move]:
        """The moves with these repairs."""
        return in_order(timeline, map(self._repaired, build(tuple(self.evicted))))

    def _repaired(self, move: Move) -> Move:
        if move.recomputed or move.gap not in self.evicted:
            return move
        return replace(move, prefetch=min(move.next, max(move.prefetch, self.evicted[move.gap] + 1)))


def repaired(
    timeline: Timeline, build: Build, chosen: Sequence[Gap], budget: int, room: Room, padded: bool = True
) -> tuple[list[Move], tuple[Padding, ...]]:
    """Moves and paddings that find room, or come as far as repairs help.

    Args:
        timeline: the step.
        build: makes the moves of some gaps beside the chosen ones.
        chosen: the gaps that move anyway.
        budget: bytes that no repair may go over, if the moves it repairs do not; paddings have the room's limit.
        room: where allocations have to find room.
        padded: whether there may be paddings.
    """
    # where not all can be had, tensors come before workspace
    done = Repairer(timeline, build, chosen, budget, room, set(), padded).repaired(Repairs())
    every = set(range(len(timeline.steps)))
    done = Repairer(timeline, build, chosen, budget, room, every, padded).repaired(done)
    return done.moves(timeline, build), done.paddings


class _State(NamedTuple):
    """Some repairs, the moves they give, where the step runs out of room under them, and what is in memory there."""

    done: Repairs
    moves: list[Move]
    failure: Failure
    held: list[HeldBuffer]


@dataclass(frozen=True)
class Repairer:
    timeline: Timeline
    build: Build
    chosen: Sequence[Gap]
    budget: int
    room: Room
    excused: set[int]  # positions of ops that go without their workspace; it grows
    padded: bool

    @property
    def patience(self) -> int:
        return PATIENCE if len(self.timeline.steps) <= SHORT else 1

    def repaired(self, done: Repairs) -> Repairs:
        """One repair after the other; an op whose workspace no repair makes room for goes without."""
        for _ in range(REPAIRS * self.patience):
            state = self.replayed(done)
            if state is None:
                break
            best = self.best(state)
            if best is not None:
                done = best
            elif state.failure.workspace:
                self.excused.add(state.failure.position)
            else:
                break
        return done

    def replayed(self, done: Repairs) -> _State | None:
        """None: the step runs through."""
        moves = done.moves(self.timeline, self.build)
        failure, held = replay(self.timeline, moves, self.room, done.paddings, excused=self.excused)
        return failure and _State(done, moves, failure, held)

    def best(self, state: _State) -> Repairs | None:
        """The first repair more under which the step runs through, or the one under which it comes furthest, if any."""
        reached, best = state.failure, None
        cleared = self.cleared(state) if self.padded else ()
        candidates = chain(cleared, self.with_evictions(state))
        for candidate in islice(candidates, TRIES * self.patience):
            moves, paddings = candidate.moves(self.timeline, self.build), candidate.paddings
            further = first_failure(self.timeline, moves, self.room, paddings, excused=self.excused)
            if further is None:
                return candidate
            if further.is_after(reached):
                reached, best = further, candidate
        return best

    def cleared(self, state: _State) -> Iterator[Repairs]:
        """A window of memory that would do is cleared: what lies in it is put to the end of the chunk it was cut from,
        or into another, one after the other in the order in which they are allocated.

        It costs nothing: no byte is copied.
        """
        wanted = rounded(state.failure.wanted)
        usage = usage_under(self.timeline, state.moves)
        limit = max(self.budget, self.room.limit, int(usage.max()))
        windows = sorted(
            _windows(self.room, state.held, wanted), key=lambda start: _taken(state.held, start, start + wanted)
        )
        for start in windows[: WINDOWS * self.patience]:
            for away in (False, True):
                paddings = state.done.paddings
                for _ in range(CLEARED):
                    stopped, held = self.until(state, paddings, state.failure.position)
                    inside = [item for item in held if item.address < start + wanted and item.end > start]
                    if stopped is not None or not inside:
                        break
                    first = min(inside, key=lambda item: item.padding.position)
                    left = limit - int(usage[first.padding.position])
                    tried = self.elsewhere(state, first, paddings, left, away)
                    if tried is None:
                        break
                    paddings = tried
                if paddings != state.done.paddings:
                    yield replace(state.done, paddings=paddings)

    def until(
        self, state: _State, paddings: tuple[Padding, ...], position: int
    ) -> tuple[Failure | None, list[HeldBuffer]]:
        return replay(self.timeline, state.moves, self.room, paddings, excused=self.excused, until=position)

    def elsewhere(
        self, state: _State, item: HeldBuffer, paddings: tuple[Padding, ...], left: int, away: bool
    ) -> tuple[Padding, ...] | None:
        """One padding more, of at most `left` bytes with those at its position, so that `item` lies elsewhere: at the
        end of its chunk, before it the op's workspace if need be, or in another chunk; that first if `away`."""
        position, chunk = item.padding
        if position in self.timeline.unordered:  # nothing can be taken right before it
            return None
        workspace = int(self.room.spare * self.timeline.steps[position].workspace)
        end = chunk - rounded(self.timeline.buffers[item.buffer].nbytes)
        ends = (end, end - rounded(workspace)) if workspace > 0 else (end,)
        left -= sum(padding.nbytes for padding in paddings if padding.position == position)
        for nbytes in (chunk, *ends) if away else (*ends, chunk):
            tried = (*paddings, Padding(position, nbytes))
            if 0 < nbytes <= left and self.until(state, tried, position + 1)[0] is None:
                return tried
        return None

    def with_evictions(self, state: _State) -> Iterator[Repairs]:
        """One more tensor out of the way where room was short: first the smallest that would do, then the largest."""
        failure, gone = state.failure, {*self.chosen, *state.done.evicted}

        size = self.timeline.nbytes
        there = [gap for gap in self.timeline.gaps() if gap.last < failure.position < gap.next and size(gap) >= SMALL]
        around = sorted((gap for gap in there if gap not in gone), key=size)
        enough = [gap for gap in around if size(gap) >= failure.short]
        less = [gap for gap in around if size(gap) < failure.short]
        most = MOST_EVICTED * self.patience
        for gap in (*enough[:most], *less[-most:]):
            yield replace(state.done, evicted={**state.done.evicted, gap: failure.position})


def _windows(room: Room, held: Sequence[HeldBuffer], wanted: int) -> set[int]:
    """Where so many bytes in one piece could begin: with a chunk of the room, behind a buffer, or up to its end."""
    found: set[int] = set()
    for address, size in room.chunks:
        last = address + size - wanted
        begins = [address, last, *(item.end for item in held if address <= item.address < address + size)]
        found.update(begin for begin in begins if address <= begin <= last)
    return found


def _taken(held: Sequence[HeldBuffer], start: int, end: int) -> int:
    """Bytes of what lies between two addresses, whole buffers."""
    return sum(item.size for item in held if item.address < end and item.end > start)
