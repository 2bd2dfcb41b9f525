"""What ops mean for fusion, kernels of them, and regions: as data, on graphs made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from custom_ops.expr.text import to_text
from custom_ops.fusion.region import Assign, Call, Kernel, Read, TensorType, View
from graph_passes.analysis.op_pattern import OpPattern, pattern_of, patterns_of
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.lower.lower_nodes import Lowering, LoweringError, VariableValue, lower_kernel
from graph_passes.lower.shapes import Shapes
from graph_passes.passes.fuse.lower_region import lower_region
from graph_passes.refusals import Reason

ITEMSIZE = {"float32": 4, "float16": 2, "int32": 4, "int64": 8, "bool": 1, "string": 0, "resource": 0, "uint8": 1}


class Builder:
    """A graph, an op at a time."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._specs: dict[TensorId, TensorSpec] = {}
        self._constants: dict[str, Any] = {}

    def add(
        self,
        name: str,
        op: str,
        inputs: Sequence[str] = (),
        *shapes: tuple[int | None, ...] | None,
        dtype: str = "float32",
        stateful: bool = False,
        **attrs: Any,
    ) -> str:
        """A node with outputs of these shapes."""
        tensors = [TensorId(text.split(":")[0], int(text.partition(":")[2] or 0)) for text in inputs]
        self._nodes.append(Node(name, op, tensors, attrs=attrs, outputs=len(shapes), stateful=stateful))
        for index, shape in enumerate(shapes):
            self._specs[TensorId(name, index)] = TensorSpec(dtype, ITEMSIZE[dtype], shape)
        return name

    def constant(self, name: str, value: Any) -> str:
        """A small constant."""
        self._constants[name] = np.asarray(value)
        return self.add(name, "Const", (), np.shape(value), dtype=str(np.asarray(value).dtype))

    def variable(self, name: str, shape: tuple[int, ...]) -> str:
        """A handle."""
        self.add(name, "VarHandleOp", (), (), dtype="resource", stateful=True)
        self._specs[TensorId(name)] = TensorSpec("resource", 0, (), TensorSpec("float32", 4, shape))
        return name

    def graph(self) -> Graph:
        """All of it."""
        return Graph(self._nodes, self._specs, self._constants)


def softmax() -> Graph:
    """A softmax of [4, 5] after a bias, by primitive ops."""
    b = Builder()
    b.add("x", "Placeholder", (), (4, 5))
    b.add("bias", "Placeholder", (), (5,))
    b.constant("axis", np.array([-1], np.int32))
    b.add("add", "BiasAdd", ("x", "bias"), (4, 5))
    b.add("max", "Max", ("add", "axis"), (4, 1), keep_dims=True)
    b.add("sub", "Sub", ("add", "max"), (4, 5))
    b.add("exp", "Exp", ("sub",), (4, 5))
    b.add("sum", "Sum", ("exp", "axis"), (4, 1), keep_dims=True)
    b.add("div", "RealDiv", ("exp", "sum"), (4, 5))
    return b.graph()


MEMBERS = ("add", "max", "sub", "exp", "sum", "div")


def test_a_softmax_of_primitive_ops() -> None:
    """What is reduced and what is divided are the same nodes; dimensions of size 1 are none."""
    kernel = lower_kernel(softmax(), MEMBERS, [TensorId("div"), TensorId("max")])
    assert to_text(kernel.program) == (
        "program 1\naxes 4 5\ntensor float32 2\ntensor float32 1\ninput 0 a0 a1\ninput 1 a1\nadd 0 1\nreduce max 2 1\n"
        "subtract 2 3\nexp 4\nreduce sum 5 1\ndivide 5 6\noutput 7 0 1\noutput 3 0\n"
    )
    assert kernel.inputs == (TensorId("x"), TensorId("bias"))
    assert (kernel.outputs, kernel.output_shapes) == ((TensorId("div"), TensorId("max")), ((4, 5), (4,)))


def test_kinds() -> None:
    found = patterns_of(softmax())
    assert {name: each.pattern for name, each in found.items()} == {
        "x": OpPattern.OPAQUE, "bias": OpPattern.OPAQUE, "axis": OpPattern.CONSTANT, "add": OpPattern.ELEMENTWISE,
        "max": OpPattern.ROW_REDUCTION, "sub": OpPattern.ELEMENTWISE, "exp": OpPattern.ELEMENTWISE,
        "sum": OpPattern.ROW_REDUCTION, "div": OpPattern.ELEMENTWISE,
    }  # fmt: skip
    assert found["max"].operands == (0,)  # the axes say only how


