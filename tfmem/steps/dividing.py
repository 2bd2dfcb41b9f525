"""A step in which tensors move, or parts of it on pieces of the batch: the one that is measured to be faster.

    all else is decided              the ops' times say which share of the unlimited rate the step keeps
    a thread divides the step        for the same budget, if the cost model says that it is clearly faster
    a call tries it in dry runs      which write no variable; a separate step passes through the phases of any other
    or calls train with it           if it is of several replicas, which have no dry runs, until that step is settled
    the faster one stays             by the times that both were measured with, of those within the budget

Without this, less memory may be faster: a budget that only a split meets keeps what the split keeps, and moves for a
larger budget may keep less. A split adds sums in another order. So it has to be clearly faster, as predicted
(`CLEARLY`) and as measured (`FASTER`), or to keep to a budget that the step with its moves exceeds. A step of one
device that keeps its moves has computed nothing else meanwhile. And no clock decides about numbers that would be equal
in two runs: on a CPU, or with deterministic ops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from graph_passes.device_report import milliseconds
from graph_passes.graph.ops import has_regions
from graph_passes.refusals import Reason, Refusal
from graph_passes.report import Report
from graph_passes.splitting import CLEARLY, FASTER
from graph_passes.verdict import rated_by
from tfmem.capture.error_text import said
from tfmem.runtime.faults import is_fault
from tfmem.runtime.out_of_memory import SUSPECTS
from tfmem.runtime.settings import Settings
from tfmem.steps.composed import memory_engine, more_over, total_over
from tfmem.steps.dry_run import can_dry_run
from tfmem.steps.job import Job
from tfmem.steps.phases import Event, Transition
from tfmem.steps.replicas import in_use_on_devices, waits_for_others
from tfmem.steps.states import Checking, Dividing, Settled, StepState
from tfmem.steps.trace import Trace
from tfmem.steps.work import Work

if TYPE_CHECKING:
    from tfmem.steps.managed_step import ManagedStep

_WHOLE_AGAIN = "not split along the batch, after some steps that were, whose sums are equal to rounding"
_MISSED = 1e-9  # share of the unlimited rate that counts as kept over the budget: any split within it is better
MEANWHILE = "whether a split along the batch is faster is not known yet"


def before_the_end(job: Job, transition: Transition[StepState]) -> Transition[StepState]:
    """`transition`; but where all else is decided, and a split may be faster, a thread first divides the step."""
    state = transition.state
    rate = _rate(job, state.report) if isinstance(state, Settled) else None
    if rate is None or not isinstance(state, Settled):
        return transition
    known: dict[str, Any]  # now, between two calls: what is in use then is no tensor of a call
    if job.trace.shared:
        known = {"in_use": in_use_on_devices(job.trace.step.graph, job.engine)}
    else:
        known = {"costs": job.engine.estimate(workspace=False)}
    work = Work(partial(_divided, job, rate, known), "tfmem splitting")
    return Transition(Event.DIVIDES, Dividing(**vars(state), stays=state, work=work))


def _rate(job: Job, report: Report) -> float | None:
    """The share of the unlimited rate that the step's moves keep; None where no split is to be looked for."""
    if not report.transfers or not report.step_measured_ns:
        return None
    rate = _MISSED if total_over(report) else rate_of(report)
    return rate if may_be_faster(job.engine.settings, job.trace, rate) else None


def may_be_faster(settings: Settings, trace: Trace, rate: float) -> bool:
    """Whether a split is to be looked for.

    Args:
        settings: the user's.
        trace: the step, read.
        rate: the share of the unlimited rate that its moves keep.
    """
    if not settings.splits_by_time or trace.split or has_regions(trace.step.graph) or not 0 < rate <= CLEARLY:
        return False
    if trace.shared:  # other processes would have to agree
        return not waits_for_others(trace.step.graph)
    return not trace.of_replicas and can_dry_run(trace.step.graph)


def rate_of(report: Report) -> float:
    """The share of the unlimited rate that a step was measured to keep; 1 where that is not known."""
    if report.verdict is None or not report.step_measured_ns:
        return 1.0
    return report.verdict.seconds_unlimited * 1e9 / report.step_measured_ns


def _divided(job: Job, rate: float, known: Mapping[str, Any]) -> Trace | Refusal:
    trace = job.trace.variant(job.trace.optimized(), memory_engine(job.engine), rehearsed=True)
    trace.read()
    return trace.divide(job.limit, rate, **known) or trace


def divided(state: Dividing) -> Trace | Refusal:
    """The divided step, once the thread is done, or why there is none. Raises what it raised."""
    found = state.work.take()
    if found is None:
        raise state.work.error or RuntimeError("splitting ended without a result")
    return found


