"""The allocator's replay in Python, which the one in C++ (custom_ops/extension/replay.cc) is compared with."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from graph_passes.analysis.memory.fragmentation import SMALL, Chunk, Failure, HeldBuffer, Room, rounded
from graph_passes.analysis.memory.simulate import Move, Padding
from graph_passes.analysis.memory.timeline import Timeline

MOST_ELEMENTS = 64  # of a list that are replayed one by one; longer lists have larger ones
_KEEP_WHOLE = 128 << 20  # a chunk is split if at least this much is left over, or if it is twice as large as asked for


class Region:
    """Free chunks, best fit, neighbours joined when freed."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        # (size, address), ascending: the first that fits is the best
        self._free = sorted((size, address) for address, size in chunks)
        self._by_address = dict(chunks)  # address -> size
        self._by_end = {address + size: address for address, size in chunks}
        self.split = 0  # bytes of the free chunk that was last taken from

    @property
    def largest(self) -> int:
        """Bytes of the largest free chunk."""
        return self._free[-1][0] if self._free else 0

    def allocate(self, nbytes: int) -> Chunk | None:
        """The (address, size) of a chunk of at least `nbytes`, or None if no free chunk is large enough."""
        wanted = rounded(nbytes)
        index = bisect_left(self._free, (wanted, -1))
        if index == len(self._free):
            return None
        size, address = self._free[index]
        self.split = size
        self._remove(address, size)
        if size >= 2 * wanted or size - wanted >= _KEEP_WHOLE:
            self._add(address + wanted, size - wanted)
            size = wanted
        return address, size

    def free(self, chunk: Chunk) -> None:
        """Give a chunk back."""
        address, size = chunk
        after = self._by_address.get(address + size)
        if after is not None:
            self._remove(address + size, after)
            size += after
        before = self._by_end.get(address)
        if before is not None:
            length = address - before
            self._remove(before, length)
            address, size = before, size + length
        self._add(address, size)

    def _add(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._by_address[address] = size
        self._by_end[address + size] = address

    def _remove(self, address: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, address))]
        del self._by_address[address]
        del self._by_end[address + size]


@dataclass
class _Event:
    """What happens at one position: buffers that leave, paddings, buffers that come back, are made or recomputed,
    die."""

    releases: list[int] = field(default_factory=list)
    paddings: list[int] = field(default_factory=list)
    prefetches: list[int] = field(default_factory=list)
    again: list[Move] = field(default_factory=list)
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
                back.again.append(move)
            else:
                back.prefetches.append(move.buffer)
    for padding in paddings:
        found.setdefault(padding.position, _Event()).paddings.append(padding.nbytes)
    return found


def replayed(
    timeline: Timeline,
    moves: Sequence[Move],
    room: Room,
    paddings: Sequence[Padding] = (),
    *,
    excused: Container[int] = (),
    until: int | None = None,
) -> tuple[Failure | None, list[HeldBuffer], list[int]]:
    """Where the step runs out of room, what is in memory there or at `until`, and which ops miss their workspace."""
    run = _Replay(timeline, room, excused)
    failure = None
    try:
        run.run(moves, paddings, until)
    except _NoRoomError as error:
        failure = error.failure
    return failure, [HeldBuffer(index, *chunk, run.taken[index]) for index, chunk in run.held.items()], run.missed


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
        for move in planned.again:
            self.recompute(move)
        if event.starts or event.workspace:
            self.compute(event.starts, event.workspace)
        for index in event.ends:
            self.drop(index)
        for chunk in full:
            self.region.free(chunk)

    def recompute(self, move: Move) -> None:
        """Run a chain; its temporary tensors are taken to lie in one piece."""
        chain = self.timeline.chain(move.gap)
        assert chain is not None
        temporary = max(chain.held) - self.timeline.buffers[move.buffer].nbytes
        between = self.allocate(temporary) if temporary >= SMALL else None
        self.compute([move.buffer], max(self.timeline.steps[position].workspace for position in chain.ops))
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
