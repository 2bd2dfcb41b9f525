"""Regions under a memory budget: none of two segments, and the planned peak is that of a replay in which each is one
op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_ops.expr.text import from_text as program_from
from custom_ops.fusion.region import Assign, Call, Kernel, Region, TensorType, View
from custom_ops.fusion.text import from_text as region_from
from custom_ops.fusion.text import to_text
from graph_passes.analysis.cost.device_costs import Device
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.cost.region_costs import region_costs
from graph_passes.analysis.memory.simulate import Link
from graph_passes.errors import BudgetError
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.ops import FUSION_OP, writes
from graph_passes.graph.order import topological
from graph_passes.passes.fuse.partition.partition import ON_CPU, ON_GPU, partition_graph
from graph_passes.passes.fuse.schedule_segments import segments, with_regions
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.pipeline import Step, edit_step, plan_step
from tests.fusion_graphs import UNIT, Nodes, graphs, run_graph, run_plan
from tests.spmd_graphs import ELEMENTS, steps, training_step
from tests.tiers import examples

TWICE = "program 1\naxes 0\ntensor float32 1\ninput 0 a0\nadd 0 0\noutput 1 0\n"


def region(inputs: int, kernels: Sequence[tuple[int, int]], outputs: Sequence[int], sizes: Sequence[int]) -> Region:
    """A region of kernels that each read one value and make another, of so many numbers."""
    program = program_from(TWICE)
    values = tuple(TensorType("float32", (size,)) for size in sizes)
    return Region(inputs, (), values, tuple(Kernel(program, (a,), (b,)) for a, b in kernels), tuple(outputs))


def node_of(found: Region, *inputs: str, name: str = "fusion_0") -> Node:
    attrs = {"region": to_text(found), "N": len(found.variables)}
    return Node(name, FUSION_OP, [TensorId(each) for each in inputs], [], "", attrs, len(found.outputs), stateful=True)


@settings(max_examples=examples(60))
@given(graphs(), st.sampled_from([ON_CPU, ON_GPU]), st.integers(1, 6))
def test_no_region_is_of_two_segments(made, kinds, length):
    graph, op_patterns = made
    order = topological(graph)
    within = {name: place // length for place, name in enumerate(order)}
    plan = partition_graph(graph, op_patterns, UNIT, kinds=kinds, segments=within)
    for found in plan.regions:
        assert len({within[name] for name in found.members}) == 1
    assert run_plan(graph, op_patterns, plan) == run_graph(graph, op_patterns)  # which needs an order without cycles
    names = with_regions(order, {str(number): found.members for number, found in enumerate(plan.regions)})
    kept = [name for name in order if not any(name in found.members for found in plan.regions)]
    assert sorted(names) == sorted([*kept, *map(str, range(len(plan.regions)))])


def test_a_node_that_is_in_no_segment_belongs_to_what_it_reads():
    made = Nodes()
    last = made.add("Opaque")
    for name in ("a", "b", "new", "c", "d", "e"):
        last = made.add("Elementwise", last, name=name)
    within = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}
    plan = partition_graph(made.graph(), made.op_patterns, UNIT, segments=within)
    assert [found.members for found in plan.regions] == [("a", "b", "new"), ("c", "d", "e")]


def test_a_segment_makes_at_most_so_many_bytes():
    made = Nodes()
    first = made.add("Opaque", name="o", size=4)
    for name, size in (("a", 10), ("b", 20), ("c", 25), ("d", 100), ("e", 5)):
        first = made.add("Elementwise", first, name=name, size=size)
    graph = made.graph()
    order = ["o", "a", "b", "c", "d", "e"]
    # o, a and b make 34 bytes, c would make it 59; d alone makes more than 40; e begins the next one
    assert segments(graph, order, 40) == {"o": 0, "a": 0, "b": 0, "c": 1, "d": 2, "e": 3}
    assert set(segments(graph, order, None).values()) == {0}


@settings(max_examples=examples(30))
@given(steps(), st.integers(1, 8))
def test_equal_lanes_have_equal_segments(net, units):
    graph = training_step(net)
    within = segments(graph, [node.name for node in graph], 4 * ELEMENTS * units, lanes=True)
    for name, number in within.items():
        if name != "losses":  # which one lane alone computes
            assert number == within[f"{name.rpartition('/')[0]}/0"]


def test_a_region_stands_where_its_last_member_stood():
    found = with_regions(["a", "b", "c", "d", "e"], {"one": ["a", "c"], "two": ["d"], "new": ["x"]})
    assert found == ("b", "one", "two", "e", "new")


def test_a_region_takes_what_its_steps_hand_to_each_other():
    # 0 -> 1 -> 2 -> 3: of 4-byte numbers 1 and 2 are inside, and both are there while the second kernel runs
    found = region_costs(node_of(region(1, [(0, 1), (1, 2), (2, 3)], [3], [5, 10, 20, 40]), "x"))
    assert found.workspace == 4 * (10 + 20)
    assert found.steps == ((4 * 15, 0.0), (4 * 30, 0.0), (4 * 60, 0.0))
    assert found.views == ()
    assert region_costs(Node("x", "Relu", [], [], "", {}, 1)) is None


def test_a_view_of_an_input_is_the_inputs_memory_and_an_assigned_value_the_variables():
    plain = region(1, [(0, 1)], [1], [4, 4])
    values = (*plain.values, plain.values[0])
    both = Region(1, values[:1], values, (*plain.steps, View(0, 2), Assign(0, 1)), (2,))
    node = node_of(both, "x", "v")
    assert region_costs(node).views == ((0, 0),)
    assert region_costs(node).workspace == 0
    assert writes(node)
    assert not writes(node_of(plain, "x"))


def test_products_and_convolutions_in_a_region_cost_what_they_multiply():
    shapes = [(8, 3), (3, 5), (8, 5), (2, 8, 8, 3), (3, 3, 3, 7), (2, 8, 8, 7)]
    values = tuple(TensorType("float32", each) for each in (shapes[0], shapes[1], shapes[3], shapes[4], *shapes[2::3]))
    steps = (Call("MatMul", b"", (0, 1), (4,)), Call("Conv2D", b"", (2, 3), (5,)))
    found = region_costs(node_of(Region(4, (), values, steps, (4, 5)), "a", "b", "c", "d"))
    assert [flops for _, flops in found.steps] == [2.0 * 8 * 3 * 5, 2.0 * (2 * 8 * 8 * 7) * (3 * 3 * 3)]


@pytest.mark.parametrize("depthwise", [False, True])
def test_gradients_of_convolutions_multiply_as_much_with_and_without_their_sizes(depthwise):
    image, filters, result = (2, 8, 8, 3), (3, 3, 3, 7), (2, 8, 8, 21 if depthwise else 7)
    op = "DepthwiseConv2dNative" if depthwise else "Conv2D"
    shapes = (image, filters, result, image, filters, image, filters)
    values = tuple(TensorType("float32", each) for each in shapes[:3])
    values += (TensorType("int32", (4,)), *(TensorType("float32", each) for each in shapes[3:]))
    steps = (
        Call(f"{op}BackpropInput", b"", (1, 2), (4,)),
        Call(f"{op}BackpropFilter", b"", (0, 2), (5,)),
        Call(f"{op}BackpropInput", b"", (3, 1, 2), (6,)),
        Call(f"{op}BackpropFilter", b"", (0, 3, 2), (7,)),
    )
    found = region_costs(node_of(Region(4, (), values, steps, (4, 5, 6, 7)), "a", "b", "c", "d"))
    assert {flops for _, flops in found.steps} == {2.0 * (2 * 8 * 8 * result[-1]) * 9 * (1 if depthwise else 3)}


@st.composite
def steps_of_regions(draw):
    """A step of regions: each reads some of what was made before, and holds some more while it runs."""
    nodes = [Node("x", "Placeholder", [], [], "", {}, 1)]
    specs = {TensorId("x"): TensorSpec("float32", 4, (16,))}
    size = st.integers(1 << 16, 1 << 18)
    for number in range(draw(st.integers(3, 14))):
        inputs = draw(st.lists(st.sampled_from([*specs]), min_size=1, max_size=3, unique=True))
        sizes = [specs[each].shape[0] for each in inputs]
        inside, made = draw(size), draw(st.lists(size, min_size=1, max_size=2))
        count = len(inputs)
        kernels = [(0, count), *((count, count + 1 + place) for place in range(len(made)))]
        outputs = range(count + 1, count + 1 + len(made))
        found = region(count, kernels, outputs, [*sizes, inside, *made])
        node = node_of(found, *(each.node for each in inputs), name=f"fusion_{number}")
        nodes.append(Node(node.name, FUSION_OP, list(inputs), [], "", node.attrs, len(made), stateful=True))
        specs |= {TensorId(node.name, place): TensorSpec("float32", 4, (each,)) for place, each in enumerate(made)}
    last = nodes[-1].name
    return Step.read(Graph(nodes, specs), [node.name for node in nodes], [TensorId(last)])


def nbytes_of(node: Node, index: int) -> int:
    """Bytes of an output of a region, of its second run, or of what is brought back."""
    if node.op == "MemOpPrefetch":
        return 4 * prod(node.attrs["shape"].dims)
    found = region_from(node.attrs["region"])
    return 4 * prod(found.values[found.outputs[index]].shape)


def replayed(step: Step, graph: Graph, base: int) -> int:
    """The peak of an allocator that runs an edited graph op by op; the chain of the plan orders the ops."""
    readers = Counter(tensor for node in graph for tensor in node.inputs) + Counter(step.fetches)
    owner: dict[TensorId, TensorId] = {}  # an Await is what its Prefetch allocated
    alive: dict[TensorId, int] = {}
    held: Counter[TensorId] = Counter()
    peak = base
    for name in topological(graph):
        node, found = graph[name], region_costs(graph[name])
        for tensor in graph.tensors(node):
            if node.op in ("MemOpOffload", "Placeholder"):
                continue
            owner[tensor] = owner[node.inputs[0]] if node.op == "MemOpAwait" else tensor
            if owner[tensor] == tensor:
                alive[tensor] = nbytes_of(node, tensor.index)
            held[owner[tensor]] += readers[tensor]
        peak = max(peak, base + sum(alive.values()) + (found.workspace if found else 0))
        for tensor in node.inputs:
            if tensor in owner:
                held[owner[tensor]] -= 1
        for root in {owner[tensor] for tensor in (*node.inputs, *graph.tensors(node)) if tensor in owner}:
            if not held[root]:
                alive.pop(root, None)
    return peak


@settings(max_examples=examples(60))
@given(steps_of_regions(), st.floats(0.4, 1.0), st.sampled_from([1e3, 1e9]))
def test_the_planned_peak_is_that_of_a_replay(step, share, bandwidth):
    """Whether regions' outputs are copied, or, over a slow link, computed again."""
    timeline = step.timeline(Roofline(Device("unit", 1e9, 1e9, 0.0, 1e9, 1e9)))
    options = OffloadOptions(reuse_distance=1)
    try:
        plan = plan_step(step, timeline, Link(bandwidth, bandwidth), int(timeline.peak * share), options)
    except BudgetError:
        return
    edited = edit_step(step, timeline, plan, options)
    assert replayed(step, edited, timeline.base) <= plan.after.peak <= int(timeline.peak * share)


