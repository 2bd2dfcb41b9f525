"""Whether a plan's allocations find room in a device's memory, given in the order the step makes them.

TensorFlow's GPU allocator (BFC, best fit with coalescing) hands out contiguous chunks of one region, so a step can fail
while the bytes in use are well below the limit. The allocator is deterministic, and so is a planned step's order; it is
replayed (in C++: custom_ops/extension/replay.cc) from the chunks that are free before the step: variables and what the
caller holds lie between them.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain as chained
from typing import NamedTuple

from custom_ops.allocator import replay_step
from graph_passes.analysis.memory.simulate import Move, Padding
from graph_passes.analysis.memory.timeline import Timeline

SMALL = 1 << 16  # smaller buffers are not replayed: they have separate chunks, or come and go in the gaps between
_ROUND = 256

Chunk = tuple[int, int]  # (address, size)


def rounded(nbytes: int) -> int:
    """What the allocator takes for `nbytes`."""
    return max(_ROUND, -(-nbytes // _ROUND) * _ROUND)


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


class HeldBuffer(NamedTuple):
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
) -> tuple[Failure | None, list[HeldBuffer]]:
    """`first_failure`, and what is in memory there, or when the op at position `until` runs."""
    failure, held, _ = _replayed(timeline, moves, room, paddings, excused, until)
    rows = zip(*[iter(held)] * 5, strict=True)
    return failure, [
        HeldBuffer(buffer, address, size, Padding(position, chunk)) for buffer, address, size, position, chunk in rows
    ]


def without_workspace(
    timeline: Timeline, moves: Sequence[Move], room: Room, paddings: Sequence[Padding] = ()
) -> list[int] | None:
    """Positions of the ops that do not find the workspace they had; None if not even the tensors find room."""
    failure, _, missed = _replayed(timeline, moves, room, paddings, range(len(timeline.steps)))
    return missed if failure is None else None


def _replayed(
    timeline: Timeline,
    moves: Sequence[Move],
    room: Room,
    paddings: Sequence[Padding],
    excused: Container[int],
    until: int | None = None,
) -> tuple[Failure | None, list[int], list[int]]:
    """The failure, the fields of what is in memory, and the positions of the ops that miss their workspace."""
    planned = (
        _table((move.buffer, move.release, move.prefetch, *_recomputing(timeline, move)) for move in moves),
        _table(paddings),
        _table(room.chunks),
    )
    end = len(timeline.steps) + 1 if until is None else until
    failed, held, missed = replay_step((*_tables(timeline), *planned), room.spare, SMALL, excused, end)
    return failed and Failure(*failed), held, missed


def _recomputing(timeline: Timeline, move: Move) -> tuple[bool, int, int]:
    """Whether a buffer is recomputed, the bytes of its chain's temporary tensors in one piece, and the workspace."""
    chain = timeline.chain(move.gap) if move.recomputed else None
    if chain is None:
        return False, 0, 0
    temporary = max(chain.held) - timeline.buffers[move.buffer].nbytes
    return True, temporary, max(timeline.steps[position].workspace for position in chain.ops)


@lru_cache(maxsize=4)
def _tables(timeline: Timeline) -> tuple[bytes, bytes]:
    """What every replay of the step has in common: its buffers, and the workspace of each op."""
    buffers = _table(
        (each.nbytes, each.start, timeline.end(each), each.element, each.twice, each.between)
        for each in timeline.buffers
    )
    return buffers, timeline.workspace.tobytes()


def _table(rows: Iterable[tuple[int, ...]]) -> bytes:
    return array("q", chained.from_iterable(rows)).tobytes()
