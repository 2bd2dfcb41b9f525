"""What the workers of a cluster agree on before a step runs stitched: equal kernels on all, and one choice of two.

    asked to stitch, or not   -> a wish of each worker    -> all stitch, beside moves if one has any; or none does
    regions of a segmentation -> an offer of each worker  -> all try these regions, or none does
    peaks, and times          -> a finding of each worker -> the same choice for all

What a worker computes behind an all-reduce updates its copy of the variables. So all compute it by equal kernels.
Regions before it may differ, since all get the sum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from graph_passes.graph.ir import Graph
from graph_passes.passes.fuse.equal_kernels import kernel_text, needed_by_updates
from graph_passes.passes.fuse.plan import FusionPlan
from tfmem.devices import conditions, instructions
from tfmem.runtime.engine import Engine
from tfmem.runtime.workers import Board
from tfmem.steps.agreement import digest, meets_others
from tfmem.steps.trace import Trace
from tfmem.steps.worker_records import Record, exchange, publish

_WISH, _OFFER, _FINDING = "fusion", "regions", "findings"  # parts of keys on the board


@dataclass(frozen=True)
class Wish:
    """Whether a worker may run a step stitched.

    Attributes:
        why: what keeps it from that; "" if nothing does.
        facts: what decides which kernels compute the step, by name.
        moves: whether tensors move on it; of all workers together, whether they do on any.
    """

    why: str = ""
    facts: Mapping[str, str] | None = None
    moves: bool = False

    @property
    def text(self) -> str:
        """The wish for the board."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Offer:
    """Regions that a worker could run; of all workers together, what all of them run.

    Attributes:
        why: what keeps it from that; "" if nothing does.
        kernels: a digest of those regions that have to be equal on all workers.
        regions: how many there are.
        new: whether the worker has not offered them before.
        last: whether the worker offers nothing after this.
        moved: seconds of the step with its moves, by the cost model.
        unlimited: seconds of the step without a budget, by the cost model.
    """

    why: str = ""
    kernels: str = ""
    regions: int = 0
    new: bool = True
    last: bool = False
    moved: float = 0.0
    unlimited: float = 0.0


@dataclass(frozen=True)
class FusionFinding:
    """What came of a step without regions and with them, on a worker; or on all of them together.

    Attributes:
        failed: why it cannot be said; "" if it can.
        given_over: bytes beyond its budgets of the step without regions.
        over: bytes beyond its budgets of the step with them.
        given: seconds of the step without regions.
        seconds: of the step with them.
        noise: by how much either may be off.
    """

    failed: str = ""
    given_over: int = 0
    over: int = 0
    given: float = 0.0
    seconds: float = 0.0
    noise: float = 0.0

    @property
    def excess(self) -> int:
        """Bytes beyond budgets of the step with regions, unless it takes more without; else 0."""
        return self.over if self.over > self.given_over else 0

    @property
    def less(self) -> int:
        """Bytes beyond budgets of the step without regions, unless it takes more with them; else 0."""
        return self.given_over if self.given_over > self.over else 0


def board_of(engine: Engine, trace: Trace) -> Board | None:
    """Where the workers of a step agree; None where it waits for no other, or there is no coordination service."""
    board = engine.workers.board()
    return board if board is not None and meets_others(trace.concrete.graph) else None


def decline(engine: Engine, trace: Trace, why: str) -> None:
    """Tell the other workers, which may wait for it, that this one does not stitch the step."""
    if (board := board_of(engine, trace)) is not None:
        publish(board, engine.workers, f"{trace.concrete.graph.name}/{_WISH}", Wish(why).text)


def wished(board: Board, engine: Engine, trace: Trace, moves: bool, timed: bool) -> Wish:
    """What all workers do: why none stitches, or whether tensors move on any.

    Args:
        board: where the workers agree.
        engine: of this worker.
        trace: the step.
        moves: whether tensors move here.
        timed: whether calls decide between the two versions.
    """
    own = Wish(facts={**facts_of(engine), "timed": str(timed)}, moves=moves)
    name, patience = f"{trace.concrete.graph.name}/{_WISH}", engine.workers.patience
    text = exchange(board, engine.workers, name, own.text, lambda texts: wish_of_all(texts, patience).text)
    return Wish(**json.loads(text))


def offered(board: Board, engine: Engine, trace: Trace, own: Offer) -> Offer:
    """What all workers run, of regions that each of them offers at the same time."""
    name, patience = f"{trace.concrete.graph.name}/{_OFFER}", engine.workers.patience

    def judge(texts: Mapping[str, str | None]) -> str:
        found = {task: None if text is None else Offer(**json.loads(text)) for task, text in texts.items()}
        return json.dumps(asdict(offer_of_all(found, patience)))

    return Offer(**json.loads(exchange(board, engine.workers, name, json.dumps(asdict(own)), judge)))