@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        ((2,), OpPattern.ROW_REDUCTION), ((1, 2), OpPattern.ROW_REDUCTION), ((0,), OpPattern.COLUMN_REDUCTION),
        ((0, 1), OpPattern.COLUMN_REDUCTION), ((0, 1, 2), OpPattern.SCALAR_REDUCTION), ((1,), OpPattern.REDUCTION),
        ((0, 2), OpPattern.REDUCTION), ((3,), OpPattern.LAYOUT), ((-2, 3), OpPattern.ROW_REDUCTION),
    ],
)  # fmt: skip
def test_kinds_of_reductions(axes: tuple[int, ...], kind: OpPattern) -> None:
    """The last dimension has size 1, and does not count."""
    b = Builder()
    b.add("x", "Placeholder", (), (4, 5, 6, 1))
    b.constant("axes", np.array(axes, np.int32))
    kept = tuple(size for place, size in enumerate((4, 5, 6, 1)) if place not in {axis % 4 for axis in axes})
    b.add("sum", "Sum", ("x", "axes"), kept)
    graph = b.graph()
    assert pattern_of(graph, graph["sum"]).pattern is kind


@pytest.mark.parametrize(
    ("op", "dtype", "shape", "stateful", "kind", "reason"),
    [
        ("RandomUniform", "float32", (4,), True, OpPattern.OPAQUE, "a stateful random op"),
        ("Print", "float32", (4,), True, OpPattern.OPAQUE, "Print is a stateful op"),
        ("Exp", "string", (4,), False, OpPattern.OPAQUE, "is string"),
        ("Exp", "float32", None, False, OpPattern.OPAQUE, "unknown rank"),
        ("Exp", "uint8", (4,), False, OpPattern.CALL, "is uint8"),
        ("Exp", "int32", (4,), False, OpPattern.CALL, "Exp of int32"),
        ("Exp", "float32", (0,), False, OpPattern.CALL, "no elements"),
        ("Lgamma", "float32", (4,), False, OpPattern.CALL, "fusion has no rule for Lgamma"),
        ("Sum", "float32", (4,), False, OpPattern.CALL, "the dimensions to reduce are not constant"),
    ],
)
def test_why_an_op_is_no_member(op: str, dtype: str, shape: Any, stateful: bool, kind: OpPattern, reason: str) -> None:
    b = Builder()
    b.add("x", "Placeholder", (), shape, dtype=dtype)
    b.add("y", op, ("x", "x") if op == "Sum" else ("x",), shape, dtype=dtype, stateful=stateful)
    graph = b.graph()
    found = pattern_of(graph, graph["y"])
    assert found.pattern is kind
    assert reason in str(found.reason)


def test_what_is_read_in_two_orders_is_computed_twice() -> None:
    """A matrix plus its transpose computes its producer twice; a reshape, both forms of which are used, once."""
    b = Builder()
    b.add("x", "Placeholder", (), (6, 6))
    b.constant("order", np.array([1, 0], np.int32))
    b.add("exp", "Exp", ("x",), (6, 6))
    b.add("turned", "Transpose", ("exp", "order"), (6, 6))
    b.add("both", "AddV2", ("exp", "turned"), (6, 6))
    b.constant("shape", np.array([9, 4], np.int32))
    b.add("other", "Reshape", ("exp", "shape"), (9, 4))
    b.add("sum", "Square", ("other",), (9, 4))
    graph = b.graph()
    twice = lower_kernel(graph, ["exp", "turned", "both"], [TensorId("both")])
    assert to_text(twice.program).count("\nexp ") == 2
    b.constant("split", np.array([2, 3, 6], np.int32))
    b.add("parts", "Reshape", ("exp", "split"), (2, 3, 6))
    b.add("square", "Square", ("parts",), (2, 3, 6))
    once = lower_kernel(b.graph(), ["exp", "parts", "square"], [TensorId("square"), TensorId("exp")])
    assert once.program.axes == (36,)


def test_a_reshape_that_no_index_says() -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (6, 4))
    b.constant("shape", np.array([8, 3], np.int32))
    b.add("turned", "Reshape", ("x", "shape"), (8, 3))
    b.constant("order", np.array([1, 0], np.int32))
    b.add("exp", "Exp", ("turned",), (8, 3))
    b.add("back", "Reshape", ("exp", "shape"), (6, 4))
    b.add("sum", "AddV2", ("back", "x"), (6, 4))
    with pytest.raises(LoweringError, match="the reshape 'back' cannot be expressed") as raised:
        lower_kernel(b.graph(), ["turned", "exp", "back", "sum"], [TensorId("sum")])
    assert raised.value.refusal == Reason.RESHAPED(node="back", op="Reshape")


