"""What follows a measured call of a step: what its probes read, that it ran out of memory, or what it took."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar

from graph_passes.analysis.memory.observe import Sample, corrected, least_taken, observe, short_at
from graph_passes.analysis.memory.simulate import usage_under
from graph_passes.errors import InfeasibleBudgetError
from tfmem.runtime.faults import is_fault
from tfmem.runtime.measured_call import Flow
from tfmem.runtime.measuring_lock import WaitsFor
from tfmem.runtime.out_of_memory import lacks_memory
from tfmem.steps import improving, known_moves, solving
from tfmem.steps.job import Job
from tfmem.steps.lane_trials import Lanes, LaneTrial, best_of, measured_costs, worth_running
from tfmem.steps.phases import Event, Transition
from tfmem.steps.planning import begun
from tfmem.steps.replicas import measured_replicas, plan_replicas, replanned
from tfmem.steps.settling import keep, left, next_trial, probed, settle_best
from tfmem.steps.states import Checking, Observing, Probed, StepState, Trying, Warming, Watching
from tfmem.steps.trials import CPU_RETRIES, judged

GOOD_ENOUGH = 1.02  # times the ops' own run times: nothing is left to gain
CHECKS = 3  # unprobed steps whose peak is watched
PATIENT_CALLS = 3  # that could not be measured, until tfmem stops measuring the step
CALLS_AROUND_OTHERS = 30  # so many of a step whose Python code calls other steps, which are measured first

W = TypeVar("W", bound=Watching)


def ran(job: Job, state: Probed, samples: list[Sample] | None, flow: Flow) -> Transition[StepState]:
    """What follows a step with probes that ran through.

    Args:
        job: the trace.
        state: what ran.
        samples: what its probes read; None if another call was measured meanwhile.
        flow: the op library's counters before and after.
    """
    if isinstance(state, Warming) and not state.search.observed:
        return Transition(Event.RAN, Observing(**vars(state)))
    if isinstance(state, Trying) and samples is not None and not state.warm and job.is_gpu:
        return Transition(Event.RAN, replace(state, warm=True))
    known = state
    try:
        if samples is None:
            return job.told(disturbed(job, state))
        known = _learned(job, state, samples, flow)
        return job.told(_after(job, known))
    except InfeasibleBudgetError as error:
        return job.told(_divided(job, known) or keep(job, known, error))
    except Exception as error:
        return job.told(keep(job, known, error))


def _divided(job: Job, state: Probed) -> Transition[StepState] | None:
    """What follows where no plan meets the budget by what was measured, but parts may run on pieces of the batch.

    On a CPU this is for users who asked for pieces: what oneDNN needs for a piece is not known before it runs, so a
    step that was divided may still be over, and its numbers are equal to rounding only.
    """
    if not job.engine.settings.splits_if_faster:
        return None
    try:
        if isinstance(state, Warming) or known_moves.divide(job) is not None:
            return None
        transition = begun(job, state, job.limit)
    except Exception as error:
        if is_fault(error):
            job.noted(error, "splitting the batch", "the best plan that ran stays")
        return None
    named = {Event.UNKNOWN: Event.DIVIDED, Event.KNOWN: Event.NEXT}
    return Transition(named.get(transition.event, transition.event), transition.state)


def _learned(job: Job, state: Probed, samples: list[Sample], flow: Flow) -> Probed:
    """`state` with what the probes read; unchanged for a first plan whose costs come from a profile."""
    if isinstance(state, Observing):
        return _observed(job, state, samples, flow)
    return _tried(job, state, samples, flow) if isinstance(state, Trying) else state


def _observed(job: Job, state: Observing, samples: list[Sample], flow: Flow) -> Observing:
    """`state` with the costs that were measured."""
    search, report = state.search, state.report
    seen = observe(search.timeline, search.first.moves, samples, search.first.paddings)
    if not job.is_gpu:  # it may be the only one that meets the budget
        search = replace(search, observed_trial=(judged(search.first, report, seen, flow),))
    elif seen.peak <= job.limit:
        search = replace(search, within=judged(search.first, report, seen, flow))
    search.known.keep(seen)
    timeline = job.timeline(seen)
    lower = None if job.is_gpu else least_taken(timeline, seen)
    return replace(state, search=replace(search, timeline=timeline, seen=timeline, lower=lower))


def _tried(job: Job, state: Trying, samples: list[Sample], flow: Flow) -> Trying:
    """`state` with the trial that ran. On a CPU, whose allocator is not replayed, it corrects the costs."""
    search = state.search
    seen = observe(search.timeline, state.plan.moves, samples, state.plan.paddings)
    trial = judged(state.plan, state.report, seen, flow)
    if not job.is_gpu:
        timeline = corrected(search.timeline, seen)
        search = replace(search, timeline=timeline, lower=search.lower or least_taken(timeline, seen), plans=None)
    return replace(state, search=replace(search, trials=(*search.trials, trial)))


def _after(job: Job, state: Probed) -> Transition[StepState]:
    """The next plan to try; or what was chosen, where nothing is left to gain."""
    search = state.search
    if search.stays is not None:
        return solving.judged(job, state, search.stays)
    if isinstance(state, Trying):
        seen = search.trials[-1].seen
        floor = sum(step.seconds for step in search.timeline.steps)
        good = not job.is_gpu or seen.step_seconds <= GOOD_ENOUGH * floor
        if good and seen.peak <= job.limit:
            return settle_best(job, state, search)
        if search.began is not None:
            return improving.again(job, state, search.began)
    elif isinstance(state, Observing) and improving.may_begin(job, search):
        return improving.begun(job, state, search)
    return next_trial(job, state, search)


def timed_on(job: Job, state: Watching, samples: list[list[Sample]] | None) -> Transition[StepState]:
    """What follows a step with probes on several devices: plans by what was measured, without probes.

    Args:
        job: the trace.
        state: what ran.
        samples: what the probes of each device read; None if another call was measured meanwhile.
    """
    if not state.warm:  # its kernels were loaded meanwhile
        return Transition(Event.RAN, replace(state, warm=True))
    plans, costs = state.plans, None
    waiting: tuple[Lanes, ...] = ()
    try:
        if samples is not None:
            costs = measured_costs(job.engine, state.plans, samples)
        budgets = {found.device: found.budget for found in state.report.devices}
        plans = plan_replicas(job.trace.step, job.engine, budgets, costs=costs)
        if costs is not None:
            waiting = worth_running(job.trace.step, job.engine, plans, state.plans, budgets, costs)
        function, report = job.trace.build_lanes(plans), job.trace.describe_lanes(plans, costs is not None)
    except Exception as error:  # the plan by estimate stays
        note = job.noted(error, "planning by measured times", "the plan by estimates runs")
        plans, costs, waiting, function = state.plans, None, (), job.trace.build_lanes(state.plans)
        report = replace(state.report, notes=(*state.report.notes, note))
    state = replace(state, function=function, report=report, plans=plans, costs=costs, tables=(), warm=False)
    return Transition(Event.RAN, replace(state, waiting=waiting))


def watched_on(job: Job, state: Watching, peaks: tuple[int, ...] | None, seconds: float) -> Transition[StepState]:
    """What follows a step on several devices: other plans, plans for less where a peak is over its budget, or a choice.

    Args:
        job: the trace.
        state: what ran.
        peaks: bytes that it took of each device; None if that is not known.
        seconds: that it took.
    """
    try:
        if peaks is None:
            return job.told(disturbed(job, state))
        if not state.warm:
            report = measured_replicas(state.report, [peaks], last=False)
            return Transition(Event.RAN, replace(state, report=report, warm=True))
        state = replace(state, peaks=(*state.peaks, peaks), seconds=(*state.seconds, seconds))
        return job.told(_checked_on(job, state))
    except Exception as error:  # the step ran, and its result is the caller's
        notes = (*state.report.notes, job.noted(error, "planning by measurement", "what ran stays"))
        return job.told(left(job, replace(state, report=replace(state.report, notes=notes)), Event.FAULT))


def _checked_on(job: Job, state: Watching) -> Transition[StepState]:
    """What follows calls of the plans of all devices; a trial ends at once where a peak is over its budget."""
    report = measured_replicas(state.report, state.peaks, last=False)
    state, must_fit = replace(state, report=report), job.engine.settings.must_fit
    over = {found.device: found.over for found in report.devices if found.over}
    if len(state.peaks) < CHECKS and not (over and must_fit and (state.waiting or state.replans < CPU_RETRIES)):
        return Transition(Event.RAN, state)
    trial = LaneTrial(state.plans, state.function, report, state.peaks, min(state.seconds))
    state = replace(state, trials=(*state.trials, trial))
    if state.waiting and not trial.as_predicted:
        following, *waiting = state.waiting
        return Transition(Event.RAN, trying(job, replace(state, waiting=tuple(waiting)), following))
    best = best_of(state.trials)
    if best.over and must_fit and state.replans < CPU_RETRIES:
        over_it = trial if state.replans else best  # what is tighter follows the plan that was tightest
        plans = replanned(job.trace.step, job.engine, over_it.plans, over_it.report, state.costs)
        if plans is not None:
            notes = tuple(
                f"replanned: a plan ran {found.over:,} bytes over the budget of {found.device}"
                for found in over_it.report.devices
                if found.over
            )
            state = replace(state, notes=(*state.notes, *notes), replans=state.replans + 1, waiting=())
            return Transition(Event.OVER, trying(job, state, plans))
        if len(best.peaks) < CHECKS and best is trial:  # nothing is left to try
            return Transition(Event.RAN, replace(state, trials=state.trials[:-1], replans=CPU_RETRIES))
    report = replace(measured_replicas(best.report, best.peaks, last=True), step_measured_ns=round(best.seconds * 1e9))
    tried = (f"plans tried: {'; '.join(map(str, state.trials))}",) if len(state.trials) > 1 else ()
    report = replace(report, notes=tuple(dict.fromkeys((*report.notes, *state.notes, *tried))))
    return left(job, replace(state, function=best.function, report=report), Event.WITHIN)


def trying(job: Job, state: W, plans: Lanes) -> W:
    """The state in which other plans of all devices run."""
    function, report = job.trace.build_lanes(plans), job.trace.describe_lanes(plans, state.costs is not None)
    report = replace(report, notes=(*report.notes, *state.notes))
    return replace(state, function=function, report=report, plans=plans, warm=False, peaks=(), seconds=())


def disturbed(job: Job, state: Probed | Checking | Watching) -> Transition[StepState]:
    """What follows a call that overlapped with another measured one: the next call is measured, or none any more."""
    state = replace(state, disturbed=state.disturbed + 1)
    if state.disturbed < (PATIENT_CALLS if job.waits_for is WaitsFor.NOTHING else CALLS_AROUND_OTHERS):
        return Transition(Event.DISTURBED, state)
    if isinstance(state, Watching):
        final: StepState = _best_measured(state)
    else:
        final = state if isinstance(state, Checking) else settle_best(job, state, state.search).state
    note = f"not measured: {state.disturbed} calls ran while another step was measured"
    report = replace(final.report, notes=(*final.report.notes, note))
    return left(job, replace(final, report=report), Event.IMPATIENT)


def _best_measured(state: Watching) -> Watching:
    """`state` with the best trial that was measured; itself if none was."""
    if not state.trials:
        return state
    best = best_of(state.trials)
    report = measured_replicas(best.report, best.peaks, last=True)
    notes = tuple(dict.fromkeys((*report.notes, *state.notes)))
    return replace(state, function=best.function, report=replace(report, notes=notes))


def wrote_nothing(job: Job, state: Probed) -> bool:
    """Whether a call with probes that failed had not come to the first update of a variable, or ran dry."""
    reached = max((row.index // 2 for row in job.engine.library.probes(job.run)), default=0)
    return state.search.dry_run or reached < job.trace.step.first_update


def short_of_memory(job: Job, state: Probed, error: Exception, held: bool) -> Transition[StepState]:
    """A plan ran out of memory before any variable was written: go on to the next, with the same step.

    Args:
        job: the trace.
        state: what ran.
        error: what was raised.
        held: whether memory beyond the budget was held back: then the same plan runs again, in all of it.

    Raises:
        Exception: `error`, if it does not speak of memory, if a weight may have been updated already, so that the
            step cannot be run again, or if there is no other plan.
        InfeasibleBudgetError: there is no other plan, because no plan's allocations find room.
    """
    search, trace = state.search, job.trace
    if not lacks_memory(error) or not wrote_nothing(job, state):
        raise error
    if held:
        return Transition(Event.SHORT, replace(state, search=replace(search, roomy=True)))
    where = str(error).partition("Detected at node ")[2].partition(" ")[0].strip("'")
    note = (
        f"a plan for {state.plan.budget:,} bytes ran out of memory at '{where}', before any variable was written; the "
        f"step was run again under another plan{trace.graphs.again(search.dry_run)}"
    )
    state = replace(state, notes=(*state.notes, note))
    if search.stays is not None:
        return job.told(left(job, replace(search.stays, notes=state.notes)))
    if isinstance(state, Trying):
        usage = usage_under(search.timeline, state.plan.moves, state.plan.paddings)
        cut = short_at(search.timeline, where, usage.tolist(), job.limit)
        try:
            return job.told(next_trial(job, state, replace(search, timeline=cut, plans=None)))
        except Exception as fault:
            if not is_fault(fault):
                raise
            return job.told(keep(job, state, fault))
    try:
        following = next((plan for plan in search.firsts if plan.actions not in search.tried), None)
        if following is not None:
            search = replace(search, first=following, tried=search.tried | {following.actions})
            return Transition(Event.SHORT, probed(job, type(state), state, search, following))
        known = job.plans(search.timeline, partial(trace.plan, search.timeline)).no_room(where)
    except Exception as fault:
        if not is_fault(fault):
            raise
        raise error from fault
    raise known or error from error
