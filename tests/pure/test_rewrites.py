"""Random training graphs, rewritten: acyclic, the same values, and the planned peak to the byte.

A graph is run here by an interpreter that allocates and frees as TensorFlow's executor does: outputs when an op runs,
inputs when their last reader has run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes import pipeline
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.fragmentation import Room
from graph_passes.analysis.memory.simulate import Link
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.order import topological
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.thin import thinned
from tests.tiers import examples

UNIT = load("unit")
UNIT_LINK = Link(1.0, 1.0)
SLOW_LINK = Link(0.01, 0.01)  # anything is recomputed faster than it is copied
ELEMENTS = 1 << 14  # of 4 bytes: 64 KiB, the smallest that moves


@dataclass(frozen=True)
class Layer:
    """One forward op: which earlier layers it reads, and how large its output is."""

    reads: tuple[int, ...]
    units: int


@st.composite
def nets(draw) -> list[Layer]:
    """Nets with skip connections and tensors of several sizes."""
    layers = [Layer((), draw(st.integers(1, 4)))]
    for index in range(1, draw(st.integers(3, 12))):
        skips = draw(st.sets(st.integers(0, index - 1), max_size=2))
        layers.append(Layer(tuple(sorted(skips | {index - 1})), draw(st.integers(1, 4))))
    return layers


def training_graph(net: list[Layer]) -> Graph:
    """Forward ops f0.. and their gradients g.., which read the forward op's inputs, output and the gradient above."""
    nodes, specs = [], {}

    def add(name: str, op: str, inputs: list[str], units: int) -> None:
        nodes.append(Node(name, op, [TensorId(i) for i in inputs], outputs=1))
        specs[TensorId(name)] = TensorSpec("float32", 4, (units * ELEMENTS,))

    for index, layer in enumerate(net):
        add(f"f{index}", "Conv2D", [f"f{i}" for i in layer.reads], layer.units)
    gradient = f"f{len(net) - 1}"
    for index in reversed(range(len(net))):
        reads = [f"f{i}" for i in net[index].reads]
        add(f"g{index}", "Conv2DBackpropInput", list(dict.fromkeys([*reads, f"f{index}", gradient])), net[index].units)
        gradient = f"g{index}"
    return Graph(nodes, specs)


def run(graph: Graph) -> tuple[dict[str, object], int]:
    """Values of all nodes that are not MemOps, and the peak in bytes."""
    values: dict[TensorId, object] = {}
    owner: dict[TensorId, TensorId] = {}
    readers = {t: len(graph.uses(t)) for node in graph for t in graph.tensors(node)}
    held: dict[TensorId, int] = {}  # buffer -> tensors that still refer to it
    peak = 0

    def size(tensor: TensorId) -> int:
        return graph.specs[tensor].nbytes or 0

    def drop(tensor: TensorId) -> None:
        if tensor in owner:
            held[owner[tensor]] -= 1
            if not held[owner[tensor]]:
                del held[owner[tensor]]

    for name in topological_by_name(graph):
        node, output, taken = graph[name], TensorId(name), 0
        inputs = [values[tensor] for tensor in node.inputs]
        if node.op == "MemOpOffload":
            values[output] = ("handle", inputs[0], node.inputs[0])
        elif node.op == "MemOpPrefetch":
            _, value, source = inputs[0]
            values[output] = value
            graph.specs[output] = graph.specs[source]
            owner[output], held[output] = output, 1
        elif node.op == "MemOpAwait":
            values[output] = inputs[0]
            graph.specs[output] = graph.specs[node.inputs[0]]
            owner[output] = owner[node.inputs[0]]
            held[owner[output]] += 1
        elif node.op == "MemOpFill":
            graph.specs[output] = TensorSpec("uint8", 1, (int(node.attrs["bytes"]),))
            values[output], owner[output], held[output] = "padding", output, 1
        elif node.op == "MemOpPreaccess":  # it frees what it allocates
            taken = int(node.attrs["bytes"])
        elif name.endswith("/Emptied"):
            values[output] = "nothing"
        elif node.op != "MemOpRelease":
            original = name.removeprefix("tfmem/Recompute/")
            original = original if original in graph.nodes else original.rpartition("_")[0]  # recomputed twice
            values[output] = (node.op, original, tuple(inputs))
            graph.specs[output] = graph.specs[TensorId(original)]
            owner[output], held[output] = output, 1
        peak = max(peak, taken + sum(size(buffer) for buffer in held))
        for tensor in node.inputs:
            readers[tensor] -= 1
            if not readers[tensor]:
                drop(tensor)
        if node.outputs and not readers[output]:
            drop(output)
    return {t.node: hash(v) for t, v in values.items() if not t.node.startswith("tfmem/")}, peak


def topological_by_name(graph: Graph) -> list[str]:
    """One of the orders the executor may choose."""
    return topological(graph)


