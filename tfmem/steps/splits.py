"""Divides a step along the batch: on one device, or in the lanes of all replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.analysis.cost.model import CostModel
from graph_passes.analysis.peers import default_lane
from graph_passes.lane_splitting import split_lanes
from graph_passes.passes.split.split_regions import BatchDivision
from graph_passes.pipeline import Step
from graph_passes.refusals import Reason, Refusal
from graph_passes.splitting import SplitStep, split_step
from tfmem.runtime.engine import Engine
from tfmem.steps.replicas import budgets_on_devices, estimated, in_use_on_devices, pools_under, waits_for_others


def split_under(
    step: Step,
    engine: Engine,
    budget: int,
    rate: float = 0.0,
    costs: CostModel | None = None,
    in_use: Mapping[str, int] | None = None,
    known: Sequence[BatchDivision] = (),
    measured: bool = False,
) -> SplitStep | Refusal:
    """The fastest division of a step that meets the budget, or why there is none.

    Args:
        step: the step; not changed.
        engine: options, op library and devices. Each device of a step of several has its budget there.
        budget: bytes, of a step of one device.
        rate: share of the unlimited rate that the step keeps with nothing split; see `split_step`.
        costs: of its ops; by default an estimate, with the memory that is in use now.
        in_use: bytes by allocator that are taken while no step of several devices runs; by default what is in use now.
        known: of each device the division that another process chose; see `split_step` and `split_lanes`.
        measured: of a step of one device; see `split_step`.
    """
    options, graph = engine.settings.options.offload, step.graph
    if not step.shared:
        by = costs or engine.estimate(workspace=False)
        return split_step(step, lambda each: each.timeline(by), engine.link, budget, options, rate, known, measured)
    if waits_for_others(graph) and engine.workers.board() is None:  # they could not agree
        return Reason.SPLIT_SHARED(detail=step.shared)
    by = costs or estimated(engine)
    in_use = in_use_on_devices(graph, engine) if in_use is None else in_use
    pools = pools_under(graph, engine, budgets_on_devices(step, engine), {}, in_use)
    default = default_lane(graph)
    return split_lanes(step, lambda each: each.timeline(by), pools, default, options, rate, known)
