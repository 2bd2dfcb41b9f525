"""A step that meets its budget unchanged, or has no budget: it runs unchanged until the faster variant is known.

off     the first call plans by the cost model, and every call runs stitched
fast    calls run without regions while a thread plans, once one has run; then some of them time both, a slice of
        a second each
full    the first call plans and times

Timing uses copies of the variables. If a step cannot run on copies, its next calls run the two variants in turn.

XLA keeps the steps that it compiles. With "full", tfmem also times a step that Keras compiles with XLA by default.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from custom_ops.background import go_on
from custom_ops.timing.remembered import Remembered
from graph_passes.decision import Decision, Fusion, FusionWhy, Xla
from graph_passes.report import Report
from tfmem.capture.captured import Captured
from tfmem.capture.concrete_function import (
    RestoredFunction,
    asks_for_xla,
    call_traced,
    flat_arguments,
    with_places,
)
from tfmem.devices import conditions, is_deterministic
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import fault_note
from tfmem.steps.after_grappler import stitched, unstitched, with_decision, with_fusion, with_regions
from tfmem.steps.fused_replicas import against_edited, against_fusion
from tfmem.steps.job import Job
from tfmem.steps.phases import Event, Move
from tfmem.steps.random_streams import StepGraphs
from tfmem.steps.states import Contest, Failed, Fusing, Placed, Settled, State
from tfmem.steps.trace import Trace
from tfmem.steps.variable_copies import Copies, NotCopiedError, Run, WithXla, noticed
from tfmem.steps.work import Work
from tfmem.timing.ab_timing import Slices, Times, Turns
from tfmem.timing.choices import choices, key_of

SLICE = 1.0  # seconds that one call may be held up by timing
PATIENT = 60.0  # the limit where the user asked for timing


@dataclass(frozen=True)
class Rivals:
    """The two variants to choose between.

    Attributes:
        function: runs stitched.
        given, stitched: the variants that are timed: without regions (with XLA, if XLA would run the step) and with
            them. Both have separate random streams.
        noticed: why tfmem cannot time the step; else empty.
        key: of the choice in the cache.
    """

    function: RestoredFunction
    given: Run
    stitched: Run
    noticed: str
    key: str


@dataclass(frozen=True)
class Found:
    """The result of planning.

    Attributes:
        report: with the regions.
        rivals: None where there is no region.
        why: why there is none.
    """

    report: Report
    rivals: Rivals | None = None
    why: str = FusionWhy.NOTHING


@dataclass(frozen=True)
class Timed:
    """How a choice was made, for the report.

    Attributes:
        times: seconds of both.
        how: how they were found, as text behind them.
        beside_xla: whether the step without regions ran with XLA.
    """

    times: Times
    how: str
    beside_xla: bool

    def __str__(self) -> str:
        beside = " with XLA" if self.beside_xla else ""
        times = f"{1e3 * self.times.stitched:.3g} ms a step against {1e3 * self.times.given:.3g} ms{beside}{self.how}"
        if self.times.is_faster:
            return f"stitched: {times}"
        return f"{'left to XLA' if self.beside_xla else 'left unchanged'}: stitched it took {times}"


@dataclass(frozen=True)
class Fuser:
    """Plans the regions of a step, and chooses.

    Attributes:
        engine: device and options.
        trace: its recurrent layers replaced.
        with_xla: whether XLA would run the step.
        graphs: makes functions that share random streams; None if no op has any.
        mirrored: whether replicas on several devices keep equal variables.
    """

    engine: Engine
    trace: Trace
    with_xla: bool
    graphs: StepGraphs | None = None
    mirrored: bool = False

    @property
    def known(self) -> Remembered[Times]:
        """What was timed before."""
        return choices(self.engine.options.cache_directory)

    def plan(self, report: Report) -> Found:
        """The regions of the step; `report` is of the step without."""
        plain = self.trace.optimized()
        go_on()
        given = self.trace.to_stitch()
        if self.mirrored:
            given = with_places(given, self.trace.concrete)
        captured, found = stitched(given, self.engine, mirrored=self.mirrored)
        report = with_regions(report, found, report.fusion)
        if self.mirrored and (why := against_edited(captured, found, self.engine.feed_shapes)):
            return Found(report, why=why)
        if found.regions:
            return Found(report, self._rivals(plain, captured))
        faults = [region.reason for region in found.kept if region.warned]
        return Found(report, why=f"left unchanged: {faults[0]}" if faults else FusionWhy.NOTHING)

    def _rivals(self, plain: Captured, captured: Captured) -> Rivals:
        graphs = self.graphs or self.trace.drawing()
        function = graphs.restore(captured.graph_def, captured=captured)
        rival = graphs.apart(captured.graph_def, captured) if graphs.draws else function
        given = WithXla(self.trace.concrete) if self.with_xla else graphs.apart(plain.graph_def)
        facts = {**conditions(self.engine.target), **({"beside": "XLA"} if self.with_xla else {})}
        key = key_of(self.known, captured.graph_def, facts)
        return Rivals(function, given, rival, noticed(captured.graph_def), key)

    def settled(self, state: State, why: object, event: Event = Event.STAYS) -> Move[State]:
        """What runs in `state` stays, without regions."""
        return Move(event, Settled(**_shared(state, fusion=str(why), fusion_state=Fusion.LEFT)))

    def stitched(self, state: State, rivals: Rivals, why: object, event: Event = Event.STAYS) -> Move[State]:
        """The step runs stitched from now on."""
        report = replace(with_decision(state.report), fusion=str(why), fusion_state=Fusion.STITCHED)
        if self.with_xla:
            report = replace(report, jit_compile=Xla.STITCHED)
        # Random streams continue: keep the old function, unless its successor runs before this call returns.
        kept = (*state.kept, state.function) if isinstance(state, Placed) else state.kept
        return Move(event, Settled(function=rivals.function, report=report, notes=state.notes, kept=kept))

    def failed(self, state: State, error: Exception, doing: str, why: str) -> Move[State]:
        """The step stays without regions, because of a bug in tfmem."""
        notices, name = self.engine.notices, self.trace.name
        note = fault_note(notices, name, error, doing, "the unmodified step runs")
        notes = (*state.report.notes, note)
        return Move(Event.FAULT, Failed(**_shared(state, fusion=why, fusion_state=Fusion.LEFT, notes=notes)))

    def chosen(self, state: State, rivals: Rivals, times: Times, how: str, event: Event) -> Move[State]:
        """The faster one stays."""
        timed = Timed(times, how, self.with_xla)
        return self.stitched(state, rivals, timed, event) if times.is_faster else self.settled(state, timed, event)


def _shared(state: State, **changes: Any) -> dict[str, Any]:
    """What the next state has of `state`, its report changed."""
    report = replace(state.report, **changes)
    return {"function": state.function, "report": report, "notes": state.notes, "kept": state.kept}


def fuse(job: Job, state: Placed) -> Move[State]:
    """What follows once memory is settled: regions are planned, now or by a thread, or not at all."""
    engine, trace = job.engine, job.trace
    if not engine.stitches:
        if state.report.decision is Decision.FAILED:
            return Move(Event.FAULT, Failed(**_shared(state)))
        return Move(Event.STAYS, Settled(**_shared(state)))
    if not state.unchanged:
        report = unstitched(state.report, engine, FusionWhy.PLANNED)
        return Move(Event.STAYS, Settled(**_shared(replace(state, report=report))))
    options = engine.options
    timed = options.observe and options.fusion.tune != "off"
    with_xla = trace.jit_compile and not trace.replacements.matches
    fuser, state = Fuser(engine, trace, with_xla), replace(state, function=trace.base)
    if with_xla and (not timed or options.fusion.tune != "full" or asks_for_xla(trace.concrete)):
        return fuser.settled(state, FusionWhy.XLA_ASKED)
    try:
        if trace.of_replicas:
            return _of_replicas(fuser, state)
        if timed and trace.draws:  # steps before and after the choice share random streams
            graphs = trace.drawing()
            fuser = replace(fuser, graphs=graphs)
            state = replace(state, function=graphs.unmoved(state.function, with_xla))
    except Exception as error:
        return fuser.failed(state, error, "stitching", FusionWhy.FAILED)
    if timed and options.fusion.tune == "fast":
        report = with_fusion(state.report, FusionWhy.UNDECIDED)
        work: Work[Found] = Work(partial(fuser.plan, report), "tfmem fusion")
        return Move(Event.THREAD, Fusing(**_shared(replace(state, report=report)), fuser=fuser, work=work))
    try:
        found = fuser.plan(state.report)
    except Exception as error:  # after any error, the step runs without regions
        return fuser.failed(state, error, "stitching", FusionWhy.FAILED)
    return decide(fuser, state, found)


def _of_replicas(fuser: Fuser, state: State) -> Move[State]:
    """A step of several replicas runs stitched at once, by the cost model, where the user asked for fusion.

    It is not timed, since copies of its variables have no collectives.
    """
    engine = fuser.engine
    if "fusion" not in (engine.options.passes or ()):
        return fuser.settled(state, FusionWhy.DISTRIBUTED)
    try:
        why = against_fusion(fuser.trace.optimized(), engine.feed_shapes)
        if why:
            engine.notices.warn("fusion", f"tfmem: {fuser.trace.name} was to be stitched, but is {why}")
            return fuser.settled(state, why)
        untimed = replace(engine.options, fusion=replace(engine.options.fusion, tune="off"))
        fuser = replace(fuser, engine=replace(engine, options=untimed), mirrored=True)
        found = fuser.plan(state.report)
    except Exception as error:  # after any error, the step runs without regions
        return fuser.failed(state, error, "stitching", FusionWhy.FAILED)
    state = replace(state, report=found.report)
    if found.rivals is None:
        return fuser.settled(state, found.why)
    return fuser.stitched(state, found.rivals, FusionWhy.REPLICAS)


def planned(state: Fusing) -> Move[State]:
    """What follows once the thread has planned."""
    found = state.work.take()
    if found is None:
        error = state.work.error or RuntimeError("planning ended without a result")
        return state.fuser.failed(state, error, "stitching", FusionWhy.FAILED)
    return decide(state.fuser, state, found)


def decide(fuser: Fuser, state: State, found: Found) -> Move[State]:
    """What can be decided before there are arguments."""
    rivals, options = found.rivals, fuser.engine.options
    state = replace(state, report=found.report)
    if rivals is None:
        return fuser.settled(state, found.why)
    if fuser.with_xla and (is_deterministic() or rivals.noticed):
        return fuser.settled(state, FusionWhy.XLA_UNTIMED)
    if options.fusion.tune == "off":
        return fuser.stitched(state, rivals, FusionWhy.UNTUNED)
    if is_deterministic():
        return fuser.stitched(state, rivals, FusionWhy.DETERMINISTIC)
    if (times := fuser.known.find(rivals.key)) is not None:
        return fuser.chosen(state, rivals, times, "; known from the cache", Event.STAYS)
    if not options.observe:
        return fuser.stitched(state, rivals, FusionWhy.BY_MODEL)
    turns = Turns() if rivals.noticed else None
    return Move(Event.TIMED, Contest(**_shared(state), fuser=fuser, rivals=rivals, turns=turns))


def contest(state: Contest, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Move[State]:
    """What follows a slice of timing on copies of the step's variables and this call's arguments."""
    fuser, rivals = state.fuser, state.rivals
    limit = PATIENT if fuser.engine.options.fusion.tune == "full" else SLICE
    try:
        copies, timing = state.copies, state.timing
        if timing is None or copies is None:
            concrete = fuser.trace.concrete
            copies = Copies(concrete, flat_arguments(concrete, args, kwargs), fuser.engine.memory.free)
            timing = Slices()
        times = timing.go_on(partial(copies.run, rivals.given), partial(copies.run, rivals.stitched), limit)
    except NotCopiedError as error:
        if fuser.with_xla:
            return fuser.settled(state, f"left to XLA: nothing can be timed, since {error}", Event.CLEAR)
        return Move(Event.UNCLEAR, replace(state, turns=Turns()))
    except tf.errors.OpError as error:  # if the step itself fails, its unmodified run, which follows, fails too
        return fuser.settled(state, _failing(error), Event.CLEAR)
    except Exception as error:
        return fuser.failed(state, error, "timing", _failing(error))
    if times is None:
        return Move(Event.UNCLEAR, replace(state, copies=copies, timing=timing))
    fuser.known.keep(rivals.key, times)
    return fuser.chosen(state, rivals, times, ", on copies", Event.CLEAR)


def _failing(error: Exception) -> str:
    return f"left unchanged: timing failed with {type(error).__name__}: {error}"


def take_turn(
    state: Contest, turns: Turns, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Move[State]]:
    """One of the step's own calls, timed: its result, and what follows."""
    function = state.rivals.function if turns.stitched else state.function
    tf.test.experimental.sync_devices()  # a call ends before the GPU has run what it enqueued
    began = time.perf_counter()
    result = call_traced(function, args, kwargs)
    tf.test.experimental.sync_devices()
    times = turns.add(time.perf_counter() - began)
    if times is None:
        return result, Move(Event.UNCLEAR, state)
    state.fuser.known.keep(state.rivals.key, times)
    return result, state.fuser.chosen(state, state.rivals, times, ", in turn", Event.CLEAR)
