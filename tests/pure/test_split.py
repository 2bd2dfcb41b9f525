"""Parts of a step on pieces of the batch: which ops can, where parts end, what the pieces are, and what is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.batch.labels import Rows, Summed
from graph_passes.analysis.batch.separable import Separable, again, batches, convex, levels, separable
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline, held
from graph_passes.analysis.memory.simulate import Link
from graph_passes.graph.gates import with_open_gates
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.graph.ops import ROWS_ATTRIBUTE
from graph_passes.graph.order import topological
from graph_passes.graph.verify import verify_graph
from graph_passes.passes.offload.options import Effort, OffloadOptions
from graph_passes.passes.split.apply import split_graph
from graph_passes.passes.split.plan import SplitEstimate, SplitLane, SplitNeeds, plan_split
from graph_passes.passes.split.split_regions import Exactness, Users, plan_of, sizes_of_pieces
from graph_passes.pipeline import Step, plan_step
from graph_passes.refusals import Reason, Refusal
from graph_passes.report import Report, SplitRecord
from graph_passes.splitting import CLEARLY, SplitStep, split_step
from tests.tiers import examples

BATCH = 6


class Net:
    """A graph that is written op by op, with shapes."""

    def __init__(self, batch: int = BATCH) -> None:
        self.batch = batch
        self.nodes: list[Node] = []
        self.specs: dict[TensorId, TensorSpec] = {}
        self.constants: dict[str, Any] = {}
        self.add("x", "Placeholder", [], (batch, 16))

    def add(
        self, name: str, op: str, inputs: Sequence[str], shape: tuple[int, ...], dtype: str = "float32", **attrs: Any
    ) -> str:
        self.nodes.append(Node(name, op, [TensorId(each) for each in inputs], attrs=attrs, outputs=1))
        self.specs[TensorId(name)] = TensorSpec(dtype, 4, shape)
        return name

    def constant(self, name: str, values: Any, dtype: str = "int32") -> str:
        self.constants[name] = np.array(values, dtype)
        return self.add(name, "Const", [], self.constants[name].shape, dtype)

    def weight(self, name: str, *shape: int) -> str:
        return self.add(name, "VariableV2", [], shape)

    def update(self, name: str, gradient: str) -> None:
        node = Node(name, "AssignSubVariableOp", [TensorId(gradient)], outputs=0, stateful=True)
        self.nodes.append(node)

    def graph(self) -> Graph:
        return Graph([node.copy() for node in self.nodes], self.specs, self.constants)

    def separable(self) -> Separable:
        graph = self.graph()
        return separable(graph, tuple(topological(graph)), self.batch)


def trained(batch: int = BATCH, width: int = 16, statistics: bool = False) -> Net:
    """Two products, and their gradients; between them perhaps a mean over the batch, which is subtracted."""
    net = Net(batch)
    net.weight("w", 16, width)
    net.weight("v", width, 1)
    net.constant("rows", [0])
    net.constant("all", [0, 1])
    net.add("a", "MatMul", ["x", "w"], (batch, width))
    if statistics:
        net.add("mean", "Mean", ["a", "rows"], (width,))
        net.add("b", "Sub", ["a", "mean"], (batch, width))
    else:
        net.add("b", "Relu", ["a"], (batch, width))
    net.add("c", "MatMul", ["b", "v"], (batch, 1))
    net.add("squares", "Square", ["c"], (batch, 1))
    net.add("loss", "Mean", ["squares", "all"], ())
    net.add("dc", "Neg", ["c"], (batch, 1))
    net.add("dv", "MatMul", ["b", "dc"], (width, 1), transpose_a=True)
    net.add("db", "MatMul", ["dc", "v"], (batch, width), transpose_b=True)
    net.add("da", "ReluGrad", ["db", "b"], (batch, width))
    net.add("dw", "MatMul", ["x", "da"], (16, width), transpose_a=True)
    net.update("train_v", "dv")
    net.update("train_w", "dw")
    return net


def why(op: str, shapes: Sequence[tuple[int, ...]], made: tuple[int, ...], **attrs: Any) -> Refusal | None:
    """Why an op of `x` and other inputs cannot work on a piece; None if it can."""
    net = Net()
    names = ["x"]
    for place, shape in enumerate(shapes):
        names.append(net.add(f"in_{place}", "VariableV2", [], shape))
    net.add("op", op, names, made, **attrs)
    return net.separable().refused.get("op")


def label(net: Net, name: str) -> Any:
    return net.separable().labels.get(TensorId(name))


def test_rows_and_sums() -> None:
    net = trained()
    assert label(net, "a") == Rows(0)
    assert label(net, "loss") == Summed(weighted=True)
    assert label(net, "dw") == Summed()
    net.constant("turned", [1, 0])
    net.add("t", "Transpose", ["a", "turned"], (16, BATCH))
    assert label(net, "t") == Rows(1)
    net.constant("flat", [2, BATCH * 8])
    net.add("r", "Reshape", ["a", "flat"], (2, BATCH * 8))
    assert net.separable().refused["r"] == Reason.SPLIT_MIXES(
        node="r", op="Reshape"
    )  # 2 is no dimension before the batch
    net.constant("flatter", [BATCH * 8, 2])
    net.add("s", "Reshape", ["a", "flatter"], (BATCH * 8, 2))
    assert label(net, "s") == Rows(0, 8)
    assert net.separable().rules["s"].shapes == ((1, 0, 8),)


@pytest.mark.parametrize(
    ("op", "shapes", "made", "attrs"),
    [
        ("Cholesky", [], (BATCH, 16), {}),
        ("AddV2", [(16, BATCH, 16)], (16, BATCH, 16), {}),  # allowed: the batch is the second dimension
        ("MatMul", [(BATCH, 16)], (16, 16), {"transpose_a": True}),  # allowed: both are sliced
        ("Squeeze", [], (BATCH, 16), {}),
    ],
    ids=str,
)
def test_ops_that_mix_examples(op: str, shapes: Any, made: Any, attrs: Any) -> None:
    found = why(op, shapes, made, **attrs)
    assert found == (Reason.SPLIT_MIXES(node="op", op=op) if op in ("Cholesky", "Squeeze") else None)


def test_a_shape_that_is_not_known_ends_a_part() -> None:
    assert why("Reshape", [(2,)], (2, 48)) == Reason.SPLIT_MIXES(node="op", op="Reshape")
    assert why("Reshape", [(2,)], (BATCH * 2, 8)) == Reason.SPLIT_SHAPE(node="op", op="Reshape", tensor="in_0:0")


def test_a_reduction_over_the_batch_is_a_border_if_an_op_reads_it() -> None:
    found = trained(statistics=True).separable()
    assert {"a", "mean"} <= found.rules.keys()
    first, second = levels(found)
    assert first == {"a", "mean"}
    assert "b" in second
    assert convex(found, found.rules) == second  # the larger part
    assert again(found, second) == {"a"}
    assert again(found, second, products=False) == frozenset()


def test_without_borders_all_is_one_region() -> None:
    found = trained().separable()
    assert convex(found, found.rules) == frozenset(found.rules) == levels(found)[0]


def test_a_constant_that_waits_for_an_op_is_no_border() -> None:
    """As Grappler leaves constants that it folded."""
    net = trained()
    net.constant("scale", 2.0, "float32")
    net.nodes[-1].control.append("a")
    net.add("scaled", "Mul", ["da", "scale"], (BATCH, 16))
    found = net.separable()
    assert convex(found, found.rules) == frozenset(found.rules)
    graph, _ = split_graph(plan_of(found, [(frozenset(found.rules), frozenset())], 2, ()), found.graph)
    verify_graph(graph)


@given(batch=st.integers(2, 40), count=st.integers(2, 40))
def test_pieces_of_any_batch(batch: int, count: int) -> None:
    pieces = sizes_of_pieces(batch, min(count, batch))
    assert sum(pieces) == batch
    assert max(pieces) - min(pieces) <= 1


@settings(max_examples=examples(40))
@given(batch=st.integers(2, 9), count=st.integers(2, 5), statistics=st.booleans(), more=st.booleans(), data=st.data())
def test_pieces_are_a_sound_graph_of_known_shapes(
    batch: int, count: int, statistics: bool, more: bool, data: st.DataObject
) -> None:
    found = trained(batch, statistics=statistics).separable()
    parts = [(members, again(found, members) if more else frozenset[str]()) for members in levels(found)]
    chosen = [part for part in parts if data.draw(st.booleans())]
    plan = plan_of(found, chosen, min(count, batch), [TensorId("loss")])
    graph, order = split_graph(plan, found.graph)
    verify_graph(graph)
    assert set(order) == set(graph.nodes)
    assert TensorId("loss").node in graph.nodes
    assert {"train_v", "train_w"} <= graph.nodes.keys()
    for node in graph:
        assert all(graph.specs[tensor].sizes is not None for tensor in graph.tensors(node))
    for members, _ in chosen:
        assert members.isdisjoint(graph.nodes.keys() - {"loss"})


def test_a_piece_waits_for_the_one_before_it_and_sums_are_added_in_order() -> None:
    found = trained().separable()
    plan = plan_of(found, [(frozenset(found.rules), frozenset())], 3, ())
    graph, _ = split_graph(plan, found.graph)
    assert plan.exactness is Exactness.SUMS
    slices = [node for node in graph if node.op == "Slice"]
    assert {before for node in slices if node.name.startswith("tfmem/split_0/2") for before in node.control} == {
        "tfmem/split_0/1/End"
    }
    last = graph[graph["train_w"].inputs[0].node]
    assert last.op == "AddV2"
    assert last.inputs[1].node == "tfmem/split_0/2/dw"
    assert graph[last.inputs[0].node].inputs == [TensorId("tfmem/split_0/0/dw"), TensorId("tfmem/split_0/1/dw")]


def test_a_slice_of_whole_rows_holds_its_tensor_and_takes_no_memory() -> None:
    net = Net(16)
    net.add("y", "Relu", ["x"], (16, 16))
    net.add("z", "Softmax", ["y"], (16, 16))
    net.add("end", "Neg", ["z"], (16, 16))
    found = net.separable()
    graph, order = split_graph(plan_of(found, [(frozenset({"z"}), frozenset())], 2, ()), found.graph)
    assert all(ROWS_ATTRIBUTE in node.attrs for node in graph if node.op == "Slice")
    timeline = Step.read(graph, order).timeline(Roofline(load("unit")))
    buffers = {buffer.tensor.node: buffer for buffer in timeline.buffers}
    assert not any(name.endswith("Slice/y") for name in buffers)
    position = {step.node: place for place, step in enumerate(timeline.steps)}
    assert position["tfmem/split_0/0/z"] in buffers["y"].uses
    assert position["tfmem/split_0/1/z"] not in buffers["y"].uses  # the last piece has a copy of its rows
    assert buffers["tfmem/split_0/1/Slice/y/Own"].nbytes == 8 * 16 * 4
    assert buffers["tfmem/split_0/Rows/z"].nbytes == 16 * 16 * 4  # one buffer for the rows of both pieces
    assert not any("/Put/" in name for name in buffers)


def split(graph: Graph, budget: float, split_option: Any = "needed", **how: Any) -> SplitStep | Refusal:
    step = Step.read(graph, fetches=[TensorId("loss")])
    options, costs = OffloadOptions(split=split_option, reuse_distance=1), Roofline(load("unit"))
    return split_step(step, lambda each: each.timeline(costs), Link(1.0, 1.0), int(budget), options, **how)


def test_the_fastest_that_meets_the_budget() -> None:
    net = trained(batch=64, width=1 << 12)
    base = Step.read(net.graph()).timeline(Roofline(load("unit"))).base
    found = split(net.graph(), base + (1 << 20))
    assert isinstance(found, SplitStep)
    assert sum(found.plan.regions[0].pieces) == 64
    assert found.peak_before > base + (1 << 20)
    timeline = Step.read(found.graph, found.order, [TensorId("loss")]).timeline(Roofline(load("unit")))
    assert timeline.peak <= base + (1 << 20) + (1 << 18)


def test_a_split_that_is_not_needed_has_to_be_clearly_faster() -> None:
    graph = trained(batch=64, width=1 << 12).graph()
    room = Step.read(graph).timeline(Roofline(load("unit"))).base + (1 << 20)
    found = split(graph, room)
    assert isinstance(found, SplitStep)
    timeline = Step.read(found.graph, found.order, [TensorId("loss")]).timeline(Roofline(load("unit")))
    options = OffloadOptions(reuse_distance=1)
    step = Step.read(found.graph, found.order, [TensorId("loss")])
    seconds = plan_step(step, timeline, Link(1.0, 1.0), int(room), options, effort=Effort.GREEDY).after.seconds
    rate = found.seconds_before / seconds
    assert isinstance(split(graph, room, rate=0.99 * CLEARLY * rate), SplitStep)
    assert isinstance(split(graph, room, rate=1.01 * CLEARLY * rate), Refusal)


def test_what_is_not_split() -> None:
    graph = trained(batch=64, width=1 << 12).graph()
    base = Step.read(graph).timeline(Roofline(load("unit"))).base
    room = base + (1 << 20)
    assert split(graph, room, "never") == Reason.SPLIT_NEVER()
    assert split(graph, base) == Reason.SPLIT_BASE(base=f"{base:,}")
    over = split(graph, base + 1)
    assert isinstance(over, Refusal)
    assert over.reason is Reason.SPLIT_OVER
    assert isinstance(split(graph, room, rate=1.0), Refusal)
    graph["a"].device, graph["b"].device = "/device:GPU:0", "/device:GPU:1"
    assert split(graph, room) == Reason.SPLIT_SHARED(detail="/device:GPU:0, /device:GPU:1")
    small = trained(batch=2).graph()
    assert split(small, 1 << 30) == Reason.SPLIT_NO_REGION()
    net = trained(batch=2)
    net.add("mixed", "AnOpWithoutARule", ["x"], (2, 16))
    mixes = Reason.SPLIT_MIXES(node="mixed", op="AnOpWithoutARule")
    assert split(net.graph(), 1 << 30) == Reason.SPLIT_ENDS(why=str(mixes))
    net = Net(1)
    net.add("loss", "Neg", ["x"], (1, 16))
    assert split(net.graph(), 1 << 30) == Reason.SPLIT_NO_BATCH(count=2)


def test_the_batch_is_the_size_of_the_largest_inputs() -> None:
    net = Net()
    net.add("labels", "Placeholder", [], (BATCH,), "int32")
    net.add("other", "Placeholder", [], (3, 4))
    assert batches(net.graph()) == [BATCH, 3]


def test_more_pieces_are_tried_while_they_help() -> None:
    net = trained(batch=32)
    graph = net.graph()
    tried: list[int] = []

    def trial(plan: Any) -> SplitEstimate:
        count = len(plan.regions[0].pieces)
        tried.append(count)
        return SplitEstimate(1000 // count, None if count < 8 else 1.0)

    class Source:
        def read(self) -> Graph:
            return graph

    needs = SplitNeeds(tuple(topological(graph)), (), [SplitLane(4, ())], 200, trial)
    choice, _ = plan_split(Source(), needs)  # type: ignore[arg-type]
    assert choice.plan is not None
    assert len(choice.plan.regions[0].pieces) == 8
    assert sorted(set(tried)) == [2, 4, 8, 16]


def test_a_report_with_splits_is_read_back() -> None:
    record = SplitRecord(4, 1, "a", "dw", (3, 3), str(Exactness.SUMS))
    given_report = Report("g", "cpu", "optimal", "split along the batch", 10, 5, budget=7, splits=(record,) * 6)
    assert Report.from_json(given_report.to_json()) == given_report
    assert "4 ops from 'a' to 'dw', 1 of the forward pass again, in 2 pieces of 3 examples" in str(given_report)
    assert "and 2 more parts" in str(given_report)


def test_what_is_written_over_a_slice_keeps_all_that_is_sliced() -> None:
    """Once nothing else holds the tensor, TensorFlow writes a product over a slice of whole rows."""
    net = Net(batch=32)
    whole = net.add("whole", "Tile", ["x"], (32, 16))
    ends = [net.constant(name, values) for name, values in (("begin", [0, 0]), ("size", [16, 16]))]
    net.add("rows", "Slice", [whole, *ends], (16, 16), **{ROWS_ATTRIBUTE: True})
    other = net.add("other", "Const", [], (16, 16))
    net.add("product", "Mul", ["rows", other], (16, 16))
    net.add("later", "Tile", ["x"], (32, 16))
    net.add("end", "MatMul", ["product", "later"], (16, 16))
    graph = Graph(net.nodes, net.specs, net.constants)
    order = [node.name for node in net.nodes]
    timeline = Step(graph, tuple(order), ()).timeline(Roofline(load("v100")))
    buffer = next(each for each in timeline.buffers if each.tensor == TensorId("whole"))
    assert max(buffer.uses) == order.index("end")


def test_gates_between_pure_ops_are_opened() -> None:
    """The gates of updates, and fetched ones, stay."""
    net = Net()
    for name in ("a", "b", "c"):
        net.add(name, "Relu", ["x"], (BATCH, 16))
    net.nodes.append(Node("gate", "NoOp", [], control=["a", "b"], outputs=0))
    net.nodes.append(Node("fetched", "NoOp", [], control=["gate", "c"], outputs=0))
    net.nodes.append(Node("behind", "Identity", [TensorId("a")], control=["gate"], outputs=1))
    graph = Graph(net.nodes, net.specs, net.constants)
    opened, rewrites = with_open_gates(graph, [node.name for node in net.nodes], {"fetched"})
    assert [rewrite.name for rewrite in rewrites] == ["gate"]
    assert set(opened["behind"].control) == {"a", "b"}
    assert set(opened["fetched"].control) == {"a", "b", "c"}
    assert "gate" not in opened.nodes
    assert "gate" in graph.nodes


def test_what_users_hold_stays_and_runs_again_in_each_piece() -> None:
    net = Net()
    net.add("inner", "Relu", ["x"], (BATCH, 16))
    net.add("held", "Tanh", ["inner"], (BATCH, 16))
    net.add("outer", "Relu", ["held"], (BATCH, 16))
    found = separable(Graph(net.nodes, net.specs, net.constants), [node.name for node in net.nodes], BATCH)
    users = Users(held=frozenset({"held"}), read=frozenset({TensorId("outer")}))
    plan = plan_of(found, [(frozenset({"inner", "held", "outer"}), frozenset())], 2, (), users)
    (region,) = plan.regions
    assert region.members == ("inner", "outer")
    assert region.again == ("held",)
    assert region.exits == (TensorId("inner"), TensorId("outer"))


def test_slots_that_are_never_read_by_name_are_in_use() -> None:
    """An optimizer's moments are behind handles that only its updates read."""
    handle = TensorSpec("resource", 0, (), TensorSpec("float32", 4, (100,)))
    graph = Graph([Node("m", "VarHandleOp", [], outputs=1)], {TensorId("m"): handle}, {})
    assert held(graph) == 400
