"""What follows a measured call of a step: what its probes read, that it ran out of memory, or what it took."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from graph_passes.analysis.memory.observe import Sample, observe
from graph_passes.passes.offload.plan import tighter
from tfmem.runtime.faults import is_fault
from tfmem.runtime.measured_call import Flow
from tfmem.runtime.out_of_memory import lacks_memory
from tfmem.steps.job import Job
from tfmem.steps.phases import Event, Move
from tfmem.steps.settling import choose, keep, left, next_trial, probed, settle
from tfmem.steps.states import Checking, Observing, Probed, State, Trying, Warming
from tfmem.steps.trials import CPU_RETRIES, checked, judged

GOOD_ENOUGH = 1.02  # times the ops' own run times: nothing is left to gain
CHECKS = 3  # unprobed steps whose peak is watched
PATIENT_CALLS = 3  # that could not be measured, until tfmem stops measuring the step


def ran(job: Job, state: Probed, samples: list[Sample] | None, flow: Flow) -> Move[State]:
    """What follows a step with probes that ran through.

    Args:
        job: the trace.
        state: what ran.
        samples: what its probes read; None if another call was measured meanwhile.
        flow: the op library's counters before and after.
    """
    if isinstance(state, Warming) and not state.search.observed:
        return Move(Event.RAN, Observing(**vars(state)))
    if isinstance(state, Trying) and samples is not None and not state.warm and job.is_gpu:
        return Move(Event.RAN, replace(state, warm=True))
    known = state
    try:
        if samples is None:
            return job.told(_disturbed(job, state))
        known = _learned(job, state, samples, flow)
        return job.told(_after(job, known))
    except Exception as error:
        return job.told(keep(job, known, error))


def _learned(job: Job, state: Probed, samples: list[Sample], flow: Flow) -> Probed:
    """`state` with what the probes read; unchanged for a first plan whose costs come from a profile."""
    if isinstance(state, Observing):
        return _observed(job, state, samples, flow)
    return _tried(state, samples, flow) if isinstance(state, Trying) else state


def _observed(job: Job, state: Observing, samples: list[Sample], flow: Flow) -> Observing:
    """`state` with the costs that were measured."""
    search, report = state.search, state.report
    seen = observe(search.timeline, search.first.moves, samples, search.first.paddings)
    if not job.is_gpu:  # it may be the only one that meets the budget
        search = replace(search, observed_trial=(judged(search.first, report, seen, flow),))
    search.known.keep(seen)
    timeline = job.timeline(seen)
    return replace(state, search=replace(search, timeline=timeline, seen=timeline))


def _tried(state: Trying, samples: list[Sample], flow: Flow) -> Trying:
    """`state` with the trial that ran."""
    search = state.search
    seen = observe(search.timeline, state.plan.moves, samples, state.plan.paddings)
    trial = judged(state.plan, state.report, seen, flow)
    return replace(state, search=replace(search, trials=(*search.trials, trial)))


def _after(job: Job, state: Probed) -> Move[State]:
    """The next plan to try; or what was chosen, where nothing is left to gain."""
    search = state.search
    if isinstance(state, Trying):
        seen = search.trials[-1].seen
        floor = sum(step.seconds for step in search.timeline.steps)
        good = not job.is_gpu or seen.step_seconds <= GOOD_ENOUGH * floor
        if good and seen.peak <= job.limit:
            return choose(job, state, search)
    return next_trial(job, state, search)


def _disturbed(job: Job, state: Probed | Checking) -> Move[State]:
    """What follows a call that overlapped with another measured one: the next call is measured, or none any more."""
    state = replace(state, disturbed=state.disturbed + 1)
    if state.disturbed < PATIENT_CALLS:
        return Move(Event.DISTURBED, state)
    final: State = state if isinstance(state, Checking) else choose(job, state, state.search).state
    note = f"not measured: {PATIENT_CALLS} calls ran while another step was measured"
    report = replace(final.report, notes=(*final.report.notes, note))
    return left(job, replace(final, report=report), Event.IMPATIENT)


def short_of_memory(job: Job, state: Probed, error: Exception) -> Move[State]:
    """A plan ran out of memory before any variable was written: go on to the next, with the same step.

    Raises:
        Exception: `error`, if it does not speak of memory, if a weight may have been updated already, so that the
            step cannot be run again, or if there is no other plan.
        InfeasibleBudgetError: there is no other plan, because no plan's allocations find room.
    """
    search, trace = state.search, job.trace
    rows = job.engine.library.probes(job.run)
    reached = max((row.index // 2 for row in rows), default=0)
    if not lacks_memory(error) or (reached >= trace.step.first_update and not search.dry_run):
        raise error
    where = str(error).partition("Detected at node ")[2].partition(" ")[0].strip("'")
    note = (
        f"a plan for {state.plan.budget:,} bytes ran out of memory at '{where}', before any variable was written; the "
        f"step was run again under another plan{trace.graphs.again(search.dry_run)}"
    )
    state = replace(state, notes=(*state.notes, note))
    if isinstance(state, Trying):
        try:
            return job.told(next_trial(job, state, search))
        except Exception as fault:
            if not is_fault(fault):
                raise
            return job.told(keep(job, state, fault))
    try:
        following = next((plan for plan in search.firsts if plan.actions not in search.tried), None)
        if following is not None:
            search = replace(search, first=following, tried=search.tried | {following.actions})
            return Move(Event.SHORT, probed(job, type(state), state, search, following))
        known = job.plans(search.timeline, partial(trace.plan, search.timeline)).no_room(where)
    except Exception as fault:
        if not is_fault(fault):
            raise
        raise error from fault
    raise known or error from error


def watched(job: Job, state: Checking, peak: int | None) -> Move[State]:
    """What follows a step without probes: it is planned for less if its peak is over the budget.

    Args:
        job: the trace.
        state: what ran.
        peak: bytes that it took; None if that is not known.
    """
    try:
        return job.told(_disturbed(job, state) if peak is None else _checked(job, state, peak))
    except Exception as error:  # the step ran, and its result is the caller's
        notes = (*state.notes, job.noted(error, "planning by measurement", "what ran stays"))
        report = replace(state.report, notes=tuple(dict.fromkeys((*notes, *state.report.notes))))
        return job.told(left(job, replace(state, notes=notes, report=report), Event.FAULT))


def _checked(job: Job, state: Checking, peak: int) -> Move[State]:
    peak += state.uncounted
    if peak > job.limit and state.replans < CPU_RETRIES:
        move = _replanned(job, state, peak - job.limit)
        if move is not None:
            return move
        state = replace(state, replans=CPU_RETRIES)  # nothing is left to try
    state = replace(state, peaks=(*state.peaks, peak))
    if len(state.peaks) < CHECKS:
        return Move(Event.RAN, state)
    report = replace(state.report, notes=tuple(dict.fromkeys((*state.notes, *state.report.notes))))
    planned = state.function is not job.trace.base
    return left(job, replace(state, report=checked(report, state.peaks, job.limit, planned)), Event.WITHIN)


def _replanned(job: Job, state: Checking, over: int) -> Move[State] | None:
    """A plan that takes `over` bytes less than that of `state`; None if there is none."""
    timeline, plan = state.timeline, state.plan
    if plan is None or timeline is None:
        return None
    try:
        tight = tighter(partial(job.trace.plan, timeline, timed=True), plan, over)
        if tight is not None:
            job.engine.memory.require_host_room(timeline, tight)
    except Exception as error:
        if is_fault(error):
            raise
        return None
    if tight is None:
        return None
    note = f"replanned: a plan for {plan.budget:,} bytes ran {over:,} over the budget"
    again = settle(job, replace(state, notes=(*state.notes, note)), timeline, tight, force=True).state
    if isinstance(again, Checking):
        return Move(Event.OVER, replace(again, replans=state.replans + 1))
    return Move(Event.WITHIN, again)
