"""What the workers of a cluster agree on before a step runs stitched: equal kernels on all, and one choice of two.

    regions, or why there are none -> a wish of each worker -> stitched on all, or on none
    times of each worker           -> the slowest of each   -> the same choice for all

What a worker computes behind an all-reduce updates its copy of the variables. So all compute it by equal kernels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from graph_passes.decision import FusionWhy
from graph_passes.passes.fuse.equal_kernels import kernel_text
from graph_passes.passes.fuse.plan import FusionPlan
from tfmem.devices import conditions, instructions
from tfmem.runtime.engine import Engine
from tfmem.runtime.workers import Board
from tfmem.steps.agreement import exchange, meets_others, publish
from tfmem.steps.trace import Trace
from tfmem.timing.ab_timing import Times

_WISH, _TIMES = "fusion", "times"  # parts of keys on the board


@dataclass(frozen=True)
class Wish:
    """Whether a worker can run a step stitched, and by what kernels.

    Attributes:
        why: what keeps it from that; "" if nothing does.
        facts: what decides which kernels compute the step, by name.
        regions: a digest of the regions and of their kernels.
    """

    why: str = ""
    facts: Mapping[str, str] | None = None
    regions: str = ""

    @property
    def text(self) -> str:
        """The wish for the board."""
        return json.dumps(asdict(self))


def board_of(engine: Engine, trace: Trace) -> Board | None:
    """Where the workers of a step agree; None where it waits for no other, or there is no coordination service."""
    board = engine.workers.board()
    return board if board is not None and meets_others(trace.concrete.graph) else None


def decline(engine: Engine, trace: Trace, why: str) -> None:
    """Tell the other workers, which may wait for it, that this one does not stitch the step."""
    if (board := board_of(engine, trace)) is not None:
        publish(board, engine.workers, f"{trace.concrete.graph.name}/{_WISH}", Wish(why).text)


def kept_by_others(board: Board, engine: Engine, trace: Trace, found: FusionPlan, timed: bool) -> str:
    """Why no worker runs the step stitched, the same on all; "" if all do.

    Args:
        board: where the workers agree.
        engine: of this worker.
        trace: the step.
        found: its regions.
        timed: whether calls decide between the two versions.
    """
    wish = Wish(facts={**facts_of(engine), "timed": str(timed)}, regions=digest_of(found))
    name = f"{trace.concrete.graph.name}/{_WISH}"
    return exchange(board, engine.workers, name, wish.text, lambda texts: verdict_of(texts, engine.workers.patience))


def facts_of(engine: Engine) -> dict[str, str]:
    """What decides which kernels compute a step, besides its graph."""
    known = {**conditions(engine.settings.target), "instructions": instructions(engine.settings.target)}
    known.pop("driver", None)
    return {"tfmem": engine.workers.version, **{name: json.dumps(value) for name, value in known.items()}}


def digest_of(found: FusionPlan) -> str:
    """What the regions compute, and by what code; replicas of one worker count once."""
    parts = {
        (kernel_text(each.lowered.region), tuple(program.to_text() for program in each.programs))
        for each in found.regions
    }
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()


def verdict_of(texts: Mapping[str, str | None], patience: float) -> str:
    """Why no worker stitches; "" if all do."""
    first: tuple[str, dict[str, Any]] | None = None
    for task, text in texts.items():
        wish = {} if text is None else json.loads(text)
        if text is None:
            return f"left unchanged: {task} published nothing on the step within {patience:g} seconds"
        if wish["why"]:
            return f"left unchanged: {task} does not stitch the step ({wish['why']})"
        if first is None:
            first = task, wish
        for name, value in wish["facts"].items():
            if (other := first[1]["facts"].get(name)) != value:
                return (
                    f"left unchanged: {task} has {name}={value}, and {first[0]} has {name}={other}, so kernels behind "
                    "an all-reduce would differ; stitch on equal machines"
                )
        if wish["regions"] != first[1]["regions"]:
            return f"left unchanged: {task} would run other kernels than {first[0]}, so variables would differ"
    return ""


def agreed_times(board: Board, engine: Engine, trace: Trace, times: Times) -> Times | None:
    """The times by which all workers choose: of each version those of the slowest; None if a worker gave none."""

    def slowest(texts: Mapping[str, str | None]) -> str:
        if None in texts.values():
            return ""
        found = [json.loads(text) for text in texts.values() if text is not None]
        return json.dumps({name: max(each[name] for each in found) for name in ("given", "stitched", "noise")})

    name = f"{trace.concrete.graph.name}/{_TIMES}"
    text = exchange(board, engine.workers, name, json.dumps(asdict(times)), slowest)
    return Times(**json.loads(text)) if text else None


def declined(stitches: bool, unchanged: bool) -> str:
    """Why this worker does not come to a plan of regions; "" if it does."""
    if not stitches:
        return "it was not asked to"
    return "" if unchanged else str(FusionWhy.PLANNED)
