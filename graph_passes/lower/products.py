"""Products of matrices: MatMul, BatchMatMulV2, and _FusedMatMul with a bias and a ReLU. Half types are multiplied and
added up in float32 and rounded once, as cuBLAS does."""

from __future__ import annotations

from custom_ops.expr.nodes import Index
from graph_passes.graph.ir import Graph, Node, TensorId, boolean, texts
from graph_passes.graph.ops import OpPattern
from graph_passes.lower.access import FIRST, Access, along
from graph_passes.lower.program_writer import ProgramWriter, Steps
from graph_passes.lower.rule import Rule, broadcast_sizes
from graph_passes.lower.shapes import TRANSPOSES
from graph_passes.refusals import Reason, Refusal

_HALF_TYPES = ("float16", "bfloat16")
_FUSED = {("BiasAdd",), ("BiasAdd", "Relu")}


def _product(w: ProgramWriter, node: Node, output: int, at: Access) -> Steps:
    left, right = node.inputs[:2]
    flipped = [boolean(node.attrs.get(name)) for name in TRANSPOSES[node.op]]
    sizes = w.shapes[left]
    depth = sizes[-2] if flipped[0] else sizes[-1]
    *batch, row, column = at
    deep, axes = _depth(w, left, flipped[0], depth, at)
    shape = w.shapes[TensorId(node.name)][:-2]
    outer = [broadcast_sizes(factor, w.shapes[factor][:-2], shape, batch) for factor in (left, right)]
    x = yield left, (*outer[0], *((deep, row) if flipped[0] else (row, deep)))
    y = yield right, (*outer[1], *((column, deep) if flipped[1] else (deep, column)))
    dtype = w.dtype(x)
    if dtype in _HALF_TYPES:
        x, y = w.cast("float32", x), w.cast("float32", y)
    found = w.cast(dtype, w.reduce("dot", w.apply("multiply", x, y), axes))
    fused = texts(node.attrs.get("fused_ops")) if node.op == "_FusedMatMul" else ()
    if fused:
        bias = yield node.inputs[2], (column,)
        found = w.apply("add", found, bias)
    return w.apply("relu", found) if "Relu" in fused else found


def _depth(w: ProgramWriter, left: TensorId, flipped: bool, size: int, at: Access) -> tuple[Index, tuple[int, ...]]:
    """Where to read along the depth, and its axis: one along which the left factor is read elsewhere, so that products
    with the same one share what they read."""
    if size == 1:
        return FIRST, ()
    place = -2 if flipped else -1
    used = {axis for index in at for axis in w.axes_of(index)}
    seen = [earlier[place].axis for earlier in w.demanded.get(left, ())]
    free = [axis for axis in seen if axis is not None and axis not in used and w.symbol(axis) == size]
    axis = free[0] if free else w.axis(size)
    return along(axis), (axis,)


def _fused_refusal(graph: Graph, node: Node) -> Refusal | None:
    fused = texts(node.attrs.get("fused_ops"))
    return None if fused in _FUSED else Reason.FUSED_OPS(op=node.op, fused=", ".join(fused))


RULES = {
    "MatMul": Rule(_product, OpPattern.PRODUCT),
    "_FusedMatMul": Rule(_product, OpPattern.PRODUCT, refusal=_fused_refusal),
    "BatchMatMul": Rule(_product, OpPattern.BATCHED_PRODUCT),
    "BatchMatMulV2": Rule(_product, OpPattern.BATCHED_PRODUCT),
}