def trained() -> Graph:
    """y = x w; w -= 0.1 x^T (y - t), by ResourceApplyGradientDescent; the loss is the sum of squares."""
    b = Builder()
    b.add("x", "Placeholder", (), (3, 4))
    b.add("t", "Placeholder", (), (3, 2))
    b.variable("w", (4, 2))
    b.add("read", "ReadVariableOp", ("w",), (4, 2), stateful=True)
    b.add("y", "MatMul", ("x", "read"), (3, 2))
    b.add("error", "Sub", ("y", "t"), (3, 2))
    b.add("loss", "L2Loss", ("error",), ())
    b.add("gradient", "MatMul", ("x", "error"), (4, 2), transpose_a=True)
    b.constant("rate", np.float32(0.1))
    b.add("update", "ResourceApplyGradientDescent", ("w", "rate", "gradient"), stateful=True)
    return b.graph()


STEPS = [["read"], ["y"], ["error", "loss"], ["gradient"], ["update"]]


def test_a_step_of_training_as_a_region() -> None:
    lowered = lower_region(trained(), STEPS, lambda node: node.op.encode(), keep=[TensorId("loss")])
    region = lowered.region
    assert lowered.inputs == (TensorId("x"), TensorId("t"))
    assert lowered.variables == (TensorId("w"),)
    assert lowered.outputs == (TensorId("loss"),)
    assert region.variables == (TensorType("float32", (4, 2)),)
    assert [type(step) for step in region.steps] == [
        Read,
        Call,
        View,
        View,
        Kernel,
        View,
        Call,
        View,
        View,
        Kernel,
        View,
        Assign,
    ]
    call, kernel, update = (step for step in region.steps if isinstance(step, Call | Kernel) and step.members != ("y",))
    assert (call.members, kernel.members, update.members) == (("error", "loss"), ("gradient",), ("update",))
    assert region.values[region.outputs[0]] == TensorType("float32", ())


def test_a_program_that_planning_made_is_that_of_the_region() -> None:
    graph = trained()
    lowering = Lowering(graph, Shapes(graph))
    before = lowering.kernel(["error", "loss"], [TensorId("error"), TensorId("loss")])
    lowered = lower_region(graph, STEPS, lambda _: b"", keep=[TensorId("loss")], lowering=lowering)
    found = next(each for each in lowered.region.steps if isinstance(each, Kernel) and "loss" in each.members)
    assert found.program is before.program


def test_what_an_update_reads_and_gives() -> None:
    kernel = lower_kernel(trained(), ["update"], [])
    assert kernel.inputs == (VariableValue("update", 0), TensorId("gradient"))
    assert kernel.outputs == (VariableValue("update", 0, updated=True),)
    assert "constant float32 0.1" in to_text(kernel.program)


def test_a_variable_that_was_assigned_is_not_read_again() -> None:
    b = Builder()
    b.variable("w", (4,))
    b.add("x", "Placeholder", (), (4,))
    b.add("first", "AssignAddVariableOp", ("w", "x"), stateful=True)
    b.add("read", "ReadVariableOp", ("w",), (4,), stateful=True)
    b.add("second", "AssignVariableOp", ("w", "x"), stateful=True)
    lowered = lower_region(b.graph(), [["first"], ["read"], ["second"]], lambda _: b"", keep=[TensorId("read")])
    assert [type(step) for step in lowered.region.steps] == [Read, Kernel, Assign, Assign]
    (kernel,) = (step for step in lowered.region.steps if isinstance(step, Kernel))
    assert lowered.region.outputs == kernel.outputs


def test_a_kernel_that_reads_and_updates_a_variable_several_times() -> None:
    """Each member sees what the one before it gave; the variable is read once and assigned once."""
    b = Builder()
    b.variable("w", (4,))
    b.add("x", "Placeholder", (), (4,))
    b.add("first", "AssignAddVariableOp", ("w", "x"), stateful=True)
    b.add("read", "ReadVariableOp", ("w",), (4,), stateful=True)
    b.add("square", "Square", ("read",), (4,))
    b.add("second", "AssignSubVariableOp", ("w", "square"), stateful=True)
    members = ["first", "read", "square", "second"]
    kernel = lower_kernel(b.graph(), members, [TensorId("read")])
    assert set(kernel.inputs) == {VariableValue("first", 0), TensorId("x")}
    assert kernel.outputs == (TensorId("read"), VariableValue("second", 0, updated=True))
    lines = to_text(kernel.program).splitlines()
    assert lines[-5:] == ["add 1 0", "square 2", "subtract 2 3", "output 2 0", "output 4 0"]
    lowered = lower_region(b.graph(), [members], lambda _: b"", keep=[TensorId("read")])
    assert [type(step) for step in lowered.region.steps] == [Read, Kernel, Assign]


