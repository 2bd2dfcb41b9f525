"""One traced training step, managed: called as the trace itself, while its stages go on underneath."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from graph_passes.decision import Fusion
from graph_passes.report import Report
from tfmem.capture.concrete_function import call_traced, is_recorded
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import fault_note
from tfmem.runtime.out_of_memory import SUSPECTS
from tfmem.runtime.progress import shown
from tfmem.steps.after_grappler import LARGER, PLANNED, unstitched
from tfmem.steps.deferred_start import MEANWHILE, Later, can_wait, start
from tfmem.steps.fusion_stage import AS_IT_WAS, FusionStage
from tfmem.steps.known_profiles import BatchProfiles
from tfmem.steps.measured_call import sampled, watched
from tfmem.steps.random_streams import Draws
from tfmem.steps.stage import Stage
from tfmem.steps.stages import Stages
from tfmem.steps.trace import Trace

BEGINNING = "planning in the background"


class ManagedStep:
    """One trace of a function, run under a budget. Calls are as to the trace itself."""

    def __init__(
        self,
        concrete: Any,
        engine: Engine,
        jit_compile: bool = False,
        draws: Draws | None = None,
        others: BatchProfiles | None = None,
    ) -> None:
        """Plan by estimate.

        Args:
            concrete: the trace, a `ConcreteFunction`.
            engine: budget, device and options.
            jit_compile: whether the trace would run under XLA if nothing had to move.
            draws: streams of random numbers that this step goes on with, and others; its own if not given.
            others: what was observed of other batch sizes of the function.

        Raises:
            InfeasibleBudgetError, NoGradientError, UnknownShapeError, AlreadyOptimizedError, HostMemoryError,
            SpillDirectoryError: see `graph_passes.errors`.
        """
        self._engine = engine
        self._given = concrete
        self._lock = threading.RLock()
        self._took = 0.0  # seconds of the latest staged call
        others = BatchProfiles() if others is None else others
        self._make = partial(Trace, concrete, engine, jit_compile, draws)
        self._trace = trace = self._make()
        self._stages = Stages(engine, trace, others)
        self._later: Later | None = None
        self._fusion: FusionStage | None = None
        self._unstitched: Report | None = None
        self._label = engine.label or trace.name
        count = len(concrete.graph.get_operations())
        with shown(engine.options.progress, lambda: f"planning {self._label} ({count:,} ops)"):
            if can_wait(engine, trace):
                self._later = Later(Stages(engine, trace, others), engine.budget)
            else:
                start(self._stages, engine.budget)
                self._stitch()

    def _stitch(self) -> None:
        """Go on with the fusion pass, once it is settled that no memory has to move."""
        if not self._engine.stitches or self._stages.stage is not Stage.READY:
            return
        if self._stages.leaves_as_it_was:
            fusion = FusionStage(self._engine, self._trace, self._stages.report)
            fusion.start()
            self._fusion = fusion
        else:
            self._unstitched = unstitched(self._stages.report, self._engine, PLANNED, LARGER)

    def _take_over(self) -> None:
        """Go on with stages that began in the background, once they have."""
        with self._lock:
            later = self._later
            if later is None or not later.thread.done:
                return
            if later.error is None:
                self._stages = later.stages
            else:
                self._trace = self._make()
                note = fault_note(self._engine, self._trace.name, later.error, BEGINNING, "the step runs as it was")
                self._stages.report = replace(self._stages.report, notes=(note,))
            self._stitch()
            self._later = None

    @property
    def report(self) -> Report:
        """What was decided and measured by now."""
        if self._later:
            return replace(self._stages.report, fusion=MEANWHILE, fusion_state=Fusion.UNDECIDED)
        if self._fusion:
            return self._fusion.report
        report = self._stages.report
        if not self._engine.stitches:
            return report
        return self._unstitched or replace(report, fusion=AS_IT_WAS, fusion_state=Fusion.UNDECIDED)

    @property
    def unchanged(self) -> bool:
        """Whether calls go to the trace as it was given, by now and for good."""
        return self._runs is self._given and self.settled

    @property
    def settled(self) -> bool:
        """Whether `function` is final and holds no probes."""
        if self._later:
            return False
        return self._fusion.settled if self._fusion else self._stages.stage is Stage.READY

    @property
    def function(self) -> Any:
        """The `ConcreteFunction` that runs by now; it can be called, put into other graphs, and saved."""
        return getattr(self._runs, "portable", self._runs)

    @property
    def _runs(self) -> Any:
        return (self._fusion or self._stages).function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        if self._later:
            self._take_over()
        if self._later or self.settled or is_recorded(self._given, args, kwargs):  # by a tape: then the original runs
            result = call_traced(self._runs, args, kwargs)
            if later := self._later:
                later.thread.begin()
            return result
        if self._fusion:
            return self._fusion(args, kwargs)
        with self._lock:  # an observed step runs alone
            if self._fusion or self.settled:  # since another thread's call
                return call_traced(self._runs, args, kwargs)
            result = self._staged(args, kwargs)
            self._stitch()
            return result

    def _staged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stages = self._stages
        while stages.stage not in (Stage.CHECK, Stage.READY):
            began, doing = time.monotonic(), f"{self._label}: {stages.doing}"  # after the call, it is what comes next
            with shown(self._engine.options.progress, partial(str, doing), self._took):
                done, result = self._probed(args, kwargs)
            self._took = time.monotonic() - began
            if done:
                return result
            del result
        if stages.stage is Stage.READY:
            return call_traced(stages.function, args, kwargs)
        result, peak = watched(self._engine, partial(call_traced, stages.function), (args, kwargs), {})
        stages.ran()
        stages.check(peak)
        return result

    def _probed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Run a plan with probes; whether that was the step, and its result."""
        stages = self._stages
        try:
            function = partial(call_traced, stages.function)
            result, samples, flow = sampled(self._engine, stages.run, function, (args, kwargs), {})
        except SUSPECTS as error:
            stages.give_up(error)
            return False, None
        stages.ran()
        stages.go_on(samples, flow)
        return not stages.dry_run, result
