"""One captured step with parts that run on pieces of the batch, chosen so that a memory plan meets the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from custom_ops.background import go_on
from graph_passes.analysis.cost.folded import folded
from graph_passes.analysis.memory.chains import SMALLEST_MOVED
from graph_passes.analysis.memory.replica_step import are_one_device
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.decision import Decision
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import IN_PLACE_OVER_FIRST
from graph_passes.graph.order import is_acyclic
from graph_passes.passes.offload.options import Effort, OffloadOptions
from graph_passes.passes.offload.plan import How, movable
from graph_passes.passes.offload.selection import lowest
from graph_passes.passes.split.apply import split_graph
from graph_passes.passes.split.plan import LARGE, SplitChoice, SplitEstimate, SplitLane, SplitNeeds
from graph_passes.passes.split.split_regions import NO_USERS, BatchDivision, SplitPlan, SplitRegion, Users
from graph_passes.pipeline import SPLIT, PassOutcome, PassPhase, Step, StepSource, plan_step, run_passes
from graph_passes.refusals import Reason, Refusal
from graph_passes.report import Report, SplitRecord

CLEARLY = 0.9  # of a step's time, as predicted: predictions are off by up to 6%
FASTER = 0.95  # of it, as measured: a split changes the order of sums, and has to be worth that
_NEAR = 0.85  # of what the largest op needs: where less is needed, a split does not help


@dataclass(frozen=True, eq=False)
class SplitStep:
    """A step with parts that run on pieces of the batch.

    Attributes:
        graph: the edited graph.
        order: the order in which its ops are to run.
        plan: what was split.
        peak_before: bytes that the unmodified step needs, by estimate.
        seconds_before: how long it takes, by estimate.
        peaks_before: of a step of several devices, bytes that each needs, as its nodes name it.
        note: what a report says of why it is split; "" for nothing.
    """

    graph: Graph
    order: tuple[str, ...]
    plan: SplitPlan
    peak_before: int = 0
    seconds_before: float = 0.0
    peaks_before: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


def split_step(
    step: Step,
    timeline_of: Callable[[Step], Timeline],
    link: Link,
    budget: int,
    options: OffloadOptions,
    rate: float = 0.0,
    known: Sequence[BatchDivision] = (),
    measured: bool = False,
    users: Users = NO_USERS,
) -> SplitStep | Refusal:
    """The fastest division of the step that meets the budget, or why there is none.

    Args:
        step: the step; not changed.
        timeline_of: a step under a cost model.
        link: bandwidths of the link to the host.
        budget: bytes.
        options: of the memory plan.
        rate: share of the unlimited rate that the step keeps with nothing split: a split has to be clearly faster; 0 if
            the step does not run so.
        known: the division that an earlier process chose; () where none did. Another is chosen where it fails.
        measured: whether the known one was measured to meet the budget: it is carried out, or none is.
        users: what else reads tensors of the step.
    """
    if options.split == "never":
        return Reason.SPLIT_NEVER()
    devices = sorted({node.device for node in step.graph if node.device})
    if step.shared or not are_one_device(devices):
        return Reason.SPLIT_SHARED(detail=step.shared or ", ".join(devices))

    def trial(plan: SplitPlan) -> SplitEstimate:
        go_on()
        graph, order = split_graph(plan, step.graph)
        if not is_acyclic(graph):  # one piece gives what a condition reads, and another reads what that gives
            return SplitEstimate(LARGE)
        found = read_again(step, graph, order)
        timeline = timeline_of(found)
        try:
            planned = plan_step(found, timeline, link, budget, options, effort=Effort.GREEDY)
        except InfeasibleBudgetError as error:
            return SplitEstimate(error.least)
        floor = planned.verdict.smallest_budget if planned.verdict else planned.after.peak
        return SplitEstimate(floor, planned.after.seconds)

    timeline = timeline_of(step)
    if budget <= timeline.base:
        return Reason.SPLIT_BASE(base=f"{timeline.base:,}")
    seconds = float(timeline.begins[-1])
    faster_than = CLEARLY * seconds / rate if rate else float("inf")
    lane = SplitLane(timeline.turn, over_budget(timeline, budget, options), alone=alone_over(step, timeline, budget))
    needs = SplitNeeds(step.order, step.fetches, [lane], budget, trial, faster_than, known, measured, users)
    found = divided(step, needs)
    if isinstance(found, Refusal):
        return found
    return replace(found, peak_before=timeline.peak, seconds_before=seconds)


def over_budget(timeline: Timeline, budget: int, options: OffloadOptions) -> frozenset[str]:
    """The ops at whose positions no memory plan meets the budget, and those that need nearly as much as any."""
    usage = lowest(timeline, movable(timeline, options, How()))
    limit = min(budget, _NEAR * int(usage.max(initial=0)))
    return frozenset(item.node for item, nbytes in zip(timeline.steps, usage, strict=True) if nbytes > limit)


def alone_over(step: Step, timeline: Timeline, budget: int) -> dict[str, int]:
    """The ops that exceed the budget with nothing in memory but what they read and make, and the bytes of that.

    A division around such an op leaves what it reads whole. What TensorFlow folds is left out: a division may change
    it. So are lists, whose elements may be elsewhere, and what may be written over an input.
    """
    graph = step.graph
    constants = sum(graph.nbytes(TensorId(node.name)) for node in graph if node.op == "Const")
    base = timeline.base - folded(graph) - constants
    needed = [base + item.workspace for item in timeline.steps]
    for buffer in timeline.buffers:
        if buffer.element or buffer.holders or buffer.nbytes < SMALLEST_MOVED:
            continue
        sizes: dict[str, int] = {}
        for view in buffer.views:
            for use in graph.uses(view):
                sizes[use.node] = max(sizes.get(use.node, 0), min(graph.nbytes(view), buffer.nbytes))
        if graph[buffer.tensor.node].op not in IN_PLACE_OVER_FIRST:
            sizes[buffer.tensor.node] = buffer.nbytes
        for place in (buffer.start, *buffer.uses):
            needed[place] += sizes.get(timeline.steps[place].node, 0)
    return {item.node: nbytes for item, nbytes in zip(timeline.steps, needed, strict=True) if nbytes > budget}


def divided(step: Step, needs: SplitNeeds) -> SplitStep | Refusal:
    """The step as the pass divides it; its figures before are not filled in."""
    done = run_passes(PassPhase.UNDER_BUDGET, (SPLIT.option,), StepSource(step), {SPLIT.name: lambda _: needs})
    outcome: PassOutcome[SplitChoice] = done[SPLIT.name]
    failed = next(iter(outcome.errors.values()), outcome.failed)
    if failed is not None:
        raise failed
    choice = outcome.plan or SplitChoice()
    if choice.plan is None:
        return choice.refused or Reason.SPLIT_NO_REGION()
    graph, order = split_graph(choice.plan, step.graph)
    return SplitStep(graph, order, choice.plan)


def read_again(step: Step, graph: Graph, order: tuple[str, ...]) -> Step:
    """The step with another graph."""
    loss = step.loss if step.loss is not None and step.loss.node in graph.nodes else None
    found = Step.read(graph, order, step.fetches, loss, step.merging, step.counted, step.of_data)
    return replace(found, shared=step.shared, hosted=step.hosted)


def _device(region: SplitRegion) -> str:
    """The device of a region's ops, as "GPU:1"."""
    return region.separable.graph[region.members[0]].device.rpartition("device:")[2]


def with_split(report: Report, split: SplitStep, moves: bool) -> Report:
    """The report of a step with parts that run on pieces, beside the unmodified step.

    Args:
        report: of the edited step.
        split: what was done.
        moves: whether tensors move as well.
    """
    records = tuple(
        SplitRecord(
            device=_device(region) if split.peaks_before else "",
            ops=len(region.members),
            again=len(region.again),
            first=region.members[0],
            last=region.members[-1],
            pieces=region.pieces,
            exactness=str(split.plan.exactness),
        )
        for region in split.plan.regions
    )
    verdict = report.verdict
    if verdict is not None:
        how = "split along the batch, with moves" if moves else "split along the batch"
        verdict = replace(verdict, fits=False, seconds_unlimited=split.seconds_before, least=None, how=how)
    decision = report.decision if moves else Decision.SPLIT
    return replace(report, splits=records, verdict=verdict, decision=decision, peak_before=split.peak_before)
