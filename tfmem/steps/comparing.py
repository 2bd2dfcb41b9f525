"""When the regions of a step are planned, and how calls time the step with them against the step without.

off     the first call plans by the cost model, and every call runs stitched
fast    calls run without regions while a thread plans by the cost model, once one has run; then some of them time
        both, a slice of a second each. What wins runs, and on a GPU a thread times the kernels of the plan: if others
        save enough, the step with these is timed against it in the same way
full    the first call plans and times

A step in which tensors move, or whose memory is settled, runs as it is until the faster variant is known.
Timing uses copies of the variables. If a step cannot run on copies, its next calls run the two variants in turn.

Once that is decided, a thread has XLA compile the step where XLA may run it, and that is timed against what runs
(`tfmem.steps.xla_runner`). A function with `jit_compile=True` is XLA's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from custom_ops.background import NEXT
from graph_passes.decision import Decision, FusionWhy
from graph_passes.errors import GraphError
from graph_passes.graph.ir import MEMORY_OPS
from graph_passes.graph.ops import LOOPS
from graph_passes.report import Report
from tfmem.capture.captured import every_node
from tfmem.capture.concrete_function import asks_for_xla, call_traced
from tfmem.capture.xla_draws import has_floats
from tfmem.devices import is_deterministic, wait_for_devices
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import error_note
from tfmem.runtime.measured_call import waits_for
from tfmem.runtime.measuring_lock import WaitsFor
from tfmem.runtime.notices import SEE
from tfmem.runtime.workers import Board
from tfmem.steps import xla_runner
from tfmem.steps.after_grappler import LEAVE_OUT, unstitched, with_fusion
from tfmem.steps.agreed_fusion import FusionFinding, Offer, board_of, decline, found_together, offered, wished, withdraw
from tfmem.steps.composed import chosen, composed
from tfmem.steps.fused_replicas import against_fusion, untimed
from tfmem.steps.fuser import Fuser, shared
from tfmem.steps.job import Job
from tfmem.steps.on_copies import RegionsFailedError, timed_on_copies
from tfmem.steps.phases import Event, Transition
from tfmem.steps.rooms import room_of
from tfmem.steps.states import Comparing, Composing, Failed, Fusing, Placed, Settled, StepState, Tuning
from tfmem.steps.trace import Trace
from tfmem.steps.variable_copies import NotCopiedError
from tfmem.steps.variants import Found
from tfmem.steps.work import Work
from tfmem.steps.xla_runner import against, may_run, then_xla
from tfmem.timing.ab_timing import Times, Turns

_OTHER_DRAWS = (
    "{}: random numbers, such as those of dropout, are TensorFlow's and not XLA's, although the model was compiled "
    "with XLA"
)


def fuse(job: Job, state: Placed) -> Transition[StepState]:
    """What follows once memory is settled: regions are planned, now or by a thread, or not at all."""
    engine, trace = job.engine, job.trace
    if not engine.settings.stitches:
        decline(engine, trace, "it was not asked to")
    if _tries(engine, trace, state):
        engine = engine.under(engine.settings.trying_fusion())
        state = replace(state, report=replace(state.report, passes=engine.settings.passes))
    if not engine.settings.stitches:
        if state.report.decision is Decision.FAILED:
            return Transition(Event.FAULT, Failed(**shared(state)))
        return Transition(Event.STAYS, Settled(**shared(state)))
    options = engine.settings.options
    timed = options.observe and options.fusion.tune != "off"
    if (board := board_of(engine, trace)) is not None:
        return _in_workers(job, state, board, timed)
    if not state.unchanged:
        return _beside_moves(job, state, timed and options.fusion.tune == "fast")
    with_xla = bool(trace.jit_compile) and not trace.replacements.matches
    wanted = options.fusion.xla and not engine.settings.tried
    xla = may_run(trace, timed, engine.settings.must_fit, wanted)
    fuser, state = Fuser(engine, trace, with_xla, xla), replace(state, function=trace.base)
    if with_xla and (not timed or asks_for_xla(trace.concrete)):
        return fuser.settled(state, FusionWhy.XLA_ASKED)
    try:
        if with_xla and (against(trace) or (engine.settings.must_fit and not xla)):
            return fuser.settled(state, FusionWhy.XLA_ASKED)
        if trace.of_replicas:
            return _of_replicas(fuser, state, timed)
        if with_xla and has_floats(trace.given().graph_def):
            cure = "to leave the step to XLA, pass passes=('recurrent', 'offload')"
            engine.notices.warn("draws", _OTHER_DRAWS.format(trace.name), cure)
        if timed and trace.draws:  # steps before and after the choice share random streams
            graphs = trace.drawing()
            fuser = replace(fuser, graphs=graphs)
            state = replace(state, function=graphs.unmoved(state.function, with_xla))
    except Exception as error:
        return fuser.failed(state, error, "stitching", FusionWhy.FAILED)
    return _planned_by(fuser, state, fuser.plan, timed and options.fusion.tune == "fast")


def _tries(engine: Engine, trace: Trace, state: Placed) -> bool:
    """Whether a step is stitched by default on a CPU, where that is timed to be faster.

    Not where replicas meet in it, where every run has to give the same bits, or where XLA, which the user chose, draws
    random numbers that would be others. Nor where it has convolutions, which no region on a CPU holds: to plan such a
    step takes long, and of those that were timed none ran faster. Only loops are worth it there.
    """
    if not (engine.settings.tries_fusion and state.unchanged) or is_deterministic():
        return False
    if state.report.decision is Decision.FAILED:
        return False
    try:
        graph_def = trace.given().graph_def
        ops = {node.op for node in every_node(graph_def)}
        if trace.of_replicas or not ops.isdisjoint(MEMORY_OPS):  # of an earlier plan
            return False
        if any("Conv" in op for op in ops) and ops.isdisjoint(LOOPS):
            return False
        return not (trace.jit_compile and not trace.replacements.matches and has_floats(graph_def))
    except GraphError:  # the step cannot be read, and runs as it is
        return False


def _beside_moves(job: Job, state: Placed, in_thread: bool) -> Transition[StepState]:
    """What follows where tensors move: regions that leave room for moves.

    Where the user asked for fusion, replicas of one process are stitched on all devices.
    """
    engine, trace = job.engine, job.trace
    mirrored = trace.shared or trace.of_replicas
    if mirrored and "fusion" not in (engine.settings.options.passes or ()):
        return _without_regions(engine, state)
    fuser = Fuser(engine, trace, with_xla=False, mirrored=mirrored)
    return _planned_by(fuser, state, partial(composed, fuser, room_of(job)), in_thread)


def _in_workers(job: Job, state: Placed, board: Board, timed: bool) -> Transition[StepState]:
    """A step that workers run together is stitched on all of them, or on none, where all users asked for fusion.

    Where tensors move on one worker, regions leave room for moves on all, so that all have equal ones.
    """
    engine, trace = job.engine, job.trace
    fuser = Fuser(engine, trace, with_xla=False, mirrored=True, board=board)
    if "fusion" not in (engine.settings.options.passes or ()):
        decline(engine, trace, FusionWhy.DISTRIBUTED)
        return _without_regions(engine, state)
    try:
        why = against_fusion(trace.optimized(), engine.settings.feed_shapes, agree=True)
        if not why and state.unchanged and trace.jit_compile and not trace.replacements.matches:
            why = FusionWhy.XLA_ASKED
    except Exception as error:  # after any error, the step runs without regions
        decline(engine, trace, FusionWhy.FAILED)
        return fuser.failed(state, error, "stitching", FusionWhy.FAILED)
    if why:
        decline(engine, trace, why)
    else:
        wish = wished(board, engine, trace, not state.unchanged, timed and not is_deterministic())
        if wish.moves:
            return _planned_by(fuser, state, partial(composed, fuser, room_of(job)), in_thread=False)
        why = wish.why
    if why:
        _tell(fuser, why)
        return fuser.settled(state, why)
    return _of_replicas(fuser, state, timed)


def _without_regions(engine: Engine, state: StepState) -> Transition[StepState]:
    report = unstitched(state.report, engine, FusionWhy.DISTRIBUTED)
    return Transition(Event.STAYS, Settled(**shared(replace(state, report=report))))


def _planned_by(fuser: Fuser, state: Placed, plan: Callable[[Report], Found], in_thread: bool) -> Transition[StepState]:
    """What follows once `plan` has found the regions of the step: a thread's work, or done now."""
    if in_thread:
        report = with_fusion(state.report, FusionWhy.UNDECIDED)
        work: Work[Found] = Work(partial(plan, report), "tfmem fusion", NEXT)
        return Transition(Event.THREAD, Fusing(**shared(replace(state, report=report)), fuser=fuser, work=work))
    try:
        found = plan(state.report)
    except Exception as error:  # after any error, the step runs without regions
        if fuser.board is not None:
            withdraw(fuser.board, fuser.engine, fuser.trace, FusionWhy.FAILED)
        return _or_xla(fuser, fuser.failed(state, error, "stitching", FusionWhy.FAILED))
    return decide(fuser, state, found)


