"""Axes that always occur together become one, and sizes that a kernel gains nothing from are left open: fewer index
computations, longer vectors, and one kernel for more patterns.

Two axes become one if every tensor that varies along one of them has both as neighbouring dimensions, every reduction
over one is over both, and every output has both in this order. `[784, 256]` variables of an optimizer are then
`[200704]`, as their numbers lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TypeVar

from custom_ops.expr.nodes import AxisTerm, Index, Input, Node, Position, Random, Reduce, indices_of
from custom_ops.expr.program import Program, Tensor

Groups = tuple[tuple[int, ...], ...]  # for each tensor how many of its dimensions become one, in order
Shapes = tuple[tuple[int | None, ...], ...]
Value = TypeVar("Value")


def collapse(program: Program, shapes: Shapes) -> tuple[Program, Shapes, Groups]:
    """The program with as few axes as there can be, the shapes of its tensors, and which dimensions became one."""
    groups: Groups = tuple((1,) * tensor.rank for tensor in program.tensors)
    found = next(_pairs(program, shapes), None)
    while found is not None:
        program, shapes, groups = _merged(program, shapes, groups, *found)
        found = next(_pairs(program, shapes), None)
    return program, shapes, groups


def grouped(shape: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    """A tensor's shape after its dimensions became one."""
    ends = [sum(groups[: number + 1]) for number in range(len(groups))]
    return tuple(prod(shape[end - size : end]) for size, end in zip(groups, ends, strict=True))


def open_sizes(program: Program, shapes: Shapes) -> tuple[Program, Shapes]:
    """A program without the sizes of axes that no other axis accompanies in any node: nothing is reduced there, so one
    kernel serves all sizes."""
    alone = set(range(len(program.axes)))
    for node, type_, live in zip(program.nodes, program.types, program.live, strict=True):
        if live and (len(type_.axes) > 1 or isinstance(node, Reduce)):
            alone -= {*type_.axes, *(node.axes if isinstance(node, Reduce) else ())}
    for output in program.outputs:
        if len(output.axes) > 1:
            alone -= set(output.axes)
    read = [(node, index, i) for node in _inputs(program) for i, index in enumerate(node.index)]
    exact = {index.axis for node, index, i in read if _is_exact(program, shapes, node.tensor, i, index.axis)}
    every = [index for node in program.nodes for index in indices_of(node)]
    other = {term.axis for index in every if index.axis is None for term in index.terms}
    opened = (alone & {axis for axis in exact if axis is not None}) - other
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


def _is_exact(program: Program, shapes: Shapes, tensor: int, dimension: int, axis: int | None) -> bool:
    """Whether a dimension is as long as the axis along which it lies: that of an axis of fixed size may be longer."""
    return axis is not None and (program.axes[axis] == 0 or shapes[tensor][dimension] == program.axes[axis])


def _pairs(program: Program, shapes: Shapes) -> Iterator[tuple[int, int]]:
    """Pairs of axes that can become one."""
    candidates = {
        (a.axis, b.axis)
        for node in _inputs(program)
        for a, b in pairwise(node.index)
        if a.axis is not None and b.axis is not None and a.axis != b.axis
    }
    for outer, inner in sorted(candidates):
        if _can_merge(program, shapes, outer, inner):
            yield outer, inner


