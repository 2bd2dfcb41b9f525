"""Ops that only arrange numbers, on a piece of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from graph_passes.analysis.batch.labels import Asked, Rows, Separation
from graph_passes.graph.ir import whole


def _label(asked: Asked) -> Rows:
    """The rows of input 0; all other inputs are read whole."""
    label = asked.labels[0]
    asked.whole(*range(1, len(asked.node.inputs)))
    asked.require(label is not None)
    assert label is not None
    return label


def _rest(asked: Asked) -> tuple[None, ...]:
    return (None,) * (len(asked.node.inputs) - 1)


def regrouped(asked: Asked) -> Separation:
    """Reshape and views like it: as many numbers before the batch, and the batch still leads its dimension."""
    label, before, after = _label(asked), asked.sizes(0), asked.made()
    dims = asked.node.attrs.get("squeeze_dims", ())
    named = dims.list.i if hasattr(dims, "list") else dims
    asked.require(asked.node.op != "Squeeze" or bool(named))  # or a piece of one example would lose its dimension
    outer = prod(before[: label.axis])
    axes = [axis for axis in range(len(after)) if prod(after[:axis]) == outer and after[axis] % asked.batch == 0]
    asked.require(bool(axes) and after[axes[0]] > 0)
    rows = asked.rows(after, axes[0])
    shapes: tuple[tuple[int, int, int], ...] = ()
    if asked.node.op == "Reshape":
        numbers = asked.numbers(1)
        if numbers[rows.axis] != -1:
            shapes = ((1, rows.axis, rows.inner),)
    return Separation((label, *_rest(asked)), (rows,), shapes)


def transposed(asked: Asked) -> Separation:
    """Transpose: the batch moves."""
    label = _label(asked)
    order = asked.numbers(1)
    return Separation((label, None), (asked.rows(asked.made(), order.index(label.axis)),))


def broadcast(asked: Asked) -> Separation:
    """BroadcastTo: other dimensions."""
    label, sizes, made = _label(asked), asked.sizes(0), asked.made()
    rows = Rows(label.axis + len(made) - len(sizes), label.inner)
    asked.require(made[rows.axis] == sizes[label.axis] and asked.numbers(1)[rows.axis] == made[rows.axis])
    return Separation((label, None), (rows,), ((1, rows.axis, rows.inner),))


def tiled(asked: Asked) -> Separation:
    """Tile: other dimensions."""
    label = _label(asked)
    asked.require(asked.numbers(1)[label.axis] == 1)
    return Separation((label, None), (label,))


def padded(asked: Asked) -> Separation:
    """Pad, and its like: other dimensions."""
    label = _label(asked)
    asked.require(asked.numbers(1)[2 * label.axis : 2 * label.axis + 2] == [0, 0])
    return Separation((label, *_rest(asked)), (label,))


def cut(asked: Asked) -> Separation:
    """Slice: (input, begin, size), all of the batch."""
    label = _label(asked)
    begin, size = asked.numbers(1), asked.numbers(2)
    asked.require(begin[label.axis] == 0 and asked.made()[label.axis] == asked.sizes(0)[label.axis])
    counted = size[label.axis] != -1
    return Separation((label, None, None), (label,), ((2, label.axis, label.inner),) if counted else ())


def _takes_all(asked: Asked, sizes: tuple[int, ...]) -> bool:
    """Whether a strided slice of a tensor of these sizes takes all of the first dimension, which stays the first."""
    attrs = asked.node.attrs
    begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_mask = (
        whole(attrs.get(f"{name}_mask")) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    )
    begin, end, strides = (asked.numbers(place) for place in (1, 2, 3))
    if ellipsis_mask & 1:
        dimensions = sum(not (ellipsis_mask | new_axis_mask) >> place & 1 for place in range(len(begin)))
        return dimensions < len(sizes)
    if (new_axis_mask | shrink_mask) & 1 or strides[0] != 1:
        return False
    return bool(begin_mask & 1 or begin[0] == 0) and bool(end_mask & 1 or end[0] >= sizes[0])


def strided(asked: Asked) -> Separation:
    """StridedSlice: (input, begin, end, strides), all of the batch, which is the first dimension."""
    label = _label(asked)
    asked.require(label.axis == 0 and _takes_all(asked, asked.sizes(0)))
    return Separation((label, *_rest(asked)), (asked.rows(asked.made(), 0),))


def strided_gradient(asked: Asked) -> Separation:
    """StridedSliceGrad: (shape, begin, end, strides, gradient), as `strided`."""
    label = asked.labels[4]
    asked.whole(0, 1, 2, 3)
    rows = asked.rows(asked.made(), 0)
    asked.require(rows == label and asked.numbers(0)[0] == asked.made()[0] and _takes_all(asked, asked.made()))
    return Separation((None, None, None, None, label), (rows,), ((0, 0, rows.inner),))


def joined(asked: Asked) -> Separation:
    """ConcatV2: (parts, dimension), along another dimension."""
    last = len(asked.node.inputs) - 1
    asked.whole(last)
    made = asked.made()
    along = asked.numbers(last)[0] % len(made)
    labels = {label for label in asked.labels if label is not None}
    asked.require(len(labels) == 1)
    (label,) = labels
    asked.require(label.axis != along)
    for index in range(last):
        asked.require(asked.rows(asked.sizes(index), label.axis) == label)
    return Separation((*(label for _ in range(last)), None), (label,))


def parted(axis: int, value: int) -> Callable[[Asked], Separation]:
    """Rules of Split and SplitV: along another dimension.

    Args:
        axis: the input that is the dimension.
        value: the input that is split.
    """

    def rule(asked: Asked) -> Separation:
        label = asked.labels[value]
        asked.whole(*(index for index in range(len(asked.node.inputs)) if index != value))
        asked.require(label is not None)
        along = asked.numbers(axis)[0] % len(asked.sizes(value))
        asked.require(label is not None and along != label.axis)
        inputs = tuple(label if index == value else None for index in range(len(asked.node.inputs)))
        return Separation(inputs, (label,) * asked.node.outputs)

    return rule


def packed(asked: Asked) -> Separation:
    """Pack: a new dimension, of which each part is one element."""
    labels = {label for label in asked.labels if label is not None}
    asked.require(len(labels) == 1)
    (label,) = labels
    rank = len(asked.made())
    along = whole(asked.node.attrs.get("axis")) % rank
    for index in range(len(asked.node.inputs)):
        asked.require(asked.rows(asked.sizes(index), label.axis) == label)
    moved = Rows(label.axis + (along <= label.axis), label.inner)
    return Separation((label,) * len(asked.node.inputs), (moved,))


def unpacked(asked: Asked) -> Separation:
    """Unpack: along another dimension, which goes."""
    label = _label(asked)
    along = whole(asked.node.attrs.get("axis")) % len(asked.sizes(0))
    asked.require(along != label.axis)
    moved = Rows(label.axis - (along < label.axis), label.inner)
    return Separation((label,), (moved,) * asked.node.outputs)


def gathered(asked: Asked) -> Separation:
    """GatherV2: (table, indices, dimension), of a whole table along its first dimension, by the examples' indices."""
    asked.whole(0, 2)
    label = asked.labels[1]
    asked.require(label is not None and not whole(asked.node.attrs.get("batch_dims")) and asked.numbers(2) == [0])
    return Separation((None, label, None), (label,))


