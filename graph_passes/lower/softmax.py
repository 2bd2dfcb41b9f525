"""Softmax and cross entropies, with the arithmetic of TensorFlow's kernels (softmax_op_functor.h, xent_op.h and
sparse_xent_op.h)."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from custom_ops.expr.reference import HALF_TYPES
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import FIRST, Access
from graph_passes.lower.program_writer import Demand, ProgramWriter, Steps
from graph_passes.lower.reductions import reduction_kind
from graph_passes.lower.rule import Rule, broadcast
from graph_passes.refusals import Reason, Refusal


def _shifted(
    w: ProgramWriter, logits: TensorId, at: Access, dtype: str
) -> Generator[Demand, int, tuple[int, int, Access, tuple[int, ...]]]:
    """The logits less the maximum of their row, as `dtype`; the sum over the row of its exponentials; where the row was
    read."""
    row, axes = w.over(logits, (len(w.shapes[logits]) - 1,), at)
    elements = w.cast(dtype, (yield logits, row))
    largest = w.reduce("max", elements, axes)
    total = w.reduce("sum", w.apply("exp", w.apply("subtract", elements, largest)), axes)
    element = w.cast(dtype, (yield logits, at))
    return w.apply("subtract", element, largest), total, row, axes


def _softmax(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Half types are rounded once, at the end, as in TensorFlow's kernel for a GPU and in oneDNN's."""
    logits = node.inputs[0]
    dtype = w.shapes.dtype(logits)
    shifted, total, _, _ = yield from _shifted(w, logits, at, "float32" if dtype in HALF_TYPES else dtype)
    if node.op == "LogSoftmax":
        result = w.apply("subtract", shifted, w.apply("log", total))
    else:
        result = w.apply("multiply", w.apply("exp", shifted), w.apply("reciprocal", total))
    return w.cast(dtype, result)


def _row_kind(graph: Graph, node: Node) -> OpPattern:
    shape = graph.specs[node.inputs[0]].shape or ()
    return reduction_kind(shape, (len(shape) - 1,))


def _cross_entropy(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """Outputs: the loss of each row; the gradient of the sum of the losses with respect to the logits."""
    features, labels = node.inputs
    shape, dtype = w.shapes[TensorId(node.name, 1)], w.shapes.dtype(features)
    if output == 1:
        shifted, total, _, _ = yield from _shifted(w, features, broadcast(w, features, shape, at), dtype)
        label = yield labels, broadcast(w, labels, shape, at)
        return w.apply("subtract", w.apply("divide", w.apply("exp", shifted), total), label)
    row, axes = w.over(TensorId(node.name, 1), (len(shape) - 1,), (*at, FIRST))
    shifted, total, _, _ = yield from _shifted(w, features, broadcast(w, features, shape, row), dtype)
    label = yield labels, broadcast(w, labels, shape, row)
    return w.reduce("sum", w.apply("multiply", label, w.apply("subtract", w.apply("log", total), shifted)), axes)


def _sparse_cross_entropy(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    """The loss or its gradient, for labels that are classes; a label that is no class gives NaN, as on a GPU."""
    features, labels = node.inputs
    classes = w.shapes[features][-1]
    if output == 0:
        row, axes = w.over(features, (1,), (*at, FIRST))
    else:
        row, axes = at, ()
    shifted, total, _, _ = yield from _shifted(w, features, row, w.shapes.dtype(features))
    label = yield labels, row[:1]
    hit = w.apply("equal", label, w.position(row[1], w.dtype(label)))
    if output == 0:
        nothing = w.like(shifted, 0.0)
        loss = w.apply("select", hit, w.apply("subtract", w.apply("log", total), shifted), nothing)
        result = w.reduce("sum", loss, axes)
    else:
        probability = w.apply("divide", w.apply("exp", shifted), total)
        result = w.apply("subtract", probability, w.cast(w.dtype(shifted), hit))
    known = w.apply("greater_equal", label, w.like(label, 0))
    known = w.apply("logical_and", known, w.apply("greater", w.like(label, classes), label))
    return w.apply("select", known, result, w.like(result, np.nan))


def _known_classes(graph: Graph, node: Node) -> Refusal | None:
    shape = graph.specs[node.inputs[0]].shape
    return None if shape and shape[-1] is not None else Reason.CLASSES()


RULES = {
    "Softmax": Rule(_softmax, _row_kind),
    "LogSoftmax": Rule(_softmax, _row_kind),
    "SoftmaxCrossEntropyWithLogits": Rule(_cross_entropy, OpPattern.ROW_REDUCTION),
    "SparseSoftmaxCrossEntropyWithLogits": Rule(_sparse_cross_entropy, OpPattern.ROW_REDUCTION, refusal=_known_classes),
}
