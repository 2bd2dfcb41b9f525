"""The choice of the plan that a step runs next: another to try, the best that was tried, or none."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from graph_passes.analysis.memory.simulate import uncounted
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.decision import Missed
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ops import has_regions
from graph_passes.passes.offload.plan import OffloadPlan
from tfmem.runtime.faults import is_fault, left_by_fault
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import KnownProfiles
from tfmem.steps.phases import Event, Transition
from tfmem.steps.states import Checking, Improving, Placed, PlanSearch, Probed, StepState, Trying
from tfmem.steps.trials import Trial, best_trial

# of a report: what follows from a plan and the costs by which it is predicted
PREDICTED = ("peak_before", "peak_predicted", "peak_uncounted", "stall_predicted_ns", "step_predicted_ns", "verdict")


def probed(job: Job, kind: type[Probed], state: StepState, search: PlanSearch, plan: OffloadPlan) -> Probed:
    """The state in which `plan` runs with probes."""
    function = job.build(search.timeline, plan, search.dry_run)
    return kind(
        function=function,
        report=job.describe(search.timeline, plan, state.notes, function),
        notes=state.notes,
        kept=state.kept,
        disturbed=state.disturbed,
        search=search,
        plan=plan,
    )


def search_from(
    job: Job, timeline: Timeline, plan: OffloadPlan, known: KnownProfiles, seen: Timeline | None = None
) -> PlanSearch:
    """A search that begins with `plan`, or with what is first run in its place; `seen`: the timeline, if measured."""
    firsts = job.plans(timeline, partial(job.trace.plan, timeline)).first(plan)
    return PlanSearch(
        timeline=timeline,
        first=next(firsts),
        firsts=firsts,
        known=known,
        observed=seen is not None,
        dry_run=job.trace.can_dry_run,
        seen=seen,
    )


def next_trial(job: Job, state: StepState, search: PlanSearch) -> Transition[StepState]:
    """The next plan worth trying, or the best that was tried.

    A step that fits in the planned order may not fit in the order TensorFlow would choose, unless by far.
    """
    plan = job.planner(search.timeline)
    if search.timeline.peak <= job.engine.settings.surely_fits * job.limit:
        return settle(job, state, search.timeline, plan(job.limit))
    trying = following(job, state, with_plans(job, search))
    return settle_best(job, state, search) if trying is None else Transition(Event.NEXT, trying)


def with_plans(job: Job, search: PlanSearch) -> PlanSearch:
    """`search` with the plans that may be tried, in the room that there is now, unless it has them."""
    if search.plans is not None:
        return search
    return replace(search, plans=job.plans(search.timeline, job.planner(search.timeline)).remembering())


def following(job: Job, state: StepState, search: PlanSearch) -> Probed | None:
    """The state in which the next plan that is worth trying runs; None if there is none. `search` has its plans."""
    assert search.plans is not None
    for candidate in search.plans.untried(search.trials, search.first):
        if candidate.actions not in search.tried:
            return probed(job, Trying, state, replace(search, tried=search.tried | {candidate.actions}), candidate)
    return None


def settle_best(job: Job, state: StepState, search: PlanSearch) -> Transition[StepState]:
    """The fastest trial that met the budget becomes final; if none did, the one that came nearest."""
    if not search.trials:  # every plan ran out of memory: what ran first is known to run
        transition = settle(job, state, search.timeline, search.first, force=True)
        return Transition(transition.event, _with_lower(transition.state, search))
    met = any(trial.seen.peak <= job.limit for trial in search.trials)
    best, notes = best_trial(search.trials if met else (*search.trials, *search.observed_trial), job.limit)
    transition = settle_trial(job, replace(state, notes=(*state.notes, *notes)), search.timeline, best)
    final = _with_lower(transition.state, search)
    if isinstance(final, Checking) and search.stays is None and job.solves_beside(search.timeline):
        final = replace(final, search=replace(search, within=None, began=None))
    return Transition(transition.event, final)


def _with_lower(state: StepState, search: PlanSearch) -> StepState:
    """`state`, which goes on from the least that was seen where its peak is checked."""
    return replace(state, lower=search.lower) if isinstance(state, Checking) else state


def settle_trial(job: Job, state: StepState, timeline: Timeline, trial: Trial) -> Transition[StepState]:
    """The plan of a trial becomes final, and the report has what was measured of it."""
    job.engine.library.trim(keep_pinned=True)  # of which this one takes what it moves
    plan = trial.plan if job.is_gpu else trial.plan.under(timeline)
    transition = settle(job, state, timeline, plan, force=True)
    predicted = {name: getattr(transition.state.report, name) for name in PREDICTED}
    report = replace(trial.report, notes=transition.state.report.notes, **predicted)
    if isinstance(transition.state, Checking) and trial.seen.peak > job.limit:
        report = replace(report, peak_measured=None)  # another plan may follow
    return Transition(transition.event, replace(transition.state, report=report))


def settle(
    job: Job, state: StepState, timeline: Timeline, plan: OffloadPlan, force: bool = False
) -> Transition[StepState]:
    """`plan` becomes final. Without moves the trace stays unchanged, unless its order is part of what was tried."""
    function = job.build(timeline, plan) if plan.moves or force else job.trace.unmoved()
    report = job.describe(timeline, plan, state.notes, function)
    state = replace(state, function=function, report=report)
    if not job.watches(function):
        return left(job, state)
    checking = Checking(
        function=function,
        report=report,
        notes=state.notes,
        kept=state.kept,
        disturbed=state.disturbed,
        timeline=timeline,
        plan=plan,
        uncounted=uncounted(timeline, plan.moves, plan.paddings),
    )
    return Transition(Event.CHOSEN, checking)


def left(job: Job, state: StepState, event: Event = Event.UNWATCHED) -> Transition[StepState]:
    """What follows if the function of `state` is the final one for memory."""
    unchanged = state.function is job.trace.base and job.trace.split is None
    placed = Placed(
        function=state.function, report=state.report, notes=state.notes, kept=state.kept, unchanged=unchanged
    )
    return Transition(event, placed)


def without_plan(job: Job, state: StepState, error: InfeasibleBudgetError) -> Transition[StepState]:
    """What follows where no plan meets the budgets of a worker's step, and none has to: it runs unmodified.

    Args:
        job: the trace.
        state: what was known.
        error: why there is no plan.

    Raises:
        InfeasibleBudgetError: `error`, if the user gave a budget, or the step has regions: without these there is a
            plan.
    """
    if job.engine.settings.must_fit or has_regions(job.trace.step.graph):
        raise error
    notes = (*state.report.notes, f"memory was not planned: {error}")
    return left(job, replace(state, report=replace(state.report, notes=notes)))


def left_unchanged(job: Job, state: StepState, error: Exception, peak: int | None) -> Transition[StepState]:
    """The step runs unchanged, because of a bug in tfmem; its memory is watched.

    Args:
        job: the trace.
        state: what was known.
        error: the fault.
        peak: bytes that the step needs; None if that is not known.

    Raises:
        InfeasibleBudgetError: that may be more than the budget.
    """
    report = left_by_fault(job.engine, replace(state.report, notes=state.notes), error, peak)
    function = job.trace.base
    if not job.watches(function):
        return left(job, replace(state, function=function, report=report, kept=()))
    checking = Checking(
        function=function,
        report=report,
        notes=state.notes,
        disturbed=state.disturbed,
        timeline=None,
        plan=None,
    )
    return Transition(Event.CHOSEN, checking)


def keep(job: Job, state: Probed | Improving, error: Exception) -> Transition[StepState]:
    """The best of what ran stays, because nothing else can be planned.

    Raises:
        InfeasibleBudgetError: nothing ran but dry runs, and what they tried cannot be made; see `left_unchanged`.
    """
    if is_fault(error):
        note: str = job.noted(error, "planning by measurement", "the best plan that ran stays")
    else:  # the step needs more than its graph showed; training continues with the function that runs
        note = Missed.of(f": {error}")
    state = replace(state, notes=(*state.notes, note))
    try:
        return settle_best(job, state, state.search)
    except Exception as fault:
        search = state.search
        try:
            function = job.build(search.timeline, state.plan)  # without probes
        except Exception:
            if search.dry_run:
                return left_unchanged(
                    job, state, fault, search.seen.peak if search.seen else job.trace.estimated_peak()
                )
            function = state.function  # with probes, it runs as well
        notes = (*state.notes, job.noted(fault, "making the final plan", "what ran last stays"))
        report = replace(state.report, notes=notes)
        return left(job, replace(state, function=function, notes=notes, report=report), Event.FAULT)
