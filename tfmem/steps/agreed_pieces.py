"""How the workers of a cluster come to run a step on the same pieces of the batch, where one of them has to.

    a worker without a plan       a division of its step, as names of ops: what it proposes beside its record
    the verdict                   all proposals, that of the most pieces first
    each in turn, on all          the step divided as it says, and planned; or why it cannot be
    the first that all can run    runs on all; if there is none, all do what they would without proposals

A piece is of one replica, and collectives run once in each step, behind the sums of all pieces. So the same collectives
meet, in the same order, whatever is divided. Workers are one program, so an op has the same name on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

from graph_passes.errors import InfeasibleBudgetError, ReplicasError
from graph_passes.graph.ops import has_regions
from graph_passes.passes.split.split_regions import BatchDivision
from graph_passes.refusals import Reason, Refusal
from tfmem.runtime.faults import is_fault
from tfmem.runtime.workers import Board
from tfmem.steps.job import Job
from tfmem.steps.phases import Transition
from tfmem.steps.settling import without_plan
from tfmem.steps.splits import split_under
from tfmem.steps.states import StepState
from tfmem.steps.trace import Trace
from tfmem.steps.worker_records import ProposedPieces, Record, WorkersVerdict, agree, failed, planned

Move = Transition[StepState]
Plans = Callable[[Job], Move]  # plans and edits a step

_PIECES = "pieces"  # part of keys on the board


def infeasible(job: Job, record: Record, error: InfeasibleBudgetError) -> tuple[Record, Move | None, Exception]:
    """What a worker says whose step has no plan, what follows here if all run the unmodified step, and what to raise.

    Args:
        job: the step, read; it stays as it is.
        record: of this worker, without what came of its planning.
        error: why there is no plan with nothing divided.
    """
    try:
        found = _proposed(job)
    except Exception as fault:  # the others have to know of the budget all the same
        job.noted(fault, "splitting the batch", "this worker proposes no pieces")
        found = Reason.FAULT(error=f"{type(fault).__name__}: {fault}")
    cause = error.with_split(str(found)) if isinstance(found, Refusal) else error
    try:
        transition: Move | None = without_plan(job, job.unplanned(), cause)
    except InfeasibleBudgetError:
        transition = None
    record = failed(record, cause) if transition is None else planned(record, transition)
    return replace(record, proposal=found if isinstance(found, ProposedPieces) else None), transition, cause


def _proposed(job: Job) -> ProposedPieces | Refusal:
    """How the step would be divided, or why it cannot be."""
    if job.trace.split is not None or has_regions(job.trace.step.graph):
        return Reason.SPLIT_AGAIN()
    found = split_under(job.trace.step, job.engine, job.limit)
    return found if isinstance(found, Refusal) else ProposedPieces.of(BatchDivision.of(found.plan))


def in_pieces(
    job: Job, board: Board, record: Record, verdict: WorkersVerdict, transition: Move | None, again: Plans
) -> tuple[WorkersVerdict, Move | None]:
    """What all workers do once they tried each division that one of them proposed, and what follows here.

    Args:
        job: the step. It stays as it is, unless all run a division.
        board: where all workers read and write.
        record: of this worker, without what came of its planning.
        verdict: with the divisions.
        transition: what follows here with nothing divided; None if the worker raises.
        again: plans a step that is divided.

    Raises:
        tf.errors.OpError: the cluster has lost a worker.
        ReplicasError: the coordination service has failed.
    """
    name, refused = f"{job.trace.concrete.graph.name}/{_PIECES}", []
    for task, proposal in verdict.divisions.items():
        found, own = _tried(job, record, task, proposal, again)
        said = agree(board, job.engine.workers, name, own)
        if found is not None and not said.plain and said.error is None:
            trace, transition = found
            job.trace.become(trace)
            return said, transition
        refused.append(said.plain or f"{said.failed}: {said.error.why if said.error else ''}")
    why = f"; it was not split along the batch: {'; '.join(dict.fromkeys(refused))}"
    error = verdict.error and replace(verdict.error, why=f"{verdict.error.why}{why}")
    return replace(verdict, error=error, plain=verdict.plain and f"{verdict.plain}{why}"), transition


def _tried(
    job: Job, record: Record, task: str, proposal: ProposedPieces, again: Plans
) -> tuple[tuple[Trace, Move] | None, Record]:
    """The trace that is divided as the worker `task` proposed, with what follows, and what this worker says of it.

    None for the first where it cannot be; the record then has an error, whatever kept it from that.
    """
    trace = copy(job.trace)
    try:
        refused = trace.divide(job.limit, known=proposal.read())
        if refused is not None or trace.split is None:
            return None, replace(record, why=str(refused), error=ReplicasError.__name__)
        note = f"split along the batch on all workers: {task} has no other plan within its budget"
        trace.split = replace(trace.split, note=note)
        transition = again(replace(job, trace=trace))
        record = planned(record, transition)
        return (trace, transition), replace(record, error=record.why and ReplicasError.__name__)
    except Exception as error:  # the others have to know
        if is_fault(error):
            job.noted(error, "splitting the batch", "no worker runs these pieces")
        return None, failed(record, error)
