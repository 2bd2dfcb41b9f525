"""Plans as data: what is planned can be carried out in the order of the chain, whatever ops the chain leaves out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes import pipeline
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.fragmentation import Room
from graph_passes.analysis.memory.roles import unordered
from graph_passes.analysis.memory.simulate import Link, Move, Padding
from graph_passes.analysis.memory.timeline import Buffer, Gap, ScheduledOp, Timeline
from graph_passes.errors import GraphError, InfeasibleBudgetError
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.order import schedule
from graph_passes.graph.verify import verify_merged
from graph_passes.passes.offload.apply import offload_rewrites
from graph_passes.passes.offload.check import faults
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.placement import in_order
from graph_passes.passes.offload.plan import How, StepPlan, plan_offload
from graph_passes.passes.offload.thin import thinned
from tests.tiers import examples

UNIT_LINK = Link(1.0, 1.0)
SLOW_LINK = Link(0.01, 0.01)  # anything is recomputed faster than it is copied


def waits(unordered: frozenset[int] = frozenset()) -> Timeline:
    """a is made at 0, read at 1 and 2, and read again at 7; there are 10 bytes at every other position."""
    others = [Buffer(TensorId(f"o{i}"), 10, i, ()) for i in range(1, 8)]
    buffers = (Buffer(TensorId("a"), 10, 0, (1, 2, 7)), *others)
    return Timeline(tuple(ScheduledOp(f"n{i}", 1.0) for i in range(8)), buffers, 3, unordered=unordered)


@pytest.mark.parametrize(
    ("unordered", "gap"),
    [
        ((), Gap(0, 2, 7)),
        ((2,), Gap(0, 2, 7)),  # copied after 1, the last of the chain before its reader; free before 3
        ((2, 3), Gap(0, 3, 7)),  # 4 is the first of the chain that is known to run after its reader at 2
        ((7,), Gap(0, 2, 6)),  # back before 6, the last of the chain that runs before its reader at 7
        ((4, 5), Gap(0, 2, 7)),
    ],
)
def test_a_gap_begins_and_ends_on_the_chain(unordered, gap):
    timeline = waits(frozenset(unordered))
    assert [found for found in timeline.gaps() if found.buffer == 0] == [gap]


def test_what_nothing_can_come_before_does_not_move():
    # the copy would have to begin after an op before 0
    timeline = replace(waits(frozenset({0})), buffers=(Buffer(TensorId("a"), 10, 0, (7,)),))
    assert timeline.gaps() == []


@pytest.mark.parametrize("unordered", [(2,), (3,), (2, 3), (6,), (7,), (2, 6, 7), (4, 5)])
@pytest.mark.parametrize("copy_start", ["last_use", "produced"])
def test_plans_around_ops_that_cannot_be_ordered(unordered, copy_start):
    timeline = waits(frozenset(unordered))
    options = OffloadOptions(reuse_distance=1, policy="autovm", copy_start=copy_start)
    plan = plan_offload(timeline, UNIT_LINK, 20, options, How(widest=True))
    assert [move.gap for move in plan.moves] == [gap for gap in timeline.gaps() if gap.buffer == 0]
    assert plan.moves
    assert faults(timeline, plan) == []


def test_copies_are_put_at_ops_that_can_be_ordered():
    # 3 is the last of the chain before 4, and 6 the first after 5; what is made again is read at 7, where it is made
    move = Move(0, last=2, copy_after=2, release=4, prefetch=5, next=7)
    again = replace(move, recomputed=True)
    assert in_order(waits(frozenset({4, 5})), [again, move]) == [replace(move, release=3, prefetch=6), again]


def test_a_release_after_a_reader_that_is_merged_into_another_op():
    """What broke ResNet50V2: `late` waits from its bias's gradient on, which oneDNN merges into the filter's, so that
    the chain leaves it out; the release came before the op that the copy was to come after."""
    nodes, specs = [], {}
    ops = [
        ("x", "Relu", []),
        ("y", "Relu", ["x"]),
        ("g", "Neg", ["y"]),  # the gradient that waits
        ("filter", "Conv2DBackpropFilter", ["x", "y", "g"]),
        ("bias", "BiasAddGrad", ["g"]),
        ("h", "Conv2DBackpropInput", ["x", "y"]),
        ("i", "Conv2DBackpropInput", ["x", "h"]),
        ("j", "Conv2DBackpropInput", ["x", "i"]),
        ("k", "AddN", ["j", "g"]),
    ]
    for name, op, inputs in ops:
        nodes.append(Node(name, op, [TensorId(i) for i in inputs], outputs=1))
        specs[TensorId(name)] = TensorSpec("float32", 4, (1 << (4 if name in ("filter", "bias") else 16),))
    graph = Graph(nodes, specs)
    step = pipeline.Step.read(graph, [name for name, _, _ in ops], merging=True)
    timeline = step.timeline(Roofline(load("unit")))
    options = OffloadOptions(reuse_distance=1, policy="autovm")
    # 262,144 bytes each: x, h, i and g at i; without g three of these, and a filter
    plan = pipeline.plan_step(step, timeline, UNIT_LINK, (3 << 18) + 1024, options)
    assert "g" in {timeline.buffers[move.buffer].tensor.node for move in plan.moves}
    edited = pipeline.edit_step(step, timeline, plan, options)
    assert any(node.op == "MemOpRelease" for node in edited)


def test_ops_that_the_host_may_wait_for_are_not_ordered():
    """Ops on int32, which lies in the host's memory, and small ones, whose results it may read."""
    size = 1 << 14
    nodes = [
        Node("x", "Relu", [], outputs=1),
        Node("ids", "Range", [], outputs=1),
        Node("rows", "Reshape", [TensorId("ids")], outputs=1),
        Node("gather", "GatherV2", [TensorId("x"), TensorId("rows")], outputs=1),
        Node("count", "Shape", [TensorId("gather")], outputs=1),  # small: no budget depends on it
        Node("first", "Cast", [TensorId("rows")], outputs=1),
        Node("state", "Range", [], outputs=1),
        Node("seed", "FloorMod", [TensorId("state")], outputs=1),
        Node("norm", "Sum", [TensorId("x")], outputs=1),  # waits for what is large
        Node("after", "NoOp", [], control=["x"]),
    ]
    dtypes = {"x": "float32", "ids": "int32", "rows": "int32", "gather": "float32", "count": "int32", "first": "int64"}
    dtypes |= {"state": "int64", "seed": "int64", "norm": "float32"}
    sizes = {"count": (1,), "state": (2,), "seed": (2,), "norm": ()}
    graph = Graph(
        nodes, {TensorId(name): TensorSpec(dtype, 8, sizes.get(name, (size,))) for name, dtype in dtypes.items()}
    )
    order = [node.name for node in nodes]
    free = [order[place] for place in sorted(unordered(graph, order, False, hosted=True))]
    assert free == ["ids", "rows", "state", "seed"]
    assert unordered(graph, order, False) == frozenset()
    step = pipeline.Step.read(graph, order, hosted=True)
    assert step.timeline(Roofline(load("unit"))).unordered == unordered(graph, step.order, False, hosted=True)


