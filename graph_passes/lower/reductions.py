"""Reductions over dimensions that are constants, and what is a reduction and a little arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from custom_ops.expr.program import REDUCTIONS as PROGRAM_REDUCTIONS
from graph_passes.graph.ir import Graph, Node, TensorId, boolean, text
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import FIRST, Access, along
from graph_passes.lower.known_numbers import integers
from graph_passes.lower.program_writer import ProgramWriter, Steps
from graph_passes.lower.rule import Rule
from graph_passes.refusals import Reason, Refusal

_KINDS = {"Sum": "sum", "Mean": "mean", "Max": "max", "Min": "min", "Prod": "product", "Any": "any", "All": "all"}


def reduction_kind(shape: Sequence[int | None], dimensions: Sequence[int]) -> OpPattern:
    """Which reduction it is over some dimensions of a shape; those of size 1 do not count."""
    wide = [place for place, size in enumerate(shape) if size != 1]
    over = [place for place in wide if place in dimensions]
    if not over:
        return OpPattern.LAYOUT
    if over == wide:
        return OpPattern.SCALAR_REDUCTION
    if over == wide[-len(over) :]:
        return OpPattern.ROW_REDUCTION
    return OpPattern.COLUMN_REDUCTION if over == wide[: len(over)] else OpPattern.REDUCTION


def _dimensions(graph: Graph, node: Node) -> list[int] | None:
    """The dimensions that are reduced, in order; None if they are no constants."""
    found = integers(graph, node.inputs[1])
    spec = graph.specs[node.inputs[0]]
    if found is None or spec.shape is None:
        return None
    return sorted({place % max(len(spec.shape), 1) for place in found} if spec.shape else ())


def _kind(graph: Graph, node: Node) -> OpPattern:
    return reduction_kind(graph.specs[node.inputs[0]].shape or (), _dimensions(graph, node) or ())


def _refusal(graph: Graph, node: Node) -> Refusal | None:
    if _dimensions(graph, node) is None:
        return Reason.REDUCED_AXES()
    dtype = graph.specs[node.inputs[0]].dtype
    return None if dtype in PROGRAM_REDUCTIONS[_KINDS[node.op]] else Reason.OP_DTYPE(op=node.op, dtype=dtype)


def widened(at: Access, dimensions: Sequence[int], kept: bool) -> Access:
    """The access of a result in the dimensions of what was reduced; nothing where it was."""
    if kept:
        return at
    found = list(at)
    for place in sorted(dimensions):
        found.insert(place, FIRST)
    return tuple(found)


def _reduce(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    (x, _), dimensions = node.inputs, _dimensions(w.graph, node) or ()
    access, axes = w.over(x, dimensions, widened(at, dimensions, boolean(node.attrs.get("keep_dims"))))
    element = yield x, access
    return w.reduce(_KINDS[node.op], element, axes)


def _bias_gradient(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    (x,) = node.inputs
    rank = len(w.shapes[x])
    channels = 1 if text(node.attrs.get("data_format")) == "NCHW" else rank - 1
    dimensions = [place for place in range(rank) if place != channels]
    access, axes = w.over(x, dimensions, widened(at, dimensions, kept=False))
    element = yield x, access
    return w.reduce("sum", element, axes)


def _bias_gradient_kind(graph: Graph, node: Node) -> OpPattern:
    shape = graph.specs[node.inputs[0]].shape or ()
    channels = 1 if text(node.attrs.get("data_format")) == "NCHW" else len(shape) - 1
    return reduction_kind(shape, [place for place in range(len(shape)) if place != channels])


def _l2_loss(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    (x,) = node.inputs
    shape = w.shapes[x]
    access, axes = w.over(x, range(len(shape)), (FIRST,) * len(shape))
    element = yield x, access
    total = w.reduce("sum", w.apply("square", element), axes)
    return w.apply("divide", total, w.like(total, 2.0))


def _arg(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """The first position of the extreme; a NaN is none, and all that is as low as the lowest number counts as it."""
    x, (place, *_) = node.inputs[0], _dimensions(w.graph, node) or [0]
    access, axes = w.over(x, (place,), widened(at, (place,), kept=False))
    element = yield x, access
    dtype = w.shapes.dtype(TensorId(node.name))
    if not axes:
        return w.number(dtype, 0)
    largest = node.op == "ArgMax"
    if w.dtype(element) not in ("int32", "int64"):
        limits = np.finfo(np.float64 if w.dtype(element) == "float64" else np.float32)
        worst = w.like(element, float(limits.min if largest else limits.max))
        better = w.apply("greater", *((element, worst) if largest else (worst, element)))
        element = w.apply("select", better, element, worst)
    extreme = w.reduce("max" if largest else "min", element, axes)
    position = w.position(along(axes[0]), dtype)
    last = w.number(dtype, np.iinfo(dtype).max)  # more than any position
    return w.reduce("min", w.apply("select", w.apply("equal", element, extreme), position, last), axes)


def _arg_refusal(graph: Graph, node: Node) -> Refusal | None:
    if graph.specs[node.inputs[0]].dtype not in ("float32", "float64", "int32", "int64"):
        return Reason.OP_DTYPE(op=node.op, dtype=graph.specs[node.inputs[0]].dtype)
    return None if len(_dimensions(graph, node) or ()) == 1 else Reason.REDUCED_AXIS()


_FIRST = (0, 1)

RULES = {name: Rule(_reduce, _kind, _FIRST, _refusal) for name in _KINDS} | {
    "BiasAddGrad": Rule(_bias_gradient, _bias_gradient_kind, _FIRST),
    "L2Loss": Rule(_l2_loss, OpPattern.SCALAR_REDUCTION, _FIRST),
    "ArgMax": Rule(_arg, _kind, _FIRST, _arg_refusal),
    "ArgMin": Rule(_arg, _kind, _FIRST, _arg_refusal),
}
