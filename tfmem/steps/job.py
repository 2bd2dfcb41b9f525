"""A trace that has to run within a budget: the data that no phase of the step changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from graph_passes.analysis.cost.model import MeasuredCosts
from graph_passes.analysis.memory.observe import Observation
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.decision import Missed
from graph_passes.passes.offload.options import Effort
from graph_passes.passes.offload.plan import OffloadPlan, Probing
from graph_passes.report import Report
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import error_note
from tfmem.runtime.measured_call import waits_for
from tfmem.runtime.measuring_lock import WaitsFor
from tfmem.steps.known_profiles import BatchProfiles
from tfmem.steps.phases import Transition
from tfmem.steps.replicas import waits_for_others
from tfmem.steps.states import Checking, Given, Placed, Probed, Solving, StepState, Warming, Watching
from tfmem.steps.trace import Trace
from tfmem.steps.trials import Plans

LARGE = 1_000  # ops of a step whose integer program takes a solver a second or more


@dataclass(frozen=True)
class Job:
    """A trace that has to run within a budget: the data that no phase changes.

    Attributes:
        engine: settings, and what carries them out.
        trace: on its way through the passes.
        others: what was observed of other batch sizes.
        budget: bytes; None for no limit.
        run: the table that the probes of this step write to.
        elsewhere: why the step is left alone; "" if it is not.
    """

    engine: Engine
    trace: Trace
    others: BatchProfiles
    budget: int | None
    run: int
    elsewhere: str = ""

    @property
    def limit(self) -> int:
        """The budget, where there is one."""
        if self.budget is None:
            raise ValueError(f"'{self.trace.name}' is planned without a budget")
        return self.budget

    @property
    def is_gpu(self) -> bool:
        """Whether the step runs on a GPU."""
        return self.engine.settings.target.is_gpu

    def given(self) -> Given:
        """The state before anything is known."""
        return Given(function=self.trace.concrete, report=self.engine.settings.unplanned(self.trace.name))

    def unplanned(self) -> Given:
        """The state once recurrent layers were replaced."""
        return replace(self.given(), function=self.trace.base, report=self.trace.unplanned())

    def noted(self, error: Exception, doing: str, instead: str) -> str:
        """The line of a report about an error that the step survives, of which the user is warned."""
        return error_note(self.engine.notices, self.trace.name, error, doing, instead)

    def watches(self, function: Any) -> bool:
        """Whether tfmem measures the memory of unprobed calls; not of a step that XLA runs, nor with other replicas."""
        return self._can_watch(function) and not self.trace.shared

    def watches_replicas(self, function: Any) -> bool:
        """Whether tfmem reads the peaks of a step of several replicas: where it waits for other processes, only if the
        user gave a budget, and if they can agree on what follows."""
        if not self._can_watch(function):
            return False
        return not self.waits or (self.engine.settings.must_fit and self.engine.workers.board() is not None)

    @property
    def waits(self) -> bool:
        """Whether a step of several replicas waits for other processes."""
        return bool(waits_for_others(self.trace.step.graph))

    @property
    def waits_for(self) -> WaitsFor:
        """What a measured call of the step may wait for, in this process, as far as that is known."""
        return waits_for(self.trace.step.graph) if self.trace.was_read else WaitsFor.NOTHING

    def _can_watch(self, function: Any) -> bool:
        left_to_xla = self.trace.jit_compile and function is self.trace.base and self.trace.split is None
        return self.engine.settings.observes and not left_to_xla

    def room(self, state: Probed) -> AbstractContextManager[bool]:
        """The memory for a call of `state`: the budget's where cuDNN may choose its algorithms; see `within`."""
        if isinstance(state, Warming) and not state.search.roomy:
            return self.engine.memory.within(self.limit)
        return nullcontext(False)

    def timeline(self, seen: Observation) -> Timeline:
        """The step by what was measured."""
        estimate = self.engine.estimate(workspace=False)
        return self.trace.step.timeline(MeasuredCosts(seen.seconds, seen.workspace, seen.base, estimate.roofline))

    def solves_beside(self, timeline: Timeline) -> bool:
        """Whether a thread solves the integer program of a step while the step runs another plan."""
        return self.engine.settings.options.offload.policy == "optimal" and len(timeline.steps) > LARGE

    def planner(self, timeline: Timeline) -> Callable[..., OffloadPlan]:
        """What makes plans by measured costs: without a solver where a thread will solve the program."""
        plan = partial(self.trace.plan, timeline, timed=True)
        return partial(_greedily, plan) if self.solves_beside(timeline) else plan

    def plans(self, timeline: Timeline, make: Callable[..., OffloadPlan]) -> Plans:
        """What may be run of the step, with the room that there is now."""
        memory, budget = self.engine.memory, self.limit
        return Plans(memory, timeline, budget, make, memory.room(timeline, budget) if self.is_gpu else None)

    def build(self, timeline: Timeline, plan: OffloadPlan, dry_run: bool | None = None) -> Any:
        """A function that runs `plan`; with probes where `dry_run` says whether it writes variables."""
        if dry_run is None:
            return self.trace.build(timeline, plan)
        return self.trace.build(timeline, plan, Probing(self.run, self.engine.settings.target.name), dry_run=dry_run)

    def describe(self, timeline: Timeline, plan: OffloadPlan, notes: tuple[str, ...], function: Any) -> Report:
        """The report of `plan`, by which `function` runs."""
        return self.trace.describe(timeline, plan, notes, given=function is self.trace.base)

    def told(self, transition: Transition[StepState]) -> Transition[StepState]:
        """`transition`, after warning the user of what its report says, as soon as that is final."""
        state = transition.state
        if isinstance(state, Checking | Watching | Solving | Placed):
            notes = (*state.notes, *state.report.notes)
            if isinstance(state, Checking):  # it may run another plan, and a budget that is missed is said at the end
                notes = tuple(note for note in notes if not isinstance(note, Missed))
            self.engine.notices.warn_of_losses(replace(state.report, notes=notes), self.may_split(state.report))
        return transition

    def may_split(self, report: Report) -> bool:
        """Whether the step of `report` stays whole although `split="faster"` would divide it where it is measured."""
        settings = self.engine.settings
        allowed = settings.options.offload.split != "never" and not settings.splits_if_faster
        return allowed and settings.observes and not report.splits and not report.devices


def _greedily(plan: Callable[..., OffloadPlan], *args: Any, **how: Any) -> OffloadPlan:
    return plan(*args, **{**how, "effort": Effort.GREEDY})