def one_hot(asked: Asked) -> Separation:
    """OneHot: (indices, depth, values): a new last dimension."""
    label = _label(asked)
    axis = asked.node.attrs.get("axis")
    asked.require(axis is not None and whole(axis) == -1)
    return Separation((label, *_rest(asked)), (label,))


def along_another(asked: Asked) -> Separation:
    """Cumsum, Cumprod and ReverseV2: (input, dimensions), not the batch."""
    label = _label(asked)
    rank = len(asked.sizes(0))
    asked.require(label.axis not in {axis % rank for axis in asked.numbers(1)})
    return Separation((label, None), (label,))


RULES: Mapping[str, Callable[[Asked], Separation]] = {
    **dict.fromkeys(["Reshape", "Squeeze", "ExpandDims"], regrouped),
    "Transpose": transposed,
    "BroadcastTo": broadcast,
    "Tile": tiled,
    **dict.fromkeys(["Pad", "PadV2", "MirrorPad", "MirrorPadGrad"], padded),
    "Slice": cut,
    "StridedSlice": strided,
    "StridedSliceGrad": strided_gradient,
    "ConcatV2": joined,
    "Split": parted(axis=0, value=1),
    "SplitV": parted(axis=2, value=0),
    "Pack": packed,
    "Unpack": unpacked,
    "GatherV2": gathered,
    "OneHot": one_hot,
    **dict.fromkeys(["Cumsum", "Cumprod", "ReverseV2"], along_another),
}
