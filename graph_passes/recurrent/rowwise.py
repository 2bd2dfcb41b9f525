"""Which ops treat the rows of a batch alike, so that they may run on all steps' rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graph_passes.ir import Graph, Node, boolean, integer
from graph_passes.recurrent.elementwise import ELEMENTWISE_OPS
from graph_passes.recurrent.hoist import Form, Hoisted
from graph_passes.recurrent.loops import PASSING, Unreadable


def is_elementwise(node: Node) -> bool:
    """Whether `node` works on each number by itself, under broadcasting."""
    return node.op in ELEMENTWISE_OPS or node.op in PASSING


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
        return operand is not None and operand.form is not Form.FIXED

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
        case "Tile":
            multiples = constant(1)
            return multiples is not None and multiples.size > 0 and int(multiples[0]) == 1
        case "Softmax" | "LogSoftmax":
            return first is not None and len(first.shape) > 1
        case "MatMul" | "_FusedMatMul" | "BatchMatMulV2":
            plain = not boolean(node.attrs.get("transpose_a")) and not boolean(node.attrs.get("adj_x"))
            ranks = [operand is not None and len(operand.shape) == 2 for operand in operands[:2]]
            return plain and all(ranks) and not varies(1)
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
    masks = {key: integer(value) for key, value in node.attrs.items() if key.endswith("_mask")}
    begin, end, step = (body.constants.get(node.inputs[index].node) for index in (1, 2, 3))
    if begin is None or end is None or step is None or not begin.size:
        return False
    bent = masks.get("ellipsis_mask", 0) or masks.get("new_axis_mask", 0) & 1 or masks.get("shrink_axis_mask", 0) & 1
    from_start = masks.get("begin_mask", 0) & 1 or int(begin[0]) == 0
    return not bent and bool(from_start) and bool(masks.get("end_mask", 0) & 1) and int(step[0]) == 1


def column_range(body: Graph, node: Node, output: int, shape: tuple[int | None, ...]) -> tuple[int, int]:
    """Which columns of an operand of `shape` output `output` of a Split, SplitV, Slice or StridedSlice is.

    Raises:
        Unreadable: not a fixed range of columns, in order and without gaps.
    """
    what = f"'{node.name}' ({node.op})"
    width = shape[-1]
    constants = [body.constants.get(source.node) for source in node.inputs]
    if len(shape) != 2 or width is None:
        raise Unreadable(f"{what} takes a part of {shape}")
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
    elif _slices_columns_only(body, node):
        begin, end, step = constants[1:4]
        if begin is not None and end is not None and step is not None:
            return _strided_columns(node, begin, end, step, width, what)
    raise Unreadable(f"{what} does not take a fixed range of columns")


def _strided_columns(node: Node, begin: Any, end: Any, step: Any, width: int, what: str) -> tuple[int, int]:
    if begin.size == 1:
        return 0, width
    if integer(node.attrs.get("shrink_axis_mask", 0)) or int(step[1]) != 1:
        raise Unreadable(f"{what} takes single columns, or skips some")
    start = None if integer(node.attrs.get("begin_mask", 0)) & 2 else int(begin[1])
    stop = None if integer(node.attrs.get("end_mask", 0)) & 2 else int(end[1])
    first, last, _ = slice(start, stop).indices(width)
    return first, max(first, last)
