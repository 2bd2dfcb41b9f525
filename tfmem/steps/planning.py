"""How a step gets its first plan, from estimates or from a profile."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from graph_passes.errors import BudgetError, InfeasibleBudgetError
from graph_passes.graph.ops import has_regions
from graph_passes.passes.offload.options import Effort
from graph_passes.plan_file import Plan
from graph_passes.refusals import Reason
from tfmem.budgets import DeviceBudgets
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import NOT_PLANNABLE, is_fault, left_alone
from tfmem.steps import known_moves, solving
from tfmem.steps.agreement import agreed, meets_others
from tfmem.steps.given_plan import DIVIDED, NOT_DIVIDED, OTHER_INPUTS, by_plan, of_call, of_graph, require_same
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import KnownProfiles
from tfmem.steps.phases import Event, Transition
from tfmem.steps.replicas import (
    budget_together,
    budgets_on_devices,
    plan_replicas,
    probes_of,
    require_fitting,
    undivided,
)
from tfmem.steps.settling import left, left_unchanged, next_trial, probed, search_from, settle
from tfmem.steps.states import (
    Checking,
    Given,
    Planning,
    PlanSearch,
    StepState,
    Trying,
    Warming,
    Watching,
    WatchingTogether,
)
from tfmem.steps.trace import Trace
from tfmem.steps.work import Work

LARGE = 20  # part of the budget from which on a loop's lists are large


def begin(job: Job) -> Transition[StepState]:
    """Plan now, or let a thread plan once the step has run. Raises what `start` raises."""
    if job.elsewhere:
        state = job.given()
        return left(job, replace(state, report=replace(state.report, notes=(f"left unchanged: {job.elsewhere}",))))
    if can_wait(job.engine, job.trace):
        work: Work[Transition[StepState]] = Work(partial(start, job), "tfmem planning")
        return Transition(Event.DEFERRED, Planning(**vars(job.given()), work=work))
    board = job.engine.workers.board()
    if board is not None and meets_others(job.trace.concrete.graph):
        return agreed(job, board, start, again)
    return start(job)


def can_wait(engine: Engine, trace: Trace) -> bool:
    """Whether a trace may run unmodified while a thread plans it.

    To plan a large step takes a second, and kernels for recurrent layers take several to compile and to time.

    It may on a GPU with `tune="fast"`, where the fusion pass would also run the unmodified step first. It may not if:
    the user gave a budget; the step may need more memory than the device has; or it draws random numbers, since another
    graph would restart their streams.
    """
    options, budget = engine.settings.options, engine.settings.budget
    if not (
        engine.settings.stitches and engine.settings.target.is_gpu and (engine.settings.replaces or budget is not None)
    ):
        return False
    if not options.observe or options.fusion.tune != "fast" or engine.settings.must_fit:
        return False
    try:
        # A step of replicas is fused at once, or never: there is nothing to wait for.
        return not trace.draws and not trace.of_replicas and (budget is None or trace.surely_fits(budget))
    except Exception:  # `start` meets the same error, and reports it
        return False


def start(job: Job) -> Transition[StepState]:
    """Replace recurrent layers, then plan by estimate if there is a budget.

    Raises:
        InfeasibleBudgetError, HostMemoryError, NoGradientError, UnknownShapeError: see `graph_passes.errors`; only if
            the user gave a budget, or the step has regions.
        AlreadyOptimizedError, SpillDirectoryError: see there.
    """
    state = _with_layers(job)
    settings = job.engine.settings
    if settings.stitches and settings.replaces and settings.target.is_gpu:
        job.trace.begin_to_stitch()  # regions come next, and the trace has been read
    if job.budget is None:
        _require_used(job.engine)
        return job.told(left(job, state))
    reading = True
    try:
        job.trace.read()
        reading = False
        return job.told(begun(job, state, job.budget))
    except NOT_PLANNABLE as error:
        if isinstance(error, BudgetError) and (job.waits or has_regions(job.trace.step.graph)):
            raise  # all workers have to know of it; and without regions there is a plan
        report = left_alone(job.engine, state.report, error, bool(job.trace.replacements.matches))
        return job.told(left(job, replace(state, report=report)))
    except Exception as error:
        if not is_fault(error, reading):
            raise
        return job.told(left_unchanged(job, state, error, job.trace.estimated_peak()))


def again(job: Job) -> Transition[StepState]:
    """Plan a step that all workers have divided. Raises what `start` raises."""
    return job.told(begun(job, job.unplanned(), job.limit))


def _with_layers(job: Job) -> Given:
    """The trace with its recurrent layers replaced; raises GraphError where the trace cannot be read."""
    state, trace, reading = job.given(), job.trace, True
    try:
        found = trace.replaced_layers()
        reading = False
        if found is not None:
            trace.use_layers(*found)
        state = replace(state, report=trace.unplanned())
    except Exception as error:
        if not is_fault(error, reading):
            raise
        notes = (job.noted(error, "replacing recurrent layers", "they stay as they were"),)
        state = replace(state, report=replace(state.report, notes=notes), notes=notes)
    job.engine.notices.warn_of_kept(trace.name, trace.replacements)
    return replace(state, function=trace.base)


def begun(job: Job, state: StepState, budget: int) -> Transition[StepState]:
    """What follows the reading of a step: a plan by estimates, or a first plan that is observed."""
    engine, trace = job.engine, job.trace
    if trace.shared:
        return _of_replicas(job, state, budget)
    _require_used(engine)
    given = engine.settings.plan
    if given is not None and trace.split is None:
        same = of_call(given, trace)
        if same and not given.split:
            if not of_graph(given, trace):
                cuts_loops(engine, trace, budget)
            return by_plan(job, state, given)
        state = replace(state, notes=(*state.notes, _divided_by(trace, given, budget) if same else OTHER_INPUTS))
    by_known = known_moves.run(job, state)
    if isinstance(by_known, Transition):
        return by_known
    state, careful = by_known, trace.step.timeline(engine.estimate(workspace=True))
    if careful.peak <= engine.settings.surely_fits * budget:
        transition = settle(job, state, careful, trace.plan(careful, budget))
        if isinstance(transition.state, Checking) and engine.settings.observes and not job.is_gpu:
            return Transition(transition.event, replace(transition.state, by_estimates=True))
        return transition
    if trace.split_loops(least=budget // LARGE):
        by_known = known_moves.run(job, state)
        if isinstance(by_known, Transition):
            return by_known
        state, careful = by_known, trace.step.timeline(engine.estimate(workspace=True))
    # What cuDNN takes is not known yet. Without it, this is the least that any plan needs.
    timeline = trace.step.timeline(engine.estimate(workspace=False)) if job.is_gpu else careful
    # raises where no plan can meet the budget; a step that is observed is planned again, and so is a large one
    planned_again = engine.settings.observes or job.solves_beside(timeline)
    effort = Effort.GREEDY if planned_again else Effort.SEARCHED
    try:
        least = trace.plan(timeline, budget, effort=effort)
    except InfeasibleBudgetError as error:
        if engine.memory.reclaimed():
            return begun(job, state, budget)
        if trace.split is not None:
            raise
        refused = known_moves.divide(job)
        if refused is not None:
            raise error.with_split(str(refused)) from error
        return begun(job, state, budget)
    engine.memory.require_host_room(timeline, least)
    if engine.settings.observes and not least.ordered:  # all that is large is within branches: a probe has no place
        return settle(job, state, timeline, least)
    if engine.settings.options.observe:
        engine.memory.separate(trace.concrete.variables)
    known = KnownProfiles(engine, trace, job.others)
    trace.in_use = known.in_use if trace.in_use is None else trace.in_use
    found, seen = known.find(), None
    if found is not None:
        try:
            seen = job.timeline(found[0])
            least, timeline = trace.plan(seen, budget, timed=True, effort=effort), seen
            state = replace(state, notes=(*state.notes, found[1]))
        except InfeasibleBudgetError:
            if not engine.settings.observes:
                raise
            seen = None  # to refuse it, it has to be seen itself
    if not engine.settings.observes:
        state = replace(state, notes=(*state.notes, *_unobserved(engine, trace.name, seen is not None)))
        transition = settle(job, state, timeline, least)
        if not planned_again or not least.moves:
            return transition
        search = PlanSearch(
            timeline=timeline,
            first=least,
            firsts=iter(()),
            known=known,
            observed=seen is not None,
            dry_run=False,
            seen=seen,
        )
        return solving.by_estimates(job, transition.state, search)
    state = replace(state, kept=tuple(engine.memory.keep_apart(timeline)) if job.is_gpu else ())
    search = search_from(job, timeline, least, known, seen)
    if search.observed and not job.is_gpu:
        transition = next_trial(job, state, search)
        return Transition(Event.KNOWN, transition.state) if isinstance(transition.state, Trying) else transition
    search = replace(search, tried=frozenset([search.first.actions]))
    return Transition(Event.UNKNOWN, probed(job, Warming, state, search, search.first))


def cuts_loops(engine: Engine, trace: Trace, budget: int) -> bool:
    """Put loops into pieces where a step may need more than the budget, and their lists much of it; whether there are
    any."""
    peak = trace.step.timeline(engine.estimate(workspace=True)).peak
    return peak > engine.settings.surely_fits * budget and trace.split_loops(least=budget // LARGE)


def _divided_by(trace: Trace, given: Plan, budget: int) -> str:
    """Divide the step, as the given plan does; a note. Raises StalePlanError."""
    require_same(given, trace)
    refused = trace.divide(budget)
    return DIVIDED if refused is None else f"{NOT_DIVIDED}: {refused}"


def _require_used(engine: Engine) -> None:
    """Refuse budgets by device of which none is for the one device of a step."""
    if isinstance(engine.settings.options.memory_budget, DeviceBudgets):
        engine.settings.require_used()


def _of_replicas(job: Job, state: StepState, budget: int) -> Transition[StepState]:
    """A plan for each device by estimates; what several devices run next, `tfmem.steps.measuring` decides."""
    why = undivided(job.trace.step.graph, "GPU" if job.is_gpu else "CPU")
    if why:
        return _of_replicas_together(job, state, why)
    budgets = budgets_on_devices(job.trace.step, job.engine)
    watched = job.watches_replicas(None)
    timed = watched and not job.waits
    effort = Effort.GREEDY if timed else Effort.SEARCHED  # what is timed is planned again
    try:
        plans = plan_replicas(job.trace.step, job.engine, budgets, effort=effort)
    except InfeasibleBudgetError as found:
        if job.waits:  # all workers divide it, or none does
            raise
        refused = Reason.SPLIT_AGAIN() if job.trace.split else job.trace.divide(budget)
        if refused is None:
            return _of_replicas(job, state, budget)
        if job.trace.split:
            raise
        raise found.with_split(str(refused)) from found
    probing = probes_of(plans, job.run) if timed and any(each.plan.moves for each in plans) else ()
    function = job.trace.build_lanes(plans, probing, final=job.waits and not watched)
    report = job.trace.describe_lanes(plans)
    state = replace(state, function=function, report=report)
    if not job.watches_replicas(function):
        return left(job, state)
    kind = Watching if timed else WatchingTogether
    watching = kind(function=function, report=report, notes=state.notes, kept=state.kept, plans=plans)
    if probing:
        watching = replace(watching, tables=tuple(each.run for each in probing))
    return Transition(Event.CHOSEN, watching)


def _of_replicas_together(job: Job, state: StepState, why: str) -> Transition[StepState]:
    """The unmodified step, where it fits in what its devices may use together.

    Args:
        job: the step.
        state: its report so far.
        why: what keeps tfmem from planning the devices one by one.

    Raises:
        ReplicasError: it does not fit.
    """
    engine, trace = job.engine, job.trace
    budget = budget_together(trace.step, engine)
    if budget is None:
        return left(job, state)
    timeline = trace.step.timeline(
        engine.estimate(workspace=engine.settings.target.is_gpu and engine.settings.must_fit)
    )
    require_fitting(timeline, budget, why)
    notes = (f"devices were not planned one by one: {why}",)
    report = trace.describe(timeline, trace.plan(timeline, budget), notes, given=True)
    return left(job, replace(state, report=replace(report, budget=budget)))


def _unobserved(engine: Engine, name: str, known: bool) -> list[str]:
    """Notes for a step that is not observed. If the user asked for observation, this also warns."""
    notes = [] if known else ["op times and memory are estimates: nothing was observed"]
    if engine.settings.options.observe:
        notes.append("tfmem cannot measure memory: the allocator keeps no statistics (oneDNN is off)")
        cure = "set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported, or pass observe=False"
        engine.notices.warn("observe", f"{name}: {notes[-1]}, so the plan uses estimates", cure)
    return notes