def test_views_of_what_is_given_are_no_kernels() -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (6, 4))
    b.constant("shape", np.array([8, 3], np.int32))
    b.add("turned", "Reshape", ("x", "shape"), (8, 3))
    b.add("exp", "Exp", ("x",), (6, 4))
    b.add("user", "Print", ("turned", "exp"), stateful=True)
    lowered = lower_region(b.graph(), [["turned", "exp"]], lambda _: b"")
    assert [type(step) for step in lowered.region.steps] == [View, Kernel, View, View]
    assert lowered.outputs == (TensorId("turned"), TensorId("exp"))


def test_a_node_that_tensorflows_kernel_runs_reads_all_its_inputs() -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (2, 4))
    b.constant("axis", np.int32(1))
    b.add("exp", "Exp", ("x",), (2, 4))
    b.add("both", "ConcatV2", ("exp", "x", "axis"), (2, 8))
    steps = [["exp"], ["both"]]
    lowered = lower_region(b.graph(), steps, lambda _: b"", keep=[TensorId("both")], called=["both"])
    assert lowered.inputs == (TensorId("x"), TensorId("axis"))
    assert isinstance(lowered.region.steps[-1], Call)


def test_sizes_that_are_not_known_follow_from_the_ops() -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (None, 4))
    b.add("t", "Placeholder", (), (None, 2))
    b.add("w", "Placeholder", (), (4, 2))
    b.add("y", "MatMul", ("x", "w"), (None, 2))
    b.add("tanh", "Tanh", ("y",), (None, 2))
    b.add("error", "Sub", ("tanh", "t"), (None, 2))
    graph = b.graph()
    shapes = Shapes(graph)
    assert shapes[TensorId("x")][0] == shapes[TensorId("tanh")][0] < 0
    assert shapes[TensorId("t")][0] != shapes[TensorId("x")][0]
    with pytest.raises(LoweringError, match="is broadcast are unknown"):
        lower_kernel(graph, ["tanh", "error"], [TensorId("error")], shapes)
    equal = Shapes(graph, [[(TensorId("x"), 0), (TensorId("t"), 0)]])
    kernel = lower_kernel(graph, ["tanh", "error"], [TensorId("error")], equal)
    assert kernel.program.axes == (0,) or kernel.program.axes == (0, 2)


def test_the_batch_of_an_images_gradient_is_that_of_the_image_and_of_the_results_gradient() -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (None, 8, 8, 3))
    b.add("dy", "Placeholder", (), (None, 4, 4, 5))
    b.add("w", "Placeholder", (), (3, 3, 3, 5))
    b.add("sizes", "Shape", ("x",), (4,), dtype="int32")
    b.add("dx", "Conv2DBackpropInput", ("sizes", "w", "dy"), (None, 8, 8, 3))
    b.add("given", "Placeholder", (), (4,), dtype="int32")
    b.add("transposed", "Conv2DBackpropInput", ("given", "w", "dy"), (None, 8, 8, 3))
    shapes = Shapes(b.graph())
    batches = {shapes[TensorId(name)][0] for name in ("x", "dy", "dx", "transposed")}
    assert len(batches) == 1
    assert batches.pop() < 0


def test_constants_of_int64_are_written_as_they_are() -> None:
    build = Builder()
    build.add("x", "Placeholder", (), (3,), dtype="int64")
    build.constant("prime", np.int64(2**63 - 25))
    build.add("times", "Mul", ("x", "prime"), (3,), dtype="int64")
    kernel = lower_kernel(build.graph(), ["times"], [TensorId("times")])
    assert f"constant int64 {2**63 - 25}" in to_text(kernel.program).splitlines()


def test_positions_that_no_int32_holds_stay_outside() -> None:
    """A program compares positions of 32 bits: of more of them it would take one for another."""
    build = Builder()
    build.add("x", "Placeholder", (), (2**31,))
    build.constant("around", np.int32([[1, 1]]))
    build.add("pad", "Pad", ("x", "around"), (2**31 + 2,))
    with pytest.raises(LoweringError, match="exceeds int32"):
        lower_kernel(build.graph(), ["pad"], [TensorId("pad")])
