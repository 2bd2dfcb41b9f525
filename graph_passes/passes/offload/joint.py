"""The joint plan as a program: keep, copy or recompute for each gap, with the least time. Pure: Timeline in, rows out.

    ops         |-----|--|-------|---|------|     intervals end where a gap begins or ends, and at long ops
    cells       |--------|-----------|------|     some intervals in a row: the link and the compute stream in them

    x_k    the chain of gap k runs before the use that ends it
    o_k    gap k is copied; f_kc and h_kc are its shares that leave and come back in cell c
    W_i    MiB that are away in interval i, a running balance: each row has few numbers
    s_c    the time that the compute stream waits in cell c

    minimise     sum s_c + sum t_k x_k
    subject to   x_k + o_k <= 1;   sum_c f_kc = sum_c h_kc = o_k;   W_i >= usage_i - budget
                 a cell's copies of one direction take no longer than its ops, its waits and its chains
                 what a chain reads is not away when it runs;   its temporary tensors fit

Each true plan of these gaps is a solution, so the cost without integers is a bound: a copy frees its bytes at the
beginning of the cell in which it leaves, takes them at the end of the cell in which it comes back, and gaps beyond the
`MOST_GAPS` largest are away for nothing.

Solvers tolerate an absolute error, so the unit of time is a thousandth of the longest time that the program has.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from graph_passes.analysis.linear_program import LinearProgram, Solution
from graph_passes.analysis.memory.elements import made_again
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Gap, Timeline
from graph_passes.passes.offload.placement import is_early

MOST_GAPS = 2000
CELLS = 96
_MIB = float(1 << 20)
_PARTS = 1e3  # of the longest time, for the unit of time


@dataclass(frozen=True, eq=False)
class Joint:
    """One step under one budget.

    Attributes:
        timeline, link, budget: the step.
        gaps: the gaps that the program decides on.
        free: gaps that count as away: they are small, or too short to matter.
    """

    timeline: Timeline
    link: Link
    budget: int
    gaps: tuple[Gap, ...]
    free: tuple[Gap, ...] = ()

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        link: Link,
        budget: int,
        candidates: Sequence[Gap],
    ) -> Joint:
        """The largest of the candidates that lie where memory is short; the others are free."""
        short = np.flatnonzero(timeline.usage > budget)
        useful = [
            gap
            for gap in candidates
            if np.searchsorted(short, gap.last, side="right") < np.searchsorted(short, gap.next)
        ]
        useful.sort(key=lambda gap: (-timeline.nbytes(gap), gap.next, gap.last, gap.buffer))
        chosen = tuple(sorted(useful[:MOST_GAPS], key=lambda gap: (gap.next, gap.last, gap.buffer)))
        return cls(timeline, link, budget, chosen, tuple(useful[MOST_GAPS:]))

    @cached_property
    def borders(self) -> list[int]:
        """The first position of each interval, and the number of positions."""
        length = len(self.timeline.steps)
        found = {0, length, *self.cell_borders}
        for gap in self.gaps:
            found.update((gap.last + 1, gap.next, min(gap.next + 1, length)))
        return sorted(found)

    @cached_property
    def cell_borders(self) -> list[int]:
        """The first position of each cell: cells have equal time, as far as ops allow."""
        moments = self.timeline.moments
        return sorted({bisect_left(moments, moments[-1] * part / CELLS) for part in range(CELLS)} | {0})

    def interval(self, position: int) -> int:
        """The interval that a position lies in."""
        return min(bisect_right(self.borders, position), len(self.borders) - 1) - 1

    def cell(self, position: int) -> int:
        """The cell that a position lies in."""
        return bisect_right(self.cell_borders, position) - 1

    @cached_property
    def needs(self) -> list[float]:
        """MiB that have to be away in each interval."""
        timeline = self.timeline
        gone = timeline.within((gap.buffer, gap.last + 1, gap.next) for gap in self.free)
        over = (timeline.usage - gone - self.budget) / _MIB
        ends = self.borders
        return [float(over[ends[at] : ends[at + 1]].max(initial=0.0)) for at in range(len(ends) - 1)]

    @cached_property
    def mib(self) -> list[float]:
        """The size of each gap's buffer."""
        return [self.timeline.nbytes(gap) / _MIB for gap in self.gaps]

    @cached_property
    def unit(self) -> float:
        """Seconds in the program's unit of time."""
        slowest = min(self.link.offload, self.link.prefetch)
        copied = max(map(self.timeline.nbytes, self.gaps), default=0) / slowest
        return max(self.timeline.moments[-1], copied) / _PARTS or 1.0

    @cached_property
    def prices(self) -> list[float]:
        """The time of each gap's chain; infinity where it has none."""
        return [self.timeline.recomputing(gap) / self.unit for gap in self.gaps]

    def temporary(self, number: int) -> float:
        """MiB that have to be away while a gap's chain runs."""
        timeline, gap = self.timeline, self.gaps[number]
        chain = timeline.chain(gap)
        if chain is None:
            return 0.0
        most = max(
            nbytes + timeline.steps[position].workspace for position, nbytes in zip(chain.ops, chain.held, strict=True)
        )
        at = gap.next
        beside = timeline.usage[at] - timeline.made[at] - timeline.workspace[at] - timeline.nbytes(gap)
        beside -= made_again(timeline, gap)
        away = sum(timeline.nbytes(other) for other in self.free if other.last < at < other.next)
        return float(beside + most - away - self.budget) / _MIB