def refused(state: Dividing, why: Refusal) -> Transition[StepState]:
    """What follows if the step cannot be divided, or is not predicted to be faster."""
    slower = why.reason is Reason.SPLIT_OVER and not total_over(state.report)
    text = "no division is predicted to be clearly faster" if slower else str(why)
    return whole(state, f"not split along the batch: {text}")


def _saves(given: Report, report: Report) -> bool:
    """Whether a divided step is clearly faster than the given one, or keeps to a budget that this one exceeds."""
    if total_over(given) > total_over(report):
        return True
    return (report.step_measured_ns or 0) <= FASTER * (given.step_measured_ns or 0)


def whole(state: Dividing, note: str = "") -> Transition[StepState]:
    """What follows if the step stays as it is."""
    stays = state.stays
    if note:
        stays = replace(stays, report=replace(stays.report, notes=(*stays.report.notes, note)))
    return Transition(Event.STAYS, stays)


def failed(job: Job, state: Dividing, error: Exception) -> Transition[StepState]:
    """What follows an error: the step keeps its moves."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(cause, tf.errors.OpError) or not is_fault(cause):  # if the step itself fails, its own run does, too
        return whole(state, f"not split along the batch: {said(error)}")
    return whole(state, job.noted(cause, "splitting the batch", "the step keeps its moves"))


def decided(job: Job, state: Dividing, trace: Trace, tried: StepState) -> tuple[Job, Transition[StepState]]:
    """The job that goes on, and what follows once the divided step has run in dry runs.

    Args:
        job: the step with its moves.
        state: what runs.
        trace: the divided step.
        tried: what came of it.
    """
    given, report = state.report, tried.report
    before, after = ((each.step_measured_ns or 0) / 1e9 for each in (given, report))
    if not isinstance(tried, Checking) or not after:
        return job, whole(state, "not split along the batch: what that takes could not be measured")
    if excess := more_over(given, report):
        return job, whole(state, f"not split along the batch: that takes {excess:,} bytes more than the budget")
    times = f"{milliseconds(after)} a step, {milliseconds(before)} with nothing split"
    if not _saves(given, report):
        return job, whole(state, f"not split along the batch: that takes {times}")
    notes = (*tried.notes, f"split along the batch: {times}")
    report = replace(
        report,
        notes=(*report.notes, notes[-1]),
        verdict=rated_by(report.verdict, given.verdict),
        passes=given.passes,
        peak_before=given.peak_before,
        curve_before=given.curve_before,
        jit_compile=given.jit_compile,
    )
    kept = (*tried.kept, state.function)  # random streams go on in its kernels, until the divided step has run
    return replace(job, trace=trace), Transition(Event.CHOSEN, replace(tried, report=report, notes=notes, kept=kept))


def called(
    job: Job,
    state: Dividing,
    step: ManagedStep,
    call: Callable[[], Any],
    go_on: Callable[[Transition[StepState]], StepState],
) -> Any:
    """What a call of the divided step of several replicas returns.

    Args:
        job: the step with its moves.
        state: what would run without pieces.
        step: the divided one.
        call: calls that.
        go_on: takes what follows, if anything does.
    """
    try:
        result = call()
    except SUSPECTS as error:  # the next call runs the step with its moves
        go_on(failed(job, state, error))
        raise
    if step.settled:
        go_on(decided_on(state, step.report, step.running))
    return result


def decided_on(state: Dividing, report: Report, function: Any) -> Transition[StepState]:
    """What follows once the divided step of several replicas is settled.

    Args:
        state: what ran before.
        report: of the divided step.
        function: runs it.
    """
    given = state.report
    before, after = ((each.step_measured_ns or 0) / 1e9 for each in (given, report))
    state = replace(state, stays=replace(state.stays, kept=(*state.stays.kept, function)))  # its streams go on
    if not after:
        return whole(state, f"{_WHOLE_AGAIN}: what that takes could not be measured")
    if excess := more_over(given, report):
        return whole(state, f"{_WHOLE_AGAIN}: that takes {excess:,} bytes more than the budget")
    times = f"{milliseconds(after)} a step, {milliseconds(before)} with nothing split"
    if not _saves(given, report):
        return whole(state, f"{_WHOLE_AGAIN}: that takes {times}")
    notes = (*report.notes, f"split along the batch: {times}")
    verdict = rated_by(report.verdict, given.verdict)
    report = replace(report, notes=notes, verdict=verdict, passes=given.passes, jit_compile=given.jit_compile)
    kept = (*state.kept, state.function)
    settled = Settled(function=function, report=report, notes=state.notes, kept=kept)
    return Transition(Event.STAYS, settled)


def meanwhile(report: Report) -> Report:
    """`report` of a step that may be split."""
    return replace(report, notes=(*report.notes, MEANWHILE))
