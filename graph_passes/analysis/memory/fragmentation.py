"""Whether a plan's allocations find room in a device's memory, given in the order the step makes them.

TensorFlow's GPU allocator (BFC, best fit with coalescing) hands out contiguous chunks of one region, so a step can fail
while the bytes in use are well below the limit. The allocator is deterministic, and so is a planned step's order; it is
replayed here from the chunks that are free before the step: variables and what the caller holds lie between them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from graph_passes.analysis.memory.bfc_allocator import Chunk, Region
from graph_passes.analysis.memory.simulate import Move, Padding
from graph_passes.analysis.memory.timeline import Gap, Timeline

MOST_ELEMENTS = 64  # of a list that are replayed one by one; longer lists have larger ones
SMALL = 1 << 16  # smaller buffers are not replayed: they have separate chunks, or come and go in the gaps between


@dataclass(frozen=True)
class Room:
    """What is free before a step.

    Attributes:
        chunks: each free chunk.
        spare: workspace is asked for with so many times its bytes.
        limit: bytes that may be in use for as long as an op runs, whatever the budget that is planned for.
    """

    chunks: tuple[Chunk, ...]
    spare: float = 1.0
    limit: int = 0

    @classmethod
    def guess(cls, memory: int, base: int) -> Room:
        """One chunk beside `base` bytes of a device's `memory`, where nothing better is known: with a margin."""
        return cls(((base, max(0, int(0.985 * memory) - base)),), 1.03)

    def grown(self, nbytes: int) -> Room:
        """This room with its last chunk larger."""
        *others, (address, size) = self.chunks
        return replace(self, chunks=(*others, (address, size + nbytes)))


class Held(NamedTuple):
    """A buffer in memory: where it lies, and when and in a free chunk of how many bytes it was allocated."""

    buffer: int
    address: int
    size: int
    padding: Padding

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.address + self.size


class Failure(NamedTuple):
    """Where a step runs out of room.

    Attributes:
        position: the op's position.
        wanted: bytes that found no room.
        short: by how many bytes the largest free chunk is too small.
        made: how many allocations there were before it at that position.
        workspace: whether it is workspace that found no room; an op gets by without.
    """

    position: int
    wanted: int
    short: int
    made: int
    workspace: bool = False

    def is_after(self, other: Failure) -> bool:
        """Whether the step came further: to a later op or allocation, or to more of the room that is needed for it."""
        return (self.position, self.made, -self.short) > (other.position, other.made, -other.short)


@dataclass
class _Event:
    """What happens at one position: buffers that leave, paddings, buffers that come back, are made or recomputed,
    die."""

    releases: list[int] = field(default_factory=list)
    paddings: list[int] = field(default_factory=list)
    prefetches: list[int] = field(default_factory=list)
    again: list[Gap] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    workspace: int = 0


_Events = dict[int, _Event]  # by position
_NOTHING = _Event()


@lru_cache(maxsize=4)
def _step_events(timeline: Timeline) -> tuple[_Events, list[int]]:
    """What every replay of the step has in common, and the positions of it in order."""
    found: _Events = {}
    for index, buffer in enumerate(timeline.buffers):
        if buffer.nbytes >= SMALL:
            found.setdefault(buffer.start, _Event()).starts.append(index)
            found.setdefault(timeline.end(buffer), _Event()).ends.append(index)
    for position, workspace in enumerate(timeline.workspace.tolist()):
        if workspace >= SMALL:
            found.setdefault(position, _Event()).workspace = workspace
    return found, sorted(found)


def _plan_events(timeline: Timeline, moves: Sequence[Move], paddings: Sequence[Padding]) -> _Events:
    found: _Events = {}
    for move in moves:
        if timeline.buffers[move.buffer].nbytes >= SMALL and (move.release < move.prefetch or move.recomputed):
            found.setdefault(move.release, _Event()).releases.append(move.buffer)
            back = found.setdefault(move.prefetch, _Event())
            if move.recomputed:
                back.again.append(move.gap)
            else:
                back.prefetches.append(move.buffer)
    for padding in paddings:
        found.setdefault(padding.position, _Event()).paddings.append(padding.nbytes)
    return found


def first_failure(
    timeline: Timeline,
    moves: Sequence[Move],
    room: Room,
    paddings: Sequence[Padding] = (),
    *,
    excused: Container[int] = (),
) -> Failure | None:
    """Where the step runs out of room; None if it runs through.

    Args:
        timeline: the step.
        moves: the plan's moves.
        room: what is free before it.
        paddings: the plan's paddings.
        excused: positions of the ops that may go without their workspace; a convolution gets by, more slowly.
    """
    return replay(timeline, moves, room, paddings, excused=excused)[0]


