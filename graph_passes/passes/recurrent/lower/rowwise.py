"""Which ops treat every row of a batch alike, and which columns of a value they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graph_passes.graph import slices
from graph_passes.graph.ir import Graph, Node, TensorId, boolean, integer, integers
from graph_passes.graph.ops import IDENTITIES
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.elementwise_ops import ELEMENTWISE_OPS
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm
from graph_passes.refusals import Reason


def is_elementwise(node: Node) -> bool:
    """Whether `node` works on each number by itself, under broadcasting."""
    return node.op in ELEMENTWISE_OPS or node.op in IDENTITIES


def keeps_rows(body: Graph, node: Node, operands: Sequence[Hoisted | None]) -> bool:
    """Whether `node`, of which at least one operand holds rows, treats every row alike and keeps their order.

    `operands` has None for what says how, not what (axes, shapes).
    """
    first = operands[0] if operands else None

    def constant(index: int) -> Any:
        return body.constants.get(node.inputs[index].node)

    def axes(index: int, rank: int) -> list[int]:
        found = constant(index)
        return [0] if found is None else [int(axis) % rank for axis in found.reshape(-1)]

    def varies(index: int) -> bool:
        operand = operands[index]
        return operand is not None and operand.form is not HoistedForm.FIXED

    match node.op:
        case "Split":
            value = operands[1]
            return value is not None and 0 not in axes(0, len(value.shape))
        case "SplitV":
            return first is not None and 0 not in axes(2, len(first.shape))
        case "ConcatV2":
            known = [operand for operand in operands[:-1] if operand is not None]
            return bool(known) and 0 not in axes(len(node.inputs) - 1, len(known[0].shape))
        case "Mean" | "Sum" | "Max" | "Min" | "Prod" | "Any" | "All":
            return first is not None and 0 not in axes(1, len(first.shape))
        case "ExpandDims":
            return first is not None and 0 not in axes(1, len(first.shape) + 1)
        case "Squeeze":
            gone = integers(node.attrs.get("squeeze_dims"))
            return first is not None and bool(gone) and all(axis % len(first.shape) for axis in gone)
        case "Tile":
            multiples = constant(1)
            return multiples is not None and multiples.size > 0 and int(multiples[0]) == 1
        case "Softmax" | "LogSoftmax":
            return first is not None and len(first.shape) > 1
        case "MatMul" | "_FusedMatMul" | "BatchMatMulV2":
            plain = not boolean(node.attrs.get("transpose_a")) and not boolean(node.attrs.get("adj_x"))
            ranks = [0 if operand is None else len(operand.shape) for operand in operands[:2]]
            if max(ranks) == 2:
                return plain and ranks == [2, 2] and not varies(1)
            # A row is a matrix or more: a weight has no dimension for it, or both operands have.
            alike = ranks[0] == ranks[1] if varies(0) and varies(1) else ranks[varies(0)] == 2
            return node.op == "BatchMatMulV2" and alike
        case "Conv2D" | "Conv3D" | "DepthwiseConv2dNative" | "MaxPool" | "AvgPool":
            return first is not None and not any(varies(index) for index in range(1, len(operands)))
        case "GatherV2":
            return not varies(0) and axes(2, 8) == [0]
        case "ResourceGather":
            return not varies(0)
        case "Slice":
            begin, size = constant(1), constant(2)
            return begin is not None and size is not None and int(begin[0]) == 0 and int(size[0]) == -1
        case "StridedSlice":
            return _slices_columns_only(body, node)
        case _:
            return False


def _slices_columns_only(body: Graph, node: Node) -> bool:
    taken = slices.axes(body, node)
    if not taken or any(isinstance(end, TensorId) for axis in taken for end in (axis.begin, axis.end)):
        return False
    first = taken[0]
    return first.begin in (None, 0) and first.end is None and first.step == 1 and not (first.single or first.new)


def is_column(body: Graph, node: Node) -> bool:
    """Whether a StridedSlice is `x[:, None]`."""
    taken = slices.axes(body, node)
    return taken is not None and len(taken) == 2 and taken[0].whole and taken[1].new


def column_range(body: Graph, node: Node, output: int, shape: tuple[int | None, ...]) -> tuple[int, int]:
    """Which columns of an operand of `shape` output `output` of a Split, SplitV, Slice or StridedSlice is.

    Raises:
        Unreadable: not a fixed range of columns, in order and without gaps.
    """
    width = shape[-1]
    constants = [body.constants.get(source.node) for source in node.inputs]
    if len(shape) != 2 or width is None:
        raise Unreadable(Reason.PART_OF.of(node, shape=shape))
    if node.op == "Split":
        count = integer(node.attrs["num_split"])
        if constants[0] is not None and int(constants[0].reshape(())) % 2 == 1 and width % count == 0:
            return output * width // count, (output + 1) * width // count
    elif node.op == "SplitV":
        axis, sizes = constants[2], constants[1]
        if axis is not None and sizes is not None and int(axis.reshape(())) % 2 == 1:
            left = width - int(sizes[sizes >= 0].sum())  # for the one size that may be -1
            ends = [0, *np.cumsum(np.where(sizes < 0, left, sizes))]
            return int(ends[output]), int(ends[output + 1])
    elif node.op == "Slice":
        begin, size = constants[1:3]
        if begin is not None and size is not None and int(begin[0]) == 0 and int(size[0]) == -1:
            start = int(begin[1])
            return start, width if int(size[1]) == -1 else start + int(size[1])
    elif (taken := slices.axes(body, node)) and _slices_columns_only(body, node):
        return _strided_columns(node, taken, width)
    raise Unreadable(Reason.PART_RANGE.of(node))


def _strided_columns(node: Node, taken: Sequence[slices.Axis], width: int) -> tuple[int, int]:
    if len(taken) == 1:
        return 0, width
    columns = taken[1]
    if columns.single and isinstance(columns.begin, int) and len(taken) == 2:
        return columns.begin % width, columns.begin % width + 1
    if columns.single or columns.new or columns.step != 1:
        raise Unreadable(Reason.PART_SINGLE.of(node))
    first, last, _ = slice(columns.begin, columns.end).indices(width)
    return first, max(first, last)
