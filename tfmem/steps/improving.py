"""A large step that trains by the plan that was observed, while a thread makes the plans that measured times ask for.

This is for dry runs, which otherwise all happen in the first call. To plan a step and to make its graph takes seconds
of Python. The step trains meanwhile, and the call that finds the thread done tries the plan in a dry run. The plans,
their order and the choice between them are those of a first call that tries all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from graph_passes.errors import BudgetError
from graph_passes.report import Report
from tfmem.steps import solving
from tfmem.steps.job import Job
from tfmem.steps.phases import Event, Transition
from tfmem.steps.settling import following, keep, settle_best, with_plans
from tfmem.steps.states import Improving, Observing, PlanSearch, Solving, StepState, Trying
from tfmem.steps.work import Work

MEANWHILE = "a plan by measured times is being made; until then the plan that was observed runs"
PAUSE = 0.1  # seconds before the thread begins: the step has run by then


def may_begin(job: Job, search: PlanSearch) -> bool:
    """Whether a step can train by the plan that was observed, whose dry run kept within the budget.

    A step that no plan by measured costs keeps within the budget is divided before it trains. A step that fits by far
    needs no trial.
    """
    if search.within is None or not search.dry_run or job.trace.rehearsed or not job.solves_beside(search.timeline):
        return False
    if search.timeline.peak <= job.engine.settings.surely_fits * job.limit:
        return False
    try:
        job.planner(search.timeline)(budget=job.limit)
    except BudgetError:
        return False
    return True


def begun(job: Job, state: Observing, search: PlanSearch) -> Transition[StepState]:
    """The plan that was observed trains. `search` has its trial."""
    assert search.within is not None
    function = job.build(search.timeline, search.first)
    shown = replace(state, function=function, report=search.within.report)
    return Transition(Event.BESIDE, _improving(job, shown, search))


def again(job: Job, state: Trying, begun_with: StepState) -> Transition[StepState]:
    """A trial did not end the search: a thread makes the next plan, and what trained goes on."""
    shown = replace(begun_with, notes=state.notes, disturbed=state.disturbed)
    return Transition(Event.BESIDE, _improving(job, shown, state.search))


def _improving(job: Job, state: StepState, search: PlanSearch) -> Improving:
    """The room of a GPU's allocator is read now, between two calls."""
    search = with_plans(job, search)
    return Improving(
        function=state.function,
        report=state.report,
        notes=state.notes,
        kept=state.kept,
        disturbed=state.disturbed,
        search=search,
        plan=search.first,
        work=Work(lambda: (following(job, state, search),), "tfmem trials", PAUSE),
    )


def called(job: Job, state: Improving, function: Callable[[], Any]) -> Any:
    """What a call returns that has found no plan to try; then the thread begins."""
    result = function()
    job.trace.ran(state.function)
    state.work.begin()
    return result


def ended(job: Job, state: Improving | Solving) -> Transition[StepState]:
    """What follows once the thread of `state` is done."""
    return job.told(solving.solved(job, state) if isinstance(state, Solving) else _made(job, state))


def _made(job: Job, state: Improving) -> Transition[StepState]:
    """What follows once the thread is done: its plan is tried, or the best that was tried becomes final."""
    found = state.work.take()
    if found is None:
        error = state.work.error or RuntimeError("the thread that makes plans ended without a result")
        return keep(job, state, error)
    (trying,) = found
    if trying is None:
        return settle_best(job, state, state.search)
    began = StepState(function=state.function, report=state.report, kept=state.kept)
    return Transition(Event.NEXT, replace(trying, search=replace(trying.search, began=began)))


def meanwhile(report: Report) -> Report:
    """`report` of a step for which a thread makes plans."""
    return replace(report, notes=(*report.notes, MEANWHILE))