def replay(
    timeline: Timeline,
    moves: Sequence[Move],
    room: Room,
    paddings: Sequence[Padding] = (),
    *,
    excused: Container[int] = (),
    until: int | None = None,
) -> tuple[Failure | None, list[Held]]:
    """`first_failure`, and what is in memory there, or when the op at position `until` runs."""
    run = _Replay(timeline, room, excused)
    failure = None
    try:
        run.run(moves, paddings, until)
    except _NoRoomError as error:
        failure = error.failure
    return failure, [Held(index, *chunk, run.taken[index]) for index, chunk in run.held.items()]


def without_workspace(
    timeline: Timeline, moves: Sequence[Move], room: Room, paddings: Sequence[Padding] = ()
) -> list[int] | None:
    """Positions of the ops that do not find the workspace they had; None if not even the tensors find room."""
    run = _Replay(timeline, room, excused=range(len(timeline.steps)))
    try:
        run.run(moves, paddings)
    except _NoRoomError:
        return None
    return run.missed


class _NoRoomError(Exception):
    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class _Replay:
    def __init__(self, timeline: Timeline, room: Room, excused: Container[int]) -> None:
        self.timeline = timeline
        self.region = Region(room.chunks)
        self.spare = room.spare
        self.excused = excused
        self.held: dict[int, Chunk] = {}
        self.lists: dict[int, list[Chunk]] = {}  # of each list: where its elements lie
        self.taken: dict[int, Padding] = {}  # of each buffer: when it was allocated, and in a chunk of what size
        self.position = self.made = 0
        self.missed: list[int] = []  # positions of the ops that did not find their workspace

    def run(self, moves: Sequence[Move], paddings: Sequence[Padding], until: int | None = None) -> None:
        """Allocate and free what the step does, up to a position; raises where there is no room."""
        plan, (step, order) = _plan_events(self.timeline, moves, paddings), _step_events(self.timeline)
        for self.position in sorted([*order, *(position for position in plan if position not in step)]):
            if until is not None and self.position >= until:
                return
            self.happen(step.get(self.position, _NOTHING), plan.get(self.position, _NOTHING))

    def happen(self, event: _Event, planned: _Event) -> None:
        """What the step does at one position, and the plan."""
        self.made = 0
        for index in planned.releases:
            self.drop(index)
        full = [self.allocate(nbytes) for nbytes in planned.paddings]
        for index in planned.prefetches:
            self.hold(index)
        for gap in planned.again:
            self.recompute(gap)
        if event.starts or event.workspace:
            self.compute(event.starts, event.workspace)
        for index in event.ends:
            self.drop(index)
        for chunk in full:
            self.region.free(chunk)

    def recompute(self, gap: Gap) -> None:
        """Run a chain; its temporary tensors are taken to lie in one piece."""
        chain = self.timeline.chain(gap)
        if chain is None:
            return
        temporary = max(chain.held) - self.timeline.buffers[gap.buffer].nbytes
        between = self.allocate(temporary) if temporary >= SMALL else None
        self.compute([gap.buffer], max(self.timeline.steps[position].workspace for position in chain.ops))
        if between:
            self.region.free(between)

    def hold(self, index: int) -> None:
        buffer = self.timeline.buffers[index]
        if buffer.element:
            count = min(MOST_ELEMENTS, buffer.nbytes // buffer.element)
            self.lists[index] = [self.allocate(buffer.nbytes // count) for _ in range(count)]
            return
        self.held[index] = self.allocate(buffer.nbytes)
        self.taken[index] = Padding(self.position, self.region.split)

    def drop(self, index: int) -> None:
        if index in self.lists:
            for chunk in self.lists.pop(index):
                self.region.free(chunk)
            return
        self.region.free(self.held.pop(index))
        del self.taken[index]

    def compute(self, outputs: Sequence[int], workspace: int) -> None:
        """An op that makes buffers."""
        twice: list[tuple[int, Chunk]] = []
        borrowed: list[Chunk] = []
        for index in outputs:
            buffer = self.timeline.buffers[index]
            self.hold(index)
            if buffer.twice and workspace >= buffer.nbytes + buffer.between:
                workspace -= buffer.nbytes + buffer.between
                if buffer.between >= SMALL:
                    borrowed.append(self.allocate(buffer.between))
                twice.append((index, self.allocate(buffer.nbytes)))
        if workspace >= SMALL:
            self.borrow(int(self.spare * workspace))
        for index, second in twice:
            self.region.free(self.held[index])
            self.held[index] = second
        for chunk in borrowed:
            self.region.free(chunk)

    def allocate(self, nbytes: int) -> Chunk:
        chunk = self.region.allocate(nbytes)
        if chunk is None:
            raise _NoRoomError(self.failure(nbytes))
        self.made += 1
        return chunk

    def failure(self, nbytes: int, workspace: bool = False) -> Failure:
        return Failure(self.position, nbytes, nbytes - self.region.largest, self.made, workspace)

    def borrow(self, nbytes: int) -> None:
        """Allocate and free at once, which leaves the region unchanged."""
        if nbytes <= self.region.largest:
            self.made += 1
        elif self.position in self.excused:
            self.missed.append(self.position)
        else:
            raise _NoRoomError(self.failure(nbytes, workspace=True))