BROKEN = [
    ({"release": 2}, "not in this order"),
    ({"prefetch": 3, "release": 4}, "not in this order"),
    ({"copy_after": 3}, "not in this order"),
    ({"next": 6}, "is read between positions"),
    ({"buffer": 1}, "is read between positions"),
    ({"recomputed": True}, "from what is not there"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_faults_of_a_move(change, words):
    timeline = waits()
    plan = plan_offload(timeline, UNIT_LINK, 25, OffloadOptions(reuse_distance=1, policy="autovm"), How(widest=True))
    (move,) = plan.moves
    assert faults(timeline, plan) == []
    broken = replace(plan, moves=(replace(move, **change),))
    assert any(words in fault for fault in faults(timeline, broken)), faults(timeline, broken)
    assert faults(timeline, replace(plan, moves=(move, move)))
    with pytest.raises(GraphError, match="cannot be put into the graph") as caught:
        offload_rewrites([StepPlan(broken, timeline, OffloadOptions())], Graph([], {}))
    assert faults(timeline, broken)[0] in str(caught.value)


def test_faults_of_a_chain():
    timeline = waits(frozenset({4}))
    plan = plan_offload(timeline, UNIT_LINK, 25, OffloadOptions(reuse_distance=1, policy="autovm"), How(widest=True))
    assert faults(timeline, plan) == []
    for ordered, words in (
        ((), "outside the control chain"),
        ((3, 2), "does not ascend"),
        ((*plan.ordered, 99), "goes through position 99 of 8 ops"),
        ((4,), "goes through 'n4', which no control edge may go to"),
    ):
        found = faults(timeline, replace(plan, ordered=ordered))
        assert any(words in fault for fault in found), (ordered, found)
    assert faults(timeline, replace(plan, paddings=(Padding(4, 1),)))


@st.composite
def training_graphs(draw) -> Graph:
    """Convolutions with skip connections, biases, paddings and updates; a kernel library merges some of these ops."""
    nodes: list[Node] = []
    specs: dict[TensorId, TensorSpec] = {}

    def add(name: str, op: str, inputs: list[str], units: int) -> str:
        nodes.append(Node(name, op, [TensorId(i) for i in inputs], outputs=1))
        specs[TensorId(name)] = TensorSpec("float32", 4, (units << 14,))  # 64 KiB, the smallest that moves
        return name

    layers: list[tuple[list[str], str, bool]] = []
    tops = [add("x", "Relu", [], draw(st.integers(1, 4)))]
    for index in range(draw(st.integers(2, 8))):
        reads = sorted({tops[-1], draw(st.sampled_from(tops))})
        units, padded, biased = draw(st.integers(1, 4)), draw(st.booleans()), draw(st.booleans())
        source = [add(f"p{index}", "Pad", [reads[0]], units)] if padded else reads[:1]
        convolution = add(f"c{index}", "Conv2D", [*source, *reads[1:]], units)
        top = add(f"b{index}", "BiasAdd", [convolution], units) if biased else convolution
        if draw(st.booleans()):
            top = add(f"r{index}", "Relu", [top], units)
        layers.append((source if draw(st.booleans()) else reads[:1], top, biased))
        tops.append(top)
    gradient = add("loss", "Mean", [tops[-1]], 1)
    for index in reversed(range(len(layers))):
        source, top, biased = layers[index]
        units = draw(st.integers(1, 4))
        if biased and draw(st.booleans()):
            add(f"gb{index}", "BiasAddGrad", [gradient], 1)
        filters = add(f"gf{index}", "Conv2DBackpropFilter", [source[0], top, gradient], 1)
        if biased and f"gb{index}" not in {node.name for node in nodes}:
            add(f"gb{index}", "BiasAddGrad", [gradient], 1)
        if draw(st.booleans()):
            add(f"u{index}", "ResourceApplyGradientDescent", [filters], 1)
        gradient = add(f"gx{index}", "Conv2DBackpropInput", [top, gradient], units)
        if draw(st.booleans()):
            gradient = add(f"gs{index}", "AddN", [gradient, draw(st.sampled_from(tops))], units)
    return Graph(nodes, specs)


@settings(max_examples=examples(100))
@given(
    graph=training_graphs(),
    share=st.floats(0.2, 1.0),
    link=st.sampled_from([UNIT_LINK, SLOW_LINK]),
    values=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["optimal", "hybrid", "autovm", "vdnn_all", "vdnn_conv"]),
            "prefetch": st.sampled_from(["late", "early"]),
            "copy_start": st.sampled_from(["last_use", "produced"]),
        }
    ),
    widest=st.booleans(),
    in_room=st.booleans(),
)
def test_every_plan_of_a_random_step_can_be_put_into_its_graph(graph, share, link, values, widest, in_room):
    step = pipeline.Step.read(graph, merging=True)
    timeline = step.timeline(Roofline(load("unit")))
    budget = int(timeline.peak * share)
    options = OffloadOptions(reuse_distance=1, **values)
    room = Room(((0, int(timeline.peak * share)),), limit=budget) if in_room else None
    try:
        plan = pipeline.plan_step(step, timeline, link, budget, options, widest=widest, room=room)
    except InfeasibleBudgetError:
        return
    assert faults(timeline, plan) == []
    pipeline.edit_step(step, timeline, plan, options)  # verifies that it is acyclic
    if room:
        thin = thinned(timeline, plan, room)
        assert faults(timeline, thin) == []
        pipeline.edit_step(step, timeline, thin, options)


