"""Steps of several lanes: which collectives meet, whether a step waits for itself, and plans of each lane."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis import peers
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.lane_timeline import lane_of
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.analysis.peers import (
    awaited_elsewhere,
    default_lane,
    every_device,
    lanes,
    meetings,
    waits_for_itself,
)
from graph_passes.errors import GraphError, InfeasibleBudgetError
from graph_passes.graph import ops, verify
from graph_passes.graph.ir import Function, Graph, Node, TensorId
from graph_passes.graph.order import is_acyclic
from graph_passes.lane_edits import edit_lanes
from graph_passes.passes.offload.lanes import LanePlan
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import OffloadPlan, Probing, plan_offload
from graph_passes.pipeline import Step, edit_step
from graph_passes.refusals import Reason
from tests.spmd_graphs import Spmd, device, execute, steps, training_step
from tests.tiers import examples

OPTIONS = OffloadOptions(reuse_distance=1)
NET = Spmd((2, 3, 1, 2, 4), (0, 0, 0, 1, 2), 2, 1)


def timelines(step: Step) -> dict[str, Timeline]:
    whole = step.timeline(Roofline(load("unit")))
    return {lane: lane_of(step.graph, whole, lane, device(0)) for lane in lanes(step.graph)}


def moved(step: Step, share: float) -> tuple[Graph, dict[str, OffloadPlan]]:
    """The step with a plan in each lane; lanes of which no plan keeps the budget stay without."""
    plans = {}
    for lane, timeline in timelines(step).items():
        with suppress(InfeasibleBudgetError):
            plan = plan_offload(timeline, Link(1.0, 1.0), int(timeline.peak * share), OPTIONS)
            plans[lane] = LanePlan(lane, timeline, plan)
    edited = edit_lanes(step, tuple(plans.values()), OPTIONS)
    return edited, {lane: found.plan for lane, found in plans.items()}


def test_ops_without_a_device_are_of_the_first_gpu() -> None:
    """The host's ops come first where they read data; TensorFlow still places what has a kernel there on a GPU."""
    host, second, first = "/device:CPU:0", "/device:GPU:1", "/device:GPU:0"
    placed = [Node(device, "Relu", device=device, outputs=1) for device in (host, second, first)]
    assert default_lane(Graph(placed, {})) == first
    assert default_lane(Graph(placed[:1], {})) == host
    assert default_lane(Graph([], {})) == ""


def test_collectives_meet_in_the_order_of_their_tokens() -> None:
    graph = training_step(Spmd((1, 1, 1), (0, 0, 1), 3, 2))
    found = [(meeting.turn, set(meeting.members)) for meeting in meetings(graph)]
    assert found == [(turn, {f"reduce{turn}/{lane}" for lane in range(3)}) for turn in range(2)]


def test_collectives_without_an_order_are_refused() -> None:
    graph = training_step(Spmd((1, 1), (0, 0), 2, 2))
    graph.remove_control("reduce1/1", "reduce0/1")
    with pytest.raises(GraphError, match=r"has no order among those of .*GPU:1; expected an ordering token"):
        meetings(graph)


def test_collectives_without_a_token_are_refused() -> None:
    graph = training_step(NET)
    graph.constants.clear()
    with pytest.raises(GraphError, match="no constant group key and ordering token"):
        meetings(graph)


def calls(inner: Graph) -> Graph:
    return Graph([Node("if", "If", outputs=1)], functions={("if", "then_branch"): Function(inner, (), ())})


def test_a_branch_in_which_all_lanes_meet_is_an_op_like_others() -> None:
    graph = calls(training_step(NET))
    assert meetings(graph) == meetings(calls(graph)) == ()
    assert lanes(graph) == ()
    assert every_device(calls(graph)) == (device(0), device(1))


def test_a_branch_that_meets_what_is_outside_of_it_is_refused() -> None:
    more = training_step(replace(NET, packs=2))
    last = [node for node in more if node.op in ops.COLLECTIVES][-1]
    last.op = "NoOp"  # one lane has fewer than the other
    unknown = training_step(NET)
    unknown.constants.clear()
    alone = of_group(1, lanes=1)
    met_outside = training_step(NET)
    met_outside.insert("if", "If", [], {})
    met_outside.functions.update(calls(alone).functions)
    for outer in (calls(more), calls(unknown), calls(calls(more)), met_outside):
        with pytest.raises(GraphError, match="is inside of a function that 'if' calls, and what it meets is not"):
            meetings(outer)


