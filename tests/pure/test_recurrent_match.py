"""Loops as small graphs, read into matches: what a cell says, what is hoisted, what is rewired, what stays and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from custom_ops.expr.nodes import Elementwise
from custom_ops.recurrent.cell import CellConstant, Product, RowSum
from graph_passes.errors import GraphError
from graph_passes.graph.ir import DataType, Function, Graph, Literal, Node, TensorId, TensorSpec
from graph_passes.graph.rewrite import NewNode, apply_rewrites
from graph_passes.graph.verify import verify_graph
from graph_passes.passes.recurrent.apply import recurrent_rewrites
from graph_passes.passes.recurrent.find.equal_scalars import dimension_key, scalar_key
from graph_passes.passes.recurrent.match import RECURRENT_OP, Direction, RecurrentNode
from graph_passes.passes.recurrent.plan import plan_inference
from graph_passes.refusals import Reason

UNITS, INPUTS = 4, 3
ITEMS = {"float32": 4, "int32": 4, "bool": 1, "variant": 0}


class Builder:
    """A graph, node by node, with the shapes that TensorFlow would infer."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.specs: dict[TensorId, TensorSpec] = {}
        self.constants: dict[str, Any] = {}

    def op(
        self,
        name: str,
        op: str,
        *inputs: TensorId,
        shapes: Sequence[Any] = ((None, UNITS),),
        dtype: str = "float32",
        stateful: bool = False,
        **attrs: Any,
    ) -> TensorId:
        self.nodes.append(Node(name, op, list(inputs), [], "", dict(attrs), len(shapes), stateful))
        for index, shape in enumerate(shapes):
            self.specs[TensorId(name, index)] = TensorSpec(dtype, ITEMS[dtype], shape)
        return TensorId(name)

    def constant(self, name: str, value: Any, dtype: str = "int32") -> TensorId:
        self.constants[name] = np.array(value, dtype)
        return self.op(name, "Const", shapes=(self.constants[name].shape,), dtype=dtype)

    def graph(self, functions: Any = None) -> Graph:
        return Graph(self.nodes, self.specs, self.constants, functions)


Step = Callable[[Builder, TensorId, TensorId, dict[str, TensorId]], tuple[TensorId, TensorId]]


def plain(body: Builder, x: TensorId, h: TensorId, given: dict[str, TensorId]) -> tuple[TensorId, TensorId]:
    """h' = tanh(x W + h R + b)"""
    inputs = body.op("inputs", "MatMul", x, given["W"])
    hidden = body.op("hidden", "MatMul", h, given["R"])
    total = body.op("total", "BiasAdd", body.op("both", "AddV2", inputs, hidden), given["b"])
    new = body.op("new", "Tanh", total)
    return new, new


def condition_function(op: str = "Less") -> Function:
    condition = Builder()
    time = condition.op("time", "Placeholder", shapes=((),), dtype="int32")
    bound = condition.op("bound", "Placeholder", shapes=((),), dtype="int32")
    others = [f"unused{place}" for place in range(6)]
    for name in others:
        condition.op(name, "Placeholder")
    result = condition.op("less", op, time, bound, shapes=((),), dtype="bool")
    return Function(condition.graph(), ("time", "bound", *others), (result,))


def loop_graph(step: Step = plain, *, name: str = "loop", reverse: bool = False, condition: str = "Less") -> Builder:
    """A `StatelessWhile` over x [time, batch, inputs], whose output `stack` and state `loop:4` are read."""
    outer = Builder()
    x = outer.op("x", "Placeholder", shapes=((None, None, INPUTS),))
    given = {
        "W": outer.op("W", "Placeholder", shapes=((INPUTS, UNITS),)),
        "R": outer.op("R", "Placeholder", shapes=((UNITS, UNITS),)),
        "b": outer.op("b", "Placeholder", shapes=((UNITS,),)),
    }
    h = outer.op("h", "Placeholder", shapes=((None, UNITS),))
    return add_loop(outer, step, x, h, given, name, reverse, condition)