def _of_replicas(fuser: Fuser, state: StepState, timed: bool) -> Transition[StepState]:
    """A step of several replicas is stitched on all of them, or on none, where the user asked for fusion.

    Its calls run both versions in turn, since copies of its variables have no collectives.
    """
    engine, trace, board = fuser.engine, fuser.trace, fuser.board
    if "fusion" not in (engine.settings.options.passes or ()):
        return fuser.settled(state, FusionWhy.DISTRIBUTED)
    try:
        why = against_fusion(trace.optimized(), engine.settings.feed_shapes, agree=board is not None)
        if not why:
            fuser = replace(fuser, engine=untimed(engine), mirrored=True)
            if timed and trace.draws:
                graphs = trace.drawing()
                fuser = replace(fuser, graphs=graphs)
                state = replace(state, function=graphs.unmoved(state.function, False))
            found = fuser.plan(state.report)
            state, why = replace(state, report=found.report), "" if found.variants else found.why
    except Exception as error:  # after any error, the step runs without regions
        if board is not None:
            withdraw(board, engine, trace, FusionWhy.FAILED)
        return fuser.failed(state, error, "stitching", FusionWhy.FAILED)
    timed = timed and not is_deterministic()
    if board is not None:
        why = offered(board, engine, trace, Offer(why) if why else Offer(kernels=found.kernels)).why
    if why or found.variants is None:
        _tell(fuser, why)
        return fuser.settled(state, why)
    if not timed:
        return fuser.stitched(state, found.variants, FusionWhy.REPLICAS)
    if board is None and (times := fuser.known.find(found.variants.key)) is not None:
        return fuser.chosen(state, found.variants, times, "; known from the cache", Event.STAYS)
    return Transition(Event.TIMED, Comparing(**shared(state), fuser=fuser, variants=found.variants, turns=Turns()))


