"""A graph as the planner sees it: ops in order with their times, buffers with their uses. Pure data.

    position    0      1      2      3      4 ...          one per op of the schedule
    buffer     [alloc  use           use]                  alive from `start` to `end`, both included

Memory at a position is `base` (variables, constants, what the caller holds), the buffers alive there, and the op's own
workspace. Offload plans cut holes into buffers' lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from graph_passes.graph.ir import TensorId
from graph_passes.refusals import Refusal

# TensorFlow's CPU allocator with oneDNN on (mkl_cpu_allocator.h, kSmallAllocationsThreshold): smaller buffers come from
# another allocator, which keeps no statistics. A larger one gets a whole chunk, if no smaller one is free, of up to
# twice its size (bfc_allocator.cc, `FindChunkPtr`), and all of that counts.
COUNTED = 1 << 18


@dataclass(frozen=True)
class ScheduledOp:
    """One op of the schedule.

    Attributes:
        node: the op's name.
        seconds: how long it runs on the device.
        workspace: bytes it allocates while it runs, beyond its outputs.
    """

    node: str
    seconds: float = 0.0
    workspace: int = 0


@dataclass(frozen=True)
class Chain:
    """The ops that make a buffer's content again for the use that ends a gap.

    Attributes:
        since: the use of the buffer (or its start) after which the gap begins.
        ops: positions of the ops, in their order; the last makes the content. Empty if there is no such chain.
        sources: indices of the buffers that they read. Those that end before are small, and are kept for the chain.
        held: bytes of the chain's tensors in memory while each op runs, without its workspace.
        kind: the type of each op and the bytes it makes. Chains of one kind are decided together.
    """

    since: int
    ops: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    kind: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Holder:
    """A list that holds a buffer as one of its elements.

    Attributes:
        list: the tensor that the list's buffer is named by.
        made: whether the loop that fills the list makes the element, and returns it besides; else the loop gets it.
    """

    list: TensorId
    made: bool


@dataclass(frozen=True)
class Buffer:
    """One allocation of the step.

    Attributes:
        tensor: the output that allocates it.
        nbytes: its size.
        start: the position of the op that allocates it.
        uses: positions that read it (through any of its views), ascending; `start` is not among them.
        views: every tensor that shares it, `tensor` first.
        written: positions at which one of its views is made, ascending; the last of them before a gap is when its
            content is final.
        pinned_by: why it cannot be moved, if it cannot.
        fetched: whether it stays alive after the last op, because the step returns it.
        chains: how its content could be made again, ascending by `Chain.since`: one for each of its gaps.
        twice: whether TensorFlow's GPU kernel allocates it twice and keeps the second; the first is in the op's
            workspace.
        between: bytes that it allocates between the two, in its workspace, too.
        element: bytes of one of the allocations that it stands for, where it is a list; else 0.
        holders: the movable lists that hold it as an element. Their uses are among `uses`.
        read: the last position that reads it otherwise than as an element, where lists hold it.
    """

    tensor: TensorId
    nbytes: int
    start: int
    uses: tuple[int, ...]
    views: tuple[TensorId, ...] = ()
    written: tuple[int, ...] = ()
    pinned_by: Refusal | None = None
    fetched: bool = False
    chains: tuple[Chain, ...] = ()
    twice: bool = False
    between: int = 0
    element: int = 0
    holders: tuple[Holder, ...] = ()
    read: int = 0

    @property
    def allocation(self) -> int:
        """Bytes of one allocation of it."""
        return self.element or self.nbytes

    @property
    def movable(self) -> bool:
        """Whether a MemOp may move it."""
        return not self.pinned_by


@dataclass(frozen=True)
class Gap:
    """A stretch of a buffer's life in which no op reads it: after position `last`, before position `next`."""

    buffer: int
    last: int
    next: int

    @property
    def distance(self) -> int:
        """The reuse distance: ops between the two uses (thesis 3.3.1.1)."""
        return self.next - self.last - 1


