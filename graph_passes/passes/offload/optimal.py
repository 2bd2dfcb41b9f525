"""Policy `optimal`: the gaps of a step, and how each ends, by an integer program. Pure: Timeline in, a selection out.

    greedy        what `hybrid` would choose; it stays where no solver runs, or finds nothing better
    bound         the program without integers: no plan of these columns takes less time
    per margin    the program where copies count cautiously: rounded, then with integers; `best_order`
    copies        of the fastest, those chains become copies without which the step takes less time

The program's copies take any share of a tensor at any moment of a cell, so a plan of whole tensors needs some memory
more to hide them. The program is asked for a few budgets below the real one. For each choice an order of its copies is
searched, and the fastest plan of all is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from custom_ops.background import go_on
from graph_passes.analysis.linear_program import UnsolvedError, solved
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Gap, Timeline
from graph_passes.passes.offload.copy_order import GAIN, best_order
from graph_passes.passes.offload.joint import GapShares, Joint, JointProgram
from graph_passes.passes.offload.options import Effort, OffloadOptions
from graph_passes.passes.offload.placement import tightest
from graph_passes.passes.offload.selection import Selection, lowest, needed

MARGINS = (0.03, 0.0, 0.015, 0.06)  # shares of the budget that the program leaves free, in the order of trying
ROUNDINGS = (0.02, 0.3)  # shares of a gap that the relaxed program moves, from which on a rounded plan moves it
ROUNDED, SOLVED = 300_000, 50_000  # numbers in the programs of a search, after which none more is rounded, or solved
NEAR = 1.005  # times the bound: a plan that is as fast ends the search
GAP, NODES = 1e-2, 30  # of the solver's tree: its limits are the same in every process
LONGEST_SOLVE = 20.0  # seconds: only for a solver that hangs, since what comes of it depends on the machine
TOLERATED = 1e-3  # of the program's unit of time: what a solver's errors sum up to
COPYING = 3  # selections whose chains may become copies
COPYING_OPS = 200_000  # ops of all steps for one of them, at most, with one order of the copies each
COPYING_MOVES = 10_000  # moves of all orders that are tried for one of them, at most
SMALL, MORE_NODES = 60_000, 200  # numbers in a program that is also solved with all of its copies, and nodes for it
LIKELY = 0.05  # share of a gap that the relaxed program copies, for a copy to be a choice of the one with integers


@lru_cache(maxsize=8)  # plans for several rooms begin with the same selection
def select(
    timeline: Timeline,
    candidates: tuple[Gap, ...],
    link: Link,
    budget: int,
    options: OffloadOptions,
    timed: bool,
    greedy: Selection,
    effort: Effort = Effort.SEARCHED,
) -> Selection:
    """The selection with the least predicted time: `greedy`, or one by the program.

    Args:
        timeline, link, budget, options: the step.
        candidates: gaps that may move.
        timed: whether run times were measured.
        greedy: a selection within the budget.
        effort: one program or several.
    """
    search = _Search(timeline, candidates, link, budget, options, timed)
    least, note, known = None, "", [search.ordered(greedy)]
    try:
        least = search.bound()
        selections = search.found(MARGINS if effort is Effort.SEARCHED else MARGINS[:1])
        while min(known).seconds > NEAR * least and (found := next(selections, None)) is not None:
            go_on()
            known.append(search.ordered(found))
        for one in sorted(known)[:COPYING]:
            if min(known).seconds > NEAR * least:
                known.append(search.copying(one))
    except UnsolvedError as error:
        note = f"planned without the solver: {error}"
    return replace(min(known).selection, least=least, note=note)


@dataclass(frozen=True, order=True)
class _Timed:
    """A selection with the copies in order, and the seconds that the step takes under it; infinity if over budget.
    `tried` counts the moves of all orders that were tried."""

    seconds: float
    selection: Selection = field(compare=False)
    tried: int = field(compare=False, default=0)


@dataclass(frozen=True)
class _Search:
    timeline: Timeline
    candidates: Sequence[Gap]
    link: Link
    budget: int
    options: OffloadOptions
    timed: bool

    def joint(self, budget: int) -> Joint:
        """The program's data for a budget."""
        return Joint.of(self.timeline, self.link, budget, self.candidates)

    def bound(self) -> float:
        """Seconds that no plan of the candidates goes below."""
        joint = self.joint(self.budget)
        solution = solved(JointProgram(joint).program, relaxed=True, seconds=LONGEST_SOLVE)
        if not solution.optimal:
            raise UnsolvedError(f"{solution.solver} found no optimum within {LONGEST_SOLVE:g} s")
        return self.timeline.moments[-1] + max(0.0, solution.cost - TOLERATED) * joint.unit

    def found(self, margins: Sequence[float]) -> Iterator[Selection]:
        """Selections by the program: rounded ones for each margin, then those with integers."""
        relaxed: list[tuple[Joint, bool, GapShares]] = []
        work = 0
        for margin in margins:
            joint = self.joint(int((1 - margin) * self.budget))
            if relaxed and work > ROUNDED:
                break
            for cautious in (True, False):
                program = JointProgram(joint, cautious=cautious)
                work += program.program.size
                choice = _solved(program, relaxed=True)
                if choice is not None:
                    relaxed.append((joint, cautious, choice))
                    yield from (self.whole(joint, choice.rounded(least)) for least in ROUNDINGS)
                    break
        work = 0
        for joint, cautious, shares in relaxed:
            likely = frozenset(number for number, share in enumerate(shares.copied) if share > LIKELY)
            program = JointProgram(joint, copies=likely, cautious=cautious)
            if work > SOLVED:
                break
            work += program.program.size
            choice = _solved(program, relaxed=False)
            if choice is not None:
                yield self.whole(joint, choice)
        if len(margins) > 1 and relaxed:
            joint, cautious, _ = max(relaxed, key=lambda each: each[0].budget)
            program = JointProgram(joint, cautious=cautious)
            choice = _solved(program, relaxed=False, nodes=MORE_NODES) if program.program.size <= SMALL else None
            if choice is not None:
                yield self.whole(joint, choice)

    def whole(self, joint: Joint, choice: GapShares) -> Selection:
        """A choice without what it could do without; short gaps stay first, and chains that take long."""
        timeline, budget = self.timeline, self.budget
        again = [gap for gap, share in zip(joint.gaps, choice.again, strict=True) if share > 0.5]
        copied = [gap for gap, share in zip(joint.gaps, choice.copied, strict=True) if share > 0.5]
        usage = lowest(timeline, (*again, *copied, *joint.free))
        small = sorted(joint.free, key=lambda gap: (timeline.nbytes(gap), gap.next, gap.buffer))
        short = sorted(copied, key=lambda gap: (gap.distance, gap.next, gap.buffer))
        dear = sorted(again, key=lambda gap: (-timeline.recomputing(gap) / timeline.nbytes(gap), gap.next, gap.buffer))
        copies = (*needed(timeline, small, usage, budget), *needed(timeline, short, usage, budget))
        kept = needed(timeline, dear, usage, budget)
        gaps = (*kept, *copies)
        return Selection(gaps, frozenset(kept), min(map(timeline.nbytes, gaps), default=0))

    def ordered(self, selection: Selection) -> _Timed:
        """A selection with its copies in order."""
        start = tightest(self.timeline, selection.gaps, self.link, self.budget, self.options, selection.again)
        seconds, queue, orders = best_order(self.timeline, start, self.link, self.budget, self.options, self.timed)
        return _Timed(seconds, replace(selection, queue=queue), orders * len(selection.gaps))

    def copying(self, best: _Timed) -> _Timed:
        """A selection with copies in place of the chains that take longer, the largest tensors first. The program does
        not see how well a copy hides; it counts whole cells."""
        most, tries, moves, better = COPYING_OPS // len(self.timeline.steps), 0, 0, True
        while better:
            better = False
            for gap in sorted(best.selection.again or (), key=self._largest):
                if tries == most or moves > COPYING_MOVES:
                    return best
                go_on()
                tries += 1
                again = (best.selection.again or frozenset()) - {gap}
                found = self.ordered(replace(best.selection, again=again))
                moves += found.tried
                if found.seconds < best.seconds - GAIN * self.timeline.moments[-1]:
                    best, better = found, True
        return best

    def _largest(self, gap: Gap) -> tuple[int, int, int]:
        return -self.timeline.nbytes(gap), gap.next, gap.buffer


def _solved(program: JointProgram, *, relaxed: bool, nodes: int = NODES) -> GapShares | None:
    """What a program chooses; None if the solver finds nothing."""
    try:
        return program.shares(solved(program.program, relaxed=relaxed, gap=GAP, nodes=nodes, seconds=LONGEST_SOLVE))
    except UnsolvedError:
        return None
