"""Ops that do not treat rows alike, of all steps at once: of tensors with one more dimension, the steps, in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph_passes.graph.ir import AttrValue, DataType, Graph, Node, TensorId, integer
from graph_passes.graph.ops import copied
from graph_passes.graph.writer import SHAPE_DTYPE
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm, Prologue
from graph_passes.refusals import Reason

_REDUCTIONS = frozenset({"Mean", "Sum", "Max", "Min", "Prod", "Any", "All"})
_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def of_all_steps(body: Graph, prologue: Prologue, node: Node, operands: Sequence[Hoisted]) -> TensorId:
    """Output 0 of what `node` makes in every step, `[time, ...]`.

    Args:
        body: one step.
        prologue: takes the new nodes.
        node: of `body`.
        operands: its inputs, outside.

    Raises:
        Unreadable: it is no op that this is known of, or its axes are unknown.
    """
    constants = [body.constants.get(source.node) for source in node.inputs]
    rank = max((len(operand.shape) for operand in operands), default=0)
    attrs: dict[str, AttrValue | object] = dict(copied(node))

    def steps(place: int) -> TensorId:
        value = operands[place]
        return prologue.steps(prologue.fixed_rows(value) if value.form is HoistedForm.FIXED else value)

    def behind(axes: Any) -> TensorId:
        """The axes of one step, where steps are in front; a scalar stays one."""
        moved = [int(axis) + (axis >= 0) for axis in axes.reshape(-1)]
        return prologue.constant(SHAPE_DTYPE, axes.shape, moved)

    match node.op:
        case op if op in _REDUCTIONS and constants[1] is not None:
            kinds = attrs | {"Tidx": DataType(SHAPE_DTYPE)}
            return prologue.emit(op, [steps(0), behind(constants[1])], kinds, node.name)
        case "Cumsum" | "Cumprod" if constants[1] is not None:
            kinds = attrs | {"Tidx": DataType(SHAPE_DTYPE)}
            return prologue.emit(node.op, [steps(0), behind(constants[1])], kinds, node.name)
        case "Roll" if constants[2] is not None and operands[1].form is HoistedForm.FIXED:
            inputs = [steps(0), operands[1].tensor, behind(constants[2])]
            return prologue.emit(node.op, inputs, attrs | {"Taxis": DataType(SHAPE_DTYPE)}, node.name)
        case "Softmax" | "LogSoftmax" if rank:
            return prologue.emit(node.op, [steps(0)], attrs, node.name)
        case "Pack" | "Unpack":
            axis = integer(node.attrs.get("axis", 0))
            inputs = [steps(place) for place in range(len(operands))]
            return prologue.emit(node.op, inputs, attrs | {"axis": axis + (axis >= 0)}, node.name, node.outputs)
        case "ConcatV2" | "StridedSlice" if _first(body, node) is None:  # what it is joined of, or its part, is unknown
            raise Unreadable(Reason.ROWS_LOST.of(node))
        case "ConcatV2" if constants[-1] is not None:
            inputs = [*(steps(place) for place in range(len(operands) - 1)), behind(constants[-1])]
            return prologue.emit(node.op, inputs, attrs | {"Tidx": DataType(SHAPE_DTYPE)}, node.name)
        case "StridedSlice" if all(constant is not None for constant in constants[1:]):
            ends = [
                prologue.constant(SHAPE_DTYPE, (1 + len(found),), [first, *map(int, found)])
                for first, found in zip((0, 0, 1), constants[1:], strict=True)
                if found is not None
            ]
            masks = {mask: integer(node.attrs.get(mask, 0)) << 1 for mask in _MASKS}
            whole = {"begin_mask": masks["begin_mask"] | 1, "end_mask": masks["end_mask"] | 1}
            kinds = attrs | masks | whole | {"Index": DataType(SHAPE_DTYPE)}
            return prologue.emit(node.op, [steps(0), *ends], kinds, node.name)
        case _:
            raise Unreadable(Reason.ROWS_UNALIKE.of(node))


def _first(body: Graph, node: Node) -> int | None:
    """The first dimension of what a node makes, 0 of a scalar; None if it is unknown."""
    spec = body.specs.get(TensorId(node.name))
    return None if spec is None or spec.shape is None else (*spec.shape, 0)[0]
