"""A pattern over fewer axes (`custom_ops/expr/collapse.py`), and without sizes that a kernel gains nothing from: one
kernel for more patterns. `[784, 256]` variables of an optimizer are then `[200704]`, as their numbers lie in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add

from custom_ops.expr.collapse import collapse as joined_axes
from custom_ops.expr.collapse import joined, one_for_two
from custom_ops.expr.nodes import Index, Input, Node, Reduce, indices_of, renumbered
from custom_ops.expr.program import Output, Program, Tensor

Groups = tuple[tuple[int, ...], ...]  # for each tensor how many of its dimensions become one, in order
Shapes = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True)
class _Form:
    """A program while its axes are joined; the size of an axis that was joined to another is None."""

    axes: tuple[int | None, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    shapes: Shapes
    groups: Groups


def collapse(program: Program, shapes: Shapes) -> tuple[Program, Shapes, Groups]:
    """The program with as few axes as there can be, the shapes of its tensors, and which dimensions became one."""
    groups: Groups = tuple((1,) * tensor.rank for tensor in program.tensors)
    form = joined_axes(_Form(program.axes, program.nodes, program.outputs, shapes, groups), _joined)
    if None not in form.axes:
        return program, shapes, groups
    place = {axis: new for new, axis in enumerate(a for a, size in enumerate(form.axes) if size is not None)}
    fewer = Program(
        tuple(size for size in form.axes if size is not None),
        tuple(Tensor(tensor.dtype, len(shape)) for tensor, shape in zip(program.tensors, form.shapes, strict=True)),
        tuple(renumbered(node, lambda number: number, place.__getitem__) for node in form.nodes),
        tuple(Output(each.node, tuple(place[axis] for axis in each.axes)) for each in form.outputs),
    )
    return fewer, form.shapes, form.groups


def _joined(form: _Form, outer: int, inner: int) -> _Form | None:
    """The program with one axis in place of two; its size is 0, not fixed, if that of one of them is."""

    def covers(tensor: int, dimension: int, one: Index, other: Index) -> bool:
        indices = enumerate((one, other), dimension)
        return all(_is_exact(form.axes, form.shapes, tensor, i, index.axis) for i, index in indices)

    found = joined(form, outer, inner, form.axes[inner] or None, covers)
    if found is None:
        return None
    size = (form.axes[outer] or 0) * (form.axes[inner] or 0)
    known = {outer: size, inner: None}
    places = found.places
    return _Form(
        tuple(known.get(axis, old) for axis, old in enumerate(form.axes)),
        found.nodes,
        found.outputs,
        tuple(one_for_two(shape, places.get(i), _product) for i, shape in enumerate(form.shapes)),
        tuple(one_for_two(group, places.get(i), add) for i, group in enumerate(form.groups)),
    )


def grouped(shape: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    """A tensor's shape after its dimensions became one."""
    ends = [sum(groups[: number + 1]) for number in range(len(groups))]
    return tuple(prod(shape[end - size : end]) for size, end in zip(groups, ends, strict=True))


def open_sizes(program: Program, shapes: Shapes) -> tuple[Program, Shapes]:
    """A program without the sizes of axes that no other axis accompanies in any node: nothing is reduced there, so one
    kernel serves all sizes. The size stays where a tensor is longer than its axis, of which only the first part is
    read: shapes would not say then which size is meant."""
    alone = set(range(len(program.axes)))
    for node, type_, live in zip(program.nodes, program.types, program.live, strict=True):
        if live and (len(type_.axes) > 1 or isinstance(node, Reduce)):
            alone -= {*type_.axes, *(node.axes if isinstance(node, Reduce) else ())}
    for output in program.outputs:
        if len(output.axes) > 1:
            alone -= set(output.axes)
    read = [(node, index, i) for node in _inputs(program) for i, index in enumerate(node.index)]
    along = [(node.tensor, i, index.axis) for node, index, i in read if index.axis is not None]
    exact = {axis for tensor, i, axis in along if _is_exact(program.axes, shapes, tensor, i, axis)}
    longer = {axis for tensor, i, axis in along if not _is_exact(program.axes, shapes, tensor, i, axis)}
    every = [index for node in program.nodes for index in indices_of(node)]
    other = {term.axis for index in every if index.axis is None for term in index.terms}
    opened = (alone & exact) - longer - other
    dimensions = {(node.tensor, i) for node, index, i in read if index.axis in opened}
    return (
        replace(program, axes=tuple(0 if axis in opened else size for axis, size in enumerate(program.axes))),
        tuple(
            tuple(None if (tensor, i) in dimensions else size for i, size in enumerate(shape))
            for tensor, shape in enumerate(shapes)
        ),
    )


def _inputs(program: Program) -> list[Input]:
    return [node for node in program.nodes if isinstance(node, Input)]


def _is_exact(axes: Sequence[int | None], shapes: Shapes, tensor: int, dimension: int, axis: int | None) -> bool:
    """Whether a dimension is as long as the axis along which it lies: that of an axis of fixed size may be longer."""
    return axis is not None and (axes[axis] == 0 or shapes[tensor][dimension] == axes[axis])


def _product(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one * other
