"""What follows a call of the plan that was chosen, which runs without probes: its peak is checked.

    within the budget, several times over   the plan stays
    over it, though by estimates it fits    the next call is measured, as it is where a step may not fit
    over it                                 a plan for less runs; where none is left, the one that came nearest

TensorFlow's CPU allocator gives out whole chunks, of up to twice the bytes that a tensor has. Which chunk a tensor gets
depends on what ran before, so a plan that met the budget with probes may miss it without, and a plan that moves as much
as another may take less.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from custom_ops.errors import TfmemError
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.decision import met_since
from graph_passes.passes.offload.plan import OffloadPlan, tighter
from tfmem.steps import known_moves, solving
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import KnownProfiles
from tfmem.steps.measuring import CHECKS, disturbed
from tfmem.steps.phases import Event, Transition
from tfmem.steps.settling import left, probed, search_from, settle
from tfmem.steps.states import Checking, StepState, Warming
from tfmem.steps.trials import checked

REPLANS = 6  # plans that are made for less, one after the other
_SHARES = (0.0, 0.25, 0.5, 0.75)  # of the bytes between what the tightest plan takes and the budget


def watched(job: Job, state: Checking, peak: int | None) -> Transition[StepState]:
    """What follows a step without probes: it is planned for less if its peak is over the budget.

    Args:
        job: the trace.
        state: what ran.
        peak: bytes that it took; None if that is not known.
    """
    try:
        return job.told(disturbed(job, state) if peak is None else _checked(job, state, peak))
    except Exception as error:  # the step ran, and its result is the caller's
        notes = (*state.notes, job.noted(error, "planning by measurement", "what ran stays"))
        report = replace(state.report, notes=tuple(dict.fromkeys((*notes, *state.report.notes))))
        return job.told(left(job, replace(state, notes=notes, report=report), Event.FAULT))


def _checked(job: Job, state: Checking, peak: int) -> Transition[StepState]:
    peak += state.uncounted
    state = replace(state, peaks=(*state.peaks, peak))
    plan, timeline = state.plan, state.timeline
    if peak > job.limit and state.by_estimates and plan is not None and plan.ordered and timeline is not None:
        return _misjudged(job, state, timeline, plan)
    if peak > job.limit and state.replans <= REPLANS:
        if state.nearest is None or max(state.nearest.peaks) > max(state.peaks):
            state = replace(state, nearest=replace(state, nearest=None))
        transition = _replanned(job, state, peak - job.limit) if state.replans < REPLANS else None
        if transition is not None:
            return transition
        state = _nearest(state)
    job.engine.library.trim_unused()  # what trials moved beyond what this plan does
    if len(state.peaks) < CHECKS:
        return Transition(Event.RAN, state)
    if max(state.peaks) <= job.limit:
        report = replace(state.report, notes=met_since(state.report.notes))
        state = replace(state, notes=met_since(state.notes), report=report)
    report = replace(state.report, notes=tuple(dict.fromkeys((*state.notes, *state.report.notes))))
    planned = state.function is not job.trace.base
    state = replace(state, report=checked(report, state.peaks, job.limit, planned))
    if state.search is not None and state.plan is not None:
        return solving.begun(job, state, state.search, state.plan)
    if state.plan is not None and state.timeline is not None:
        known_moves.keep(job, state.timeline, state.plan, state.report)
    return left(job, state, Event.WITHIN)


def _misjudged(job: Job, state: Checking, timeline: Timeline, plan: OffloadPlan) -> Transition[StepState]:
    """The first plan again, with probes: an op takes memory of which estimates know nothing."""
    job.engine.memory.separate(job.trace.concrete.variables)
    known = KnownProfiles(job.engine, job.trace, job.others)
    search = search_from(job, timeline, plan, known)
    search = replace(search, tried=frozenset([search.first.actions]))
    return Transition(Event.MISJUDGED, probed(job, Warming, state, search, search.first))


def _nearest(state: Checking) -> Checking:
    """The plan that came nearest to the budget, once no other is left to run."""
    nearest = state.nearest or state
    return replace(nearest, notes=state.notes, replans=REPLANS + 1, nearest=None)


def _replanned(job: Job, state: Checking, over: int) -> Transition[StepState] | None:
    """A plan that may take less than that of `state`, which ran `over` bytes over; None if there is none."""
    plan = state.plan
    if plan is None or state.timeline is None:
        return None
    for timeline, found in _closer(job, state, plan, over):
        if found.actions in state.tried:
            continue
        note = f"replanned: a plan for {plan.budget:,} bytes ran {over:,} over the budget"
        again = settle(job, replace(state, notes=(*state.notes, note)), timeline, found, force=True).state
        if not isinstance(again, Checking):
            return Transition(Event.WITHIN, again)
        tried = state.tried | {plan.actions, found.actions}
        again = replace(again, replans=state.replans + 1, tried=tried, lower=state.lower)
        return Transition(Event.OVER, replace(again, nearest=state.nearest, search=state.search))
    return None


def _closer(job: Job, state: Checking, plan: OffloadPlan, over: int) -> Iterator[tuple[Timeline, OffloadPlan]]:
    """Plans that may take less, the one that is predicted to first; the host has room for each.

    By what was measured no plan may meet the budget, although some of it was the unused part of chunks, which another
    plan has elsewhere. By the least that the step may take, plans do that are worth a run.
    """
    timelines = [timeline for timeline in (state.timeline, state.lower) if timeline is not None]
    for timeline in timelines:
        with suppress(TfmemError):
            found = tighter(job.planner(timeline), plan.under(timeline), over)
            if found is not None:
                job.engine.memory.require_host_room(timeline, found)
                yield timeline, found
    if state.lower is None:
        return
    make = job.planner(state.lower)
    with suppress(TfmemError):
        least = tighter(make, plan.under(state.lower), job.limit)
        floor = (least or plan.under(state.lower)).after.peak
        for share in _SHARES:
            found = make(budget=floor + int(share * (job.limit - floor)))
            job.engine.memory.require_host_room(state.lower, found)
            yield state.lower, found
