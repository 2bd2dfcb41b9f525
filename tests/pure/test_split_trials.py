"""Divisions that are not planned: an op that they leave whole needs more than the budget, so no choice changes; or they
have too many ops."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes import splitting
from graph_passes.analysis.batch.separable import again, levels
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.simulate import Link
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.passes.offload.options import Effort, OffloadOptions
from graph_passes.passes.split import plan as split_plan
from graph_passes.passes.split.apply import split_graph
from graph_passes.passes.split.plan import (
    FIRST_TRIALS,
    LARGE,
    SplitChoice,
    SplitEstimate,
    SplitLane,
    SplitNeeds,
    plan_split,
)
from graph_passes.passes.split.split_regions import SplitPlan, plan_of
from graph_passes.pipeline import Step, plan_step
from graph_passes.refusals import Refusal
from graph_passes.splitting import SplitStep, alone_over, read_again
from tests.pure.test_split import split, trained
from tests.tiers import examples

COSTS = Roofline(load("unit"))


def least_of(step: Step, plan: SplitPlan, budget: int) -> int:
    """Bytes that no memory plan of the divided step goes below."""
    found = read_again(step, *split_graph(plan, step.graph))
    try:
        planned = plan_step(
            found, found.timeline(COSTS), Link(1.0, 1.0), budget, OffloadOptions(reuse_distance=1), effort=Effort.GREEDY
        )
    except InfeasibleBudgetError as error:
        return error.least
    assert planned.verdict is not None
    return planned.verdict.smallest_budget


@settings(max_examples=examples(60))
@given(
    batch=st.integers(4, 40),
    width=st.sampled_from([16, 1 << 12, 1 << 14]),
    statistics=st.booleans(),
    more=st.booleans(),
    share=st.integers(0, 100),
    data=st.data(),
)
def test_what_a_division_leaves_whole_needs_what_it_reads(
    batch: int, width: int, statistics: bool, more: bool, share: int, data: st.DataObject
) -> None:
    found = trained(batch, width, statistics).separable()
    parts = [(part, again(found, part) if more else frozenset[str]()) for part in levels(found)]
    parts = [part for part in parts if data.draw(st.booleans())]
    step = Step.read(found.graph, fetches=[TensorId("loss")])
    timeline = step.timeline(COSTS)
    plan = plan_of(found, parts, data.draw(st.integers(2, 4)), step.fetches)
    inside = frozenset().union(*(members | others for members, others in parts))
    alone = alone_over(step, timeline, 0)
    outside = max((nbytes for name, nbytes in alone.items() if name not in inside), default=0)
    budget = timeline.base + (timeline.peak - timeline.base) * share // 100
    assert outside <= least_of(step, plan, budget)
    divided = split_graph(plan, step.graph)[1]
    assert plan.ops(len(step.order)) <= len(divided) <= 4 * plan.ops(len(step.order))


def chosen(graph: Graph, alone: dict[str, int]) -> tuple[SplitChoice, list[tuple[int, bool]]]:
    """What is chosen for 150 bytes, and the trials: how many pieces, and whether "a" is among the parts."""
    tried: list[tuple[int, bool]] = []

    def trial(plan: SplitPlan) -> SplitEstimate:
        count, whole = len(plan.regions[0].pieces), "a" in plan.regions[0].members
        tried.append((count, whole))
        return SplitEstimate(1000 // count if whole else 400, 1.0 if whole and count >= 8 else None)

    class Source:
        def read(self) -> Graph:
            return graph

    order = Step.read(graph).order
    needs = SplitNeeds(order, (), [SplitLane(order.index("loss"), (), alone=alone)], 150, trial)
    source: Any = Source()
    return plan_split(source, needs)[0], tried


def test_a_division_that_changes_nothing_is_not_planned() -> None:
    graph = trained(batch=32).graph()
    every, all_tried = chosen(graph, {})
    some, tried = chosen(graph, {"a": 400})
    assert every.plan is not None
    assert (some.plan, some.least) == (every.plan, every.least)
    assert (2, False) in tried  # 400 bytes are the least so far, which a refusal would name
    assert [count for count, whole in all_tried if not whole] == [2, 2, 4, 4, 8, 8, 16, 16]
    assert [count for count, whole in tried if not whole] == [2]
    assert [each for each in tried if each[1]] == [each for each in all_tried if each[1]]


def test_what_fits_is_planned_though_others_need_less() -> None:
    graph = trained(batch=32).graph()
    _, all_tried = chosen(graph, {})
    assert chosen(graph, {"a": 150})[1] == all_tried
    assert chosen(graph, {"a": LARGE})[1] == [each for each in all_tried if each[1]]


def test_once_some_were_planned_no_large_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trained(batch=32).graph()
    _, all_tried = chosen(graph, {})
    monkeypatch.setattr(split_plan, "MOST_OPS", 0)
    assert chosen(graph, {})[1] == all_tried[:FIRST_TRIALS]
    monkeypatch.setattr(split_plan, "MOST_OPS", 16 * len(graph))
    _, tried = chosen(graph, {})
    assert FIRST_TRIALS < len(tried) < len(all_tried)


def test_a_division_with_a_cycle_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the optimizer's condition, behind all pieces, reads what one piece gives and is read by another."""
    graph = trained(batch=64, width=1 << 12).graph()
    room = Step.read(graph).timeline(Roofline(load("unit"))).base + (1 << 20)
    best = split(graph, room)
    assert isinstance(best, SplitStep)

    def made(plan: SplitPlan, given: Graph) -> tuple[Graph, tuple[str, ...]]:
        divided, order = split_graph(plan, given)
        if plan.regions[0].pieces == best.plan.regions[0].pieces:
            divided[order[0]].control = [order[-1]]
        return divided, order

    monkeypatch.setattr(splitting, "split_graph", made)
    found = split(graph, room)
    assert isinstance(found, Refusal) or found.plan.regions[0].pieces != best.plan.regions[0].pieces
