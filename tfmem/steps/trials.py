"""Plans that are run to be measured: which to run, and which of them to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

from custom_ops.errors import TfmemError
from custom_ops.load import Counters
from custom_ops.timing.rounds import fastest
from graph_passes.analysis.memory.fragmentation import Room, without_workspace
from graph_passes.analysis.memory.observe import Observation
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.analysis.memory.workspace import SLOWER
from graph_passes.decision import Missed, met_since
from graph_passes.errors import BudgetError, InfeasibleBudgetError
from graph_passes.passes.offload.options import Effort
from graph_passes.passes.offload.plan import OffloadPlan, tighter
from graph_passes.passes.offload.repair import SHORT
from graph_passes.passes.offload.thin import thinned
from graph_passes.report import Report, measured
from tfmem.runtime.device_memory import DeviceMemory

LEAST_SHARE = 50  # percent of a GPU's budget that is planned for, the largest that is not fragmented
LESS, LESS_IF_LONG = 1, 3  # percent each time; the second where a replay takes more than milliseconds
GPU_TRIALS = 3
AS_PREDICTED = 1.05  # times the predicted time: a trial that took no more ends the search
SEARCHED, ONCE = 2, 3  # shares that are planned with these efforts, the largest first; others greedily
CPU_RETRIES = 3


@dataclass(frozen=True)
class Trial:
    """A plan that was run, and what came of it."""

    plan: OffloadPlan
    seen: Observation
    report: Report


def judged(plan: OffloadPlan, report: Report, seen: Observation, flow: tuple[Counters, Counters]) -> Trial:
    """A plan that was run.

    Args:
        plan: the plan.
        report: what was planned.
        seen: what its probes read.
        flow: the op library's counters before and after.
    """
    before, after = flow
    report = replace(
        measured(report, seen.peak),
        bytes_out_achieved=after.bytes_out - before.bytes_out,
        bytes_in_achieved=after.bytes_in - before.bytes_in,
        stall_measured_ns=after.stall_ns - before.stall_ns,
        step_measured_ns=round(seen.step_seconds * 1e9),
        curve_after=seen.curve,
    )
    return Trial(plan, seen, report)


@dataclass(frozen=True)
class Plans:
    """The plans of a step under a budget, in the order in which they are worth running.

    Attributes:
        memory: the device's; also tells the host's room.
        timeline: the step.
        budget: bytes.
        make: makes a plan for `budget` bytes, in a `room` if that is given; the `widest` one if asked.
        room: what is free of a GPU's memory before the step; None on a CPU.
    """

    memory: DeviceMemory
    timeline: Timeline
    budget: int
    make: Callable[..., OffloadPlan]
    room: Room | None

    def remembering(self) -> Plans:
        """The plans again, none of which is made twice: they are asked for before each trial."""
        return replace(self, make=cache(self.make))

    def first(self, least: OffloadPlan) -> Iterator[OffloadPlan]:
        """Plans to run before workspace is known, the next if one runs out of memory.

        cuDNN tries its algorithms when they first run, among those whose workspace fits: first comes the plan with the
        most memory to spare, if the host can take what it moves; `least`, which moves no more than must, comes last.
        """
        widest = self.make(budget=self.budget, widest=True, room=self.room)
        try:
            self.memory.require_host_room(self.timeline, widest)
        except TfmemError:
            widest = least
        if self.room is None:
            yield widest
        else:
            finds_room, others = widest.failure(self.timeline, self.room) is None, self.falling(self.room, first=True)
            yield from chain([widest], others) if finds_room else chain(others, [widest])
        yield least

    def untried(self, trials: Sequence[Trial], first: OffloadPlan) -> Iterator[OffloadPlan]:
        """Plans that may be better than those that were tried; they may be among them.

        Args:
            trials: what was tried, in order.
            first: the plan that was observed.

        Raises:
            BudgetError: nothing was tried, and no plan meets the budget on a CPU.
        """
        times = [trial.seen.step_seconds for trial in trials]
        if self.room is not None:
            met = any(trial.seen.peak <= self.budget for trial in trials)
            helped = len(times) < 2 or not met or times[-1] <= 0.99 * min(times[:-1])
            if len(times) < GPU_TRIALS and helped and not self._is_as_predicted(trials):
                ran = thinned(self.timeline, first, self.room)
                budget = self.budget if met or not trials else less_than(trials[-1], self.budget)
                also = [ran] if not trials or ran.after.peak <= budget else []
                yield from replace(self, budget=budget).falling(self.room, also)
                if not times:
                    yield ran  # even if it finds no room on paper
            if (self.timeline.usage - self.timeline.workspace).max() <= self.budget:
                yield self.make(budget=self.budget, unmoved=True)  # no plan may be slower than none
            return
        if times:
            over = trials[-1].seen.peak - self.budget
            if over <= 0 or len(times) > CPU_RETRIES:
                return
            # The timeline shows by now where trials took more. A second one that did took more elsewhere.
            elsewhere = sum(max(0, trial.seen.peak - self.budget) for trial in trials[1:])
            with suppress(TfmemError):
                cut = self.make(budget=self.budget - elsewhere, effort=Effort.ONCE)
                if cut.actions != trials[-1].plan.actions:
                    yield cut
            with suppress(TfmemError):
                tight = tighter(self.make, trials[-1].plan, over)
                if tight is not None:
                    yield tight
            return
        found = self.make(budget=self.budget)
        self.memory.require_host_room(self.timeline, found)
        yield found

    def _is_as_predicted(self, trials: Sequence[Trial]) -> bool:
        """Whether the last trial kept within the budget and the time that its plan promised."""
        if not trials:
            return False
        last = trials[-1]
        return last.seen.peak <= self.budget and last.seen.step_seconds <= AS_PREDICTED * last.plan.after.seconds

    def no_room(self, op: str) -> InfeasibleBudgetError | None:
        """The error for a step that ran out of a GPU's memory under every plan, at `op`; None if the replay finds room
        for the plan with the most memory to spare."""
        if self.room is None:
            return None
        room, given = self.room, self.memory.target.memory

        def finds_room(memory: int) -> bool:
            larger = room.grown(memory - given)
            plan = self.make(budget=self.budget, widest=True, room=larger)
            return plan.failure(self.timeline, larger) is None

        if finds_room(given):
            return None
        tried = (given * share // 32 for share in range(33, 97))
        enough = next(filter(finds_room, tried), 3 * given)
        return InfeasibleBudgetError(
            f"the step ran out of memory at op '{op}' under every plan for the {given:,} bytes that TensorFlow may "
            f"use, since free memory is fragmented; give TensorFlow about {enough:,} bytes, or use a smaller "
            "batch",
            enough,
            op,
        )

    def by_program(self) -> OffloadPlan:
        """The plan of the solver's that is worth running first; on a GPU one whose allocations find room.

        Raises:
            BudgetError: there is none.
        """
        if self.room is None:
            return self.make(budget=self.budget)
        found = next(self.falling(self.room), None)
        if found is None:
            raise BudgetError("no plan of the solver's finds room in the GPU's memory as it is now")
        return found

    def falling(self, room: Room, also: Sequence[OffloadPlan] = (), first: bool = False) -> Iterator[OffloadPlan]:
        """Plans for falling shares of the budget whose tensors find room, fragmentation counted in.

        A group ends with the third plan in which every op finds its workspace, or with the first that is about as fast
        as if memory had no fragments. The fastest of a group, and of `also`, comes first, with a guess at what it costs
        where convolutions do not find the workspace they had.

        Args:
            room: what is free before the step.
            also: plans that ran.
            first: whether the step is planned again before its plan matters.
        """
        timeline = self.timeline

        def priced(found: OffloadPlan) -> tuple[float, OffloadPlan, bool] | None:
            """Seconds, the plan, and whether every op finds its workspace; None if not all tensors find room."""
            short = without_workspace(timeline, found.moves, room, found.paddings)
            if short is None:
                return None
            slower = sum(timeline.steps[position].seconds for position in short)
            return found.after.seconds + SLOWER * slower, found, not short

        waiting = [each for each in map(priced, also) if each]
        seen: set[object] = set()  # what plans do; several shares give the same
        whole, hoped = 0, 0.0
        with suppress(TfmemError):
            hoped = self.make(budget=self.budget, effort=_effort(0, first)).after.seconds
        less = LESS if len(timeline.steps) <= SHORT else LESS_IF_LONG
        shares = range(100, LEAST_SHARE - 1, -less)
        plans = (
            self._for_share(self.budget * share // 100, room, _effort(number, first))
            for number, share in enumerate(shares)
        )
        for found in chain.from_iterable(plans):
            try:
                self.memory.require_host_room(timeline, found)
            except TfmemError:
                continue
            if found.actions in seen:
                continue
            seen.add(found.actions)
            candidate = priced(thinned(timeline, found, room))  # a repair may have made a move needless, or a stall
            if candidate is None:
                continue
            waiting.append(candidate)
            whole += candidate[2]
            if whole >= GPU_TRIALS or (candidate[2] and candidate[0] <= AS_PREDICTED * hoped):
                yield from _fastest_first(waiting)
                waiting, whole, hoped = [], 0, 0.0
        yield from _fastest_first(waiting)

    def _for_share(self, budget: int, room: Room, effort: Effort) -> Iterator[OffloadPlan]:
        """The policy's plan, if any; where that recomputes tensors, also the one that copies them all, and where it has
        padding allocations, also one without.

        What is recomputed needs its inputs to stay, and its own op's room, when there may be none in one piece. To move
        a tensor out of the way may cost less than what paddings lead to (benchmarks/results/offload_ablation.json).
        """
        with suppress(TfmemError):
            found = self.make(budget=budget, room=room, effort=effort)
            yield found
            if found.paddings:
                with suppress(TfmemError):
                    yield self.make(budget=budget, room=room, padded=False, effort=effort)
            if any(move.recomputed for move in found.moves):
                yield self.make(budget=budget, room=room, copied=True)


def less_than(trial: Trial, budget: int) -> int:
    """What to plan for on a GPU after a trial that took more than `budget`, and so more than it was made for: an
    allocator's chunks are larger than what lies in them, and where depends on the plan."""
    return min(budget, trial.plan.budget) - max(0, trial.seen.peak - budget)


