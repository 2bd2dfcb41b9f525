"""Where one trace under a budget is on its way (`tfmem.steps.stage`), and what follows each of its calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from custom_ops.load import Counters
from graph_passes.analysis.cost.model import Measured
from graph_passes.analysis.memory.observe import Observation, Sample, observe
from graph_passes.analysis.memory.simulate import uncounted
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.decision import Missed
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.passes.offload.apply import Probing
from graph_passes.passes.offload.plan import OffloadPlan, tighter
from graph_passes.report import Report
from tfmem.kernels.replace_recurrent import with_replacements
from tfmem.runtime.arena import find_room, keep_apart, separate
from tfmem.runtime.engine import NOT_PLANNABLE, Engine
from tfmem.runtime.faults import fault_note, is_fault, left_by_fault
from tfmem.runtime.out_of_memory import lacks_memory
from tfmem.steps.known_profiles import BatchProfiles, Known
from tfmem.steps.replicas import describe_replicas, plan_replicas
from tfmem.steps.stage import CHECKS, GOOD_ENOUGH, PATIENT_CALLS, SURELY_FITS, Stage
from tfmem.steps.trace import Trace
from tfmem.steps.trials import CPU_RETRIES, GPU_TRIALS, Plans, Trial, checked, choose, judged

_runs = itertools.count(1)


class Stages:
    """A fault in planning is none of the caller's: what ran stays, or the step as it was (see `_leave`).

    Attributes:
        stage: the next call's.
        function: the `ConcreteFunction` that the next call runs.
        run: the table that its probes write to.
        dry_run: whether probed calls write no variable, so that the step has to be run again.
        report: what was decided and measured by now.
    """

    def __init__(self, engine: Engine, trace: Trace, others: BatchProfiles) -> None:
        """
        Args:
            engine, trace: device and options; nothing is done to the trace yet.
            others: what was observed of other batch sizes.
        """
        self._engine = engine
        self._others = others
        self._trace = trace
        self._reserved: list[Any] = []  # see `keep_apart`
        self._seen_plans: Plans | None = None  # by what was measured
        self._notes: list[str] = []
        self._trials: list[Trial] = []
        self._observed_trial: list[Trial] = []  # the observed step, if its plan could stay
        self._tried: set[Any] = set()  # what the plans did
        self._checked: list[int] = []  # peaks of the unprobed steps
        self._seen: Timeline | None = None  # by what was measured
        self._uncounted = 0  # bytes of the final plan's buffers that the allocator does not count
        self._replans = 0
        self._unmeasured = 0  # calls during which another was measured
        self._warm = False  # whether the current trial's first, unmeasured run is done
        self.stage = Stage.READY
        self.run = next(_runs)
        self.dry_run = False
        self.function = trace.concrete
        self.report = engine.unlimited(trace.name)

    @property
    def leaves_as_it_was(self) -> bool:
        """Whether it is settled that nothing moves, and that ops run in TensorFlow's order."""
        return self.stage is Stage.READY and self.function is self._trace.base

    @property
    def doing(self) -> str:
        """What the next probed call does, in words."""
        if self.stage is Stage.TRIAL:
            most = GPU_TRIALS if self._engine.target.is_gpu else 1 + CPU_RETRIES
            return f"trial {len(self._trials) + 1} of at most {most}"
        return "running a first plan" if self.stage is Stage.WARM else "observing a step"

    def replace_layers(self) -> None:
        """Replace recurrent layers; raises GraphError where the trace cannot be read."""
        reading = True
        try:
            found = self._trace.replaced_layers()
            reading = False
            if found is not None:
                self._trace.use_layers(*found)
            self.report = self._trace.unplanned()
        except Exception as error:
            if not is_fault(error, reading):
                raise
            self._fault(error, "replacing recurrent layers", "they stay as they were")
            self.report = replace(self.report, notes=tuple(self._notes))
        self.function = self._trace.base
        self._engine.warn_of_kept(self._trace.name, self._trace.replacements)
        self._tell()

    def begin(self, budget: int) -> None:
        """Plan by estimate.

        Raises:
            InfeasibleBudgetError, NoGradientError, UnknownShapeError, AlreadyOptimizedError, HostMemoryError,
            SpillDirectoryError: see `graph_passes.errors`.
        """
        self._budget = budget
        reading = True
        try:
            self._trace.read()
            reading = False
            self._begin()
        except NOT_PLANNABLE as error:
            self.report = self._engine.left_alone(self.report, error, bool(self._trace.replacements.matches))
        except Exception as error:
            if not is_fault(error, reading):
                raise
            self._leave(error)
        self._tell()

    def _tell(self) -> None:
        """Warn of what the report says that a user should not have to look for, once it is sure."""
        if self.stage in (Stage.CHECK, Stage.READY):
            self._engine.warn_of_losses(replace(self.report, notes=(*self._notes, *self.report.notes)))

    def ran(self) -> None:
        """`function` ran through in a stage."""
        self._trace.ran(self.function)

    def _fault(self, error: Exception, doing: str, instead: str) -> None:
        self._notes.append(fault_note(self._engine, self._trace.name, error, doing, instead))

    def _leave(self, error: Exception) -> None:
        """Run the step as it was, because of a fault, and see what it takes.

        Raises:
            InfeasibleBudgetError: that may be more than the budget.
        """
        peak = self._seen.peak if self._seen else self._trace.estimated_peak()
        self.report = left_by_fault(self._engine, replace(self.report, notes=tuple(self._notes)), error, peak)
        self.function = self._trace.base
        self._reserved, self._replans = [], CPU_RETRIES  # there is nothing to plan again with
        self.stage = Stage.CHECK if self._watches else Stage.READY

    @property
    def _watches(self) -> bool:
        """Whether the step that runs is watched for what it takes; not in place of XLA's, nor with other replicas."""
        left_to_xla = self._trace.jit_compile and self.function is self._trace.base
        return self._engine.observes and not left_to_xla and not self._trace.shared

    def _begin(self) -> None:
        engine = self._engine
        self.dry_run = self._trace.can_dry_run
        if self._trace.shared:
            self._begin_replicas()
            return
        careful = self._trace.step.timeline(engine.estimate(workspace=True))
        if careful.peak <= SURELY_FITS * self._budget:
            self._settle(careful, self._trace.plan(careful, self._budget))
            return
        # What cuDNN takes is not known yet. Without it, this is the least that any plan needs.
        is_gpu = engine.target.is_gpu
        self._timeline = self._trace.step.timeline(engine.estimate(workspace=False)) if is_gpu else careful
        least = self._trace.plan(self._timeline, self._budget)  # raises where no plan can meet the budget
        engine.require_host_room(self._timeline, least)
        if engine.options.observe:
            separate(engine, self._trace.concrete.variables)
        self._known = Known(engine, self._trace, self._budget, self._others)
        known, estimated = self._known.find(), self._timeline
        if known is not None:
            self._learn(known[0])
            try:
                least = self._trace.plan(self._timeline, self._budget, timed=True)
                self._notes.append(known[1])
            except InfeasibleBudgetError:
                if not engine.observes:
                    raise
                self._timeline, self._seen, known = estimated, None, None  # to refuse it, it has to be seen itself
        if not engine.observes:
            self._notes += engine.unobserved_notes(self._trace.name, known=known is not None)
            self._settle(self._timeline, least)
            return
        self._observed = known is not None
        self._reserved = keep_apart(engine, self._timeline) if is_gpu else []
        self._firsts = self._plans(partial(self._trace.plan, self._timeline)).first(least)
        self._first = next(self._firsts)  # also what is left when every trial runs out of memory
        if self._observed and not is_gpu:
            self._next_trial()
            return
        self._tried.add(self._first.actions)
        self._build(self._first, probed=True)
        self.stage = Stage.WARM
        self.report = self._describe(self._timeline, self._first)

    def _begin_replicas(self) -> None:
        plans = plan_replicas(self._trace.step, self._engine, self._budget)
        self.function = self._trace.build_lanes(plans)
        self.report = with_replacements(
            describe_replicas(self._trace.step, plans, self._engine, self._trace.name), self._trace.replacements
        )

    def _plans(self, make: Callable[..., OffloadPlan]) -> Plans:
        is_gpu = self._engine.target.is_gpu
        room = find_room(self._engine, self._timeline, self._budget) if is_gpu else None
        return Plans(self._engine, self._timeline, self._budget, make, room)

    def go_on(self, samples: list[Sample] | None, flow: tuple[Counters, Counters]) -> None:
        """What follows a probed step that ran through; no samples if another was measured meanwhile."""
        try:
            if self.stage is Stage.WARM and not self._observed:
                self.stage = Stage.OBSERVE
            elif samples is None:
                self._try_again()
            elif self.stage is Stage.WARM:
                self._next_trial()
            elif self.stage is Stage.OBSERVE:
                seen = observe(self._timeline, self._first.moves, samples, self._first.paddings)
                if not self._engine.target.is_gpu:  # it may be the only one that meets the budget
                    self._observed_trial = [
                        judged(self._first, self._describe(self._timeline, self._first), seen, flow)
                    ]
                self._known.keep(seen)
                self._learn(seen)
                self._next_trial()
            elif not self._warm and self._engine.target.is_gpu:
                self._warm = True
            else:
                self._judge(samples, flow)
        except Exception as error:
            if is_fault(error):
                self._fault(error, "planning by measurement", "the best plan that ran stays")
            else:  # measured, it needs more than the graph told; training goes on with what runs
                self._notes.append(Missed.of(f": {error}"))
            self._keep()
        self._tell()

    def _try_again(self) -> None:
        """Another measured call ran meanwhile, so nothing is known of this one: the next is measured, or none."""
        self._unmeasured += 1
        if self._unmeasured < PATIENT_CALLS:
            return
        if self.stage is not Stage.CHECK:
            self._choose()
        self.stage = Stage.READY
        note = f"not measured: {PATIENT_CALLS} calls ran while another step was measured"
        self.report = replace(self.report, notes=(*self.report.notes, note))

    def _keep(self) -> None:
        """Stay with the best of what ran, because nothing else can be planned.

        Raises:
            InfeasibleBudgetError: nothing ran but dry runs, and what they tried cannot be made; see `_leave`.
        """
        try:
            self._choose()
        except Exception as error:
            if self.dry_run and self.stage not in (Stage.CHECK, Stage.READY):
                self._leave(error)
                return
            self._fault(error, "making the final plan", "what ran last stays")  # with probes, it runs as well
            self.stage = Stage.READY
            self.report = replace(self.report, notes=tuple(self._notes))

    def _learn(self, seen: Observation) -> None:
        estimate = self._engine.estimate(workspace=False)
        costs = Measured(seen.seconds, seen.workspace, seen.base, estimate.roofline)
        self._timeline = self._seen = self._trace.step.timeline(costs)

    def _next_trial(self) -> None:
        """Start the next plan worth trying, or settle on the best that was tried.

        A step that fits in the planned order may not fit in the order TensorFlow would choose, unless by far.
        """
        if self._timeline.peak <= SURELY_FITS * self._budget:
            self._settle(self._timeline, self._trace.plan(self._timeline, self._budget, timed=True))
            return
        if self._seen_plans is None:  # the same plans are asked for before each trial
            self._seen_plans = self._plans(cache(partial(self._trace.plan, self._timeline, timed=True)))
        for plan in self._seen_plans.untried(self._trials, self._first):
            if plan.actions not in self._tried:
                self._tried.add(plan.actions)
                self._candidate, self._warm = plan, False
                self._build(plan, probed=True)
                self.stage = Stage.TRIAL
                self.report = self._describe(self._timeline, plan)
                return
        self._choose()

    def _judge(self, samples: list[Sample], flow: tuple[Counters, Counters]) -> None:
        seen = observe(self._timeline, self._candidate.moves, samples, self._candidate.paddings)
        self._trials.append(judged(self._candidate, self._describe(self._timeline, self._candidate), seen, flow))
        floor = sum(step.seconds for step in self._timeline.steps)
        good = not self._engine.target.is_gpu or seen.step_seconds <= GOOD_ENOUGH * floor
        if good and seen.peak <= self._budget:
            self._choose()
        else:
            self._next_trial()

    def give_up(self, error: Exception) -> None:
        """A plan ran out of memory before any variable was written: go on to the next, with the same step.

        Raises:
            Exception: `error`, if it does not speak of memory, if a weight may have been updated already, so that the
                step cannot be run again, or if there is no other plan.
            InfeasibleBudgetError: there is no other plan, because no plan's allocations find room.
        """
        rows = self._engine.library.probes(self.run)
        reached = max((row.index // 2 for row in rows), default=0)
        if not lacks_memory(error) or (reached >= self._trace.step.first_update and not self.dry_run):
            raise error
        plan = self._candidate if self.stage is Stage.TRIAL else self._first
        where = str(error).partition("Detected at node ")[2].partition(" ")[0].strip("'")
        self._notes.append(
            f"a plan for {plan.budget:,} bytes ran out of memory at '{where}', before any variable was written; the "
            f"step was run again under another plan{self._trace.graphs.again(self.dry_run)}"
        )
        if self.stage is Stage.TRIAL:
            try:
                self._next_trial()
            except Exception as fault:
                if not is_fault(fault):
                    raise
                self._fault(fault, "planning by measurement", "the best plan that ran stays")
                self._keep()
            return
        try:
            following = next((plan for plan in self._firsts if plan.actions not in self._tried), None)
            if following is not None:
                self._tried.add(following.actions)
                self._first = following
                self._build(following, probed=True)
                return
            known = self._plans(partial(self._trace.plan, self._timeline)).no_room(where)
        except Exception as fault:
            if not is_fault(fault):
                raise
            raise error from fault
        raise known or error from error

    def _choose(self) -> None:
        """Settle on the fastest trial that met the budget; if none did, on the one that came nearest."""
        if not self._trials:  # every plan ran out of memory: what ran first is known to run
            self._settle(self._timeline, self._first, force=True)
            return
        met = any(trial.seen.peak <= self._budget for trial in self._trials)
        best, notes = choose(self._trials if met else [*self._trials, *self._observed_trial], self._budget)
        self._notes += notes
        self._engine.library.trim()  # what trials moved beyond what the best of them does
        self._settle(self._timeline, best.plan, force=True)
        self.report = replace(best.report, notes=self.report.notes)

    def check(self, peak: int | None) -> None:
        """Take note of an unprobed step's peak, if it is known; plan for less if it is over the budget."""
        try:
            self._try_again() if peak is None else self._check(peak)
        except Exception as error:  # the step ran, and its result is the caller's
            self._fault(error, "planning by measurement", "what ran stays")
            self.stage = Stage.READY
            self.report = replace(self.report, notes=tuple(dict.fromkeys((*self._notes, *self.report.notes))))
        self._tell()

    def _check(self, peak: int) -> None:
        peak += self._uncounted
        self._checked.append(peak)
        over = peak - self._budget
        if over > 0 and self._replans < CPU_RETRIES:
            try:
                plan = tighter(partial(self._trace.plan, self._timeline, timed=True), self._candidate, over)
                if plan is not None:
                    self._engine.require_host_room(self._timeline, plan)
            except Exception as error:
                if is_fault(error):
                    raise
                plan = None
            if plan is None:
                self._replans = CPU_RETRIES  # nothing is left to try
            else:
                self._notes.append(
                    f"replanned: a plan for {self._candidate.budget:,} bytes ran {over:,} over the budget"
                )
                self._replans += 1
                self._checked = []
                self._settle(self._timeline, plan, force=True)
                return
        if len(self._checked) >= CHECKS:
            notes = tuple(dict.fromkeys((*self._notes, *self.report.notes)))
            planned = self.function is not self._trace.base
            self.report = checked(replace(self.report, notes=notes), self._checked, self._budget, planned)
            self.stage = Stage.READY

    def _settle(self, timeline: Timeline, plan: OffloadPlan, force: bool = False) -> None:
        """Make `plan` final. Without moves the trace stays as it was, unless its order is part of what was tried."""
        self._timeline, self._candidate = timeline, plan
        self._uncounted = uncounted(timeline, plan.moves, plan.paddings)
        if plan.moves or force:
            self._build(plan, probed=False)
        else:
            self.function = self._trace.unmoved()
        self.stage = Stage.CHECK if self._watches else Stage.READY
        self.report = self._describe(timeline, plan)

    def _build(self, plan: OffloadPlan, *, probed: bool) -> None:
        probing = Probing(self.run, self._engine.target.name) if probed else None
        self.function = self._trace.build(self._timeline, plan, probing, dry_run=probed and self.dry_run)

    def _describe(self, timeline: Timeline, plan: OffloadPlan) -> Report:
        return self._trace.describe(timeline, plan, self._notes, given=self.function is self._trace.base)
