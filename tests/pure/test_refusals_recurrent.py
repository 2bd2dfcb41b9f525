"""Reasons for which the recurrent pass leaves a loop, as loops that it leaves for these reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from graph_passes.graph.ir import Function, Graph, Node, TensorId, TensorSpec
from graph_passes.passes.recurrent.plan import plan_inference
from graph_passes.refusals import Reason
from tests.pure.test_recurrent_match import UNITS, Builder, loop_graph, plain, read

Given = dict[str, TensorId]
Step = Callable[[Builder, TensorId, TensorId, Given], tuple[TensorId, TensorId]]


def same(step: Callable[..., TensorId]) -> Step:
    """The output is the new state."""

    def both(body: Builder, x: TensorId, h: TensorId, given: Given) -> tuple[TensorId, TensorId]:
        new = step(body, x, h, given)
        return new, new

    return both


def new(op: str, *inputs: Any, shape: Any = (None, UNITS), dtype: str = "float32", **attrs: Any) -> Step:
    """A step of one op behind what `inputs` make of the body, the item, the state and what is given."""

    def step(b: Builder, x: TensorId, h: TensorId, g: Given) -> TensorId:
        made = [each(b, x, h, g) for each in inputs]
        return b.op("new", op, *made, shapes=(shape,), dtype=dtype, **attrs)

    return same(step)


def state(b: Builder, x: TensorId, h: TensorId, g: Given) -> TensorId:
    return h


def item(b: Builder, x: TensorId, h: TensorId, g: Given) -> TensorId:
    return x


def weight(name: str) -> Callable[..., TensorId]:
    return lambda b, x, h, g: g[name]


def made(name: str, op: str, *inputs: Any, shape: Any = (None, UNITS), dtype: str = "float32", **attrs: Any) -> Any:
    def make(b: Builder, x: TensorId, h: TensorId, g: Given) -> TensorId:
        given = [each(b, x, h, g) for each in inputs]
        return b.op(name, op, *given, shapes=(shape,), dtype=dtype, **attrs)

    return make


def number(name: str, value: Any, dtype: str = "int32") -> Any:
    return lambda b, x, h, g: b.constant(name, value, dtype)


def time(b: Builder, x: TensorId, h: TensorId, g: Given) -> TensorId:
    return TensorId("time")


def tensor_of(name: str) -> Callable[..., TensorId]:
    return lambda b, x, h, g: TensorId(name)


WX = made("inputs", "MatMul", item, weight("W"))
SUM = made("rows", "Sum", state, number("axes", [1]), shape=(None,))
JOINED = made("joined", "ConcatV2", state, state, number("axis", 1), shape=(None, 2 * UNITS))

TWO = made("two", "Tanh", JOINED, shape=(None, 2 * UNITS))
COLUMN = made("column", "Sum", state, number("axes", [1]), shape=(None, 1))
EVERY_SECOND = number("begin", [0, 0]), number("end", [0, 4]), number("step", [1, 2])
LESS = made("less", "Less", item, item, shape=(None,), dtype="bool")


def squared(name: str) -> Any:
    """Where the square of the step's number is."""
    return made(name, "Pack", made(f"{name}2", "Mul", time, time, shape=(), dtype="int32"), shape=(1,), dtype="int32")


SQUARE = squared("begin"), squared("end"), number("step", [1])


def beside(case: Step) -> Step:
    """The step `case` beside an op that no form of a cell has."""

    def step(b: Builder, x: TensorId, h: TensorId, g: Given) -> TensorId:
        other = b.op("other", "Cholesky", h, shapes=((None, UNITS),))
        return b.op("both", "AddV2", case(b, x, h, g)[0], other, shapes=((None, UNITS),))

    return same(step)


