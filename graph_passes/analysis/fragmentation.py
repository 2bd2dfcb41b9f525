"""Whether a plan's allocations find room in one region, given in the order the step makes them.

TensorFlow's GPU allocator (BFC, best fit with coalescing) hands out contiguous chunks of one region, so a step can fail
while the bytes in use are well below the limit. The allocator is deterministic, and so is a planned step's order; it is
replayed here (bfc_allocator.cc: `FindChunkPtr`, `SplitChunk`, `Merge`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from graph_passes.analysis.simulate import Move
from graph_passes.analysis.timeline import Timeline

SPARE = 1.03  # workspace is asked for with this much more: what else lies in the region is not known to the byte
_ROUND = 256
_KEEP_WHOLE = 128 << 20  # a chunk is split if at least this much is left over, or if it is twice as large as asked for
_SMALL = 1 << 16  # smaller buffers come and go in the gaps between


class Region:
    """Chunks of `size` bytes, best fit, neighbours joined when freed."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(size, 0)]  # (size, address), ascending: the first that fits is the best
        self._by_address: dict[int, int] = {0: size}  # address -> size, of free chunks
        self._by_end: dict[int, int] = {size: 0}  # end -> address, of free chunks

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """The (address, size) of a chunk of at least `nbytes`, or None if no free chunk is large enough."""
        wanted = max(_ROUND, -(-nbytes // _ROUND) * _ROUND)
        index = bisect_left(self._free, (wanted, -1))
        if index == len(self._free):
            return None
        size, address = self._free[index]
        self._remove(address, size)
        if size >= 2 * wanted or size - wanted >= _KEEP_WHOLE:
            self._add(address + wanted, size - wanted)
            size = wanted
        return address, size

    def free(self, chunk: tuple[int, int]) -> None:
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


def first_failure(timeline: Timeline, moves: Sequence[Move], limit: int) -> int | None:
    """The position at which the step runs out of room in a region of `limit` bytes; None if it runs through.

    Args:
        timeline: the step, workspace included; `base` lies at the region's start.
        moves: the plan's moves.
        limit: bytes.
    """
    region = Region(limit)
    if region.allocate(max(timeline.base, _ROUND)) is None:
        return 0
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for index, buffer in enumerate(timeline.buffers):
        if buffer.nbytes >= _SMALL:
            starts.setdefault(buffer.start, []).append(index)
            ends.setdefault(timeline.end(buffer), []).append(index)
    releases: dict[int, list[int]] = {}
    prefetches: dict[int, list[int]] = {}
    for move in moves:
        if move.release < move.prefetch:
            releases.setdefault(move.release, []).append(move.buffer)
            prefetches.setdefault(move.prefetch, []).append(move.buffer)

    held: dict[int, tuple[int, int]] = {}
    for position, workspace in enumerate(timeline.workspace):
        for index in releases.get(position, ()):
            region.free(held.pop(index))
        for index in (*prefetches.get(position, ()), *starts.get(position, ())):
            chunk = region.allocate(timeline.buffers[index].nbytes)
            if chunk is None:
                return position
            held[index] = chunk
        if workspace > 0:
            chunk = region.allocate(int(SPARE * workspace))
            if chunk is None:
                return position
            region.free(chunk)
        for index in ends.get(position, ()):
            region.free(held.pop(index))
    return None
