"""Replicas on pieces of the batch: each lane along its replica's batch, all in as many pieces, collectives once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.batch.separable import again, convex, levels, separable
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.peers import default_lane, is_collective, lanes, meetings, waits_for_itself
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.order import is_acyclic, topological
from graph_passes.graph.verify import verify_graph
from graph_passes.lane_edits import edit_lanes
from graph_passes.lane_splitting import split_lanes
from graph_passes.passes.offload.lanes import LanePlan, Pool, plan_lanes
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.split.apply import split_graph
from graph_passes.passes.split.split_regions import BatchDivision, Exactness, SplitPlan, plan_of, plan_of_devices
from graph_passes.pipeline import Step
from graph_passes.refusals import Reason, Refusal
from graph_passes.splitting import CLEARLY, SplitStep
from tests.spmd_batches import Batches, batched_step, execute, nets
from tests.spmd_graphs import device
from tests.tiers import examples

OPTIONS = OffloadOptions(reuse_distance=1)
UNIT = Roofline(load("unit"))
WIDE = 64  # numbers of a unit of a layer
NET = Batches((2, 4, 2), (-1, -1, 0), ("", "", ""), (1024, 1024), 2)


def planned(graph: Graph, batches: Sequence[int], count: int, kind: str) -> SplitPlan:
    """All lanes in so many pieces: their largest part, or all parts between borders, made again or not."""
    order, plans = tuple(topological(graph)), []
    for lane, batch in enumerate(batches):
        found = separable(graph, order, batch, ["losses"], device(lane))
        parts: list[Any] = [(convex(found, found.rules), frozenset[str]())]
        if kind != "largest":
            more = kind == "again"
            parts = [(members, again(found, members) if more else frozenset[str]()) for members in levels(found)]
        plans.append(plan_of(found, parts, count, [TensorId("losses")]))
    return plan_of_devices(plans)


def joined(graph: Graph) -> list[tuple[str, str]]:
    """The edges between two lanes, but from inputs and variables."""
    return [
        (before, node.name)
        for node in graph
        for before in graph.predecessors(node)
        if graph[before].device not in ("", node.device)
    ]


def require_equal(edited: Graph, graph: Graph, seed: int = 0) -> None:
    """That all updates and losses are given the same numbers, to rounding, and that no node waits for ever."""
    expected, _ = execute(graph)
    found, stuck = execute(edited, seed)
    assert not stuck
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9)


@settings(max_examples=examples(60))
@given(net=nets(), count=st.integers(2, 3), kind=st.sampled_from(["largest", "every", "again"]), seed=st.integers())
def test_pieces_of_random_replicas(net: Batches, count: int, kind: str, seed: int) -> None:
    """In whatever order ops run, sums are those of the whole batch, and each collective runs once, in its turn."""
    graph = batched_step(net)
    plan = planned(graph, net.batches, min(count, *net.batches), kind)
    edited, _ = split_graph(plan, graph)
    verify_graph(edited)
    assert waits_for_itself(edited) == ()
    assert meetings(edited) == meetings(graph)
    assert len(joined(edited)) == len(joined(graph))  # a loss of each other lane is read where losses are added
    assert all(
        edited[before].device == node.device or not edited[before].device
        for node in edited
        if node.name.startswith("tfmem/")
        for before in edited.predecessors(node)
    )
    require_equal(edited, graph, seed)


@settings(max_examples=examples(20))
@given(share=st.floats(0.3, 0.99), seed=st.integers(), borders=st.sampled_from(["", "own", "all"]))
def test_pieces_and_moves_of_each_lane(share: float, seed: int, borders: str) -> None:
    net = Batches((2, 4, 2), (-1, -1, 0), ("", borders, ""), (64, 63))
    graph = batched_step(net, 256)
    split, order = split_graph(planned(graph, net.batches, 2, "every"), graph)
    step = Step.read(split, order, [TensorId("losses")])
    timeline = step.timeline(UNIT)
    pools = [Pool(lane, (lane,), None, link=Link(1.0, 1.0)) for lane in lanes(split)]
    peaks = [each.timeline.peak for each in plan_lanes(split, timeline, pools, device(0), OPTIONS)]
    pools = [
        Pool(pool.name, pool.devices, round(share * peak), link=pool.link)
        for pool, peak in zip(pools, peaks, strict=True)
    ]
    try:
        plans = plan_lanes(split, timeline, pools, device(0), OPTIONS)
    except InfeasibleBudgetError:
        return
    require_equal(edit_lanes(step, plans, OPTIONS), graph, seed)


def splits(
    graph: Graph,
    *budgets: int | None,
    option: Any = "needed",
    rate: float = 0.0,
    known: tuple[BatchDivision, ...] = (),
    default: str = device(0),
) -> SplitStep | Refusal:
    step = Step.read(graph, fetches=[TensorId("losses")])
    pools = [Pool(f"GPU:{lane}", (device(lane),), budget) for lane, budget in enumerate(budgets)]
    options = OffloadOptions(split=option, reuse_distance=1)
    return split_lanes(step, lambda each: each.timeline(UNIT), pools, default, options, rate, known)


def after(found: SplitStep, *budgets: int) -> tuple[LanePlan, ...]:
    step = Step.read(found.graph, found.order, [TensorId("losses")])
    pools = [Pool(f"GPU:{lane}", (device(lane),), budget) for lane, budget in enumerate(budgets)]
    return plan_lanes(found.graph, step.timeline(UNIT), pools, device(0), OPTIONS)


def refused_below(graph: Graph) -> int:
    """Bytes that each device needs at least with nothing split."""
    step = Step.read(graph, fetches=[TensorId("losses")])
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_lanes(graph, step.timeline(UNIT), [Pool(device(0), (device(0),), 1)], device(0), OPTIONS)
    return caught.value.smallest_budget


def test_a_budget_that_was_refused_is_met_on_each_device() -> None:
    graph = batched_step(NET, WIDE)
    budget = refused_below(graph) - 1
    found = splits(graph, budget, budget)
    assert isinstance(found, SplitStep)
    assert {region.pieces for region in found.plan.regions} == {found.plan.regions[0].pieces}
    assert {graph[region.members[0]].device for region in found.plan.regions} == {device(0), device(1)}
    assert found.plan.exactness is Exactness.SUMS
    assert all(each.plan.after.peak <= budget for each in after(found, budget, budget))
    assert all(peak > budget for peak in found.peaks_before.values())
    for node in found.graph:
        if is_collective(node):
            packed = found.graph[node.inputs[0].node]
            sums = [found.graph[found.graph[each.node].inputs[0].node].op for each in packed.inputs[:-1]]
            assert set(sums) == {"AddV2"}
    require_equal(found.graph, graph)


def test_the_device_with_the_smaller_budget_decides_for_all() -> None:
    graph = batched_step(NET, WIDE)
    scarce = refused_below(graph) - 1
    found = splits(graph, 1 << 40, scarce)
    assert isinstance(found, SplitStep)
    assert len({len(region.pieces) for region in found.plan.regions}) == 1
    assert {graph[region.members[0]].device for region in found.plan.regions} == {device(0), device(1)}
    assert splits(graph, 1 << 40, 1 << 10) == Reason.SPLIT_DEVICE(
        device=device(1), why=str(Reason.SPLIT_BASE(base=f"{base(graph):,}"))
    )


def base(graph: Graph) -> int:
    step = Step.read(graph, fetches=[TensorId("losses")])
    (first, *_) = plan_lanes(
        graph, step.timeline(UNIT), [Pool(device(lane), (device(lane),)) for lane in range(2)], device(0), OPTIONS
    )
    return first.timeline.base


def test_replicas_have_as_many_pieces_where_their_batches_differ() -> None:
    graph = batched_step(Batches(NET.widths, NET.skips, NET.borders, (1024, 1021), 1), WIDE)
    budget = refused_below(graph) - 1
    found = splits(graph, budget, budget)
    assert isinstance(found, SplitStep)
    by_lane = {graph[region.members[0]].device: region.pieces for region in found.plan.regions}
    assert (sum(by_lane[device(0)]), sum(by_lane[device(1)])) == (1024, 1021)
    assert len(by_lane[device(0)]) == len(by_lane[device(1)])
    require_equal(found.graph, graph)


def test_another_worker_runs_the_same_pieces() -> None:
    """With room for the whole step, and with batches of other sizes."""
    graph = batched_step(NET, WIDE)
    budget = refused_below(graph) - 1
    found = splits(graph, budget, budget)
    assert isinstance(found, SplitStep)
    known = BatchDivision.of(found.plan)
    assert len(known) == 2
    other = batched_step(Batches(NET.widths, NET.skips, NET.borders, (1023, 1021), 2), WIDE)
    for step, batches in ((graph, (1024, 1024)), (other, (1023, 1021))):
        there = splits(step, 1 << 40, 1 << 40, known=known)
        assert isinstance(there, SplitStep)
        assert [region.members for region in there.plan.regions] == [region.members for region in found.plan.regions]
        assert [region.again for region in there.plan.regions] == [region.again for region in found.plan.regions]
        assert {len(region.pieces) for region in there.plan.regions} == {known[0].count}
        assert {sum(region.pieces) for region in there.plan.regions} == set(batches)
        require_equal(there.graph, step)


def test_pieces_of_another_worker_that_cannot_run_here_are_refused() -> None:
    """No other division takes their place, since the other worker would not run it."""
    graph = batched_step(NET, WIDE)
    budget = refused_below(graph) - 1
    found = splits(graph, budget, budget)
    assert isinstance(found, SplitStep)
    first, second = BatchDivision.of(found.plan)
    (members, more), *others = second.parts
    count = second.count
    for wrong in (
        replace(second, parts=(((*members, "elsewhere"), more), *others)),  # an op that is not here
        replace(second, parts=((members[::2], more), *others)),  # a path leads out and back in
        replace(second, parts=((members, (*more, "c1/1")), *others)),  # an op that no piece may run again
        replace(second, parts=((members, more), (members, more))),  # an op in two parts
        replace(second, count=1025),  # more pieces than examples
    ):
        refused = splits(graph, budget, budget, known=(first, wrong))
        expected = Reason.SPLIT_DEVICE(device=device(1), why=str(Reason.SPLIT_KNOWN(count=wrong.count)))
        assert refused == expected
    assert splits(graph, budget, budget, known=(first,)) == Reason.SPLIT_KNOWN(count=count)
    refused = splits(graph, budget, base(graph) + 1, known=(first, second))
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.SPLIT_OVER


@pytest.mark.parametrize("numbers", [0, 1000])
def test_the_host_beside_replicas_stays_whole(numbers: int) -> None:
    """It reads data, and has no budget where the replicas are GPUs; it may hold nothing while the step runs."""
    graph, host = batched_step(NET, WIDE), device(0).replace("GPU", "CPU")
    budget = refused_below(graph) - 1
    nodes = [Node("read", "Range" if numbers else "NoOp", device=host, outputs=min(1, numbers))]
    if numbers:
        nodes.append(Node("keep", "Consume", [TensorId("read")], device=host, stateful=True))
    specs = {**graph.specs, TensorId("read"): TensorSpec("float32", 4, (numbers,))}
    graph = Graph([*nodes, *graph], specs, graph.constants)
    pools = [Pool(f"GPU:{lane}", (device(lane),), budget) for lane in range(2)]
    pools.append(Pool("CPU", (host,), None, in_use=1 << 20))
    step = Step.read(graph, fetches=[TensorId("losses")])
    found = split_lanes(step, lambda each: each.timeline(UNIT), pools, device(0), OPTIONS)
    assert isinstance(found, SplitStep), found
    assert {graph[region.members[0]].device for region in found.plan.regions} == {device(0), device(1)}


def test_an_op_without_a_device_is_of_the_default_one() -> None:
    """Grappler names no device for the transposes that it puts between inputs and convolutions of the first GPU."""
    graph = batched_step(NET, WIDE)
    budget = refused_below(graph) - 1
    first = [use.node for use in graph.uses(TensorId("x/0"))]
    for name in first:
        graph[name].device = ""
    assert default_lane(graph) == device(0)
    found = splits(graph, budget, budget)
    assert isinstance(found, SplitStep), found
    members = {name for region in found.plan.regions for name in region.members}
    assert members.intersection(first)
    assert not isinstance(splits(graph, budget, budget, default=device(1)), SplitStep)


def test_if_one_device_cannot_be_split_none_is() -> None:
    graph = batched_step(NET, WIDE)
    budget = refused_below(graph) - 1
    for node in graph:
        if node.device == device(1) and node.op not in ("CollectiveReduceV2", "Const"):
            node.op = "Cholesky"  # has no rule
    found = splits(graph, budget, budget)
    assert isinstance(found, Refusal)
    assert found.reason is Reason.SPLIT_DEVICE
    assert str(found).startswith(f"{device(1)} cannot be split, so no device is: ")


def test_what_is_not_split() -> None:
    graph = batched_step(NET, WIDE)
    budget = refused_below(graph) - 1
    assert splits(graph, budget, budget, option="never") == Reason.SPLIT_NEVER()
    slow = splits(graph, budget, budget)
    assert isinstance(slow, SplitStep)
    rate = slow.seconds_before / max(each.plan.after.seconds for each in after(slow, budget, budget))
    assert isinstance(splits(graph, budget, budget, rate=1.01 * CLEARLY * rate), Refusal)
    assert isinstance(splits(graph, budget, budget, rate=0.9 * CLEARLY * rate), SplitStep)
    graph.remove_control("reduce1/1", "reduce0/1")
    found = splits(graph, budget, budget)
    assert isinstance(found, Refusal)
    assert "has no order among those of" in str(found)


def test_an_op_that_reads_what_another_device_makes_stays_whole() -> None:
    """Else each of its pieces would read it: edges between lanes that the step did not have."""
    graph = batched_step(NET)
    graph.insert("copied", "Relu", [TensorId("f1/0")], {})
    graph["copied"].device = device(1)
    graph.specs[TensorId("copied")] = graph.specs[TensorId("f1/0")]
    order = tuple(topological(graph))
    assert "copied" in separable(graph, order, 1024).rules
    assert "copied" not in separable(graph, order, 1024, device=device(1)).rules
    assert {graph[name].device for name in separable(graph, order, 1024, device=device(1)).rules} == {device(1)}


def test_pieces_for_which_devices_would_wait_for_each_other_are_refused() -> None:
    """Lane 0 reads, in each piece, what all pieces of lane 1 make, and the other way round."""
    shape = (64, 1 << 10)
    nodes, specs = [], {}

    def add(name: str, op: str, lane: int, *inputs: str) -> None:
        where = "" if op == "Placeholder" else device(lane)
        nodes.append(Node(name, op, [TensorId(each) for each in inputs], device=where, outputs=1))
        specs[TensorId(name)] = TensorSpec("float32", 4, shape)

    for lane in range(2):
        add(f"x/{lane}", "Placeholder", lane)
        add(f"a/{lane}", "Relu", lane, f"x/{lane}")
        add(f"b/{lane}", "Cholesky", lane, f"a/{lane}")  # needs all of the batch
    for lane in range(2):
        add(f"c/{lane}", "Cholesky", lane, f"b/{1 - lane}")
        add(f"d/{lane}", "AddV2", lane, f"x/{lane}", f"c/{lane}")
        add(f"losses/{lane}", "Neg", lane, f"d/{lane}")
    graph = Graph(nodes, specs, {})
    assert waits_for_itself(graph) == ()
    plan = planned(graph, (64, 64), 2, "largest")
    assert {name for region in plan.regions for name in region.members} >= {"a/0", "d/0", "a/1", "d/1"}
    assert not is_acyclic(split_graph(plan, graph)[0])
    assert splits(graph, 1 << 19, 1 << 19) == Reason.SPLIT_WAITS()