def gathering(counts: Sequence[int]) -> Graph:
    """A step whose second collective of each lane is a condition; each branch runs so many collectives.

    Args:
        counts: of both branches of the first lane, then of those of the second.
    """
    graph = training_step(replace(NET, packs=2))
    inner = training_step(Spmd((1,) * 4, (0,) * 4, 1, max(counts)))
    for lane in range(2):
        graph[f"reduce1/{lane}"].op = "If"
        for branch, count in zip(("then_branch", "else_branch"), counts[2 * lane :], strict=False):
            kept = {f"reduce{pack}/0" for pack in range(count)}
            body = training_step(Spmd((1,) * 4, (0,) * 4, 1, max(counts)))
            for node in body:
                node.device = ""  # it runs where the condition does
                if node.op in ops.COLLECTIVES and node.name not in kept:
                    node.op = "NoOp"
            for name in inner.constants:
                if name.startswith("size"):
                    body.constants[name] = graph.constants["size0/0"]
            graph.functions[f"reduce1/{lane}", branch] = Function(body, (), ())
    return graph


def test_conditions_whose_branches_meet_those_of_other_lanes_are_collectives() -> None:
    """An embedding's gradient is gathered so, if the slices of all lanes are equally long, and padded otherwise."""
    graph = gathering([2, 2, 2, 2])
    assert meetings(graph) == meetings(training_step(replace(NET, packs=2)))
    assert awaited_elsewhere(graph) == {}
    assert waits_for_itself(graph) == ()
    graph.add_control("reduce1/0", "scaled1/1")  # behind the condition of the other lane
    assert waits_for_itself(graph)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [([2, 1, 2, 2], "is inside of a function that 'reduce1/0' calls"), ([1, 1, 2, 2], "does not meet as many")],
)
def test_conditions_that_may_meet_otherwise_are_refused(counts: Sequence[int], reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        meetings(gathering(counts))


def of_group(more: int, lanes: int) -> Graph:
    """A step whose collectives wait for `more` devices of other processes."""
    graph = training_step(replace(NET, lanes=lanes))
    larger = training_step(replace(NET, lanes=lanes + more)).constants["size0/0"]
    for name in graph.constants:
        if name.startswith("size"):
            graph.constants[name] = larger
    return graph


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_branch_that_meets_other_processes_has_its_turn_among_collectives(lanes: int) -> None:
    outer = of_group(1, lanes)
    outer.insert("if", "If", [], {})
    outer.functions.update(calls(of_group(1, lanes)).functions)
    assert awaited_elsewhere(outer) == {"if": frozenset(map(device, range(lanes)))}
    with pytest.raises(GraphError, match="has no order among those of"):
        meetings(outer)
    for lane in range(lanes):
        for node in [node.name for node in outer if node.op in ops.COLLECTIVES and node.device == device(lane)]:
            outer.add_control("if", node)
    assert meetings(outer) == meetings(of_group(1, lanes))
    assert waits_for_itself(outer) == ()


@settings(max_examples=examples(200))
@given(net=steps(), edges=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=4), seed=st.integers())
def test_a_step_waits_for_itself_where_a_run_does_not_end(
    net: Spmd, edges: Sequence[tuple[int, int]], seed: int
) -> None:
    graph = training_step(net)
    names = list(graph.nodes)
    for first, second in edges:
        before, after = names[first % len(names)], names[second % len(names)]
        if before != after and before not in graph[after].control and graph[after].op != "Const":
            graph.add_control(after, before)
            if not is_acyclic(graph):
                graph.remove_control(after, before)
    try:
        cycle = waits_for_itself(graph)
    except GraphError:
        return  # an edge between lanes put collectives of a lane into another order
    stuck = execute(graph, seed).stuck
    assert bool(cycle) == bool(stuck)
    assert stuck.issuperset(cycle)


@settings(max_examples=examples(120))
@given(net=steps(), share=st.floats(0.4, 0.99), seed=st.integers())
def test_plans_of_each_lane_end_with_the_same_values(net: Spmd, share: float, seed: int) -> None:
    step = Step.read(training_step(net))
    edited, plans = moved(step, share)
    assert waits_for_itself(edited) == ()
    ran = execute(edited, seed)
    assert not ran.stuck
    assert ran.values == execute(step.graph).values
    for lane, plan in plans.items():
        assert ran.peaks[lane] <= plan.after.peak