def withdraw(board: Board, engine: Engine, trace: Trace, why: str) -> None:
    """Tell the other workers, which may wait for it, that this one offers no regions any more."""
    publish(board, engine.workers, f"{trace.concrete.graph.name}/{_OFFER}", json.dumps(asdict(Offer(why, last=True))))


def abandon(board: Board, engine: Engine, trace: Trace, why: str) -> None:
    """Tell the other workers, which plan the memory of a step with regions now, that this one does not."""
    graph, workers = trace.concrete.graph, engine.workers
    record = Record(workers.version, digest(graph), engine.settings.budget, why=why)
    publish(board, workers, graph.name, record.text)
    publish(board, workers, f"{graph.name}/{_FINDING}", json.dumps(asdict(FusionFinding(why))))


def found_together(board: Board | None, engine: Engine, trace: Trace, own: FusionFinding) -> FusionFinding:
    """What all workers found, by which they choose; what this process found where it is the only one."""
    if board is None:
        return own
    name, patience = f"{trace.concrete.graph.name}/{_FINDING}", engine.workers.patience

    def judge(texts: Mapping[str, str | None]) -> str:
        found = {task: None if text is None else FusionFinding(**json.loads(text)) for task, text in texts.items()}
        return json.dumps(asdict(finding_of_all(found, patience)))

    return FusionFinding(**json.loads(exchange(board, engine.workers, name, json.dumps(asdict(own)), judge)))


def facts_of(engine: Engine) -> dict[str, str]:
    """What decides which kernels compute a step, besides its graph."""
    known = {**conditions(engine.settings.target), "instructions": instructions(engine.settings.target)}
    known.pop("driver", None)
    return {"tfmem": engine.workers.version, **{name: json.dumps(value) for name, value in known.items()}}


def digest_of(found: FusionPlan, graph: Graph) -> str:
    """What the regions compute that variables are updated by, of which ops, and by what code.

    Args:
        found: the regions.
        graph: with them. Regions in functions that it calls all count.
    """
    needed, names = needed_by_updates(graph), {node.name for node in graph}
    parts = [
        (
            sorted(each.schedule.members),
            kernel_text(each.lowered.region),
            [program.to_text() for program in each.programs],
        )
        for each in found.regions
        if each.name in needed or each.name not in names
    ]
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()


def wish_of_all(texts: Mapping[str, str | None], patience: float) -> Wish:
    """What all workers do: why none stitches, or whether tensors move on any."""
    known: dict[str, dict[str, Any]] = {}
    for task, text in texts.items():
        wish = {} if text is None else json.loads(text)
        if text is None:
            return Wish(_late(task, patience))
        if wish["why"]:
            return Wish(f"left unchanged: {task} does not stitch the step ({wish['why']})")
        known[task] = wish
        first = next(iter(known))
        for name, value in wish["facts"].items():
            if (other := known[first]["facts"].get(name)) != value:
                return Wish(
                    f"left unchanged: {task} has {name}={value}, and {first} has {name}={other}, so kernels behind "
                    "an all-reduce would differ; stitch on equal machines"
                )
    return Wish(moves=any(wish["moves"] for wish in known.values()))


def offer_of_all(found: Mapping[str, Offer | None], patience: float) -> Offer:
    """What all workers run: their regions, if those that have to be equal are."""
    known = [offer for offer in found.values() if offer is not None]
    for task, offer in found.items():
        if offer is None:
            return Offer(_late(task, patience), last=True)
        if offer.last:
            return Offer(offer.why, last=True)
    for task, offer in zip(found, known, strict=True):
        if offer.why:
            return Offer(offer.why)
        if offer.kernels != known[0].kernels:
            first = next(iter(found))
            return Offer(f"left unchanged: {task} would run other kernels than {first}, so variables would differ")
    return Offer(
        regions=max(offer.regions for offer in known),
        new=any(offer.new for offer in known),
        moved=max(offer.moved for offer in known),
        unlimited=max(offer.unlimited for offer in known),
    )


def finding_of_all(found: Mapping[str, FusionFinding | None], patience: float) -> FusionFinding:
    """What is excess on any worker counts, and the slowest worker's times, since workers wait for each other."""
    known = [each for each in found.values() if each is not None]
    for task, each in found.items():
        if each is None or each.failed:
            return FusionFinding(_late(task, patience) if each is None else each.failed)
    return FusionFinding(
        given_over=sum(each.given_over for each in known),
        over=sum(each.over for each in known),
        given=max(each.given for each in known),
        seconds=max(each.seconds for each in known),
        noise=max(each.noise for each in known),
    )


def _late(task: str, patience: float) -> str:
    return f"left unchanged: {task} published nothing on the step within {patience:g} seconds"
