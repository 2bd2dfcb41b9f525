"""Axes that only ever lie side by side become one: longer loops and vectors, and fewer kinds of them.

An elementwise op of `[batch, time, units]` is a loop over one axis of all elements, and a layer norm over it is rows
and columns. Two axes become one if whatever varies along one of them walks along both as along one: a tensor has both
as neighbouring dimensions, or one index says it; a reduction over one is over both; an output has both, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, TypeVar

from custom_ops.expr.nodes import AxisTerm, Index, Input, Node, Position, Random, Reduce
from custom_ops.expr.program import Output


class ProgramLike(Protocol):
    """A program, or one that is not finished."""

    @property
    def nodes(self) -> tuple[Node, ...]: ...
    @property
    def outputs(self) -> tuple[Output, ...]: ...


@dataclass(frozen=True)
class JoinedAxes:
    """Nodes and outputs with one axis in place of two, whose number is that of the outer one.

    Attributes:
        places: for each tensor that has a dimension along both, the first of the two, which become one.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    places: Mapping[int, int]


Found = TypeVar("Found", bound=ProgramLike)
Value = TypeVar("Value")
# Whether a tensor's dimension and the next, at these indices, are all of both axes.
Covers = Callable[[int, int, Index, Index], bool]


def collapse(form: Found, join: Callable[[Found, int, int], Found | None]) -> Found:
    """Join pairs of axes until none is left that can be; `join` says what is then, or None if it cannot be."""
    failed: set[tuple[int, int]] = set()
    while pair := next((pair for pair in _neighbours(form) if pair not in failed), None):
        found = join(form, *pair)
        if found is None:
            failed.add(pair)
        else:
            form, failed = found, set()
    return form


def joined(form: ProgramLike, outer: int, inner: int, size: int | None, covers: Covers) -> JoinedAxes | None:
    """The program with one axis in place of two; None if that cannot be.

    Args:
        size: of the inner axis; None if it is not known.
        covers: see `Covers`; the axes that it is asked about are these.
    """
    outputs = [_output(output, outer, inner) for output in form.outputs]
    places = _places(form, outer, inner, covers)
    if outer == inner or places is None:
        return None
    nodes = [_node(node, places, outer, inner, size) for node in form.nodes]
    found = tuple(node for node in nodes if node is not None), tuple(each for each in outputs if each is not None)
    return JoinedAxes(*found, places) if (len(found[0]), len(found[1])) == (len(nodes), len(outputs)) else None


def one_for_two(
    values: tuple[Value, ...], place: int | None, combine: Callable[[Value, Value], Value]
) -> tuple[Value, ...]:
    """The values, with one for those at `place` and behind it."""
    return values if place is None else (*values[:place], combine(*values[place : place + 2]), *values[place + 2 :])


def shifted_axis(index: Index) -> int | None:
    """The axis along which a dimension lies from some position on."""
    return index._replace(offset=0).axis


def _neighbours(form: ProgramLike) -> Iterator[tuple[int, int]]:
    """Axes that lie side by side somewhere."""
    for output in form.outputs:
        yield from pairwise(output.axes)
    for node in form.nodes:
        if isinstance(node, Input):
            for one, other in pairwise(node.index):
                outer, inner = shifted_axis(one), other.axis
                if outer is not None and inner is not None:
                    yield outer, inner


def _places(form: ProgramLike, outer: int, inner: int, covers: Covers) -> dict[int, int] | None:
    """For each tensor with a dimension along both axes the first of the two; None if its readers differ in that."""
    found: dict[int, int | None] = {}
    for node in form.nodes:
        if isinstance(node, Input):
            place = None
            for dimension, (one, other) in enumerate(pairwise(node.index)):
                along_both = shifted_axis(one) == outer and other.axis == inner
                if along_both and covers(node.tensor, dimension, one, other):
                    place = dimension
            if found.setdefault(node.tensor, place) != place:
                return None
    return {tensor: place for tensor, place in found.items() if place is not None}


def _output(output: Output, outer: int, inner: int) -> Output | None:
    axes = output.axes
    if outer not in axes and inner not in axes:
        return output
    if (outer, inner) not in pairwise(axes):
        return None
    return Output(output.node, tuple(axis for axis in axes if axis != inner))


def _node(node: Node, places: Mapping[int, int], outer: int, inner: int, size: int | None) -> Node | None:
    match node:
        case Input(tensor=tensor, index=index):
            walks = _indices(index, places.get(tensor), outer, inner, size)
            return None if walks is None else Input(tensor, walks)
        case Random(index=number):
            walk = _walk(number, outer, inner, size)
            return None if walk is None else replace(node, index=walk)
        case Position(axis=axis) if axis in (outer, inner):
            return None
        case Reduce(axes=axes) if (outer in axes) != (inner in axes):
            return None
        case Reduce(axes=axes):
            return replace(node, axes=tuple(axis for axis in axes if axis != inner))
    return node


def _indices(
    index: Sequence[Index], place: int | None, outer: int, inner: int, size: int | None
) -> tuple[Index, ...] | None:
    """Where a tensor is read whose dimension `place` becomes one with the next; None if no index says it."""
    result: list[Index] = []
    for dimension, each in enumerate(index):
        if place is not None and dimension == place + 1:
            continue
        if dimension == place:
            if each.offset and size is None:
                return None
            found: Index | None = Index(each.offset * (size or 0), (AxisTerm(outer),))
        else:
            found = _walk(each, outer, inner, size)
        if found is None:
            return None
        result.append(found)
    return tuple(result)


def _walk(index: Index, outer: int, inner: int, size: int | None) -> Index | None:
    """An index that walks along both axes as along one: a sum of the inner position and `size` times the outer one."""
    own = {term.axis: term for term in index.terms if term.axis in (outer, inner)}
    if not own:
        return index
    if size is None or len(own) != 2 or sum(term.axis in own for term in index.terms) != 2:
        return None
    factor = own[inner].factor
    if own[inner] != AxisTerm(inner, factor) or own[outer] != AxisTerm(outer, factor * size):
        return None
    rest = tuple(term for term in index.terms if term.axis not in own)
    return index._replace(terms=(*rest, AxisTerm(outer, factor)))
