"""Plans the regions of a step, and makes the state that follows each choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from custom_ops.background import NEXT, go_on
from custom_ops.timing.remembered import Remembered
from graph_passes.decision import Fusion, FusionWhy, Xla
from graph_passes.passes.fuse.plan import FusionPlan
from graph_passes.report import Report
from tfmem.capture.captured import Captured
from tfmem.capture.concrete_function import with_places
from tfmem.devices import conditions
from tfmem.kernels.fusion_programs import is_timed
from tfmem.kernels.fusion_tuning import FusionKernels, with_programs
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import error_note
from tfmem.runtime.workers import Board
from tfmem.steps.after_grappler import BeforeRegions, stitched, with_decision, with_regions
from tfmem.steps.agreed_fusion import digest_of
from tfmem.steps.fused_replicas import against_edited, read
from tfmem.steps.phases import Event, Transition
from tfmem.steps.random_streams import StepGraphs
from tfmem.steps.states import Failed, Placed, Settled, StepState, Tuning
from tfmem.steps.trace import Trace
from tfmem.steps.variable_copies import Run, noticed
from tfmem.steps.variants import Before, Found, Later, TimedChoice, Variants
from tfmem.steps.work import Work
from tfmem.timing.ab_timing import Times
from tfmem.timing.choices import choices, key_of

WORTH = 0.02  # of a step's time: kernels that save less are not worth a second comparison


@dataclass(frozen=True)
class Fuser:
    """Plans the regions of a step, and chooses.

    Attributes:
        engine: device and options.
        trace: its recurrent layers replaced.
        with_xla: whether XLA would run the step.
        xla: whether XLA may run the step, if it is faster.
        graphs: makes functions that share random streams; None if no op has any.
        mirrored: whether replicas on several devices keep equal variables.
        board: where the workers that run the step agree; None where no other does.
    """

    engine: Engine
    trace: Trace
    with_xla: bool
    xla: bool = False
    graphs: StepGraphs | None = None
    mirrored: bool = False
    board: Board | None = None

    @property
    def known(self) -> Remembered[Times]:
        """What was timed before."""
        return choices(self.engine.settings.options.cache_directory)

    def plan(self, report: Report) -> Found:
        """The regions of the step; `report` is of the step without."""
        kernels = self.kernels()
        if kernels is not None:
            kernels.begin()
        given = self.trace.to_stitch()
        plain = self.trace.optimized()
        go_on()
        if self.mirrored:
            given = with_places(given, self.trace.concrete)
        captured, found = stitched(BeforeRegions(given, self.engine), mirrored=self.mirrored, kernels=kernels)
        report = with_regions(report, found, report.fusion)
        if self.mirrored and (why := against_edited(captured, found, self.engine.settings.feed_shapes)):
            return Found(report, why=why)
        if found.regions:
            later = Later(captured, found, kernels) if kernels and is_timed(self.engine.settings.options) else None
            return Found(report, self._variants(plain, captured, later), kernels=self.digest(captured, found))
        faults = [region.reason for region in found.kept if region.warned]
        return Found(report, why=f"left unchanged: {faults[0]}" if faults else FusionWhy.NOTHING)

    def digest(self, captured: Captured, found: FusionPlan) -> str:
        """What has to be equal on all workers; "" where there are no others."""
        return digest_of(found, read(captured, self.engine.settings.feed_shapes)) if self.board is not None else ""

    def kernels(self) -> FusionKernels | None:
        """What makes kernels that are timed while the plan runs, or never; None: they are timed now, or not made."""
        options, target = self.engine.settings.options, self.engine.settings.target
        now = is_timed(options) and not (options.fusion.tune == "fast" and options.observe)
        return FusionKernels(target, options, self.engine.quiet) if target.is_gpu and not now else None

    def _variants(self, plain: Captured, captured: Captured, later: Later | None) -> Variants:
        graphs = self.graphs or self.trace.drawing()
        return replace(self._against(graphs.apart(plain.graph_def), captured, ""), later=later)

    def _against(self, given: Run, captured: Captured, beside: str) -> Variants:
        """A stitched graph against another run; `beside` says which, if it is not the step without regions."""
        graphs = self.graphs or self.trace.drawing()
        function = graphs.restore(captured.graph_def, captured=captured)
        timed = graphs.apart(captured.graph_def, captured) if graphs.draws else function
        return Variants(function, given, timed, noticed(captured.graph_def), self._key(captured, beside))

    def _key(self, captured: Captured, beside: str) -> str:
        facts = {**conditions(self.engine.settings.target), **({"beside": beside} if beside else {})}
        return key_of(self.known, captured.graph_def, facts)

    def tune(self, variants: Variants, times: Times, stays: Settled) -> Variants | None:
        """The step with tuned kernels against what runs; None if they save too little.

        Args:
            variants: the first two.
            times: of these.
            stays: what follows then.
        """
        later = variants.later
        assert later is not None
        found = later.kernels.tuned(later.plan)
        captured = with_programs(later.captured, found.programs)
        key = self._key(captured, "")
        same = all(found.programs.get(region.text, region.programs) == region.programs for region in later.plan.regions)
        if same or times.stitched - found.saved > (1 - WORTH) * min(times.given, times.stitched):
            self.known.keep(key, replace(times, tuned=True))  # the next process has these kernels from the start
            return None
        given, beside = (variants.stitched, "the model's kernels") if times.is_faster else (variants.given, "")
        return replace(self._against(given, captured, beside), before=Before(stays, times, key))

    def settled(self, state: StepState, why: object, event: Event = Event.STAYS) -> Transition[StepState]:
        """What runs in `state` stays, without regions."""
        return Transition(event, Settled(**shared(state, fusion=str(why), fusion_state=Fusion.LEFT)))

    def stitched(
        self, state: StepState, variants: Variants, why: object, event: Event = Event.STAYS
    ) -> Transition[StepState]:
        """The step runs stitched from now on."""
        report = with_decision(variants.report or state.report)
        report = replace(report, fusion=str(why), fusion_state=Fusion.STITCHED)
        if self.with_xla:
            report = replace(report, jit_compile=Xla.STITCHED)
        # Random streams continue: keep the old function, unless its successor runs before this call returns.
        kept = (*state.kept, *variants.kept, *([state.function] if isinstance(state, Placed) else ()))
        return Transition(event, Settled(function=variants.function, report=report, notes=state.notes, kept=kept))

    def failed(self, state: StepState, error: Exception, doing: str, why: str) -> Transition[StepState]:
        """The step stays without regions, because of a bug in tfmem."""
        notices, name = self.engine.notices, self.trace.name
        note = error_note(notices, name, error, doing, "the unmodified step runs")
        notes = (*state.report.notes, note)
        return Transition(Event.FAULT, Failed(**shared(state, fusion=why, fusion_state=Fusion.LEFT, notes=notes)))

    def chosen(
        self, state: StepState, variants: Variants, times: Times, how: str, event: Event
    ) -> Transition[StepState]:
        """The faster one stays; its kernels may be tuned meanwhile."""
        if variants.before is not None:
            return self._tuned(state, variants, variants.before, times, how, event)
        timed = TimedChoice(times, how)
        transition = (
            self.stitched(state, variants, timed, event) if times.is_faster else self.settled(state, timed, event)
        )
        stays = transition.state
        if variants.later is None or times.tuned or not isinstance(stays, Settled):
            return transition
        work: Work[Variants | None] = Work(partial(self.tune, variants, times, stays), "tfmem tuning", NEXT)
        report = replace(stays.report, tuning=True)
        return Transition(
            Event.TUNES, Tuning(**vars(replace(stays, report=report)), fuser=self, work=work, stays=stays)
        )

    def _tuned(
        self, state: StepState, variants: Variants, before: Before, times: Times, how: str, event: Event
    ) -> Transition[StepState]:
        """Tuned kernels run if they are faster. The next process has them from the start, so what they take against the
        step without regions is kept in any case."""
        total = replace(times, given=before.times.given, tuned=True)
        self.known.keep(before.key, total)
        if not times.is_faster:
            return Transition(event, before.stays)
        state = replace(state, report=replace(state.report, tuning=False))
        return self.stitched(state, variants, TimedChoice(total, f"{how}, with tuned kernels"), event)


def shared(state: StepState, **changes: Any) -> dict[str, Any]:
    """What the next state has of `state`, its report changed."""
    report = replace(state.report, **changes)
    return {"function": state.function, "report": report, "notes": state.notes, "kept": state.kept}
