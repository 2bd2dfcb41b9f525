"""A step of several replicas with parts that run on pieces of the batch: each lane's along the batch of its replica.

    lane of GPU:0    f0 f0 | f0 f0 -> sum0 -> c0 -> update      c0 and c1 are one all-reduce, of the sums of all pieces,
    lane of GPU:1    f1 f1 | f1 f1 -> sum1 -> c1 -> update      and run once in each step, as without pieces

A piece has ops of one lane, and waits for that lane alone: so no edge that is added joins two lanes. Replicas are one
program, so their lanes have as many pieces, or none has any. A lane without collectives is no replica, and stays whole:
the host's beside GPUs, which reads data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from custom_ops.background import go_on
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.analysis.peers import meeting_nodes, meetings, waits_for_itself
from graph_passes.errors import GraphError, InfeasibleBudgetError
from graph_passes.graph.ir import Graph
from graph_passes.graph.order import is_acyclic
from graph_passes.passes.offload.lanes import LanePlan, LaneShare, Pool, lane_shares, plan_lanes
from graph_passes.passes.offload.options import Effort, OffloadOptions
from graph_passes.passes.split.apply import split_graph
from graph_passes.passes.split.plan import LARGE, SplitEstimate, SplitLane, SplitNeeds
from graph_passes.passes.split.split_regions import BatchDivision, SplitPlan
from graph_passes.pipeline import Step
from graph_passes.refusals import Reason, Refusal
from graph_passes.splitting import CLEARLY, SplitStep, divided, over_budget, read_again


def split_lanes(
    step: Step,
    timeline_of: Callable[[Step], Timeline],
    pools: Sequence[Pool],
    default: str,
    options: OffloadOptions,
    rate: float = 0.0,
    known: Sequence[BatchDivision] = (),
) -> SplitStep | Refusal:
    """The fastest division of all lanes that meets the budgets of their pools, or why there is none.

    Args:
        step: of all replicas of this process; not changed.
        timeline_of: a step under a cost model.
        pools: the memory of all lanes.
        default: the device of ops that name none.
        options: of the memory plans.
        rate: see `split_step`.
        known: of each replica's lane the division that another worker chose: this one, or none; () to choose one.
    """
    if options.split == "never":
        return Reason.SPLIT_NEVER()
    try:
        meetings(step.graph)
    except GraphError as error:
        return Reason.SPLIT_SHARED(detail=str(error))
    timeline = timeline_of(step)
    shares = lane_shares(step.graph, timeline, pools, default)
    replicas = _replicas(step.graph, shares)
    full = next((lane for lane in replicas if lane.budget <= lane.timeline.base), None)
    if full is not None:
        why = Reason.SPLIT_BASE(base=f"{full.timeline.base:,}")
        return Reason.SPLIT_DEVICE(device=full.device, why=str(why))
    budget = min(lane.pool.planned_budget for lane in replicas)
    devices = {lane.device for lane in replicas}

    def trial(plan: SplitPlan) -> SplitEstimate:
        go_on()
        graph, order = split_graph(plan, step.graph)
        if not is_acyclic(graph) or waits_for_itself(graph):
            return SplitEstimate(LARGE)
        found = read_again(step, graph, order)
        try:
            planned = plan_lanes(
                graph, timeline_of(found), pools, default, options, relax=not step.merging, effort=Effort.GREEDY
            )
        except InfeasibleBudgetError as error:
            return SplitEstimate(error.least)
        split = [each for each in planned if each.device in devices]
        return SplitEstimate(round(budget * max(map(_needed, split))), max(each.plan.after.seconds for each in split))

    seconds = max(float(lane.timeline.begins[-1]) for lane in replicas)
    lanes = [
        SplitLane(lane.timeline.turn, over_budget(lane.timeline, lane.budget, options), lane.device)
        for lane in replicas
    ]
    faster_than = CLEARLY * seconds / rate if rate else float("inf")
    needs = SplitNeeds(
        step.order, step.fetches, lanes, budget, trial, faster_than, known, only=bool(known), default=default
    )
    found = divided(step, needs)
    if isinstance(found, Refusal):
        return found
    peaks = {lane.device: lane.timeline.peak for lane in shares}
    return replace(found, peak_before=max(peaks.values()), seconds_before=seconds, peaks_before=peaks)


def _replicas(graph: Graph, shares: Sequence[LaneShare]) -> Sequence[LaneShare]:
    """The lanes with collectives; all of them where none has any."""
    meet = {graph[name].device for name in meeting_nodes(graph)}
    return [lane for lane in shares if lane.device in meet] or shares


def _needed(lane: LanePlan) -> float:
    """The share of its budget that no plan of a lane goes below."""
    plan = lane.plan
    return (plan.verdict.smallest_budget if plan.verdict else plan.after.peak) / plan.budget