def planned(
    net: list[Layer], share: float, link: Link = UNIT_LINK, parts: Sequence[float] = (), **values: object
) -> None:
    """Plan, rewrite, run; with `parts`, in a room of as many bytes as the budget, in pieces of such relative sizes."""
    graph = training_graph(net)
    step = pipeline.Step.read(graph)
    timeline = step.timeline(Roofline(UNIT))
    options = OffloadOptions(reuse_distance=1, **values)  # type: ignore[arg-type]
    expected, before = run(ordered(graph, step))
    assert before == timeline.peak
    room = Room(in_pieces(int(timeline.peak * share), parts), limit=int(timeline.peak * share)) if parts else None
    try:
        plan = pipeline.plan_step(step, timeline, link, int(timeline.peak * share), options, room=room)
    except InfeasibleBudgetError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.smallest_budget > timeline.peak * share
        return
    assert plan.after.peak <= timeline.peak * share
    if room:
        plan = thinned(timeline, plan, room)
    edited = pipeline.edit_step(step, timeline, plan, options)  # verifies that it is acyclic
    found, peak = run(edited)
    assert found == expected
    assert peak == plan.after.peak


def in_pieces(nbytes: int, parts: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """Chunks with something between them."""
    sizes = [int(nbytes * part / sum(parts)) for part in parts]
    return tuple((sum(sizes[:index]) + index * ELEMENTS, size) for index, size in enumerate(sizes))


def ordered(graph: Graph, step: pipeline.Step) -> Graph:
    chained = graph.copy()
    for before, after in zip(step.order, step.order[1:], strict=False):
        chained.add_control(after, before)
    return chained


@settings(max_examples=examples(200))
@given(net=nets(), share=st.floats(0.3, 0.99), prefetch=st.sampled_from(["late", "early"]))
def test_random_nets_keep_their_values_and_meet_the_planned_peak(net, share, prefetch):
    planned(net, share, prefetch=prefetch)


@settings(max_examples=examples(50))
@given(net=nets(), share=st.floats(0.3, 0.99))
def test_random_nets_with_early_copies(net, share):
    planned(net, share, copy_start="produced")


@settings(max_examples=examples(50))
@given(net=nets(), share=st.floats(0.3, 0.99))
def test_random_nets_in_managed_memory(net, share):
    planned(net, share, mechanism="managed")


def test_the_pages_of_each_output_are_there_before_it_is_written():
    graph = training_graph([Layer((), 1)] + [Layer((index,), index % 3 + 1) for index in range(5)])
    step = pipeline.Step.read(graph)
    timeline = step.timeline(Roofline(UNIT))
    for mechanism in ("managed", "copy"):
        options = OffloadOptions(reuse_distance=1, mechanism=mechanism)
        plan = pipeline.plan_step(step, timeline, UNIT_LINK, int(timeline.peak * 0.85), options)
        edited = pipeline.edit_step(step, timeline, plan, options)
        assert plan.moves
        for node in graph:
            before = [edited[name] for name in edited[node.name].control if edited[name].op == "MemOpPreaccess"]
            sizes = [each.attrs["bytes"] for each in before]
            assert sizes == ([graph.specs[TensorId(node.name)].nbytes] if mechanism == "managed" else [])


@settings(max_examples=examples(200))
@given(net=nets(), share=st.floats(0.3, 0.99))
def test_random_nets_that_recompute_tensors(net, share):
    planned(net, share, SLOW_LINK, policy="hybrid")


@settings(max_examples=examples(100))
@given(net=nets(), share=st.floats(0.5, 1.0), parts=st.lists(st.floats(0.2, 1.0), min_size=1, max_size=3))
def test_random_nets_in_pieces_of_memory(net, share, parts):
    planned(net, share, parts=parts, policy="autovm")


def test_hybrid_recomputes_what_its_inputs_outlive():
    # each layer's output is made from the one before, which waits even longer
    net = [Layer((), 1)] + [Layer((index,), 1) for index in range(6)]
    graph = training_graph(net)
    step = pipeline.Step.read(graph)
    timeline = step.timeline(Roofline(UNIT))
    options = OffloadOptions(reuse_distance=1, policy="hybrid")
    plan = pipeline.plan_step(step, timeline, SLOW_LINK, int(timeline.peak * 0.7), options)
    assert any(move.recomputed for move in plan.moves)
    edited = pipeline.edit_step(step, timeline, plan, options)
    assert any(node.name.startswith("tfmem/Recompute/") for node in edited)


@pytest.mark.parametrize("policy", ["vdnn_all", "vdnn_conv"])
@settings(max_examples=examples(50))
@given(net=nets(), share=st.floats(0.6, 0.99))
def test_random_nets_under_the_peers_policies(policy, net, share):
    planned(net, share, policy=policy)


@settings(max_examples=examples(50))
@given(net=nets(), share=st.floats(0.3, 0.99))
def test_the_widest_plan_is_never_higher_than_another(net, share):
    step = pipeline.Step.read(training_graph(net))
    timeline = step.timeline(Roofline(UNIT))
    options = OffloadOptions(reuse_distance=1)
    budget = int(timeline.peak * share)
    widest = pipeline.plan_step(step, timeline, Link(1.0, 1.0), budget, options, widest=True)
    edited = pipeline.edit_step(step, timeline, widest, options)
    assert run(edited)[1] == widest.after.peak
    if timeline.gaps() and widest.after.peak > budget:
        with pytest.raises(InfeasibleBudgetError):
            pipeline.plan_step(step, timeline, Link(1.0, 1.0), budget, options)
