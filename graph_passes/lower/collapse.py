"""The same program over fewer axes: those that only ever lie side by side become one.

An elementwise op of `[batch, time, units]` is a loop over one axis of all elements, and a layer norm over
`[batch, time, units]` is rows and columns: reading and writing tensors in another shape costs nothing, and what runs a
program has longer loops, and fewer kinds of them. Dimensions of size 1 go, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from custom_ops.expr.nodes import AxisTerm, Index, Input, Node, Position, Random, Reduce
from custom_ops.expr.program import Output
from graph_passes.lower.draft import Draft, Shape, times


def collapsed(draft: Draft) -> Draft:
    """The same numbers, in as few dimensions as can be."""
    draft = _without_ones(draft)
    failed: set[tuple[int, int]] = set()
    while pair := next((pair for pair in _neighbours(draft) if pair not in failed), None):
        found = _joined(draft, *pair)
        failed.add(pair)
        draft = draft if found is None else found
    return draft


def _without_ones(draft: Draft) -> Draft:
    """No dimensions of size 1, neither of tensors nor of outputs."""
    kept = [[place for place, size in enumerate(shape) if size != 1] for shape in draft.shapes]
    nodes = [
        Input(node.tensor, tuple(node.index[place] for place in kept[node.tensor])) if isinstance(node, Input) else node
        for node in draft.nodes
    ]
    shapes = [tuple(shape[place] for place in places) for shape, places in zip(draft.shapes, kept, strict=True)]
    outputs = [replace(each, axes=tuple(axis for axis in each.axes if draft.axes[axis] != 1)) for each in draft.outputs]
    return replace(draft, nodes=tuple(nodes), shapes=tuple(shapes), outputs=tuple(outputs))


def _neighbours(draft: Draft) -> Iterator[tuple[int, int]]:
    """Axes that lie side by side somewhere, the inner one of which is of a size that is known."""
    for output in draft.outputs:
        yield from zip(output.axes, output.axes[1:], strict=False)
    for node in draft.nodes:
        if isinstance(node, Input):
            for one, other in zip(node.index, node.index[1:], strict=False):
                outer, inner = _shifted_axis(one), other.axis
                if outer is not None and inner is not None:
                    yield outer, inner


def _shifted_axis(index: Index) -> int | None:
    """The axis along which a dimension lies from some position on."""
    return replace(index, offset=0).axis


def _joined(draft: Draft, outer: int, inner: int) -> Draft | None:
    """With one axis in place of two, whose number is that of the outer one; None if that cannot be."""
    size = draft.axes[inner]
    pair = {outer, inner}
    if size < 0 or outer == inner:
        return None
    for node, varying in zip(draft.nodes, draft.varying, strict=True):
        named = varying | set(node.axes) if isinstance(node, Reduce) else varying
        if len(pair & named) == 1 or (isinstance(node, Reduce) and len(pair & set(node.axes)) == 1):
            return None
        if isinstance(node, Position) and node.axis in pair:
            return None
    outputs = []
    for output in draft.outputs:
        axes = _without_inner(output.axes, outer, inner)
        if axes is None:
            return None
        outputs.append(Output(output.node, axes))
    places = _places(draft, outer, inner)
    if places is None:
        return None
    nodes: list[Node] = []
    for node in draft.nodes:
        if isinstance(node, Input):
            index = _joined_index(node.index, places.get(node.tensor), outer, inner, size)
            if index is None:
                return None
            nodes.append(Input(node.tensor, index))
        elif isinstance(node, Random):
            number = _joined_terms(node.index, outer, inner, size)
            if number is None:
                return None
            nodes.append(replace(node, index=number))
        elif isinstance(node, Reduce):
            nodes.append(replace(node, axes=tuple(axis for axis in node.axes if axis != inner)))
        else:
            nodes.append(node)
    axes_sizes = list(draft.axes)
    axes_sizes[outer] = times(axes_sizes[outer], size)
    return replace(
        draft,
        axes=tuple(axes_sizes),
        shapes=tuple(_joined_shape(shape, places.get(tensor)) for tensor, shape in enumerate(draft.shapes)),
        nodes=tuple(nodes),
        varying=tuple(varying - {inner} for varying in draft.varying),
        outputs=tuple(outputs),
    )


def _without_inner(axes: tuple[int, ...], outer: int, inner: int) -> tuple[int, ...] | None:
    """The dimensions of an output with one in place of two; None if they are there, but not side by side."""
    if outer not in axes and inner not in axes:
        return axes
    place = axes.index(outer) if outer in axes else -1
    if place < 0 or axes[place + 1 : place + 2] != (inner,):
        return None
    return (*axes[: place + 1], *axes[place + 2 :])


def _places(draft: Draft, outer: int, inner: int) -> dict[int, int] | None:
    """For each tensor that has a dimension along the outer axis, with all of the inner one behind it, which it is.

    None if it is not the same wherever the tensor is read.
    """
    found: dict[int, int | None] = {}
    for node in draft.nodes:
        if isinstance(node, Input):
            shape, place = draft.shapes[node.tensor], None
            for dimension, (one, other) in enumerate(zip(node.index, node.index[1:], strict=False)):
                if _shifted_axis(one) == outer and other.axis == inner and shape[dimension + 1] == draft.axes[inner]:
                    place = dimension
            if found.setdefault(node.tensor, place) != place:
                return None
    return {tensor: place for tensor, place in found.items() if place is not None}


def _joined_index(
    index: tuple[Index, ...], place: int | None, outer: int, inner: int, size: int
) -> tuple[Index, ...] | None:
    """Where a tensor is read whose dimension `place` becomes one with the next; None if no index says it."""
    result: list[Index] = []
    for dimension, each in enumerate(index):
        if dimension == place:
            result.append(Index(each.offset * size, (AxisTerm(outer),)))
        elif place is None or dimension != place + 1:
            joined = _joined_terms(each, outer, inner, size)
            if joined is None:
                return None
            result.append(joined)
    return tuple(result)


def _joined_terms(index: Index, outer: int, inner: int, size: int) -> Index | None:
    """An index that walks along both axes as along one: a sum of the inner position and `size` times the outer one."""
    own = {term.axis: term for term in index.terms if term.axis in (outer, inner)}
    if not own:
        return index
    if len(own) != 2 or sum(term.axis in own for term in index.terms) != 2:
        return None
    factor = own[inner].factor
    if own[inner] != AxisTerm(inner, factor) or own[outer] != AxisTerm(outer, factor * size):
        return None
    rest = tuple(term for term in index.terms if term.axis not in own)
    return replace(index, terms=(*rest, AxisTerm(outer, factor)))


def _joined_shape(shape: Shape, place: int | None) -> Shape:
    if place is None:
        return shape
    outer, inner = shape[place : place + 2]
    return (*shape[:place], times(outer, inner), *shape[place + 2 :])
