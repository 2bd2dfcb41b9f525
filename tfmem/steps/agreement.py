"""What the workers of a MultiWorkerMirroredStrategy agree on before a step runs: each its own plan, or none of them.

    plan, or why there is none -> a record of each worker -> the same verdict for all

Plans may differ: no edge that tfmem adds leaves a device, so no plan makes another worker wait. But a worker that
raises leaves the others in their first collective for ever. So each publishes how its planning went, and all do the
same. Where a worker has no plan unless its step is divided along the batch, all divide theirs, in the same pieces; see
`tfmem.steps.agreed_pieces`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import tensorflow as tf

from custom_ops.errors import TfmemError
from graph_passes.decision import Decision
from graph_passes.errors import HostMemoryError, InfeasibleBudgetError, ReplicasError, SpillDirectoryError
from graph_passes.graph import ops
from graph_passes.passes.offload.lanes import LanePlan
from graph_passes.report import Report
from tfmem.capture.set_shapes import traced_graphs
from tfmem.runtime.workers import Board
from tfmem.steps.agreed_pieces import Plans, in_pieces, infeasible
from tfmem.steps.job import Job
from tfmem.steps.phases import Transition
from tfmem.steps.replicas import probes_of
from tfmem.steps.settling import left
from tfmem.steps.states import Round, StepState, WatchingTogether
from tfmem.steps.worker_records import Record, agree, failed, planned, publish

_ERRORS = {kind.__name__: kind for kind in (HostMemoryError, SpillDirectoryError)}
_GROUP_SIZE = 1  # the input of a collective that tells how many devices its group has


def agreed(job: Job, board: Board, plan: Plans, again: Plans) -> Transition[StepState]:
    """The move that `plan` makes, if the workers agree that each runs its plan; else the unmodified step.

    Args:
        job: a step that waits for other workers.
        board: where all of them read and write.
        plan: plans and edits it.
        again: plans and edits it once it is divided along the batch.

    Raises:
        InfeasibleBudgetError, HostMemoryError, SpillDirectoryError, ReplicasError: planning failed on one of the
            workers. All raise the same.
    """
    workers, graph, cause, transition = job.engine.workers, job.trace.concrete.graph, None, None
    record = Record(workers.version, digest(graph), job.budget)
    if job.budget is None:  # it has no plan, and needs no others for that; they have to know
        publish(board, workers, graph.name, record.text)
        return plan(job)
    try:
        transition = plan(job)
        own = planned(record, transition)
    except InfeasibleBudgetError as error:
        own, transition, cause = infeasible(job, record, error)
    except Exception as error:  # the others have to know
        own, cause = failed(record, error), error
    verdict = agree(board, workers, graph.name, own)
    if verdict.divisions:
        verdict, transition = in_pieces(job, board, record, verdict, transition, again)
    if verdict.error is not None:
        raise _error_of(verdict.failed, verdict.error) from cause
    if not verdict.plain and transition is not None:
        if not isinstance(transition.state, WatchingTogether):
            return transition
        if not verdict.watches:
            return left(job, transition.state)
        return Transition(transition.event, _with_probes(job, transition.state)) if verdict.moves else transition
    job.engine.notices.warn("workers", f"{job.trace.name} runs unchanged on all workers", verdict.plain)
    report = unmoved(
        job.engine.settings.unplanned(job.trace.name) if transition is None else transition.state.report, job.budget
    )
    report = replace(report, notes=(*report.notes, f"unchanged on all workers: {verdict.plain}"))
    return left(job, replace(job.given(), function=job.trace.base, report=report))


def _with_probes(job: Job, state: WatchingTogether) -> WatchingTogether:
    """What runs first where tensors move on any worker: here with probes, if they do here."""
    state = replace(state, round=Round.PROBES)
    if not any(each.plan.moves for each in state.plans):
        return state
    try:
        probing = probes_of(state.plans, job.run)
        function = job.trace.build_lanes(state.plans, probing)
    except Exception as error:  # the other workers need not know: what runs has the same collectives
        note = job.noted(error, "measuring op times", "the plan by estimates runs")
        return replace(state, report=replace(state.report, notes=(*state.report.notes, note)))
    return replace(state, function=function, tables=tuple(each.run for each in probing))


def tell_others(job: Job, report: Report, error: tf.errors.OpError) -> None:
    """Tell the other workers that a step with moves, regions or pieces failed on this one, if they wait for it.

    A second run would meet them in other collectives than those that it left. So all have to raise.
    """
    edited = bool(report.transfers or report.regions or report.splits)
    board = job.engine.workers.board() if edited else None
    if board is not None and meets_others(job.trace.concrete.graph):
        board.report(error)


def meets_others(graph: tf.Graph) -> bool:
    """Whether a traced step waits for devices of other processes, or for an unknown number of them."""
    found = list(_collectives(graph))
    here = {op.device for op in found}
    return any(size is None or size > len(here) for size in map(_group_size, found))


def _group_size(op: tf.Operation) -> int | None:
    """How many devices the group of a collective has; None if that is not known."""
    if "group_size" in op.node_def.attr:  # of the first version
        return int(op.node_def.attr["group_size"].i)
    size = tf.get_static_value(op.inputs[_GROUP_SIZE]) if len(op.inputs) > _GROUP_SIZE else None
    return None if size is None else int(size)


def digest(graph: tf.Graph) -> str:
    """What a step's collectives are, in the order in which the program made them, which is that of their tokens."""
    parts = []
    for op in _collectives(graph):
        data = op.inputs[0] if len(op.inputs) else None
        parts.append((op.type, str(_group_size(op)), "" if data is None else f"{data.dtype.name}{data.shape}"))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _collectives(graph: tf.Graph) -> Iterator[tf.Operation]:
    """The collectives of a graph and of the functions that it calls."""
    for part in traced_graphs(graph).values():
        yield from (op for op in part.get_operations() if op.type in ops.COLLECTIVES)


def _error_of(task: str, record: Record) -> TfmemError:
    message = f"{task} cannot run the step within its budget, so none of the workers runs it: {record.why}"
    if record.error == "InfeasibleBudgetError":
        return InfeasibleBudgetError(message, record.smallest_budget, record.op, record.least)
    return _ERRORS.get(record.error, ReplicasError)(message)


def unmoved(report: Report, budget: int | None, plans: Sequence[LanePlan] = ()) -> Report:
    """The report of a step whose plan does not run; `plans` of its lanes, which say what it needs in pieces."""
    peaks: Counter[str] = Counter()
    for each in plans:
        peaks[each.pool.name] += each.plan.before.peak
    whole = Decision.OVER if report.transfers else report.decision
    return replace(
        report,
        decision=Decision.SPLIT if report.splits else whole,
        budget=budget,
        peak_predicted=max(peaks.values(), default=report.peak_before),
        peak_measured=None,
        bytes_out_predicted=0,
        bytes_in_predicted=0,
        transfers=(),
        curve_after=report.curve_before,
        devices=tuple(
            replace(
                found,
                peak_predicted=peaks.get(found.device, found.peak_before),
                peak_measured=None,
                peak_uncounted=0,
                bytes_out=0,
                bytes_in=0,
                transfers=0,
            )
            for found in report.devices
        ),
    )
