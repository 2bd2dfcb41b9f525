"""What ops that only move the numbers of a row make of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from graph_passes.graph import slices
from graph_passes.graph.ir import Node, TensorId, integer
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.numbers import NumberReader, Numbers, Row, Rule
from graph_passes.refusals import Reason


def _reshaped(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row, before, after = reader.operand(node), reader.hoister.shape(node.inputs[0]), reader.hoister.shape(tensor)
    batch = row.batch
    if batch > 0 or (batch == 0 and (not after or after[0] != before[0])):
        batch = _place_of_rows(before, after, batch)
        if batch < 0:
            raise Unreadable(Reason.ROWS_LOST.of(node))
    dims = [-1 if dim is None else dim for axis, dim in enumerate(after) if axis != batch]
    return Row(row.numbers.reshape(dims), batch)


def _place_of_rows(before: Sequence[int | None], after: Sequence[int | None], batch: int) -> int:
    """The axis of the batch behind a reshape that keeps rows apart: as many numbers before it and behind; else -1."""
    ends = _count(before[:batch]), _count(before[batch + 1 :])
    for place, dim in enumerate(after):
        if dim == before[batch] and None not in ends and (_count(after[:place]), _count(after[place + 1 :])) == ends:
            return place
    return -1


def _count(dims: Sequence[int | None]) -> int | None:
    known = [dim for dim in dims if dim is not None]
    return prod(known) if len(known) == len(dims) else None


def _expanded(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row, rank = reader.operand(node), len(reader.hoister.shape(tensor))
    axis = int(reader.constant(node.inputs[1]).reshape(())) % rank
    batch = row.batch + 1 if row.batch >= 0 and axis <= row.batch else row.batch
    return Row(np.expand_dims(row.numbers, axis - (0 <= batch < axis)), batch)


def _transposed(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row, order = reader.operand(node), [int(axis) for axis in reader.constant(node.inputs[1])]
    inner = [row.axis(axis) for axis in order if axis != row.batch]
    return Row(np.transpose(row.numbers, inner), order.index(row.batch) if row.batch >= 0 else -1)


def _joined(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    shape = reader.hoister.shape(tensor)
    axis = int(reader.constant(node.inputs[-1]).reshape(())) % len(shape)
    rows = [reader.row(source, len(shape)) for source in node.inputs[:-1]]
    batch = max(row.batch for row in rows)
    if axis == batch or any(row.batch not in (batch, -1) for row in rows):
        raise Unreadable(Reason.CELL_JOIN.of(node))
    arrays = [_repeated(row, batch) for row in rows]
    return Row(np.concatenate(arrays, axis - (0 <= batch < axis)), batch)


def _repeated(row: Row, batch: int) -> Numbers:
    """The numbers of one row, of a value that has the dimension of the batch, and all rows alike."""
    if row.batch >= 0 or batch < 0:
        return row.numbers
    return np.take(row.numbers, 0, batch)  # a constant that was filled, or one row


def _stacked(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    rank = len(reader.hoister.shape(tensor))
    axis = integer(node.attrs.get("axis", 0)) % rank
    rows = [reader.row(source, rank - 1) for source in node.inputs]
    batch = max(row.batch for row in rows)
    arrays = [_repeated(row, batch) for row in rows]
    after = batch + 1 if batch >= 0 and axis <= batch else batch
    return Row(np.stack(arrays, axis - (0 <= after < axis)), after)


def _unstacked(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row, rank = reader.operand(node), len(reader.hoister.shape(node.inputs[0]))
    axis = integer(node.attrs.get("axis", 0)) % rank
    if axis == row.batch:
        raise Unreadable(Reason.ROWS_LOST.of(node))
    batch = row.batch - 1 if 0 <= axis < row.batch else row.batch
    return Row(np.take(row.numbers, tensor.index, row.axis(axis)), batch)


def _split(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    source, at = (1, 0) if node.op == "Split" else (0, 2)
    row, shape = reader.operand(node, source), reader.hoister.shape(node.inputs[source])
    axis = int(reader.constant(node.inputs[at]).reshape(())) % len(shape)
    if axis == row.batch:
        raise Unreadable(Reason.ROWS_LOST.of(node))
    inner, sizes = row.axis(axis), [reader.hoister.shape(each)[axis] or 0 for each in reader.body.tensors(node)]
    start = sum(sizes[: tensor.index])
    return Row(np.take(row.numbers, range(start, start + sizes[tensor.index]), inner), row.batch)


def _sliced(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row, shape = reader.operand(node), reader.hoister.shape(node.inputs[0])
    if node.op == "Slice":
        begin, size = (reader.constant(node.inputs[place]).tolist() for place in (1, 2))
        ranges: list[Any] = [slice(b, None if s == -1 else b + s) for b, s in zip(begin, size, strict=True)]
        return _cut(node, row, shape, ranges)
    axes = slices.axes(reader.body, node)
    if axes is None or any(isinstance(end, TensorId) for axis in axes for end in (axis.begin, axis.end)):
        raise Unreadable(Reason.PART_RANGE.of(node))
    if any(axis.new for axis in axes):
        return _with_axes(node, row, axes)
    ranges = [axis.begin if axis.single else slice(axis.begin, axis.end, axis.step) for axis in axes]
    return _cut(node, row, shape, ranges)


def _with_axes(node: Node, row: Row, axes: Sequence[slices.Axis]) -> Row:
    """A slice that inserts axes, and takes everything of all others."""
    if not all(axis.new or axis.whole for axis in axes):
        raise Unreadable(Reason.PART_RANGE.of(node))
    numbers, batch, old, place = row.numbers, row.batch, 0, 0
    for axis in axes:
        if axis.new:
            numbers = np.expand_dims(numbers, place)
            batch += batch >= 0 and old <= row.batch
        else:
            place -= old == row.batch
            old += 1
        place += 1
    return Row(numbers, batch)


def _cut(node: Node, row: Row, shape: tuple[int | None, ...], ranges: Sequence[Any]) -> Row:
    ranges = [*ranges, *[slice(None)] * (len(shape) - len(ranges))]
    if row.batch >= 0:
        whole = ranges[row.batch]
        if not isinstance(whole, slice) or whole.start not in (None, 0) or whole.stop not in (None, shape[row.batch]):
            raise Unreadable(Reason.ROWS_UNALIKE.of(node))
    gone = sum(not isinstance(each, slice) for each in ranges[: max(row.batch, 0)])
    inner = tuple(each for axis, each in enumerate(ranges) if axis != row.batch)
    found = row.numbers[inner]
    return Row(np.asarray(found, object), row.batch - gone if row.batch >= 0 else -1)


def _tiled(reader: NumberReader, node: Node, tensor: TensorId) -> Row:
    row, after = reader.operand(node), reader.hoister.shape(tensor)
    extra = len(after) - len(reader.hoister.shape(node.inputs[0]))
    batch = row.batch + extra if row.batch >= 0 else -1
    dims = [dim for axis, dim in enumerate(after) if axis != batch]
    if any(dim is None for dim in dims):
        raise Unreadable(Reason.ROWS_LOST.of(node))
    if node.op == "BroadcastTo":
        return Row(np.broadcast_to(row.numbers, [dim or 0 for dim in dims]), batch)
    multiples = [int(each) for each in reader.constant(node.inputs[1])]
    return Row(np.tile(row.numbers, [each for axis, each in enumerate(multiples) if axis != batch]), batch)


MOVES: dict[str, Rule] = {
    **dict.fromkeys(("Reshape", "Squeeze"), _reshaped),
    "ExpandDims": _expanded,
    "Transpose": _transposed,
    "ConcatV2": _joined,
    "Pack": _stacked,
    "Unpack": _unstacked,
    **dict.fromkeys(("Split", "SplitV"), _split),
    **dict.fromkeys(("Slice", "StridedSlice"), _sliced),
    **dict.fromkeys(("Tile", "BroadcastTo"), _tiled),
}
