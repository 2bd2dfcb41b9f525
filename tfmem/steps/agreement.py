"""What the workers of a MultiWorkerMirroredStrategy agree on before a step runs: each its own plan, or none of them.

    plan, or why there is none -> a record of each worker -> the same verdict for all

Plans may differ: no edge that tfmem adds leaves a device, so no plan makes another worker wait. But a worker that
raises leaves the others in their first collective for ever. So each publishes how its planning went, and all do the
same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import tensorflow as tf

from custom_ops.errors import TfmemError
from graph_passes.decision import Decision
from graph_passes.errors import HostMemoryError, InfeasibleBudgetError, ReplicasError, SpillDirectoryError
from graph_passes.graph import ops
from graph_passes.report import Report
from tfmem.capture.set_shapes import traced_graphs
from tfmem.runtime.workers import Board, Workers
from tfmem.steps.job import Job
from tfmem.steps.phases import Transition
from tfmem.steps.replicas import probes_of
from tfmem.steps.settling import left
from tfmem.steps.states import Round, StepState, WatchingTogether

_ERRORS = {kind.__name__: kind for kind in (HostMemoryError, SpillDirectoryError)}
_GROUP_SIZE = 1  # the input of a collective that tells how many devices its group has
_GRACE = 30.0  # seconds for the verdict to arrive, once it is written


@dataclass(frozen=True)
class Record:
    """How a worker's planning went.

    Attributes:
        version: of tfmem and TensorFlow.
        collectives: a digest of the step's.
        budget: bytes for each device; None for no limit.
        moves: how many tensors would move.
        watches: whether the worker can watch the peaks of its steps; see `tfmem.steps.agreed_peaks`.
        why: what keeps the worker from planning; "" if nothing does.
        error: the name of the error that this is, if the user has to change something.
        smallest_budget: of an `InfeasibleBudgetError`, as the next two.
        op: see there.
        least: see there.
    """

    version: str
    collectives: str
    budget: int | None = None
    moves: int = 0
    watches: bool = False
    why: str = ""
    error: str = ""
    smallest_budget: int = 0
    op: str = ""
    least: int = 0

    @property
    def text(self) -> str:
        """The record for the board; see `read`."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Record:
        """The record that `text` is of; another version of tfmem may have written it, with other fields."""
        return Record(**{name: value for name, value in json.loads(text).items() if name in Record.__annotations__})