def _tell(fuser: Fuser, why: str) -> None:
    """Warn a user who asked for fusion of replicas that the step is not stitched."""
    if why != FusionWhy.NOTHING:
        told = f"{fuser.trace.name} was to be stitched, but is {why}"
        fuser.engine.notices.warn("fusion", told, f"{LEAVE_OUT}; {SEE}")


def planned(state: Fusing) -> Transition[StepState]:
    """What follows once the thread has planned."""
    found = state.work.take()
    if found is None:
        error = state.work.error or RuntimeError("planning ended without a result")
        return _or_xla(state.fuser, state.fuser.failed(state, error, "stitching", FusionWhy.FAILED))
    return decide(state.fuser, state, found)


def decide(fuser: Fuser, state: StepState, found: Found) -> Transition[StepState]:
    """What can be decided before there are arguments."""
    variants, options = found.variants, fuser.engine.settings.options
    state = replace(state, report=found.report)
    if found.composed:
        return Transition(Event.COMPOSED, Composing(**shared(state), fuser=fuser, compositions=found.composed))
    if variants is None:
        if found.why == FusionWhy.NO_ROOM:
            state = replace(state, report=unstitched(state.report, fuser.engine, FusionWhy.NO_ROOM))
        elif fuser.mirrored:
            _tell(fuser, found.why)
        return _or_xla(fuser, fuser.settled(state, found.why))
    if fuser.with_xla and (is_deterministic() or variants.noticed):
        return fuser.settled(state, FusionWhy.XLA_UNTIMED)
    if options.fusion.tune == "off":
        return fuser.stitched(state, variants, FusionWhy.UNTUNED)
    if is_deterministic():
        return fuser.stitched(state, variants, FusionWhy.DETERMINISTIC)
    if (times := fuser.known.find(variants.key)) is not None:
        return then_xla(fuser, fuser.chosen(state, variants, times, "; known from the cache", Event.STAYS))
    if not options.observe:
        return fuser.stitched(state, variants, FusionWhy.BY_MODEL)
    turns = Turns() if variants.noticed else None
    return Transition(Event.TIMED, Comparing(**shared(state), fuser=fuser, variants=variants, turns=turns))


def tuned(state: Tuning) -> Transition[StepState]:
    """What follows once the thread has tuned: a comparison, if other kernels save enough."""
    variants, fuser = state.work.take(), state.fuser
    if variants is None:
        stays = state.stays
        if (error := state.work.error) is not None:
            note = f"kernels were not tuned: {type(error).__name__}: {error}"
            stays = replace(stays, report=replace(stays.report, notes=(*stays.report.notes, note)))
        return then_xla(fuser, Transition(Event.STAYS, stays))
    turns = Turns() if variants.noticed else None
    return Transition(Event.TIMED, Comparing(**shared(state), fuser=fuser, variants=variants, turns=turns))