def test_what_onednn_reads_together_with_a_workspace_stays():
    """`MaxPoolGrad` behind a copy of `MaxPool`'s result is another kernel; of its other input a copy will do."""
    ops = [("x", "Relu", []), ("pool", "MaxPool", ["x"]), ("deep", "Relu", ["pool"]), ("late", "Neg", ["deep"])]
    ops.append(("grad", "MaxPoolGrad", ["x", "pool", "late"]))
    nodes = [Node(name, op, [TensorId(source) for source in inputs], outputs=1) for name, op, inputs in ops]
    graph = Graph(nodes, {TensorId(name): TensorSpec("float32", 4, (1 << 16,)) for name, _, _ in ops})
    for merging, pinned in ((True, {"pool"}), (False, set())):
        step = pipeline.Step.read(graph, [name for name, _, _ in ops], merging=merging)
        timeline = step.timeline(Roofline(load("unit")))
        assert {buffer.tensor.node for buffer in timeline.buffers if buffer.pinned_by} == pinned


def biased(*edges):
    """A layer in bfloat16 whose bias is cast behind the product, as Keras creates it, with control `edges`."""
    controls = dict(edges)
    nodes, specs = [], {}
    ops = [
        ("x", "Placeholder", []),
        ("filter", "Placeholder", []),
        ("bias", "Placeholder", []),
        ("product", "Conv2D", ["x", "filter"]),
        ("cast", "Cast", ["bias"]),
        ("sum", "BiasAdd", ["product", "cast"]),
    ]
    for name, op, inputs in ops:
        nodes.append(
            Node(name, op, [TensorId(i) for i in inputs], [controls[name]] if name in controls else [], outputs=1)
        )
        specs[TensorId(name)] = TensorSpec("bfloat16", 2, (8,))
    return Graph(nodes, specs)


def test_what_a_merged_op_reads_comes_before_it():
    """A control edge goes from an earlier position to a later one: none may lead from the product to its bias."""
    graph = biased()
    created = ["x", "filter", "product", "bias", "cast", "sum"]
    order = schedule(graph, created, merging=True)
    assert order.index("cast") < order.index("product")
    assert schedule(graph, created) == created


def test_a_merged_op_that_would_wait_for_itself_is_refused():
    verify_merged(biased(), biased(("cast", "x")))
    with pytest.raises(GraphError, match="'product' and 'sum' as one op"):
        verify_merged(biased(), biased(("cast", "product")))
    verify_merged(biased(), biased(("cast", "product"), ("product", "x")))  # no pair that has a control input is merged
    verify_merged(biased(("cast", "product")), biased(("cast", "product")))  # what was given is not the plan's fault
