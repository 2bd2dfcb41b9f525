"""Kernels of few ops: over which axes their programs compute, what is computed once, and what a region reads."""

from __future__ import annotations

import numpy as np
import pytest

from custom_ops.expr.text import to_text
from custom_ops.fusion.region import Kernel, View
from graph_passes.analysis.op_pattern import OpPattern, pattern_of
from graph_passes.graph.ir import TensorId
from graph_passes.lower.known_numbers import number_of
from graph_passes.lower.lower_nodes import LoweredKernel, lower_kernel
from graph_passes.passes.fuse.lower_region import lower_region
from tests.pure.test_fusion_lowering import Builder


def lowered(b: Builder, *members: str, outputs: str) -> LoweredKernel:
    return lower_kernel(b.graph(), members, [TensorId(name) for name in outputs.split()])


def test_ops_side_by_side_on_tensors_of_one_shape_share_their_axes() -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (4, 5))
    b.add("y", "Placeholder", (), (4, 5))
    b.add("exp", "Exp", ("x",), (4, 5))
    b.add("square", "Square", ("y",), (4, 5))
    assert lowered(b, "exp", "square", outputs="exp square").program.axes == (20,)


def test_what_is_reduced_and_what_is_written_read_a_tensor_once() -> None:
    """Sums over one dimension to all of a tensor, and its squares, read it along the same axes."""
    b = Builder()
    shape = (4, 5, 6, 7)
    b.add("x", "Placeholder", (), shape)
    b.add("square", "Square", ("x",), shape)
    names = ["square"]
    for kept in range(4):
        b.constant(f"axes_{kept}", np.arange(kept, 4, dtype=np.int32))
        names.append(b.add(f"sum_{kept}", "Sum", ("x", f"axes_{kept}"), shape[:kept]))
    kernel = lowered(b, *names, outputs=" ".join(names))
    assert kernel.program.axes == shape
    assert to_text(kernel.program).count("input 0") == 1


def test_axes_that_vary_together_keep_no_others_apart() -> None:
    """Rows and columns that change places stay two axes; each is still that of the sums beside them."""
    b = Builder()
    b.add("x", "Placeholder", (), (6, 6, 4))
    b.constant("order", np.array([1, 0, 2], np.int32))
    b.constant("last", np.array([2], np.int32))
    b.add("sums", "Sum", ("x", "last"), (6, 6))
    b.add("turned", "Transpose", ("x", "order"), (6, 6, 4))
    b.add("both", "AddV2", ("x", "turned"), (6, 6, 4))
    kernel = lowered(b, "sums", "turned", "both", outputs="both sums")
    assert kernel.program.axes == (6, 6, 4)
    assert to_text(kernel.program).count("input 0") == 2


def test_dimensions_side_by_side_become_one_behind_another_one() -> None:
    """The last two of what is written are read side by side, the first is not: [4, 30] of [30, 4]."""
    b = Builder()
    b.add("x", "Placeholder", (), (5, 6, 4))
    b.constant("order", np.array([2, 0, 1], np.int32))
    b.add("turned", "Transpose", ("x", "order"), (4, 5, 6))
    kernel = lowered(b, "turned", outputs="turned")
    assert to_text(kernel.program) == "program 1\naxes 4 30\ntensor float32 2\ninput 0 a1 a0\noutput 0 0 1\n"
    assert (kernel.input_shapes, kernel.output_shapes) == (((30, 4),), ((4, 30),))


def test_an_output_is_computed_where_it_was_demanded() -> None:
    """Positions, which no tensor says, are the same axis for what is written and for what is computed of it."""
    b = Builder()
    b.constant("start", np.int32(0))
    b.constant("end", np.int32(4))
    b.constant("step", np.int32(1))
    b.add("range", "Range", ("start", "end", "step"), (4,), dtype="int32")
    b.add("column", "ExpandDims", ("range", "start"), (4, 1), dtype="int32")
    b.add("x", "Placeholder", (), (4, 5), dtype="int32")
    b.add("sum", "AddV2", ("x", "column"), (4, 5), dtype="int32")
    kernel = lowered(b, "range", "column", "sum", outputs="sum range")
    assert kernel.program.axes == (4, 5)


def test_a_view_that_is_written_is_computed_in_the_shape_of_what_it_views() -> None:
    """Else `exp` would be computed for the view, and again for its sums: [8, 3] has no rows of 4."""
    b = Builder()
    b.add("x", "Placeholder", (), (6, 4))
    b.constant("shape", np.array([8, 3], np.int32))
    b.constant("last", np.array([1], np.int32))
    b.add("exp", "Exp", ("x",), (6, 4))
    b.add("view", "Reshape", ("exp", "shape"), (8, 3))
    b.add("rows", "Sum", ("exp", "last"), (6,))
    kernel = lowered(b, "exp", "view", "rows", outputs="view rows")
    assert kernel.program.axes == (6, 4)


@pytest.mark.parametrize("second", ["x", "exp"])
def test_two_kernels_read_one_view(second: str) -> None:
    """Both read [6, 4] as [24]: of `x` there is one view, and `exp` was written in that shape."""
    b = Builder()
    b.add("x", "Placeholder", (), (6, 4))
    b.add("exp", "Exp", ("x",), (6, 4))
    b.add("square", "Square", (second,), (6, 4))
    keep = [TensorId("exp"), TensorId("square")]
    region = lower_region(b.graph(), [["exp"], ["square"]], lambda _: b"", keep).region
    assert [type(step) for step in region.steps] == [View, Kernel, View, Kernel, View]
    first, last = (step for step in region.steps if isinstance(step, Kernel))
    assert last.inputs == (first.inputs if second == "x" else first.outputs)


@pytest.mark.parametrize(("op", "number"), [("ZerosLike", 0), ("OnesLike", 1)])
def test_tensors_of_one_number_read_nothing(op: str, number: int) -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (4,))
    b.add("same", op, ("x",), (4,))
    graph = b.graph()
    assert number_of(graph, TensorId("same")) == number
    assert (pattern_of(graph, graph["same"]).pattern, pattern_of(graph, graph["same"]).operands) == (
        OpPattern.CONSTANT,
        (),
    )


def test_what_is_packed_is_read_all() -> None:
    b = Builder()
    names = [b.add(name, "Placeholder", (), (4,)) for name in "xyz"]
    b.add("pack", "Pack", names, (3, 4))
    graph = b.graph()
    assert pattern_of(graph, graph["pack"]).operands == (0, 1, 2)


@pytest.mark.parametrize(("known", "kind"), [(True, OpPattern.LAYOUT), (False, OpPattern.OPAQUE)])
def test_paddings_are_constants(known: bool, kind: OpPattern) -> None:
    b = Builder()
    b.add("x", "Placeholder", (), (4,))
    if known:
        b.constant("around", np.array([[1, 1]], np.int32))
    else:
        b.add("around", "Placeholder", (), (1, 2), dtype="int32")
    b.add("pad", "Pad", ("x", "around"), (6,) if known else (None,))
    graph = b.graph()
    assert pattern_of(graph, graph["pad"]).pattern is kind
