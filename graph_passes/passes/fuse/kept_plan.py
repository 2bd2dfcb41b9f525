"""A plan of regions as JSON has it, so that another process need not make it. Pure.

It holds what was chosen: the steps of each region, what they read and make, and why other nodes stay outside. Kernels
are not in it: a later process may know faster ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from custom_ops.fusion.text import from_text
from graph_passes.graph.ir import TensorId
from graph_passes.passes.fuse.lower_region import Lowered
from graph_passes.passes.fuse.partition.ilp import PatternChoice
from graph_passes.passes.fuse.partition.partition import RegionSchedule, RegionStep, StepKind
from graph_passes.passes.fuse.plan import FusionPlan, RegionPlan, Unfused
from graph_passes.refusals import Reason, Refusal
from graph_passes.report import RegionRecord, StepRecord


def written(plan: FusionPlan) -> dict[str, Any]:
    """What `read` reads: the plan without programs.

    Raises:
        TypeError: a reason is about something that JSON does not hold.
    """
    kept = [{"name": each.name, "members": each.members, "reason": _refusal(each.reason)} for each in plan.kept]
    reasons = {name: _refusal(why) for name, why in plan.reasons.items()}
    return {"regions": list(map(_region, plan.regions)), "kept": kept, "reasons": reasons}


def read(found: Mapping[str, Any]) -> FusionPlan:
    """The plan that `written` wrote.

    Raises:
        ValueError, TypeError, KeyError, IndexError, AttributeError: it is none. A RegionError, of a text that is no
            region, is a ValueError.
    """
    kept = (
        Unfused(each["name"], tuple(each["members"]), _read_refusal(each["reason"]), warned=False)
        for each in found["kept"]
    )
    reasons = {name: _read_refusal(why) for name, why in found["reasons"].items()}
    return FusionPlan(tuple(map(_read_region, found["regions"])), tuple(kept), reasons)


def _region(region: RegionPlan) -> dict[str, Any]:
    lowered = region.lowered
    return {
        "name": region.name,
        "steps": [_step(each) for each in region.schedule.steps],
        "choice": asdict(region.schedule.choice),
        "record": region.record.name,
        "recorded": [[each.kind, each.ops, each.after] for each in region.record.steps],
        "text": region.text,
        "inputs": list(map(_tensor, lowered.inputs)),
        "variables": list(map(_tensor, lowered.variables)),
        "outputs": list(map(_tensor, lowered.outputs)),
        "renamed": region.renamed,
        "timed": region.timed,
        "keeps_memory": region.keeps_memory,
    }


def _step(step: RegionStep) -> list[Any]:
    return [step.kind.value, step.members, step.saves, step.seconds, step.explored]


def _read_region(found: Mapping[str, Any]) -> RegionPlan:
    steps = tuple(
        RegionStep(StepKind(kind), tuple(members), saves, seconds, explored)
        for kind, members, saves, seconds, explored in found["steps"]
    )
    choice: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in found["choice"].items()
    }
    recorded = (StepRecord(kind, tuple(map(tuple, ops)), tuple(after)) for kind, ops, after in found["recorded"])
    tensors = (tuple(map(_read_tensor, found[each])) for each in ("inputs", "variables", "outputs"))
    return RegionPlan(
        found["name"],
        RegionSchedule(steps, PatternChoice(**choice)),
        Lowered(from_text(found["text"]), *tensors),
        found["text"],
        RegionRecord(found["record"], tuple(recorded)),
        tuple(found["renamed"]),
        timed=found["timed"],
        keeps_memory=found["keeps_memory"],
    )


def _tensor(tensor: TensorId) -> list[Any]:
    return [tensor.node, tensor.index]


def _read_tensor(found: Sequence[Any]) -> TensorId:
    node, index = found
    return TensorId(node, index)


def _refusal(refusal: Refusal) -> dict[str, Any]:
    return {"reason": refusal.reason.name, "about": [[key, _argument(value)] for key, value in refusal.arguments]}


def _read_refusal(found: Mapping[str, Any]) -> Refusal:
    return Refusal(Reason[found["reason"]], tuple((key, _read_argument(value)) for key, value in found["about"]))


def _argument(value: object) -> Any:
    if isinstance(value, TensorId):
        return {"tensor": _tensor(value)}
    if isinstance(value, Refusal):
        return {"refusal": _refusal(value)}
    if isinstance(value, tuple | list):
        return {type(value).__name__: list(map(_argument, value))}
    if isinstance(value, Exception):
        return str(value)  # all that a reason says of it
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TypeError(f"a reason is about {value!r}, which the cache does not hold")


def _read_argument(found: Any) -> object:
    if not isinstance(found, Mapping):
        return found
    ((kind, value),) = found.items()
    if kind == "tensor":
        return _read_tensor(value)
    if kind == "refusal":
        return _read_refusal(value)
    return {"tuple": tuple, "list": list}[kind](map(_read_argument, value))