def _can_merge(program: Program, shapes: Shapes, outer: int, inner: int) -> bool:
    both = {outer, inner}
    for node in program.nodes:
        if isinstance(node, Position) and node.axis in both:
            return False
        if isinstance(node, Reduce) and len(both.intersection(node.axes)) == 1:
            return False
        if isinstance(node, Random) and _one_walk(program, node.index, outer, inner) is None:
            return False
    for output in program.outputs:
        if both.intersection(output.axes) and not _neighbours(output.axes, outer, inner):
            return False
    merged: dict[int, int] = {}  # for each tensor the first of the two dimensions
    for node in _inputs(program):
        axes = [index.axis for index in node.index]
        if not both.intersection(term.axis for index in node.index for term in index.terms):
            continue
        if not _neighbours(axes, outer, inner):
            return False
        at = axes.index(outer)
        others = [index for i, index in enumerate(node.index) if i not in (at, at + 1)]
        if both.intersection(term.axis for index in others for term in index.terms):
            return False
        if not all(_is_exact(program, shapes, node.tensor, at + i, axes[at + i]) for i in (0, 1)):
            return False
        if merged.setdefault(node.tensor, at) != at:
            return False
    # All other readers of such a tensor have to read it in the same way.
    return all(
        [index.axis for index in node.index[merged[node.tensor] : merged[node.tensor] + 2]] == [outer, inner]
        for node in _inputs(program)
        if node.tensor in merged
    )


def _one_walk(program: Program, index: Index, outer: int, inner: int) -> Index | None:
    """An index over both axes as one over the outer one alone; None if it is none."""
    own = [term for term in index.terms if term.axis in (outer, inner)]
    if not own:
        return index
    factor = min(abs(term.factor) for term in own)
    size = program.axes[inner]
    if size == 0 or set(own) != {AxisTerm(outer, factor * size), AxisTerm(inner, factor)} or len(own) != 2:
        return None
    return replace(index, terms=(*(term for term in index.terms if term not in own), AxisTerm(outer, factor)))


def _neighbours(axes: Sequence[int | None], outer: int, inner: int) -> bool:
    return any(pair == (outer, inner) for pair in pairwise(axes))


def _merged(program: Program, shapes: Shapes, groups: Groups, outer: int, inner: int) -> tuple[Program, Shapes, Groups]:
    """The program with `outer` in place of both axes, and later axes one number lower."""

    def renamed(axis: int) -> int:
        axis = outer if axis == inner else axis
        return axis - (axis > inner)

    def joined(axes: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(map(renamed, axes)))

    def index(found: Index) -> Index:
        return replace(found, terms=tuple(replace(term, axis=renamed(term.axis)) for term in found.terms))

    def node(found: Node) -> Node:
        match found:
            case Input(tensor=tensor, index=indices):
                kept = [i for i, each in enumerate(indices) if each.axis != inner]
                return Input(tensor, tuple(index(indices[i]) for i in kept))
            case Random(index=number):
                walk = _one_walk(program, number, outer, inner)
                assert walk is not None
                return replace(found, index=index(walk))
            case Reduce(kind=kind, operand=operand, axes=axes):
                return Reduce(kind, operand, tuple(sorted(joined(axes))))
            case Position(dtype=dtype, axis=axis):
                return Position(dtype, renamed(axis))
        return found

    first = {
        each.tensor: [i.axis for i in each.index].index(outer)
        for each in _inputs(program)
        if Index(terms=(AxisTerm(outer),)) in each.index
    }
    both = program.axes[outer] * program.axes[inner]  # 0, as of any axis whose size is not fixed, if one of them is
    tensors = tuple(Tensor(tensor.dtype, tensor.rank - (i in first)) for i, tensor in enumerate(program.tensors))
    return (
        Program(
            tuple(both if axis == outer else size for axis, size in enumerate(program.axes) if axis != inner),
            tensors,
            tuple(map(node, program.nodes)),
            tuple(replace(output, axes=joined(output.axes)) for output in program.outputs),
        ),
        tuple(_joined(shape, first.get(i), _product) for i, shape in enumerate(shapes)),
        tuple(_joined(group, first.get(i), sum) for i, group in enumerate(groups)),
    )


def _joined(
    values: tuple[Value, ...], at: int | None, combine: Callable[[tuple[Value, ...]], Value]
) -> tuple[Value, ...]:
    """The values, with one value in place of those at `at` and after it."""
    return values if at is None else (*values[:at], combine(values[at : at + 2]), *values[at + 2 :])


def _product(sizes: tuple[int | None, ...]) -> int | None:
    return None if None in sizes else prod(size for size in sizes if size is not None)