def add_loop(
    outer: Builder,
    step: Step,
    x: TensorId,
    h: TensorId,
    given: dict[str, TensorId],
    name: str = "loop",
    reverse: bool = False,
    condition: str = "Less",
) -> Builder:
    zero, one = outer.constant(f"{name}/0", 0), outer.constant(f"{name}/1", 1)
    shape = outer.op(f"{name}/shape", "Shape", x, shapes=((3,),), dtype="int32")
    ends = [outer.constant(f"{name}/{end}", [value]) for end, value in (("begin", 0), ("end", 1), ("step", 1))]
    steps = outer.op(f"{name}/steps", "StridedSlice", shape, *ends, shapes=((),), dtype="int32", shrink_axis_mask=1)
    if reverse:
        axis = outer.constant(f"{name}/axis", [0])
        x = outer.op(f"{name}/reversed", "ReverseV2", x, axis, shapes=((None, None, INPUTS),))
    width = outer.constant(f"{name}/width", [-1, INPUTS])
    items = outer.op(f"{name}/items", "TensorListFromTensor", x, width, shapes=((),), dtype="variant")
    out_width = outer.constant(f"{name}/out_width", [-1, UNITS])
    empty = outer.op(f"{name}/empty", "TensorListReserve", out_width, steps, shapes=((),), dtype="variant")

    body = Builder()
    time = body.op("time", "Placeholder", shapes=((),), dtype="int32")
    body.op("bound", "Placeholder", shapes=((),), dtype="int32")
    body.op("written", "Placeholder", shapes=((),), dtype="variant")
    body.op("items", "Placeholder", shapes=((),), dtype="variant")
    body.op("h", "Placeholder")
    inner = {key: body.op(key, "Placeholder", shapes=(outer.specs[tensor].shape,)) for key, tensor in given.items()}
    item = body.op("item", "TensorListGetItem", TensorId("items"), time, TensorId("items"), shapes=((None, INPUTS),))
    output, new = step(body, item, TensorId("h"), inner)
    body.op("write", "TensorListSetItem", TensorId("written"), time, output, shapes=((),), dtype="variant")
    body.op("next", "AddV2", time, body.constant("one", 1), shapes=((),), dtype="int32")
    arguments = ("time", "bound", "written", "items", "h", *given)
    results = [TensorId("next"), TensorId("bound"), TensorId("write"), TensorId("items"), new, *inner.values()]
    initial = [zero, steps, empty, items, h, *given.values()]
    shapes = [(), (), (), (), (None, UNITS), *(outer.specs[tensor].shape for tensor in given.values())]
    outer.op(name, "StatelessWhile", *initial, shapes=shapes)
    outer.specs[TensorId(name, 2)] = TensorSpec("variant", 0, ())
    stack = outer.op(f"{name}/stack", "TensorListStack", TensorId(name, 2), out_width, shapes=((None, None, UNITS),))
    if reverse:
        stack = outer.op(f"{name}/back", "ReverseV2", stack, axis, shapes=((None, None, UNITS),))
    outer.op(f"{name}/result", "Identity", stack, shapes=((None, None, UNITS),))
    outer.op(f"{name}/state", "Identity", TensorId(name, 4))
    outer.functions = getattr(outer, "functions", {}) | {  # type: ignore[attr-defined]
        (name, "body"): Function(body.graph(), arguments, tuple(results)),
        (name, "cond"): condition_function(condition),
    }
    del one
    return outer


def read(builder: Builder) -> Graph:
    return builder.graph(builder.functions)  # type: ignore[attr-defined]


def test_the_input_product_is_hoisted_with_its_bias() -> None:
    (match,) = plan_inference(read(loop_graph())).matches
    (launch,) = match.launches
    before = [node.op for node in match.nodes if isinstance(node, NewNode)]
    assert before.count("MatMul") == before.count("AddV2") == 1
    kinds = [type(node).__name__ for node in launch.cell.nodes]
    assert kinds == ["State", "Product", "Sequence", "Elementwise", "Elementwise"]
    assert launch.directions[0].matrices == (TensorId("R"),)
    assert launch.directions[0].states == (TensorId("h"),)
    assert launch.cell.sequences == (1,)
    assert not launch.cell.vectors


def test_results_are_rewired_and_the_loop_removed() -> None:
    graph = read(loop_graph())
    plan = plan_inference(graph)
    (match,) = plan.matches
    (launch,) = match.launches
    assert dict(match.rewired) == {TensorId("loop/stack"): launch.output(0), TensorId("loop", 4): launch.final(0)}
    assert {"loop", "loop/stack", "loop/items", "loop/empty"} <= set(match.removed)
    assert not {"x", "W", "R", "b", "h", "loop/steps"} & set(match.removed)
    apply_rewrites(recurrent_rewrites(plan, graph), graph)
    verify_graph(graph)
    assert [node.op for node in graph].count(RECURRENT_OP) == 1
    assert "loop" not in graph.nodes
    assert graph["loop/result"].inputs == [TensorId(launch.name, 0)]
    assert graph["loop/state"].inputs == [TensorId(launch.name, 1)]