def test_what_kernels_alone_made_is_computed_again():
    # x -> fusion_0 -> 0 -> fusion_1 -> .. and 0 once more at the end, of which a copy would take days
    large = region(1, [(0, 1)], [1], [1 << 16, 1 << 16])
    both = Region(2, (), (*large.values, large.values[0]), (Kernel(program_from(TWICE), (0,), (2,)),), (2,))
    names = [f"fusion_{number}" for number in range(5)]
    nodes = [Node("x", "Placeholder", outputs=1), node_of(large, "x", name=names[0])]
    nodes += [node_of(large, before, name=name) for before, name in pairwise(names[:4])]
    nodes += [node_of(both, names[3], names[0], name=names[4])]
    tensors = [TensorId(name) for name in ("x", *names)]
    graph = Graph(nodes, {tensor: TensorSpec("float32", 4, (1 << 16,)) for tensor in tensors})
    step = Step.read(graph, ["x", *names], [TensorId(names[4])])
    timeline = step.timeline(Roofline(Device("unit", 1e9, 1e9, 0.0, 1e9, 1e9)))
    (chain,) = timeline.buffers[0].chains
    assert [timeline.steps[place].node for place in chain.ops] == [names[0]]
    called = replace_calls(graph, names[0])
    (none,) = replace(step, graph=called).timeline(Roofline(Device("unit", 1e9, 1e9, 0.0, 1e9, 1e9))).buffers[0].chains
    assert not none.ops


def replace_calls(graph: Graph, name: str) -> Graph:
    """`graph` with a product in a region, in place of its kernel."""
    found = region_from(graph[name].attrs["region"])
    called = replace(found, steps=(Call("Relu", b"", (0,), (1,)),))
    nodes = [node.copy() for node in graph]
    for node in nodes:
        if node.name == name:
            node.attrs = {**node.attrs, "region": to_text(called)}
    return Graph(nodes, dict(graph.specs))