def test_an_order_across_lanes_waits_for_itself() -> None:
    """The order of a step that is planned as if one device ran it: replica 1's pack waits for what replica 0 got."""
    step = Step.read(training_step(NET))
    edited = step.graph.copy()
    chain = [name for name in step.order if step.graph[name].op not in ("Const", "CollectiveReduceV2")]
    for before, after in pairwise(chain):
        if before not in edited[after].control:
            edited.add_control(after, before)
    assert is_acyclic(edited)
    cycle = waits_for_itself(edited)
    assert any(name.startswith("reduce0") for name in cycle)
    assert execute(edited).stuck.issuperset(cycle)


def test_no_edge_joins_two_lanes() -> None:
    step = Step.read(training_step(NET))
    edited, plans = moved(step, 0.7)
    assert all(plan.moves for plan in plans.values())
    for node in edited:
        for before in set(node.control) - set(
            step.graph.nodes[node.name].control if node.name in step.graph.nodes else ()
        ):
            assert edited[before].device == node.device


def test_what_another_lane_reads_stays() -> None:
    lane = timelines(Step.read(training_step(NET)))[device(1)]
    (buffer,) = [buffer for buffer in lane.buffers if buffer.tensor == TensorId("f4/1")]
    assert buffer.pinned_by == Reason.OTHER_DEVICE()


def test_a_lane_takes_no_time_for_ops_elsewhere() -> None:
    step = Step.read(training_step(NET))
    whole = step.timeline(Roofline(load("unit")))
    parts = timelines(step).values()
    assert sum(float(part.begins[-1]) for part in parts) == pytest.approx(float(whole.begins[-1]))
    assert sum(len(part.buffers) for part in parts) == len(whole.buffers)


@pytest.mark.parametrize("probed", [False, True])
def test_lanes_are_edited_together_as_one_after_the_other(probed: bool) -> None:
    step = Step.read(training_step(NET))
    plans, probes, one_by_one = [], [], step.graph
    for place, (lane, timeline) in enumerate(timelines(step).items()):
        plan = plan_offload(timeline, Link(1.0, 1.0), int(timeline.peak * 0.7), OPTIONS)
        plans.append(LanePlan(lane, timeline, plan))
        probes.append(Probing(place, lane, holds=False))
        probing = probes[-1] if probed else None
        one_by_one = edit_step(replace(step, graph=one_by_one), timeline, plan, OPTIONS, probing)
    together = edit_lanes(step, plans, OPTIONS, probing=probes if probed else ())
    assert len(together) > len(step.graph)
    assert list(together) == list(one_by_one)


def graphs_looked_at(net: Spmd, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the edit of all lanes copies a whole graph or puts one in order."""
    count = 0

    def counting(function):
        def counted(*args):
            nonlocal count
            count += 1
            return function(*args)

        return counted

    step = Step.read(training_step(net))
    plans = [
        LanePlan(lane, timeline, plan_offload(timeline, Link(1.0, 1.0), int(timeline.peak * 0.7), OPTIONS))
        for lane, timeline in timelines(step).items()
    ]
    with monkeypatch.context() as patch:
        patch.setattr(Graph, "copy", counting(Graph.copy))
        for module in (verify, peers):
            patch.setattr(module, "topological", counting(module.topological))
        edit_lanes(step, plans, OPTIONS)
    return count


def test_more_lanes_do_not_look_at_the_graph_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    two, four = (graphs_looked_at(replace(NET, lanes=lanes), monkeypatch) for lanes in (2, 4))
    assert two == four


def test_a_plan_that_orders_ops_of_two_lanes_is_refused() -> None:
    """The plan of a step as if one device ran it: its chain of control edges goes through both lanes."""
    step = Step.read(training_step(NET))
    whole = step.timeline(Roofline(load("unit")))
    plan = plan_offload(whole, Link(1.0, 1.0), int(0.7 * whole.peak), OPTIONS)
    assert plan.moves
    with pytest.raises(GraphError, match="the step would wait for itself, through "):
        edit_lanes(step, [LanePlan(device(0), whole, plan)], OPTIONS)
