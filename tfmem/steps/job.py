"""A trace that has to run within a budget: the data that no phase of the step changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from graph_passes.analysis.cost.model import Measured
from graph_passes.analysis.memory.observe import Observation
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.passes.offload.plan import OffloadPlan, Probing
from graph_passes.report import Report
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import fault_note
from tfmem.steps.known_profiles import BatchProfiles
from tfmem.steps.phases import Move
from tfmem.steps.states import Checking, Given, Placed, State
from tfmem.steps.trace import Trace
from tfmem.steps.trials import Plans


@dataclass(frozen=True)
class Job:
    """A trace that has to run within a budget: the data that no phase changes.

    Attributes:
        engine: settings, and what carries them out.
        trace: on its way through the passes.
        others: what was observed of other batch sizes.
        budget: bytes; None for no limit.
        run: the table that the probes of this step write to.
    """

    engine: Engine
    trace: Trace
    others: BatchProfiles
    budget: int | None
    run: int

    @property
    def limit(self) -> int:
        """The budget, where there is one."""
        if self.budget is None:
            raise ValueError(f"'{self.trace.name}' is planned without a budget")
        return self.budget

    @property
    def is_gpu(self) -> bool:
        """Whether the step runs on a GPU."""
        return self.engine.target.is_gpu

    def given(self) -> Given:
        """The state before anything is known."""
        return Given(function=self.trace.concrete, report=self.engine.unplanned(self.trace.name))

    def noted(self, error: Exception, doing: str, instead: str) -> str:
        """The line of a report about a fault, of which the user is warned."""
        return fault_note(self.engine.notices, self.trace.name, error, doing, instead)

    def watches(self, function: Any) -> bool:
        """Whether tfmem measures the memory of unprobed calls; not of a step that XLA runs, nor with other replicas."""
        left_to_xla = self.trace.jit_compile and function is self.trace.base
        return self.engine.observes and not left_to_xla and not self.trace.shared

    def timeline(self, seen: Observation) -> Timeline:
        """The step by what was measured."""
        estimate = self.engine.estimate(workspace=False)
        return self.trace.step.timeline(Measured(seen.seconds, seen.workspace, seen.base, estimate.roofline))

    def plans(self, timeline: Timeline, make: Callable[..., OffloadPlan]) -> Plans:
        """What may be run of the step, with the room that there is now."""
        memory, budget = self.engine.memory, self.limit
        return Plans(memory, timeline, budget, make, memory.room(timeline, budget) if self.is_gpu else None)

    def build(self, timeline: Timeline, plan: OffloadPlan, dry_run: bool | None = None) -> Any:
        """A function that runs `plan`; with probes where `dry_run` says whether it writes variables."""
        if dry_run is None:
            return self.trace.build(timeline, plan)
        return self.trace.build(timeline, plan, Probing(self.run, self.engine.target.name), dry_run=dry_run)

    def describe(self, timeline: Timeline, plan: OffloadPlan, notes: tuple[str, ...], function: Any) -> Report:
        """The report of `plan`, by which `function` runs."""
        return self.trace.describe(timeline, plan, notes, given=function is self.trace.base)

    def told(self, move: Move[State]) -> Move[State]:
        """`move`, after warning the user of what its report says, as soon as that is final."""
        state = move.state
        if isinstance(state, Checking | Placed):
            notes = (*state.notes, *state.report.notes)
            self.engine.notices.warn_of_losses(replace(state.report, notes=notes))
        return move