def _effort(number: int, first: bool) -> Effort:
    """The effort for the share of this number."""
    if first or number >= ONCE:
        return Effort.GREEDY
    return Effort.SEARCHED if number < SEARCHED else Effort.ONCE


def _fastest_first(plans: Sequence[tuple[float, OffloadPlan, bool]]) -> Iterator[OffloadPlan]:
    for _, plan, _ in sorted(plans, key=lambda item: item[0]):
        yield plan


def best_trial(trials: Sequence[Trial], budget: int) -> tuple[Trial, list[str]]:
    """The fastest trial that met the budget, else the one that came nearest; and what a report should say of it."""
    notes: list[str] = []
    met = [trial for trial in trials if trial.seen.peak <= budget]
    number = fastest([trial.seen.step_seconds for trial in met])
    if number is not None:
        best = met[number]
    else:
        best = min(trials, key=lambda trial: (trial.seen.peak, trial.seen.step_seconds))
        notes.append(Missed.of(f" by {best.seen.peak - budget:,} bytes: no plan that was tried stayed within it"))
    if len(trials) > 1:
        tried = ", ".join(
            f"{trial.plan.budget:,} bytes: {trial.seen.step_seconds * 1e3:.1f} ms, peak {trial.seen.peak:,}"
            for trial in trials
        )
        notes.append(f"plans tried for {tried}")
    return best, notes


def checked(report: Report, peaks: Sequence[int], budget: int, planned: bool) -> Report:
    """`report` of a step that ran as it will, without probes.

    Args:
        report: what was planned.
        peaks: bytes that its calls took, at least two.
        budget: bytes.
        planned: whether there is a plan; else an estimate left the step unchanged.
    """
    notes, peak = [], max(peaks)
    if not planned:  # the first call has cuDNN's trying of algorithms in it
        learned, peak = peaks[1], max(peaks[1:])
        notes.append(f"{report.peak_predicted:,} bytes were estimated; the peak is as seen in one step")
        report = replace(report, peak_predicted=learned)
    if peak > budget:
        notes.append(Missed.of(f" by {peak - budget:,} bytes, in steps that were not profiled"))
        notes += report.notes
    else:
        notes += met_since(report.notes)
    return replace(measured(report, peak), notes=tuple(notes))