STEPS: dict[Reason, Step] = {
    Reason.CELL_SHAPE: new("AddV2", state, made("cube", "Tanh", state, shape=(None, 2, 2))),
    Reason.CELL_COLUMNS: new(
        "Mul", made("two", "Tanh", JOINED, shape=(None, 2 * UNITS)), state, shape=(None, 3 * UNITS)
    ),
    Reason.CELL_MIXED: new("Mul", state, made("units", "Tanh", SUM, shape=(None,))),
    Reason.CELL_PRODUCT: new("MatMul", state, state),
    Reason.CELL_MATRIX: new("MatMul", state, WX),
    Reason.CELL_PRODUCT_SIZE: new("MatMul", state, weight("W"), transpose_b=True),
    Reason.CELL_PART: new("Slice", state, number("begin", [0, 1]), number("size", [-1, 9]), shape=(None, 9)),
    Reason.CELL_JOIN: new("ConcatV2", state, state, number("axis", 0)),
    Reason.CELL_JOIN_WIDTH: new("ConcatV2", made("wide", "Tanh", state, shape=(None, None)), state, number("axis", 1)),
    Reason.CELL_SUM_AXIS: new("Mean", state, number("axes", [0]), shape=(UNITS,)),
    Reason.CELL_CAST: new("Cast", made("less", "Cast", state, dtype="int32"), dtype="float32"),
    Reason.CELL_RESHAPE: new("Reshape", state, number("shape", [-1, 2, 2]), shape=(None, 2, 2)),
    Reason.CELL_OP: new("Cholesky", state),
    Reason.PART_OF: new(
        "Slice",
        made("thin", "Sum", state, number("axes", [1]), shape=(None,)),
        number("begin", [0]),
        number("size", [4]),
    ),
    Reason.PART_RANGE: new("Slice", state, number("begin", [1, 0]), number("size", [-1, 4])),
    Reason.PART_SINGLE: new(
        "StridedSlice",
        state,
        number("begin", [0, 0]),
        number("end", [0, 4]),
        number("step", [1, 2]),
        begin_mask=1,
        end_mask=1,
        shape=(None, 2),
    ),
    Reason.SHAPE_CHECK: new("EnsureShape", state, shape=(7, UNITS)),
    Reason.STATE_COLUMNS: (lambda b, x, h, g: (h, JOINED(b, x, h, g))),
    Reason.ROWS_UNALIKE: new("AddV2", made("other", "Cholesky", WX), made("hidden", "MatMul", state, weight("R"))),
    Reason.RANK_UNKNOWN: new("AddV2", made("unknown", "Tanh", state, shape=None), state),
    Reason.NOT_A_NUMBER: new("Mul", state, made("odd", "Cast", item, shape=(None, UNITS), dtype="variant")),
    Reason.MATRIX_DTYPE: new("MatMul", state, made("half", "Cast", weight("R"), shape=(UNITS, UNITS), dtype="int32")),
    Reason.WIDTH: new("Mul", state, made("wide", "Tanh", item, shape=(None, 5))),
    Reason.ROW_SHAPE: new("Mul", state, made("cube", "Tanh", item, shape=(None, 2, 2))),
    Reason.INVARIANT_SHAPE: new("Mul", state, made("cube", "Tanh", weight("R"), shape=(1, 2, 2))),
    Reason.RANKS: new(
        "Mul",
        state,
        made(
            "chosen",
            "Select",
            made("less", "Less", item, item, shape=(None,), dtype="bool"),
            WX,
            made("again", "Tanh", tensor_of("inputs")),
        ),
    ),
    Reason.WIDTH_UNKNOWN: new("Mul", state, made("flat", "Reshape", WX, number("shape", [-1, 4]), shape=(None, None))),
    Reason.ROWS_LOST: new("Mul", state, made("flat", "Reshape", WX, number("shape", [-1, 8]), shape=(None, 2 * UNITS))),
    Reason.SHAPE_OF_CHANGING: new("Mul", state, made("size", "Size", state, shape=(), dtype="int32")),
    Reason.SIDE_EFFECTS: new("PrintV2", state, stateful=True),
    Reason.OTHER_ITEMS: new(
        "Mul", state, made("part", "StridedSlice", weight("R"), *SQUARE, shape=(UNITS,), shrink_axis_mask=1)
    ),
}


# What a cell with an op for each number could express.
SMALL = {Reason.CELL_SHAPE, Reason.CELL_COLUMNS, Reason.CELL_RESHAPE, Reason.MATRIX_DTYPE, Reason.WIDTH}
SMALL |= {Reason.INVARIANT_SHAPE, Reason.CELL_CAST}


def why(graph: Graph) -> set[Reason]:
    plan = plan_inference(graph)
    return {loop.reason.reason for loop in plan.unmatched}


@pytest.mark.parametrize("reason", STEPS, ids=lambda reason: reason.name)
def test_steps_that_no_cell_expresses(reason: Reason) -> None:
    assert why(read(loop_graph(beside(STEPS[reason]) if reason in SMALL else STEPS[reason]))) == {reason}


def node_of(builder: Builder, name: str) -> Node:
    inside = builder.functions["loop", "body"].graph.nodes.values()  # type: ignore[attr-defined]
    return next(node for node in (*builder.nodes, *inside) if node.name == name)


def with_condition(*bound: str) -> Builder:
    """A loop that goes on while `time` is below some ops of its state; with none, for ever."""
    builder = loop_graph()
    b = Builder()
    names = ("time", "bound", *(f"unused{place}" for place in range(6)))
    for name in names:
        b.op(name, "Placeholder", shapes=((None, UNITS) if name == "unused2" else (),), dtype="float32")
    if bound:
        b.op("limit", bound[0], TensorId("unused2"), shapes=((),), dtype="int32")
        result = b.op("less", "Less", TensorId("time"), TensorId("limit"), shapes=((),), dtype="bool")
    else:
        result = b.constant("true", True, "bool")
    builder.functions["loop", "cond"] = Function(b.graph(), names, (result,))  # type: ignore[attr-defined]
    return builder