def test_the_plan_is_a_function_of_the_graph() -> None:
    assert plan_inference(read(loop_graph())) == plan_inference(read(loop_graph()))


def test_what_is_fetched_stays() -> None:
    plan = plan_inference(read(loop_graph()), ["loop"])
    assert not plan.matches
    assert plan.unmatched[0].reason == Reason.LOOP_FETCHED(node="loop")
    (match,) = plan_inference(read(loop_graph()), ["loop/stack"]).matches
    assert "loop/stack" not in match.removed
    assert any(node.op == "TensorListFromTensor" for node in match.nodes if isinstance(node, NewNode))


def test_a_reversed_loop_walks_backwards_and_moves_nothing() -> None:
    (match,) = plan_inference(read(loop_graph(reverse=True))).matches
    (launch,) = match.launches
    assert launch.directions[0].reverse
    assert not any(node.op == "ReverseV2" for node in match.nodes if isinstance(node, NewNode))
    assert dict(match.rewired)[TensorId("loop/back")] == launch.output(0)
    assert {"loop/reversed", "loop/back"} <= set(match.removed)


def test_two_directions_share_one_launch() -> None:
    outer = loop_graph(name="forward")
    given = {key: TensorId(key) for key in "WRb"}
    add_loop(outer, plain, TensorId("x"), TensorId("h"), given, "backward", reverse=True)
    graph = read(outer)
    plan = plan_inference(graph)
    (match,) = plan.matches
    (launch,) = match.launches
    assert [direction.reverse for direction in launch.directions] == [False, True]
    found = dict(match.rewired)
    assert found[TensorId("forward/stack")] == TensorId(launch.name, 0)
    assert found[TensorId("backward/back")] == TensorId(launch.name, 1)
    assert found[TensorId("backward", 4)] == TensorId(launch.name, 3)
    apply_rewrites(recurrent_rewrites(plan, graph), graph)
    verify_graph(graph)


def test_directions_that_need_each_other_do_not() -> None:
    outer = loop_graph(name="forward")
    given = {key: TensorId(key) for key in "WRb"}
    add_loop(outer, plain, TensorId("x"), TensorId("forward/state"), given, "backward", reverse=True)
    assert len(plan_inference(read(outer)).matches) == 2


def normalised(body: Builder, x: TensorId, h: TensorId, given: dict[str, TensorId]) -> tuple[TensorId, TensorId]:
    total = body.op("hidden", "MatMul", h, given["R"])
    axis = body.constant("axis", [1])
    mean = body.op("mean", "Mean", total, axis, shapes=((None, 1),), keep_dims=True)
    new = body.op("new", "Sub", total, mean)
    return new, body.op("next_state", "Mul", new, body.op("scaled", "MatMul", x, given["W"]))


def test_sums_over_units_are_row_sums() -> None:
    (match,) = plan_inference(read(loop_graph(normalised))).matches
    cell = match.launches[0].cell
    assert [node for node in cell.nodes if isinstance(node, RowSum)]
    assert CellConstant(1 / UNITS) in cell.nodes
    assert max(cell.stages) == 1
    assert sum(isinstance(node, Product) for node in cell.nodes) == 1


def sliced(body: Builder, x: TensorId, h: TensorId, given: dict[str, TensorId]) -> tuple[TensorId, TensorId]:
    axis = body.constant("axis", 1)
    joined = body.op("joined", "ConcatV2", x, h, axis, shapes=((None, INPUTS + UNITS),))
    weights = body.op("weights", "ConcatV2", given["W"], given["R"], body.constant("rows", 0), shapes=((7, UNITS),))
    new = body.op("new", "Relu", body.op("product", "MatMul", joined, weights))
    return new, new


def test_a_joined_product_is_cut_by_rows() -> None:
    (match,) = plan_inference(read(loop_graph(sliced))).matches
    operations = [node.op for node in match.nodes if isinstance(node, NewNode)]
    assert operations.count("Slice") == 2
    assert operations.count("MatMul") == 1
    begin = {node.attrs.get("value") for node in match.nodes if isinstance(node, NewNode) and node.op == "Const"}
    assert Literal("int32", (2,), (INPUTS, 0)) in begin
    assert match.launches[0].cell.matrices == ((1, 1),)


