"""A trace that meets its budget as it is, or has none: it runs so until it is known whether stitched it is faster.

off     the first call plans by the model, and every call runs stitched
fast    calls run as they were while a thread plans, once one has run; then some of them time both, a slice of a
        second each
full    the first call plans and times

Timing is on copies. Where a step cannot run on copies, its next calls run the one and the other in turn.

What XLA compiles is left to it. With "full" a step of Keras, which XLA runs because Keras has it so, is timed, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from custom_ops.background import Background, go_on
from graph_passes.decision import Fusion
from graph_passes.report import UNDECIDED, Report
from tfmem.capture.captured import Captured
from tfmem.capture.concrete_function import (
    RestoredFunction,
    asks_for_xla,
    call_traced,
    flat_arguments,
    is_distributed,
)
from tfmem.devices import conditions, is_deterministic
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import fault_note
from tfmem.steps.after_grappler import BY_MODEL, NOTHING, stitched, with_decision, with_regions
from tfmem.steps.random_streams import StepGraphs
from tfmem.steps.trace import Trace
from tfmem.steps.variable_copies import Copies, NotCopiedError, Run, WithXla, noticed
from tfmem.timing.ab_timing import Contest, Times, Turns
from tfmem.timing.choices import Choices, key_of

AS_IT_WAS = f"{UNDECIDED}: it runs as it was"
SLICE = 1.0  # seconds that one call may be held up by timing
PATIENT = 60.0  # the same where the user asked for it


@dataclass(frozen=True)
class _Planned:
    """What there is to choose between.

    Attributes:
        function: runs stitched.
        rivals: what is timed, as it was (with XLA, if that would run it) and stitched; they draw no random number that
            the step would.
        noticed: why nothing can be timed; else empty.
        key: of the choice in the cache.
    """

    function: RestoredFunction
    rivals: tuple[Run, Run]
    noticed: str
    key: str


class FusionStage:
    """Calls are as to the trace.

    Attributes:
        function: the `ConcreteFunction` that the next call runs.
        settled: whether it is final.
        report: what was decided by now.
    """

    def __init__(self, engine: Engine, trace: Trace, report: Report) -> None:
        """Nothing is planned yet; see `start`.

        Args:
            engine: device and options.
            trace: its recurrent layers replaced.
            report: of it.
        """
        self._engine = engine
        self._trace = trace
        self._choices = Choices(engine.options.cache_directory)
        self._lock = threading.Lock()  # of the thread that times
        self._planning: Background | None = None
        self._planned: _Planned | None = None
        self._fault: Exception | None = None
        self._nothing = NOTHING  # why there is no region, if there is none
        self._contest: Contest | None = None
        self._copies: Copies | None = None
        self._turns: Turns | None = None
        self._graphs: StepGraphs | None = None  # where random ops have to go on
        self._with_xla = False  # whether XLA would run it
        self._before: Any = None  # kept until its successor has run, which goes on with its random numbers
        self.function = trace.base
        self.settled = False
        self.report = report

    def start(self) -> None:
        """Plan; or else a thread does, once the step has run."""
        options = self._engine.options
        timed = options.observe and options.fusion.tune != "off"
        self._with_xla = self._trace.jit_compile and not self._trace.replacements.matches
        if self._with_xla and (not timed or options.fusion.tune != "full" or asks_for_xla(self._trace.concrete)):
            return self._settle(self._trace.base, "left to XLA, which the function asks for")
        if is_distributed(self._trace.concrete):
            return self._settle(self._trace.base, "left as it was: it runs under a distribution strategy")
        if timed:
            self._go_on_drawing()
        if timed and options.fusion.tune == "fast":
            self.report = replace(self.report, fusion=AS_IT_WAS, fusion_state=Fusion.UNDECIDED)
            self._planning = Background(self._plan, "tfmem fusion")
        else:
            self._plan()
            self._decide_unseen()
        return None

    def wait(self) -> None:
        """Until planning is done."""
        if self._planning is not None:
            self._planning.wait()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the step, and perhaps time it: before, on copies, or as it runs."""
        planning = self._planning
        ready = planning is None or planning.done
        if ready and self._lock.acquire(blocking=False):
            try:
                if not self.settled:
                    self._decide(args, kwargs)
                if self._turns is not None:
                    return self._take_turn(args, kwargs)
            finally:
                self._lock.release()
        with nullcontext() if ready else self._engine.alternation.call():
            result = call_traced(self.function, args, kwargs)
        if planning is not None:
            planning.begin()
        self._before = None
        return result

    def _go_on_drawing(self) -> None:
        """Steps before and after the choice go on with the same random numbers."""
        try:
            if self._trace.draws:
                self._graphs = self._trace.drawing()
                self.function = self._graphs.unmoved(self.function, self._with_xla)
        except Exception as error:
            self._fault = error

    def _plan(self) -> None:
        if self._fault is not None:
            return
        try:
            plain = self._trace.optimized()
            go_on()
            captured, found = stitched(self._trace.to_stitch(), self._engine)
            self.report = with_regions(self.report, found, self.report.fusion)
            if found.regions:
                self._planned = self._choice(plain, captured)
            elif faults := [region.reason for region in found.kept if region.warned]:
                self._nothing = f"left as it was: {faults[0]}"
        except Exception as error:  # whatever it is, the step runs as it was
            self._fault = error

    def _choice(self, plain: Captured, captured: Captured) -> _Planned:
        graphs = self._graphs or self._trace.drawing()
        function = graphs.restore(captured.graph_def, captured=captured)
        rival = graphs.apart(captured.graph_def, captured) if graphs.draws else function
        given = WithXla(self._trace.concrete) if self._with_xla else graphs.apart(plain.graph_def)
        facts = {**conditions(self._engine.target), **({"beside": "XLA"} if self._with_xla else {})}
        key = key_of(captured.graph_def, facts)
        return _Planned(function, (given, rival), noticed(captured.graph_def), key)

    def _decide_unseen(self) -> None:
        """What can be decided before there are arguments."""
        planned, options = self._planned, self._engine.options
        if self._fault is not None:
            self._lost(self._fault)
        elif planned is None:
            self._settle(self.function, self._nothing)
        elif self._with_xla and (is_deterministic() or planned.noticed):
            self._settle(self.function, "left to XLA: nothing can be timed")
        elif options.fusion.tune == "off":
            self._stitch("stitched, as the model has it: tune='off'")
        elif is_deterministic():
            self._stitch("stitched, as the model has it: op determinism is on")
        elif (times := self._choices.find(planned.key)) is not None:
            self._choose(times, "; known from the cache")
        elif not options.observe:
            self._stitch(BY_MODEL)
        elif planned.noticed:
            self._turns = self._turns or Turns()

    def _decide(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._contest is None:
            self._decide_unseen()
        planned = self._planned
        if self.settled or planned is None or self._turns is not None:
            return
        patient = self._engine.options.fusion.tune == "full"
        try:
            if self._contest is None or self._copies is None:
                arguments = flat_arguments(self._trace.concrete, args, kwargs)
                self._copies = Copies(self._trace.concrete, arguments, self._engine.free_memory)
                self._contest = Contest()
            copies, (given, rival) = self._copies, planned.rivals
            times = self._contest.go_on(
                lambda: copies.run(given), lambda: copies.run(rival), PATIENT if patient else SLICE
            )
        except NotCopiedError as error:
            if self._with_xla:
                self._settle(self.function, f"left to XLA: nothing can be timed, since {error}")
            else:
                self._turns = Turns()
        except tf.errors.OpError as error:  # the step itself may be what fails: then it does so next, as it was
            self._settle(self.function, f"left as it was: timing failed with {type(error).__name__}: {error}")
        except Exception as error:
            self._note(error, "timing")
            self._settle(self.function, f"left as it was: timing failed with {type(error).__name__}: {error}")
        else:
            if times is not None:
                self._choices.keep(planned.key, times)
                self._choose(times)

    def _take_turn(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self._turns is not None
        assert self._planned is not None
        function = self._planned.function if self._turns.stitched else self.function
        tf.test.experimental.sync_devices()  # a call ends before the GPU has run what it enqueued
        began = time.perf_counter()
        result = call_traced(function, args, kwargs)
        tf.test.experimental.sync_devices()
        times = self._turns.add(time.perf_counter() - began)
        if times is not None:
            self._choices.keep(self._planned.key, times)
            self._choose(times, ", in turn")
        return result

    def _choose(self, times: Times, how: str = ", on copies") -> None:
        beside = " with XLA" if self._with_xla else ""
        told = f"{1e3 * times.stitched:.3g} ms a step against {1e3 * times.given:.3g} ms{beside}{how}"
        if times.is_faster:
            self._stitch(f"stitched: {told}")
        else:
            stays = "left to XLA" if self._with_xla else "left as it was"
            self._settle(self.function, f"{stays}: stitched it took {told}")

    def _stitch(self, why: str) -> None:
        assert self._planned is not None
        self.report = with_decision(self.report)
        if self._with_xla:
            self.report = replace(self.report, jit_compile="off: stitched it is faster", xla_lost=True)
        self._settle(self._planned.function, why, Fusion.STITCHED)

    def _lost(self, error: Exception) -> None:
        self._note(error, "stitching")
        self._settle(self.function, "left as it was: stitching failed")

    def _note(self, error: Exception, doing: str) -> None:
        note = fault_note(self._engine, self._trace.name, error, doing, "the step runs as it was")
        self.report = replace(self.report, notes=(*self.report.notes, note))

    def _settle(self, function: Any, why: str, state: Fusion = Fusion.LEFT) -> None:
        self._before, self.function = self.function, function
        self.report = replace(self.report, fusion=why, fusion_state=state)
        self._contest = self._copies = self._turns = None
        self._planned = None
        self.settled = True