@dataclass(frozen=True)
class WorkersVerdict:
    """What all workers do.

    Attributes:
        plain: why all run the step as TensorFlow has it; "" if each runs its plan.
        failed: the worker whose error all raise; "" for none.
        error: that worker's record.
        watches: whether all watch the peaks of their first steps.
        moves: whether tensors move on any of them.
    """

    plain: str = ""
    failed: str = ""
    error: Record | None = None
    watches: bool = False
    moves: bool = False

    @property
    def text(self) -> str:
        """The verdict for the board; see `read`."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> WorkersVerdict:
        """The verdict that `text` is of."""
        found = json.loads(text)
        error = Record(**found["error"]) if found["error"] else None
        return WorkersVerdict(
            found["plain"], found["failed"], error, found.get("watches", False), bool(found.get("moves"))
        )


def agreed(job: Job, board: Board, plan: Callable[[Job], Transition[StepState]]) -> Transition[StepState]:
    """The move that `plan` makes, if the workers agree that each runs its plan; else the unmodified step.

    Args:
        job: a step that waits for other workers.
        board: where all of them read and write.
        plan: plans and edits it.

    Raises:
        InfeasibleBudgetError, HostMemoryError, SpillDirectoryError, ReplicasError: planning failed on one of the
            workers. All raise the same.
    """
    workers, graph, cause, move = job.engine.workers, job.trace.concrete.graph, None, None
    record = Record(workers.version, digest(graph), job.budget)
    if job.budget is None:  # it has no plan, and needs no others for that; they have to know
        publish(board, workers, graph.name, record.text)
        return plan(job)
    try:
        move = plan(job)
        record = replace(_planned(record, move.state.report), watches=isinstance(move.state, WatchingTogether))
    except Exception as error:  # the others have to know
        record, cause = _failed(record, error), error
    verdict = agree(board, workers, graph.name, record)
    if verdict.error is not None:
        raise _error_of(verdict.failed, verdict.error) from cause
    if not verdict.plain and move is not None:
        if not isinstance(move.state, WatchingTogether):
            return move
        if not verdict.watches:
            return left(job, move.state)
        return Transition(move.event, _with_probes(job, move.state)) if verdict.moves else move
    job.engine.notices.warn("workers", f"{job.trace.name} runs unchanged on all workers", verdict.plain)
    report = unmoved(job.engine.settings.unplanned(job.trace.name) if move is None else move.state.report, job.budget)
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
    """Tell the other workers that a step with moves or regions failed on this one, if they wait for it.

    A second run would meet them in other collectives than those that it left. So all have to raise.
    """
    edited = bool(report.transfers or report.regions)
    board = job.engine.workers.board() if edited else None
    if board is not None and meets_others(job.trace.concrete.graph):
        board.report(error)


def agree(board: Board, workers: Workers, name: str, record: Record) -> WorkersVerdict:
    """Publish this worker's record of a step; the verdict of whichever worker had all records first.

    Args:
        board: where all workers read and write.
        workers: version, patience, and how many steps of the name there were.
        name: of the step, the same on all workers. Steps of one name are told apart by their turn.
        record: this worker's.

    Raises:
        tf.errors.OpError: the cluster has lost a worker.
    """

    def judge(texts: Mapping[str, str | None]) -> str:
        records = {task: None if text is None else Record.read(text) for task, text in texts.items()}
        return verdict_of(records, workers.patience).text

    return WorkersVerdict.read(exchange(board, workers, name, record.text, judge))


def exchange(
    board: Board, workers: Workers, name: str, text: str, judge: Callable[[Mapping[str, str | None]], str]
) -> str:
    """Publish what this worker says of `name`; the verdict of whichever worker had read all of them first.

    Args:
        board: where all workers read and write.
        workers: patience, and how many turns of the name there were.
        name: what is agreed on, the same on all workers.
        text: what this worker says.
        judge: makes the verdict from what each worker said, by task; None where one said nothing in time.

    Raises:
        tf.errors.OpError: the cluster has lost a worker.
        ReplicasError: the verdict did not come.
    """
    until = time.monotonic() + workers.patience
    key = publish(board, workers, name, text)
    found = {task: board.get(f"{key}{task}", until) for task in board.tasks}
    board.put(f"{key}/verdict", judge(found))
    verdict = board.get(f"{key}/verdict", time.monotonic() + _GRACE)
    if verdict is None:
        raise ReplicasError(f"the coordination service lost what it was told of '{name}'; start all workers again")
    return verdict


def publish(board: Board, workers: Workers, name: str, text: str) -> str:
    """Write what this worker says of `name` on the board; the key of its turn there."""
    for turn in itertools.count(workers.turns.get(name, 0)):
        key = f"tfmem/{name}/{turn}"
        if board.put(f"{key}{board.task}", text):
            workers.turns[name] = turn + 1
            return key
    raise AssertionError("turns do not end")


def verdict_of(records: Mapping[str, Record | None], patience: float) -> WorkersVerdict:
    """What all workers do. Reasons to run unchanged come first: a worker that does not know of them cannot raise."""
    known = {task: record for task, record in records.items() if record is not None}
    first, common = next(iter(known.items()))
    for task, record in records.items():
        if record is None:
            return WorkersVerdict(
                f"{task} published nothing on the step within {patience:g} seconds; optimise it on every worker, "
                "and begin training at about the same time"
            )
        if record.version != common.version:
            return WorkersVerdict(
                f"{task} has {record.version}, and {first} has {common.version}; install the same on all"
            )
        if record.collectives != common.collectives:
            return WorkersVerdict(
                f"the step of {task} has other collectives than that of {first}; build the same model, with the same "
                "strategy, on all workers"
            )
    for task, record in known.items():
        if record.budget is None:
            return WorkersVerdict(f"{task} has no budget; pass memory_budget to tfmem.optimize on every worker")
    wrong = {task: record for task, record in known.items() if record.error}
    if wrong:
        task = max(wrong, key=lambda name: (wrong[name].error == "InfeasibleBudgetError", wrong[name].smallest_budget))
        return WorkersVerdict(failed=task, error=wrong[task])
    for task, record in known.items():
        if record.why:
            return WorkersVerdict(
                f"{task} cannot plan the step ({record.why}); give it more memory, or a smaller batch"
            )
    watches, moves = (all(record.watches for record in known.values()), any(record.moves for record in known.values()))
    return WorkersVerdict(watches=watches, moves=moves)


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
    """Those of a graph and of the functions that it calls."""
    for part in traced_graphs(graph).values():
        yield from (op for op in part.get_operations() if op.type in ops.COLLECTIVES)


def _planned(record: Record, report: Report) -> Record:
    """`record` with what a report says: a step that was planned has moves, or fits."""
    unknown = report.decision in (Decision.NO_BUDGET, Decision.FAILED) and record.budget is not None
    why = report.notes[-1] if unknown and report.notes else ""
    return replace(record, moves=len(report.transfers), why=why)


def _failed(record: Record, error: Exception) -> Record:
    """`record` with an error that all workers raise."""
    if isinstance(error, InfeasibleBudgetError):
        numbers: dict[str, Any] = {"smallest_budget": error.smallest_budget, "op": error.op, "least": error.least}
        return replace(record, why=str(error), error="InfeasibleBudgetError", **numbers)
    why = str(error) if isinstance(error, TfmemError) else f"{type(error).__name__}: {error}"
    return replace(record, why=why, error=type(error).__name__)


def _error_of(task: str, record: Record) -> TfmemError:
    message = f"{task} cannot run the step within its budget, so none of the workers runs it: {record.why}"
    if record.error == "InfeasibleBudgetError":
        return InfeasibleBudgetError(message, record.smallest_budget, record.op, record.least)
    return _ERRORS.get(record.error, ReplicasError)(message)


def unmoved(report: Report, budget: int | None) -> Report:
    """The report of a step whose plan does not run."""
    return replace(
        report,
        decision=Decision.OVER if report.transfers else report.decision,
        budget=budget,
        peak_predicted=report.peak_before,
        peak_measured=None,
        bytes_out_predicted=0,
        bytes_in_predicted=0,
        transfers=(),
        curve_after=report.curve_before,
        devices=tuple(
            replace(
                found,
                peak_predicted=found.peak_before,
                peak_measured=None,
                peak_uncounted=0,
                bytes_out=0,
                bytes_in=0,
                transfers=0,
            )
            for found in report.devices
        ),
    )