def masked(body: Builder, x: TensorId, h: TensorId, given: dict[str, TensorId]) -> tuple[TensorId, TensorId]:
    new, _ = plain(body, x, h, given)
    zero = body.constant("zero", 0.0, "float32")
    total = body.op("sum", "Sum", x, body.constant("last", [1]), shapes=((None, 1),), keep_dims=True)
    mask = body.op("mask", "Greater", total, zero, shapes=((None, 1),), dtype="bool")
    wide = body.op("wide", "Tile", mask, body.constant("times", [1, UNITS]), dtype="bool")
    chosen = body.op("chosen", "SelectV2", wide, new, h)
    return chosen, chosen


def test_a_mask_is_one_number_a_row() -> None:
    (match,) = plan_inference(read(loop_graph(masked))).matches
    cell = match.launches[0].cell
    assert sorted(cell.sequences) == [0, 1]
    select = [node for node in cell.nodes if isinstance(node, Elementwise) and node.op == "select"]
    assert len(select) == 1
    assert cell.scalar[select[0].arguments[0]]


def unknown(body: Builder, x: TensorId, h: TensorId, given: dict[str, TensorId]) -> tuple[TensorId, TensorId]:
    new = body.op("new", "Cholesky", body.op("hidden", "MatMul", h, given["R"]))
    return new, new


def printing(body: Builder, x: TensorId, h: TensorId, given: dict[str, TensorId]) -> tuple[TensorId, TensorId]:
    body.op("print", "PrintV2", x, shapes=(), stateful=True)
    return plain(body, x, h, given)


def mixing(body: Builder, x: TensorId, h: TensorId, given: dict[str, TensorId]) -> tuple[TensorId, TensorId]:
    factor = body.op("factor", "Cholesky", body.op("inputs", "MatMul", x, given["W"]))
    new = body.op("new", "AddV2", factor, body.op("hidden", "MatMul", h, given["R"]))
    return new, new


def narrow(body: Builder, x: TensorId, h: TensorId, given: dict[str, TensorId]) -> tuple[TensorId, TensorId]:
    new = body.op("new", "MatMul", h, given["W"], shapes=((None, INPUTS),), transpose_b=True)
    return new, new


@pytest.mark.parametrize(
    ("step", "condition", "reason"),
    [
        (unknown, "Less", "'new' is a Cholesky, which no op of a cell computes"),
        (printing, "Less", r"'print' \(PrintV2\) has side effects"),
        (mixing, "Less", r"'factor' \(Cholesky\) is not known to treat the rows"),
        (narrow, "Less", r"'new' \(MatMul\) makes a state of 1 columns"),
        (plain, "NotEqual", r"the loop goes on while 'less' \(NotEqual\)"),
    ],
)
def test_reasons(step: Step, condition: str, reason: str) -> None:
    plan = plan_inference(read(loop_graph(step, condition=condition)))
    assert not plan.matches
    with pytest.raises(AssertionError, match=reason):
        assert not plan.unmatched, str(plan.unmatched[0].reason)
    assert str(plan).startswith("keep loop (StatelessWhile): ")


def test_lengths_are_followed_to_where_they_come_from() -> None:
    graph = read(loop_graph(reverse=True))
    assert scalar_key(graph, TensorId("loop/steps")) == (TensorId("x"), 0)
    assert dimension_key(graph, TensorId("loop/reversed"), 0) == (TensorId("x"), 0)
    assert dimension_key(graph, TensorId("x"), 2) == INPUTS
    assert scalar_key(graph, TensorId("loop/0")) == 0


def test_a_launch_counts_outputs_of_all_directions_before_finals() -> None:
    (match,) = plan_inference(read(loop_graph())).matches
    cell = match.launches[0].cell
    direction = match.launches[0].directions[0]
    launch = RecurrentNode("both", cell, UNITS, "float32", (direction, direction))
    assert [launch.output(0, 1), launch.final(0), launch.final(0, 1)] == [
        TensorId("both", index) for index in (1, 2, 3)
    ]
    node = launch.node()
    assert node.outputs == 4
    assert node.attrs["T"] == DataType("float32")
    assert node.attrs["reverse"] == (False, False)
    assert [node.attrs[key] for key in ("Ns", "Ni", "Nv", "Nm", "Nh", "No")] == [2, 0, 0, 2, 2, 2]
    assert node.inputs == (*direction.sequences * 2, *direction.matrices * 2, *direction.states * 2)


def test_a_launch_refuses_a_direction_of_another_cell() -> None:
    (match,) = plan_inference(read(loop_graph())).matches
    cell = match.launches[0].cell
    with pytest.raises(GraphError, match=r"a direction has \(0, 0, 0, 0, 0\)"):
        RecurrentNode("bad", cell, UNITS, "float32", (Direction((), (), (), (), ()),))
