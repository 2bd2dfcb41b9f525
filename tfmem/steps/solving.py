"""The integer program of a large step, solved by a thread beside the training: what begins it, and what follows.

Until then the plan of policy `hybrid` runs, which is made in a hundredth of the time. On a GPU the solver's plan is
tried in a dry run, within the call that finds the thread done. Where nothing is observed it takes over at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from graph_passes.errors import BudgetError
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.report import Report
from tfmem.runtime.faults import is_fault
from tfmem.steps import known_moves
from tfmem.steps.job import Job
from tfmem.steps.phases import Event, Transition
from tfmem.steps.settling import left, probed, settle, settle_trial
from tfmem.steps.states import Checking, PlanSearch, Probed, Solving, StepState, Trying
from tfmem.steps.trials import AS_PREDICTED, CPU_RETRIES, less_than
from tfmem.steps.work import Work

MEANWHILE = "an integer program for a faster plan is being solved; until then the plan of `hybrid` runs"


def begun(job: Job, state: Checking, search: PlanSearch, plan: OffloadPlan) -> Transition[StepState]:
    """A thread solves the program for the budget that `plan` was made for, once the step has run again.

    On a GPU less is planned for by what each trial took beyond its budget, or the solver's plan would do so, too.
    """
    budget = min(job.limit, plan.budget)
    if job.is_gpu and search.trials:
        budget = min(budget, max(less_than(trial, job.limit) for trial in search.trials))
    return _beside(state, search, plan, _work(job, search, budget))


def by_estimates(job: Job, state: StepState, search: PlanSearch) -> Transition[StepState]:
    """A thread solves the program of a step that is not observed, which runs by the first plan of `search` meanwhile.

    An earlier process may have measured the times.
    """
    solve = partial(job.trace.plan, search.timeline, job.limit, timed=search.observed)
    return _beside(state, search, search.first, Work(solve, "tfmem solving"))


def _beside(state: StepState, search: PlanSearch, plan: OffloadPlan, work: Work[OffloadPlan]) -> Transition[StepState]:
    """What runs goes on, which is by `plan`, while a thread does the work."""
    return Transition(
        Event.SOLVES,
        Solving(
            function=state.function,
            report=state.report,
            notes=state.notes,
            kept=state.kept,
            search=search,
            plan=plan,
            work=work,
        ),
    )


def _work(job: Job, search: PlanSearch, budget: int) -> Work[OffloadPlan]:
    """The room of a GPU's allocator is read now, between two calls."""
    make = partial(job.trace.plan, search.timeline, timed=True)
    return Work(replace(job.plans(search.timeline, make), budget=budget).by_program, "tfmem solving")


def solved(job: Job, state: Solving) -> Transition[StepState]:
    """What follows once the thread is done: its plan is tried if it is predicted to be faster."""
    found = state.work.take()
    if found is None:
        return _failed(job, state, state.work.error or RuntimeError("the solver's thread ended without a result"))
    now = state.plan.under(state.search.timeline).after.seconds
    verdict = found.verdict and replace(found.verdict, seconds=now)
    noted = (verdict.note,) if verdict and verdict.note else ()
    state = replace(state, report=replace(state.report, verdict=verdict, notes=(*state.report.notes, *noted)))
    if found.after.seconds >= now or found.actions in state.search.tried:
        return _stays(job, state)
    if not job.engine.settings.observes:
        return _untried(job, state, found)
    tried = state.search.tried | {found.actions}
    search = replace(state.search, stays=state, solved=state.search.solved + 1, tried=tried)
    try:
        return Transition(Event.NEXT, probed(job, Trying, state, search, found))
    except Exception as error:
        return _failed(job, state, error)


def _untried(job: Job, state: Solving, found: OffloadPlan) -> Transition[StepState]:
    """The solver's plan runs from now on, if the host has room for it."""
    try:
        job.engine.memory.require_host_room(state.search.timeline, found)
        notes = tuple(dict.fromkeys((*state.notes, *state.report.notes)))
        return settle(job, replace(state, notes=notes), state.search.timeline, found)
    except Exception as error:
        return _failed(job, state, error)


def judged(job: Job, state: Probed, stays: Solving) -> Transition[StepState]:
    """What follows a trial of the solver's plan: it runs from now on, it is made for less, or what ran before stays."""
    search, trial = state.search, state.search.trials[-1]
    others = [each.seen.step_seconds for each in search.trials[:-1] if each.seen.peak <= job.limit]
    over = trial.seen.peak - job.limit
    if over <= 0 and trial.seen.step_seconds > AS_PREDICTED * min(others, default=float("inf")):
        return _stays(job, stays)
    if over <= 0:
        return settle_trial(job, state, search.timeline, trial)
    if search.solved >= CPU_RETRIES:
        return _stays(job, stays)
    # A CPU's timeline shows by now where the first trial took more. A second one that did took more elsewhere.
    budget = less_than(trial, job.limit) if job.is_gpu or search.solved > 1 else trial.plan.budget
    return Transition(Event.SOLVES, replace(stays, search=search, work=_work(job, search, budget)))


def _stays(job: Job, state: Solving) -> Transition[StepState]:
    """What ran while the program was solved stays for good."""
    known_moves.keep(job, state.search.timeline, state.plan, state.report)
    return left(job, state)


def meanwhile(report: Report) -> Report:
    """`report` of a step whose program is being solved."""
    return replace(report, notes=(*report.notes, MEANWHILE))


def _failed(job: Job, state: Solving, error: Exception) -> Transition[StepState]:
    if not isinstance(error, BudgetError) and is_fault(error):
        note = job.noted(error, "solving the integer program", "the plan of `hybrid` stays")
        state = replace(state, report=replace(state.report, notes=(*state.report.notes, note)))
    return left(job, state)