def _or_xla(fuser: Fuser, transition: Transition[StepState]) -> Transition[StepState]:
    """What follows where the step stays without regions: XLA may still be faster, unless it runs the step already."""
    return transition if fuser.with_xla else then_xla(fuser, transition)


def compare(state: Comparing, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Transition[StepState]:
    """What follows a slice of timing on copies of the step's variables and this call's arguments."""
    before = state.variants.before
    try:
        state, times = timed_on_copies(state, args, kwargs)
    except Exception as error:
        if state.variants.xla:
            return xla_runner.untimed(state, error)
        return _untimed(state, error) if before is None else then_xla(state.fuser, _untuned(state, error, before.stays))
    if times is None:
        return Transition(Event.UNCLEAR, state)
    if state.variants.xla:
        return xla_runner.decided(state, times)
    fuser, variants = state.fuser, state.variants
    fuser.known.keep(variants.key, times)
    return then_xla(fuser, fuser.chosen(state, variants, times, ", on copies", Event.CLEAR))


def _untimed(state: Comparing, error: Exception) -> Transition[StepState]:
    """What follows where the step without regions and with them cannot be timed on copies."""
    fuser = state.fuser
    if isinstance(error, NotCopiedError):
        if fuser.with_xla:
            return fuser.settled(state, f"left to XLA: nothing can be timed, since {error}", Event.CLEAR)
        return Transition(Event.UNCLEAR, replace(state, turns=Turns()))
    if isinstance(error, RegionsFailedError):
        note = error_note(fuser.engine.notices, fuser.trace.name, error, "stitching", "the step runs without regions")
        state = replace(state, report=replace(state.report, notes=(*state.report.notes, note)))
    elif not isinstance(error, tf.errors.OpError):
        return _or_xla(fuser, fuser.failed(state, error, "timing", _failing(error)))
    # if the step itself fails, its unmodified run, which follows, fails too
    return _or_xla(fuser, fuser.settled(state, _failing(error), Event.CLEAR))


def _untuned(state: Comparing, error: Exception, stays: Settled) -> Transition[StepState]:
    """What follows where tuned kernels cannot be timed: the model's stay."""
    note = f"kernels were not tuned: {type(error).__name__}: {error}"
    if isinstance(error, RegionsFailedError):
        note = error_note(state.fuser.engine.notices, state.fuser.trace.name, error, "tuning", "other kernels run")
    report = replace(stays.report, tuning=False, notes=(*stays.report.notes, note))
    return Transition(Event.CLEAR, replace(stays, report=report))


def without_room(state: Comparing) -> Transition[StepState]:
    """The step without regions stays, since the other ran out of memory in its turn."""
    return state.fuser.settled(state, "left unchanged: stitched it ran out of memory", Event.CLEAR)


def _failing(error: Exception) -> str:
    return f"left unchanged: timing failed with {type(error).__name__}: {error}"


def take_turn(
    state: Comparing, turns: Turns, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Transition[StepState]]:
    """One of the step's own calls, timed: its result, and what follows."""
    stitched = turns.stitched
    run = partial(call_traced, state.variants.function if stitched else state.function, args, kwargs)
    board, engine = state.fuser.board, state.fuser.engine
    meter, within_budget = engine.meter, state.variants.report is not None
    devices = state.devices or (meter.target.name,)
    waits = waits_for(state.fuser.trace.step.graph, board is not None) if within_budget else WaitsFor.NOTHING
    watched = partial(meter.watched_on, devices, run, waits)
    wait_for_devices()  # a call ends before the GPU has run what it enqueued
    began = time.perf_counter()
    result, peaks = watched() if within_budget else (run(), None)
    wait_for_devices()
    times = turns.add(time.perf_counter() - began)
    if peaks is not None:
        state = replace(state, peaks=(*state.peaks, (stitched, peaks)))
    if times is None:
        return result, Transition(Event.UNCLEAR, state)
    if within_budget:
        return result, chosen(state, times)
    own = FusionFinding(given=times.given, seconds=times.stitched, noise=times.noise)
    found = found_together(board, engine, state.fuser.trace, own)
    if found.failed:
        return result, state.fuser.settled(state, found.failed, Event.CLEAR)
    times = Times(found.given, found.seconds, noise=found.noise)
    state.fuser.known.keep(state.variants.key, times)
    return result, state.fuser.chosen(state, state.variants, times, ", in turn", Event.CLEAR)