@dataclass(frozen=True, eq=False)
class Timeline:
    """Everything a plan depends on.

    Attributes:
        steps: the schedule.
        buffers: every allocation of the step that has a known size.
        turn: the position of the last forward op.
        base: bytes alive all the time.
        updates: positions of the ops between a weight's gradient and its update.
        unordered: positions of the ops that no control edge may go to (see `roles.unordered`): no move begins or ends
            at one of these, for the control chain does not go through them.
        counted: bytes of the smallest buffer that the device's allocator counts, where it gives out whole chunks (see
            `COUNTED`); 0 where it counts all, or its chunks are replayed.
        small_base: bytes of `base` that are too small to be counted.
    """

    steps: tuple[ScheduledOp, ...]
    buffers: tuple[Buffer, ...]
    turn: int
    base: int = 0
    updates: frozenset[int] = frozenset()
    unordered: frozenset[int] = frozenset()
    counted: int = 0
    small_base: int = 0

    @cached_property
    def workspace(self) -> npt.NDArray[np.int64]:
        """Workspace bytes at each position."""
        return np.array([step.workspace for step in self.steps], np.int64)

    @cached_property
    def begins(self) -> npt.NDArray[np.float64]:
        """Seconds from the step's start at which each op begins; one more entry: when the last one ends."""
        return np.concatenate([[0.0], np.cumsum([step.seconds for step in self.steps])])

    @cached_property
    def moments(self) -> list[float]:
        """`begins` as Python's numbers, which are read one by one in less time."""
        return [float(moment) for moment in self.begins]

    @cached_property
    def made(self) -> npt.NDArray[np.int64]:
        """Bytes of the buffers that each op makes."""
        made = np.zeros(len(self.steps), np.int64)
        for buffer in self.buffers:
            made[buffer.start] += buffer.nbytes
        return made

    @cached_property
    def index(self) -> dict[TensorId, int]:
        """The buffers' places by the tensors that allocate them."""
        return {buffer.tensor: place for place, buffer in enumerate(self.buffers)}

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Indices of the buffers that movable lists hold as elements, and that the step does not return."""
        return tuple(
            place
            for place, buffer in enumerate(self.buffers)
            if buffer.holders and not buffer.fetched and all(holder.list in self.index for holder in buffer.holders)
        )

    def end(self, buffer: Buffer) -> int:
        """The last position at which `buffer` is alive."""
        if buffer.fetched:
            return len(self.steps) - 1
        return buffer.uses[-1] if buffer.uses else buffer.start

    @cached_property
    def usage(self) -> npt.NDArray[np.int64]:
        """Bytes in use at each position when nothing moves."""
        alive = ((index, buffer.start, self.end(buffer) + 1) for index, buffer in enumerate(self.buffers))
        return self.within(alive) + self.workspace + self.base

    @cached_property
    def uncounted(self) -> npt.NDArray[np.int64]:
        """Bytes at each position that the device's allocator does not count."""
        small = ((index, buffer) for index, buffer in enumerate(self.buffers) if buffer.allocation < self.counted)
        return self.within((index, buffer.start, self.end(buffer) + 1) for index, buffer in small) + self.small_base

    def within(self, stretches: Iterable[tuple[int, int, int]]) -> npt.NDArray[np.int64]:
        """Bytes at each position of buffers, each counted in one stretch of positions.

        Args:
            stretches: (index of a buffer, the first position at which it counts, the first at which it no longer does).
        """
        change = np.zeros(len(self.steps) + 1, np.int64)
        for index, first, end in stretches:
            change[first] += self.buffers[index].nbytes
            change[end] -= self.buffers[index].nbytes
        return np.cumsum(change[:-1])

    @property
    def peak(self) -> int:
        """The most bytes in use at any position when nothing moves."""
        return int(self.usage.max(initial=self.base))

    def before(self, position: int) -> int:
        """The last position up to `position` that can be put into an order; -1 if there is none."""
        return self._neighbours[0][position]

    def after(self, position: int) -> int:
        """The first position from `position` on that can be put into an order; `len(steps)` if there is none."""
        return self._neighbours[1][position]

    @cached_property
    def _neighbours(self) -> tuple[list[int], list[int]]:
        before: list[int] = []
        after = [len(self.steps)]
        for position in range(len(self.steps)):
            before.append(position if position not in self.unordered else before[-1] if before else -1)
        for position in reversed(range(len(self.steps))):
            after.append(position if position not in self.unordered else after[-1])
        return before, after[::-1]

    def gaps(self) -> list[Gap]:
        """Every gap of every movable buffer, in schedule order of the use that ends it.

        A use that cannot be ordered counts as one up to the next op that can, and from the one before it on: when it
        runs between these two is the runtime's choice.
        """
        return list(self._gaps)

    @cached_property
    def _gaps(self) -> tuple[Gap, ...]:
        found = []
        for index, buffer in enumerate(self.buffers):
            if buffer.movable:
                for use, following in pairwise((buffer.start, *buffer.uses)):
                    gap = Gap(index, self.after(use + 1) - 1, self.before(following))
                    if gap.distance > 0 and self.before(use) >= 0:
                        found.append(gap)
        return tuple(sorted(found, key=lambda gap: (gap.next, gap.last)))

    def chain(self, gap: Gap) -> Chain | None:
        """How the content that waits in a gap is made again before the use that ends it; None if it cannot be."""
        known = [chain for chain in self.buffers[gap.buffer].chains if chain.since <= gap.last]
        return known[-1] if known and known[-1].ops else None

    def recomputing(self, gap: Gap) -> float:
        """Seconds that the chain of a gap runs; infinity if there is none."""
        chain = self.chain(gap)
        return sum(self.steps[position].seconds for position in chain.ops) if chain else float("inf")

    def nbytes(self, gap: Gap) -> int:
        """Bytes of the buffer that has the gap."""
        return self.buffers[gap.buffer].nbytes

    def crosses_turn(self, gap: Gap) -> bool:
        """Whether the gap lies between the last forward and the first backward use."""
        return gap.last <= self.turn < gap.next and gap.next not in self.updates


def turning_point(live: Sequence[tuple[int, int]], length: int) -> int:
    """The last forward position: where most tensors wait for a later use.

    Args:
        live: for each tensor that is used again after a pause, its (last use before, first use after).
        length: how many positions there are.

    A forward pass only adds tensors that wait for their gradient op, and a backward pass only takes them away. So the
    count of waiting tensors has its top at the boundary, for any way to write the gradient and any names of scopes.
    """
    change = np.zeros(length + 1, np.int64)
    for last, following in live:
        change[last] += 1
        change[following] -= 1
    waiting = np.cumsum(change[:-1])
    return int(np.flatnonzero(waiting == waiting.max(initial=0))[0]) if length else 0
