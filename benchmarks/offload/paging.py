"""NVIDIA's demand paging of a training step, simulated: unified memory without moves. Pure.

    an op's buffers       pages that are on the host come back by page faults, one after the other
    a new buffer          takes pages that a buffer left on the GPU when it ended, then free ones; the driver does not
                          know that a buffer ended (thesis 6.3.1), so such pages are still mapped
    no page is free       the pages that were used longest ago go to the host, while the op waits

An op whose buffers exceed the memory pages what exceeds it out and in. All of this takes its time beside no kernel:
page faults during a migration were 60 times slower still (thesis 4.2.2), which is not counted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from graph_passes.analysis.memory.simulate import by_position
from graph_passes.analysis.memory.timeline import Timeline


@dataclass(frozen=True)
class Rates:
    """Bytes a second of unified memory.

    Attributes:
        faults: of pages that a kernel's faults bring to the GPU.
        evictions: of pages that go to the host to make room.
    """

    faults: float
    evictions: float

    @staticmethod
    def of_link(offload: float, prefetch: float) -> Rates:
        """Shares of a link of these bytes a second: the thesis measured 4.3 of 12.0 GB/s for faults (4.2.2), and 9.0
        for transfers beside faults (4.3)."""
        return Rates(prefetch * 4.295 / 12.0, offload * 9.0 / 12.0)


@dataclass(frozen=True)
class Paged:
    """What a step does under demand paging.

    Attributes:
        seconds: how long it takes.
        bytes_in, bytes_out: what migrates.
    """

    seconds: float
    bytes_in: int
    bytes_out: int


class _Pages:
    """Which bytes of which buffer are on the GPU, those used longest ago first."""

    def __init__(self, memory: int) -> None:
        self.free, self.left, self.out = memory, 0, 0
        self.there: OrderedDict[int, int] = OrderedDict()

    def take(self, nbytes: int, kept: frozenset[int]) -> int:
        """Take pages, at most so many as there are beside those of `kept` buffers; the bytes that were taken."""
        found = min(nbytes, self.left)
        self.left -= found
        more = min(nbytes - found, self.free)
        self.free -= more
        found += more
        for buffer in [each for each in self.there if each not in kept]:
            if found == nbytes:
                break
            evicted = min(nbytes - found, self.there[buffer])
            self.there[buffer] -= evicted
            self.out += evicted
            found += evicted
        return found


def paged(timeline: Timeline, memory: int, rates: Rates) -> Paged:
    """A step in `memory` bytes, of which its variables keep theirs."""
    pages, bytes_in = _Pages(max(0, memory - timeline.base)), 0
    made = by_position((buffer.start, index) for index, buffer in enumerate(timeline.buffers))
    used = by_position((use, index) for index, buffer in enumerate(timeline.buffers) for use in buffer.uses)
    ended = by_position((timeline.end(buffer), index) for index, buffer in enumerate(timeline.buffers))
    beyond = 0  # bytes of ops that exceed the memory
    for position, step in enumerate(timeline.steps):
        touched = list(dict.fromkeys((*used.get(position, ()), *made.get(position, ()))))
        for number, index in enumerate(touched):
            # What an op has touched may go again where all of its buffers together exceed the memory.
            kept = frozenset(touched[: number + 1])
            lacking = timeline.buffers[index].nbytes - pages.there.get(index, 0)
            taken = pages.take(lacking, kept)
            pages.there[index] = pages.there.get(index, 0) + taken
            pages.there.move_to_end(index)
            beyond += lacking - taken
            bytes_in += lacking if timeline.buffers[index].start != position else 0
        workspace = pages.take(step.workspace, frozenset(touched))
        beyond += step.workspace - workspace
        pages.left += workspace
        for index in ended.get(position, ()):
            pages.left += pages.there.pop(index, 0)
    bytes_in, bytes_out = bytes_in + beyond, pages.out + beyond
    seconds = timeline.moments[-1] + bytes_in / rates.faults + bytes_out / rates.evictions
    return Paged(seconds, bytes_in, bytes_out)
