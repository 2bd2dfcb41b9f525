"""Plans of several devices whose budgets differ: each keeps its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.simulate import Link
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.passes.offload.lanes import LanePlan, Pool, plan_lanes, tighter_margins
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.pipeline import Step
from tests.spmd_graphs import Spmd, device, training_step

NET = Spmd((2, 3, 1, 2, 4, 1, 2), (0, 0, 0, 1, 2, 1, 3), 2, 2)
OPTIONS = OffloadOptions(reuse_distance=1)
FAST, SLOW = Link(4e9, 4e9), Link(1.0, 1.0)


def plans(*pools: Pool) -> tuple[LanePlan, ...]:
    step = Step.read(training_step(NET))
    return plan_lanes(step.graph, step.timeline(Roofline(load("unit"))), pools, device(0), OPTIONS)


def pool(lane: int, budget: int | None = None, link: Link = FAST) -> Pool:
    return Pool(f"GPU:{lane}", (device(lane),), budget, link=link)


def peak() -> int:
    first, second = plans(pool(0), pool(1))
    assert first.timeline.peak == second.timeline.peak
    return first.timeline.peak


def test_each_device_keeps_its_own_budget() -> None:
    scarce = round(0.8 * peak())
    first, second = plans(pool(0), pool(1, scarce))
    assert not first.plan.moves
    assert second.plan.moves
    assert second.plan.after.peak <= scarce < first.plan.after.peak
    assert [(each.pool.name, each.pool.budget) for each in (first, second)] == [("GPU:0", None), ("GPU:1", scarce)]
    first, second = plans(pool(0, scarce), pool(1, peak()))
    assert first.plan.moves
    assert not second.plan.moves


def test_devices_of_one_allocator_share_its_budget() -> None:
    whole = Pool("CPU:0", (device(0), device(1)), round(0.8 * 2 * peak()))
    found = plans(whole)
    assert all(each.plan.moves for each in found)
    assert sum(each.plan.after.peak for each in found) <= round(0.8 * 2 * peak())


def with_host(graph: Graph) -> tuple[Graph, str]:
    """The graph with two ops of one number on the CPU of its GPUs, and that CPU."""
    host = device(0).replace("GPU", "CPU")
    nodes = [
        Node("read", "Range", device=host, outputs=1),
        Node("use", "Consume", [TensorId("read")], device=host, stateful=True),
    ]
    specs = {**graph.specs, TensorId("read"): TensorSpec("float32", 4, (1,))}
    return Graph([*nodes, *graph], specs, graph.constants), host


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_device_that_takes_little_is_never_short_of_it(share: float) -> None:
    """A share of four bytes in proportion would be too little for them."""
    graph, host = with_host(training_step(NET))
    step = Step.read(graph)
    whole = Pool("CPU:0", (host, device(0), device(1)), round(share * 2 * peak()))
    found = plan_lanes(graph, step.timeline(Roofline(load("unit"))), [whole], device(0), OPTIONS)
    assert [each.device for each in found if each.plan.moves] == [device(0), device(1)]
    assert sum(each.plan.after.peak for each in found) <= (whole.budget or 0)


@pytest.mark.parametrize("in_use", [0, 100_000])
def test_the_budget_that_an_error_names_is_enough(in_use: int) -> None:
    """Also where what is in use before the step exceeds the budget."""
    graph, host = with_host(training_step(NET))
    whole = Pool("CPU:0", (host, device(0), device(1)), 100, in_use=in_use)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_lanes(graph, Step.read(graph).timeline(Roofline(load("unit"))), [whole], device(0), OPTIONS)
    enough = replace(whole, budget=caught.value.smallest_budget)
    assert plan_lanes(graph, Step.read(graph).timeline(Roofline(load("unit"))), [enough], device(0), OPTIONS)


def test_a_device_that_no_plan_fits_is_named() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"on .*GPU:1: "):
        plans(pool(0), pool(1, 1))
    shared = Pool("CPU:0", (device(0), device(1)), 1)
    with pytest.raises(InfeasibleBudgetError, match="memory_budget is 1 bytes for the 2 devices of one allocator"):
        plans(shared)


def test_each_device_has_its_own_link() -> None:
    scarce = round(0.8 * peak())
    first, second = plans(pool(0, scarce, FAST), pool(1, scarce, SLOW))
    assert (first.plan.link, second.plan.link) == (FAST, SLOW)
    assert first.plan.after.stall < second.plan.after.stall
    again = plans(pool(0, scarce, FAST), replace(pool(1, scarce), link=FAST))[1]
    assert again.plan.after.stall < second.plan.after.stall


def test_what_was_over_is_a_margin_of_that_device_alone() -> None:
    budget = peak()
    found = plans(pool(0, budget + 1000), pool(1, budget + 1000))
    margins = tighter_margins(found, {"GPU:1": 64})
    assert margins == {"GPU:0": 0, "GPU:1": 1000 + 64}  # below its own peak, or the same plan would come again
    first, second = plans(pool(0, budget + 1000), replace(pool(1, budget + 1000), margin=margins["GPU:1"]))
    assert first.plan.actions == found[0].plan.actions
    assert second.plan.after.peak <= budget - 64
    assert second.pool.budget == budget + 1000
    assert tighter_margins((first, second), {"GPU:1": 10})["GPU:1"] >= margins["GPU:1"] + 10