@dataclass(frozen=True)
class GapShares:
    """Values between 0 and 1 for each gap of a `Joint`: how much of it a chain ends, and how much is copied."""

    again: tuple[float, ...]
    copied: tuple[float, ...]

    def rounded(self, least: float) -> GapShares:
        """Whole gaps: those of which more than a share of `least` moves, each in the way of its larger share."""
        pairs = list(zip(self.again, self.copied, strict=True))
        moved = [sum(pair) > least for pair in pairs]
        chains = [again >= copied for again, copied in pairs]
        return GapShares(
            tuple(float(moves and chain) for moves, chain in zip(moved, chains, strict=True)),
            tuple(float(moves and not chain) for moves, chain in zip(moved, chains, strict=True)),
        )


class JointProgram:
    """The rows of a `Joint`, and what its variables mean."""

    def __init__(
        self,
        joint: Joint,
        *,
        copies: Collection[int] | None = None,
        cautious: bool = False,
    ) -> None:
        """
        Args:
            joint: the step.
            copies: numbers of the gaps that may be copied; None for all.
            cautious: whether copies count as in memory for the whole of their cells; else it is a bound.
        """
        self.joint, self.program, self.cautious = joint, LinearProgram(), cautious
        numbers = range(len(joint.gaps))
        self._again: dict[int, int] = {}
        self._copied: dict[int, int] = {}
        add = self.program.variable
        for number in numbers:
            if joint.prices[number] < float("inf"):
                self._again[number] = add(joint.prices[number], 0.0, 1.0, whole=True)
            if copies is None or number in copies:
                self._copied[number] = add(0.0, 0.0, 1.0, whole=True)
        cells = joint.cell(len(joint.timeline.steps) - 1) + 1
        self._waits = [add(1.0) for _ in range(cells)]
        self._away = [add(0.0, max(0.0, need)) for need in joint.needs]
        self._balance: list[list[tuple[int, float]]] = [[] for _ in self._away]
        self._out: list[list[tuple[int, float]]] = [[] for _ in range(cells)]
        self._in: list[list[tuple[int, float]]] = [[] for _ in range(cells)]
        self._chains: list[list[tuple[int, float]]] = [[] for _ in range(cells)]
        for number in numbers:
            self._add_gap(number)
        self._add_sources()
        self._add_balance()
        self._add_link()

    def shares(self, solution: Solution) -> GapShares:
        """What a solution says of each gap."""
        values, numbers = solution.values, range(len(self.joint.gaps))
        return GapShares(
            tuple(values[self._again[number]] if number in self._again else 0.0 for number in numbers),
            tuple(values[self._copied[number]] if number in self._copied else 0.0 for number in numbers),
        )

    def _add_gap(self, number: int) -> None:
        joint, gap, mib = self.joint, self.joint.gaps[number], self.joint.mib[number]
        first, last = joint.interval(gap.last + 1), joint.interval(gap.next)
        again, copied = self._again.get(number), self._copied.get(number)
        if again is not None:
            self._balance[first].append((again, mib))
            self._balance[last].append((again, -mib))
            self._chains[joint.cell(gap.next)].append((again, -joint.prices[number]))
            temporary = joint.temporary(number)
            if temporary > max(0.0, joint.needs[last]):
                self.program.at_most([(again, temporary), (self._away[last], -1.0)], 0.0)
        if again is not None and copied is not None:
            self.program.at_most([(again, 1.0), (copied, 1.0)], 1.0)
        if copied is None:
            return
        early = is_early(joint.timeline, gap, joint.budget)
        begin = joint.timeline.buffers[gap.buffer].start if early else gap.last
        shares_out, shares_in = [], []
        for cell in range(joint.cell(begin), joint.cell(gap.next) + 1):
            leaves, returns = self.program.variable(0.0, 0.0, 1.0), self.program.variable(0.0, 0.0, 1.0)
            shares_out.append((leaves, 1.0))
            shares_in.append((returns, 1.0))
            begins, ends = joint.cell_borders[cell], self._cell_end(cell)
            if self.cautious:
                begins, ends = ends, begins
            free, taken = joint.interval(begins), joint.interval(ends)
            self._balance[min(max(first, free), last)].append((leaves, mib))
            self._balance[max(min(last, taken), first)].append((returns, -mib))
            self._out[cell].append((leaves, mib * _MIB / joint.link.offload / joint.unit))
            self._in[cell].append((returns, mib * _MIB / joint.link.prefetch / joint.unit))
        self.program.equal([*shares_out, (copied, -1.0)], 0.0)
        self.program.equal([*shares_in, (copied, -1.0)], 0.0)

    def _cell_end(self, cell: int) -> int:
        borders = self.joint.cell_borders
        return borders[cell + 1] if cell + 1 < len(borders) else len(self.joint.timeline.steps)

    def _add_sources(self) -> None:
        """What a chain reads is not away when it runs."""
        joint = self.joint
        of_buffer: dict[int, list[int]] = defaultdict(list)
        for number, gap in enumerate(joint.gaps):
            of_buffer[gap.buffer].append(number)
        for number, again in self._again.items():
            chain, position = joint.timeline.chain(joint.gaps[number]), joint.gaps[number].next
            for source in chain.sources if chain else ():
                for other in of_buffer.get(source, ()):
                    if joint.gaps[other].last < position <= joint.gaps[other].next:
                        taken = [table[other] for table in (self._again, self._copied) if other in table]
                        if taken:
                            self.program.at_most([(again, 1.0), *((each, 1.0) for each in taken)], 1.0)

    def _add_balance(self) -> None:
        for at, changes in enumerate(self._balance):
            total: dict[int, float] = defaultdict(float)
            for variable, mib in changes:
                total[variable] += mib
            before = [(self._away[at - 1], 1.0)] if at else []
            self.program.equal([*before, *total.items(), (self._away[at], -1.0)], 0.0)

    def _add_link(self) -> None:
        moments = self.joint.timeline.moments
        for cell, wait in enumerate(self._waits):
            seconds = moments[self._cell_end(cell)] - moments[self.joint.cell_borders[cell]]
            for copies in (self._out[cell], self._in[cell]):
                if copies:
                    self.program.at_most([*copies, (wait, -1.0), *self._chains[cell]], seconds / self.joint.unit)
