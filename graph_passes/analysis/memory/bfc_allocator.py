"""TensorFlow's GPU allocator (BFC, best fit with coalescing), as far as it decides where things lie.

bfc_allocator.cc: `FindChunkPtr`, `SplitChunk`, `Merge`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

_ROUND = 256
_KEEP_WHOLE = 128 << 20  # a chunk is split if at least this much is left over, or if it is twice as large as asked for

Chunk = tuple[int, int]  # (address, size)


def rounded(nbytes: int) -> int:
    """What is taken for `nbytes`."""
    return max(_ROUND, -(-nbytes // _ROUND) * _ROUND)


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
