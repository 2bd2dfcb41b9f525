"""Chains of ops that are recomputed: which there are, and what a plan with them promises, replayed op by op."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes import pipeline
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.simulate import Link, are_there, by_position, usage_under
from graph_passes.analysis.memory.timeline import Buffer, Chain, Gap, ScheduledOp, Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph import ops
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.order import topological
from graph_passes.passes.offload.check import faults
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.placement import place, tight
from graph_passes.passes.offload.plan import chained as chained_positions
from graph_passes.passes.offload.recomputation import chain_choices
from tests.chain_nets import LARGE, SMALL, Net, nets
from tests.tiers import examples

SLOW_LINK = Link(0.01, 0.01)  # anything is recomputed faster than it is copied
LINKS = (SLOW_LINK, Link(0.5, 0.5), Link(1.0, 1.0))
OPTIONS = OffloadOptions(reuse_distance=1)


def replayed(graph: Graph, timeline: Timeline) -> tuple[dict[TensorId, int], list[int]]:
    """Values of the graph's own tensors, and the most bytes in memory at each of its ops and what is recomputed for it.

    Ops write in place where TensorFlow's kernels do: over an input that has no other reader and no other name.
    """
    values: dict[TensorId, object] = {}
    owner: dict[TensorId, TensorId] = {}
    size: dict[TensorId, int] = {}
    held: dict[TensorId, int] = {}
    readers = {tensor: len(graph.uses(tensor)) for node in graph for tensor in graph.tensors(node)}
    position = {step.node: index for index, step in enumerate(timeline.steps)}
    most, usage = 0, [0] * len(position)

    def hold(tensor: TensorId, root: TensorId) -> None:
        owner[tensor] = root
        held[root] = held.get(root, 0) + 1

    def drop(tensor: TensorId) -> None:
        held[owner[tensor]] -= 1
        if not held[owner[tensor]]:
            del held[owner[tensor]]

    for name in topological(graph):
        node = graph[name]
        read = [values[tensor] for tensor in node.inputs]
        assert all(owner[tensor] in held for tensor in node.inputs if tensor in owner), f"{name} reads what is gone"
        own = name.removeprefix("tfmem/Recompute/")
        own = own if own in position else own.rpartition("_")[0]
        for tensor in graph.tensors(node):
            if node.op == "MemOpOffload":
                values[tensor] = (read[0], size[owner[node.inputs[0]]])
            elif node.op == "MemOpPrefetch":
                values[tensor], size[tensor] = read[0]
                hold(tensor, tensor)
            elif node.op == "MemOpAwait" or node.op == "Identity":
                values[tensor] = read[0]
                hold(tensor, owner[node.inputs[0]])
            else:
                values[tensor] = hash((node.op, own, tensor.index, tuple(read)))
                nbytes = timeline_bytes(graph, TensorId(own, tensor.index))
                free = [
                    owner[each]
                    for each in node.inputs
                    if node.op in ops.IN_PLACE and tensor.index == 0 and readers[each] == 1
                    if held[owner[each]] == 1 and size[owner[each]] == nbytes
                ]
                root = free[0] if free else tensor
                size[root] = nbytes
                hold(tensor, root)
        if own in position:  # memory that is taken for an op that is recomputed counts at the op that it is for
            most = max(most, sum(size[root] for root in held))
        for tensor in node.inputs:
            readers[tensor] -= 1
            if not readers[tensor] and tensor in owner:
                drop(tensor)
        for tensor in graph.tensors(node):
            if not readers[tensor] and tensor in owner:
                drop(tensor)
        if name in position:
            usage[position[name]], most = most, 0
    return {tensor: value for tensor, value in values.items() if tensor.node in position}, usage


def timeline_bytes(graph: Graph, tensor: TensorId) -> int:
    return graph.specs[tensor].nbytes or 0


def chained(step: pipeline.Step, graph: Graph) -> Graph:
    copy = graph.copy()
    for before, after in zip(step.order, step.order[1:], strict=False):
        copy.add_control(after, before)
    return copy


@settings(max_examples=examples(500))
@given(graph=nets(), share=st.floats(0.3, 0.95), link=st.sampled_from(LINKS))
def test_a_plan_keeps_its_promise_at_every_position(graph, share, link):
    step = pipeline.Step.read(graph)
    timeline = step.timeline(Roofline(load("unit")))
    budget = int(timeline.peak * share)
    expected, before = replayed(chained(step, graph), timeline)
    assert max(before) == timeline.peak
    try:
        plan = pipeline.plan_step(step, timeline, link, budget, OPTIONS)
    except InfeasibleBudgetError:
        with pytest.raises(InfeasibleBudgetError):  # what copies can meet is never refused for a chain's sake
            pipeline.plan_step(step, timeline, link, budget, OPTIONS, copied=True)
        return
    assert faults(timeline, plan) == []
    assert plan.after.peak <= budget
    found, usage = replayed(pipeline.edit_step(step, timeline, plan, OPTIONS), timeline)
    assert found == expected
    promised = usage_under(timeline, plan.moves)
    assert [name for name, a, b in zip(step.order, usage, promised, strict=True) if a > b] == []


@settings(max_examples=examples(400))
@given(graph=nets(), data=st.data())
def test_every_chain_takes_what_is_counted_for_it(graph, data):
    step = pipeline.Step.read(graph)
    timeline = step.timeline(Roofline(load("unit")))
    gaps = [gap for gap in timeline.gaps() if timeline.chain(gap)]
    if not gaps:
        return
    gap = data.draw(st.sampled_from(gaps))
    move = replace(tight(timeline, gap, OPTIONS), recomputed=True)
    plan = replace(pipeline.plan_step(step, timeline, SLOW_LINK, timeline.peak, OPTIONS), moves=(move,))
    plan = replace(plan, ordered=chained_positions(timeline, plan.moves, plan.budget))
    expected, before = replayed(chained(step, graph), timeline)
    found, usage = replayed(pipeline.edit_step(step, timeline, plan, OPTIONS), timeline)
    assert found == expected
    promised = usage_under(timeline, plan.moves)
    assert [name for name, a, b in zip(step.order, usage, promised, strict=True) if a > b] == []
    assert promised[gap.next] >= before[gap.next]


@settings(max_examples=examples(200))
@given(graph=nets())
def test_no_chain_is_chosen_that_another_keeps_from_running(graph):
    timeline = pipeline.Step.read(graph).timeline(Roofline(load("unit")))
    for again, others in chain_choices(timeline, timeline.gaps(), SLOW_LINK):
        away = by_position((gap.buffer, gap) for gap in (*again, *others))
        assert all(are_there(timeline.chain(gap).sources, gap.next, away) for gap in again)


def block(*kinds: str) -> tuple[pipeline.Step, Timeline]:
    net = Net()
    top = skip = net.add("x", "Conv2D", [], LARGE)
    for index, kind in enumerate(kinds):
        top = net.layer(kind, index, top, skip, 1)
    step = pipeline.Step.read(net.graph(top))
    return step, step.timeline(Roofline(load("unit")))


def chain_of(timeline: Timeline, name: str) -> list[str]:
    """The ops of the chain for the last gap of the buffer that a tensor of this name is in."""
    buffer = next(buffer for buffer in timeline.buffers if TensorId(name) in buffer.views)
    return [timeline.steps[position].node for position in buffer.chains[-1].ops]


def test_a_chain_passes_in_place_writers():
    _, timeline = block("norm", "scale", "add", "relu", "product", "product", "product")
    assert chain_of(timeline, "r3") == ["n0", "s1", "a2", "i3", "r3"]


def test_a_chain_holds_a_product_whose_result_ends_before():
    _, timeline = block("product", "scale", "relu", "product", "product")
    assert chain_of(timeline, "r2") == ["c0", "s1", "i2", "r2"]


def test_a_mask_is_drawn_again_from_its_counter():
    _, timeline = block("product", "dropout", "product", "product", "product")
    assert chain_of(timeline, "m1") == ["u1", "m1"]
    (chain,) = next(buffer for buffer in timeline.buffers if buffer.tensor == TensorId("m1")).chains[-1:]
    assert [timeline.buffers[source].tensor.node for source in chain.sources] == ["k1"]
    assert max(chain.held) == 8 * LARGE  # the numbers and the mask


def test_a_long_chain_is_none():
    _, timeline = block("norm", *["scale"] * 9, "product", "product", "product")
    assert chain_of(timeline, "s9") == []


@pytest.mark.parametrize(("written", "expected"), [(False, ["r"]), (True, [])])
def test_nothing_is_recomputed_from_a_variable_that_was_written(written, expected):
    net = Net()
    net.add("v", "VarHandleOp", [], SMALL)
    net.add("read", "ReadVariableOp", ["v"], LARGE)
    net.add("r", "Relu", ["read"], LARGE)
    net.add("y", "Conv2D", ["r"], LARGE)
    net.add("g", "Neg", ["y"], SMALL)
    net.nodes.append(
        Node("w", "AssignVariableOp" if written else "Print", [TensorId("v" if written else "g"), TensorId("g")])
    )
    net.add("z", "Conv3DBackpropFilterV2", ["r", "g"], SMALL)
    graph = Graph(net.nodes, net.specs)
    graph.add_control("z", "w")
    step = pipeline.Step.read(graph, ["v", "read", "r", "y", "g", "w", "z"])
    assert chain_of(step.timeline(Roofline(load("unit"))), "r") == expected


def test_equal_blocks_are_decided_together_and_their_sources_stay():
    step, timeline = block(*["product", "norm", "scale", "relu"] * 6, "product")
    link, budget = SLOW_LINK, int(timeline.peak * 0.7)
    plan = pipeline.plan_step(step, timeline, link, budget, OPTIONS)
    again = [chain for move in plan.moves if move.recomputed and (chain := timeline.chain(move.gap))]
    assert len(again) > 2
    assert len({chain.kind for chain in again}) == 1
    assert not {source for chain in again for source in chain.sources} & {move.buffer for move in plan.moves}
    copies = pipeline.plan_step(step, timeline, link, budget, OPTIONS, copied=True)
    assert plan.after.seconds < copies.after.seconds


@pytest.mark.parametrize(("budget", "recomputed"), [(3, True), (2, False)])
def test_a_chain_that_takes_more_than_the_budget_is_a_copy(budget, recomputed):
    buffer = Buffer(TensorId("a"), 1, 0, (1, 3), chains=(Chain(1, (0,), held=(3,)),))
    timeline = Timeline(tuple(ScheduledOp(name, 1.0) for name in "abcd"), (buffer,), turn=1)
    (move,) = place(timeline, [Gap(0, 1, 3)], SLOW_LINK, budget, OPTIONS, timed=True)
    assert move.recomputed == recomputed
    assert usage_under(timeline, [move]).max() <= budget
