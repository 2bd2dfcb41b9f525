"""What each worker of a cluster says of its planning, and the verdict that all follow.

a record of each worker -> the first worker that has read all judges -> the same verdict for all
"""

from __future__ import annotations

import base64
import itertools
import json
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from custom_ops.errors import TfmemError
from graph_passes.decision import Decision
from graph_passes.errors import InfeasibleBudgetError, ReplicasError
from graph_passes.passes.split.split_regions import BatchDivision
from tfmem.runtime.workers import Board, Workers
from tfmem.steps.phases import Transition
from tfmem.steps.states import StepState, WatchingTogether

_GRACE = 30.0  # seconds for the verdict to arrive, once it is written


@dataclass(frozen=True)
class ProposedPieces:
    """How a worker would divide its step along the batch.

    Attributes:
        pieces: how many.
        text: the division of each of its devices; see `read`.
    """

    pieces: int
    text: str

    @staticmethod
    def of(divisions: tuple[BatchDivision, ...]) -> ProposedPieces:
        """The proposal of these divisions. Thousands of names that are alike take few bytes."""
        packed = zlib.compress(json.dumps([asdict(each) for each in divisions]).encode())
        return ProposedPieces(divisions[0].count, base64.b64encode(packed).decode())

    def read(self) -> tuple[BatchDivision, ...]:
        """The divisions."""
        return tuple(map(BatchDivision.read, json.loads(zlib.decompress(base64.b64decode(self.text)))))


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
        proposal: of a worker that has no plan, how it would divide the step along the batch; None if it cannot.
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
    proposal: ProposedPieces | None = None

    @property
    def text(self) -> str:
        """The record for the board; see `read`."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Record:
        """The record that `text` is of; another version of tfmem may have written it, with other fields."""
        found = {name: value for name, value in json.loads(text).items() if name in Record.__annotations__}
        proposal = found.get("proposal")
        return Record(**{**found, "proposal": proposal and ProposedPieces(**proposal)})


@dataclass(frozen=True)
class WorkersVerdict:
    """What all workers do.

    Attributes:
        plain: why all run the step as TensorFlow has it; "" if each runs its plan.
        failed: the worker whose error all raise; "" for none.
        error: that worker's record.
        watches: whether all watch the peaks of their first steps.
        moves: whether tensors move on any of them.
        divisions: by worker how it would divide the step. All try one after the other, and run the first that all can
            run; if there is none, they do what the other attributes say.
    """

    plain: str = ""
    failed: str = ""
    error: Record | None = None
    watches: bool = False
    moves: bool = False
    divisions: Mapping[str, ProposedPieces] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The verdict for the board; see `read`."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> WorkersVerdict:
        """The verdict that `text` is of."""
        found = json.loads(text)
        error = Record.read(json.dumps(found["error"])) if found["error"] else None
        divisions = {task: ProposedPieces(**each) for task, each in found.get("divisions", {}).items()}
        return WorkersVerdict(
            found["plain"], found["failed"], error, found.get("watches", False), bool(found.get("moves")), divisions
        )


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
    divisions = _divisions(known)
    wrong = {task: record for task, record in known.items() if record.error}
    if wrong:
        task = max(wrong, key=lambda name: _needs(wrong[name]))
        return WorkersVerdict(failed=task, error=replace(wrong[task], proposal=None), divisions=divisions)
    for task, record in sorted(known.items(), key=lambda item: item[1].proposal is not None):  # first what none helps
        if record.why:
            return WorkersVerdict(
                f"{task} cannot plan the step ({record.why}); give it more memory, or a smaller batch",
                divisions=divisions,
            )
    watches, moves = (all(record.watches for record in known.values()), any(record.moves for record in known.values()))
    return WorkersVerdict(watches=watches, moves=moves)


def _needs(record: Record) -> tuple[bool, bool, int]:
    """How much a worker whose planning failed lacks: what raises names the one that lacks the most."""
    return record.error == InfeasibleBudgetError.__name__, record.proposal is None, record.smallest_budget


def _divisions(records: Mapping[str, Record]) -> Mapping[str, ProposedPieces]:
    """The different divisions that workers propose, that of the most pieces first; none if one cannot be helped so."""
    if any(record.why and record.proposal is None for record in records.values()):
        return {}
    first: dict[ProposedPieces, str] = {}
    for task, record in records.items():
        if record.proposal is not None:
            first.setdefault(record.proposal, task)
    return {first[each]: each for each in sorted(first, key=lambda each: -each.pieces)}


def planned(record: Record, transition: Transition[StepState]) -> Record:
    """`record` with what follows: a step that was planned has moves, or fits."""
    report, watches = transition.state.report, isinstance(transition.state, WatchingTogether)
    unknown = report.decision in (Decision.NO_BUDGET, Decision.FAILED) and record.budget is not None
    why = report.notes[-1] if unknown and report.notes else ""
    return replace(record, moves=len(report.transfers), watches=watches, why=why)


def failed(record: Record, error: Exception) -> Record:
    """`record` with an error that all workers raise."""
    if isinstance(error, InfeasibleBudgetError):
        numbers: dict[str, Any] = {"smallest_budget": error.smallest_budget, "op": error.op, "least": error.least}
        return replace(record, why=str(error), error="InfeasibleBudgetError", **numbers)
    why = str(error) if isinstance(error, TfmemError) else f"{type(error).__name__}: {error}"
    return replace(record, why=why, error=type(error).__name__)