def test_conditions_that_count_no_steps() -> None:
    assert why(read(loop_graph(condition="NotEqual"))) == {Reason.LOOP_CONDITION}
    assert why(read(with_condition())) == {Reason.LOOP_WITHOUT_BOUND}
    assert why(read(with_condition("Size"))) <= {Reason.LOOP_BOUND, Reason.SHAPE_OF_CHANGING}
    assert why(read(with_condition("Cast"))) == {Reason.LOOP_BOUND}


def with_state(shape: Any, dtype: str = "float32") -> Builder:
    builder = loop_graph()
    builder.specs[TensorId("h")] = TensorSpec(dtype, 4, shape)
    return builder


def test_states_that_no_cell_has() -> None:
    def still(b: Builder, x: TensorId, h: TensorId, g: Given) -> tuple[TensorId, TensorId]:
        return plain(b, x, h, g)[0], h

    assert why(read(loop_graph(still))) == {Reason.NO_STATE}
    assert why(read(with_state((None, UNITS), "int32"))) == {Reason.STATE_DTYPE}
    assert why(read(with_state((None, 64, UNITS)))) == {Reason.STATE_SHAPE}
    assert why(read(with_state((None, 0)))) == {Reason.STATE_UNITS}


def changed(name: str, change: Callable[[Node], object], step: Any = plain, **how: Any) -> Builder:
    builder = loop_graph(step, **how)
    change(node_of(builder, name))
    return builder


def at(place: int, tensor: TensorId) -> Callable[[Node], object]:
    return lambda node: node.inputs.__setitem__(place, tensor)


def called(op: str) -> Callable[[Node], object]:
    return lambda node: setattr(node, "op", op)


def written_first(step: Any) -> Builder:
    """A loop that writes its output at index 0 of a list of one item."""
    builder = changed("loop/empty", at(1, TensorId("loop/1")), step)
    body = builder.functions["loop", "body"].graph  # type: ignore[attr-defined]
    zero = Node("zero", "Const", outputs=1)
    function = builder.functions["loop", "body"]  # type: ignore[attr-defined]
    nodes = [zero, *(node.copy() for node in body)]
    next(node for node in nodes if node.name == "write").inputs[1] = TensorId("zero")
    constants = {**body.constants, "zero": builder.constants["loop/0"]}
    specs = {**body.specs, TensorId("zero"): TensorSpec("int32", 4, ())}
    builder.functions["loop", "body"] = Function(  # type: ignore[attr-defined]
        Graph(nodes, specs, constants), function.arguments, function.results
    )
    return builder


def per_row(b: Builder, x: TensorId, h: TensorId, g: Given) -> tuple[TensorId, TensorId]:
    new = plain(b, x, h, g)[1]
    return b.op("row", "Sum", new, b.constant("axes", [1]), shapes=((None, 1),)), new


def spread_rows(b: Builder, x: TensorId, h: TensorId, g: Given) -> tuple[TensorId, TensorId]:
    row, new = per_row(b, x, h, g)
    return b.op("spread", "Tile", row, b.constant("times", [1, UNITS]), shapes=((None, UNITS),)), new


def squared(b: Builder, x: TensorId, h: TensorId, g: Given) -> tuple[TensorId, TensorId]:
    b.op("squared", "Mul", TensorId("time"), TensorId("time"), shapes=((),), dtype="int32")
    return plain(b, x, h, g)


def test_lists_that_are_no_sequence_of_outputs_or_items() -> None:
    assert why(read(changed("loop/empty", called("EmptyTensorList")))) == {Reason.LIST_SIZE}
    assert why(read(changed("item", at(1, TensorId("next"))))) == {Reason.OTHER_ITEMS}
    assert why(read(changed("item", at(1, TensorId("squared")), squared))) == {Reason.LIST_READ_INDEX}
    assert why(read(changed("loop/items", called("TensorListReserve")))) == {Reason.LIST_SOURCE}
    assert why(read(changed("write", at(1, TensorId("one"))))) == {Reason.LIST_INDEX}
    assert why(read(changed("write", at(0, TensorId("items"))))) == {Reason.LIST_CHANGED}
    assert why(read(written_first(per_row))) == set()
    assert why(read(written_first(spread_rows))) == set()


def test_a_single_output_of_an_array_that_is_read_by_itself() -> None:
    builder = changed("loop/stack", called("TensorArrayReadV3"))
    reserve = node_of(builder, "loop/empty")
    reserve.op, reserve.inputs = "TensorArrayV3", reserve.inputs[::-1]
    assert why(read(builder)) == {Reason.SINGLE_OUTPUT}
