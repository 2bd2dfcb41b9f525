"""A step that runs by a plan which the user gave: `tfmem.optimize(plan=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graph_passes.analysis.memory.simulate import Move, simulate
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.device_report import size
from graph_passes.errors import StalePlanError
from graph_passes.passes.offload.plan import How, OffloadPlan, chained, movable, verdict_of
from graph_passes.plan_file import Plan, PlannedMove, digests
from tfmem.steps.job import Job
from tfmem.steps.phases import Transition
from tfmem.steps.settling import settle
from tfmem.steps.states import StepState
from tfmem.steps.trace import Trace

DIVIDED = "the given plan splits the batch: parts were chosen again, within its budget"
NOT_DIVIDED = "the given plan splits the batch, which is not possible here"
VARIABLE = "resource"  # the dtype of an input that is a variable
OTHER_INPUTS = "the given plan is for inputs of other shapes, so this trace was planned by itself"


def of_call(plan: Plan, trace: Trace) -> bool:
    """Whether a trace is of the call that was planned: where its variables are others, its graph has changed."""
    given, found = ([each for each in inputs if each[0] != VARIABLE] for inputs in (plan.inputs, trace.input_specs))
    return given == found


def of_graph(plan: Plan, trace: Trace) -> bool:
    """Whether the plan is for the very ops of a trace."""
    found = digests(trace.step.graph, trace.step.order)
    return [each for _, each in plan.ops] == [each for _, each in found]


def require_same(plan: Plan, trace: Trace) -> None:
    """Refuse a graph that is not the one that was planned. Raises StalePlanError."""
    plan.renamed(digests(trace.step.graph, trace.step.order))


def by_plan(job: Job, state: StepState, plan: Plan) -> Transition[StepState]:
    """The step runs by `plan`, and is not searched for a better one.

    Raises:
        StalePlanError: the graph is not the one that was planned.
    """
    step, budget = job.trace.step, job.limit
    names = plan.renamed(digests(step.graph, step.order))
    timeline = step.timeline(job.engine.estimate(workspace=False))
    found = plan_of(job, timeline, moves_of(plan.moves, timeline, names), plan.least)
    verdict = found.verdict and replace(found.verdict, smallest_budget=plan.smallest_budget, op=plan.op)
    found = replace(found, verdict=verdict)
    job.engine.memory.require_host_room(timeline, found)
    more = found.after.peak - budget
    noted = [f"{size(more)} more is in use than when the plan was made"] if more > 0 else []
    state = replace(state, notes=(*state.notes, "planned before: by the given plan", *noted))
    return settle(job, state, timeline, found)


def plan_of(job: Job, timeline: Timeline, moves: tuple[Move, ...], least: float | None) -> OffloadPlan:
    """The plan of these moves.

    Args:
        job: the step, and the budget.
        timeline: what the moves are positions of.
        moves: what moves.
        least: seconds that no plan goes below; None where that is not known.
    """
    before, after = (simulate(timeline, each, job.engine.link) for each in ((), moves))
    gaps = movable(timeline, job.engine.settings.options.offload, How())
    verdict = verdict_of(timeline, gaps, job.limit, before.seconds, after.seconds, least)
    ordered = chained(timeline, moves, job.limit)
    return OffloadPlan(moves, job.limit, 0, before, after, job.engine.link, ordered, verdict=verdict)


def moves_of(moves: tuple[PlannedMove, ...], timeline: Timeline, names: Mapping[str, str]) -> tuple[Move, ...]:
    """Moves in positions of the timeline.

    Args:
        moves: of a plan.
        timeline: the step.
        names: the name that each op of the plan has in the step.

    Raises:
        StalePlanError: the step lacks a tensor or an op that the plan names.
    """
    position = {step.node: index for index, step in enumerate(timeline.steps)}
    buffers = {str(buffer.tensor): index for index, buffer in enumerate(timeline.buffers)}
    try:
        return tuple(
            Move(
                buffers[f"{names[op]}{colon}{number}"],
                position[names[move.last]],
                position[names[move.copy_after]],
                position[names[move.release]],
                position[names[move.prefetch]],
                position[names[move.next]],
                move.recomputed,
            )
            for move in moves
            for op, colon, number in [move.tensor.partition(":")]
        )
    except KeyError as error:
        raise StalePlanError(f"the plan names {error}, which the step does not have; make the plan again") from error


def planned_moves(moves: tuple[Move, ...], timeline: Timeline) -> tuple[PlannedMove, ...]:
    """Moves as a plan's file has them: by names."""
    names = [step.node for step in timeline.steps]
    return tuple(
        PlannedMove(
            str(timeline.buffers[move.buffer].tensor),
            names[move.last],
            names[move.copy_after],
            names[move.release],
            names[move.prefetch],
            names[move.next],
            move.recomputed,
        )
        for move in moves
    )
