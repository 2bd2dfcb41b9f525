"""Buffers that lists hold as elements: how long they are in memory when the lists move. Pure.

    h0 -> [6 steps] -> h6 -> [6 steps] -> h12      the first lists end with h6, and the second ones begin with it
    lists copied out     stay the owners of what something else holds, too: h6 stays while the first lists are away
    lists made again     are dropped: h6 stays for other readers alone, and the second run makes another h6

Lists that move by copies take an element along that nothing else holds when the copy begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graph_passes.analysis.memory.timeline import Gap, Holder, Timeline

if TYPE_CHECKING:
    from graph_passes.analysis.memory.simulate import Move

Stretch = tuple[int, int]  # the first position, the first after it


def let_go(timeline: Timeline, moves: Sequence[Move], below: int | None = None) -> npt.NDArray[np.int64]:
    """Bytes at each position that are not in memory because lists move that hold them; less than 0 where more are.

    Args:
        timeline: the step.
        moves: the plan's moves.
        below: count only buffers of fewer bytes; None for all.
    """
    if not timeline.elements:
        return np.zeros(len(timeline.steps), np.int64)
    of_list: dict[int, list[Move]] = {}
    readers: dict[int, int] = {}  # of chains: the last position before which one reads a buffer
    for move in moves:
        of_list.setdefault(move.buffer, []).append(move)
        chain = timeline.chain(move.gap) if move.recomputed else None
        for source in chain.sources if chain else ():
            readers[source] = max(move.next, readers.get(source, 0))
    gone: list[tuple[int, int, int]] = []
    there: list[tuple[int, int, int]] = []
    for index in timeline.elements:
        buffer = timeline.buffers[index]
        moved = [of_list.get(timeline.index[holder.list], []) for holder in buffer.holders]
        if (any(moved) or index in readers) and (below is None or buffer.nbytes < below):
            gone.append((index, buffer.start, timeline.end(buffer) + 1))
            read = max(buffer.read, readers.get(index, 0))
            there += [(index, *each) for each in _stretches(timeline, index, read, moved)]
    return timeline.within(gone) - timeline.within(there)


def made_again(timeline: Timeline, gap: Gap) -> int:
    """Bytes of the elements that the chain of a list's gap makes besides what the list counts."""
    tensor, chain = timeline.buffers[gap.buffer].tensor, timeline.chain(gap)
    return sum(
        timeline.buffers[index].nbytes
        for index in timeline.elements
        for holder in timeline.buffers[index].holders
        if chain is not None and holder.list == tensor and _makes(holder, index, chain.sources)
    )


def _makes(holder: Holder, index: int, sources: Collection[int]) -> bool:
    """Whether a second run of the loop that fills a list makes the element, too; else it reads it."""
    return holder.made or index not in sources


def _stretches(timeline: Timeline, index: int, read: int, moved: Sequence[Sequence[Move]]) -> Iterator[Stretch]:
    """When an element is in memory, under the moves of each of its holders; what a chain makes is one more."""
    own: Stretch = (timeline.buffers[index].start, read + 1)
    held: list[Stretch] = []
    for holder, moves in zip(timeline.buffers[index].holders, moved, strict=True):
        filled = timeline.buffers[timeline.index[holder.list]]
        end = timeline.end(filled) + 1
        for move in moves:
            chain = timeline.chain(move.gap) if move.recomputed else None
            if chain is not None and _makes(holder, index, chain.sources):
                yield move.next, end
                end = min(end, move.last + 1)
        held.append((filled.start, end))
    apart: list[Stretch] = []
    for place, (begins, end) in enumerate(held):
        begin = begins
        others = [own, *held[:place], *held[place + 1 :]]
        for move in sorted(moved[place], key=lambda move: move.release):
            alone = not any(first <= move.copy_after < after - 1 for first, after in others)
            if alone and not (move.recomputed or timeline.buffers[index].holders[place].made):  # it is taken along
                apart.append((begin, move.release))
                begin = move.prefetch
        apart.append((begin, end))
    yield from _joined([own, *apart])


def _joined(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """Stretches that do not overlap, where these do."""
    reached: Stretch | None = None
    for begin, end in sorted(each for each in stretches if each[0] < each[1]):
        if reached is not None and begin <= reached[1]:
            reached = (reached[0], max(reached[1], end))
            continue
        if reached is not None:
            yield reached
        reached = (begin, end)
    if reached is not None:
        yield reached
