"""Splits an axis of which quotients and remainders are read into two.

A reshape of `[4, 16, 32]` to `[64, 32]` is read at `a0/16 a0%16 a1`. If the kernel computes in the first shape, too,
that is everything computed twice; with axes of 4 and 16 positions in place of the one of 64 it is the same. What lies
side by side all the same becomes one axis again (`custom_ops/expr/collapse.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from custom_ops.expr.nodes import (
    AxisTerm,
    Constant,
    Elementwise,
    Index,
    Input,
    Node,
    Position,
    Random,
    Reduce,
    indices_of,
    renumbered,
)
from custom_ops.expr.program import Output
from graph_passes.lower.access import along, tidy
from graph_passes.lower.draft import Draft


def split(draft: Draft) -> Draft:
    """The draft with no quotients and remainders of axes, as far as that can be."""
    failed: set[int] = set()
    while found := next(((axis, by) for axis, by in _divided(draft) if axis not in failed), None):
        axis, by = found
        two = _in_two(draft, axis, by)
        if two is None:
            failed.add(axis)
        else:
            draft = two
    return draft


def _divided(draft: Draft) -> Iterator[tuple[int, int]]:
    """Axes of which parts are read, and the smallest number that divides one; and axes along which a dimension lies
    that is read along two axes elsewhere."""
    smallest: dict[int, int] = {}
    for term in _terms(draft.nodes):
        parts = [part for part in (term.divisor, term.divisor * term.modulus) if part > 1]
        if parts:
            smallest[term.axis] = min(*parts, smallest.get(term.axis, parts[0]))
    yield from smallest.items()
    lying: dict[tuple[int, int], list[int]] = {}
    inner: dict[tuple[int, int], int] = {}
    for node in draft.nodes:
        if isinstance(node, Input):
            for dimension, index in enumerate(node.index):
                place = (node.tensor, dimension)
                if index.axis is not None and draft.axes[index.axis] == draft.shapes[node.tensor][dimension]:
                    lying.setdefault(place, []).append(index.axis)
                elif len(index.terms) == 2 and not index.nodes and not index.offset:
                    high, low = index.terms
                    if low == AxisTerm(low.axis) and high == AxisTerm(high.axis, draft.axes[low.axis]):
                        inner[place] = high.factor
    for place, by in inner.items():
        for axis in lying.get(place, ()):
            yield axis, by


def _terms(nodes: Sequence[Node]) -> Iterator[AxisTerm]:
    for node in nodes:
        for index in indices_of(node):
            yield from index.terms


def _in_two(draft: Draft, axis: int, by: int) -> Draft | None:
    """The draft with the quotient by a number as `axis`, and the remainder as a new axis; None if that cannot be."""
    size, inner = draft.axes[axis], len(draft.axes)
    if size > 0 and size % by:
        return None
    replaced: dict[AxisTerm, tuple[AxisTerm, ...]] = {}
    for term in set(_terms(draft.nodes)):
        if term.axis == axis:
            parts = _parts(term, by, inner)
            if parts is None:
                return None
            replaced[term] = parts
    sizes = [*draft.axes, by]
    sizes[axis] = size // by if size > 0 else size
    nodes: list[Node] = []
    varying: list[frozenset[int]] = []
    places: list[int] = []
    for old, along_axes in zip(draft.nodes, draft.varying, strict=True):
        more = along_axes | {inner} if axis in along_axes else along_axes
        added = _rewritten(old, axis, inner, by, replaced, places, len(nodes), sizes)
        nodes += added
        varying += [more] * len(added)
        places.append(len(nodes) - 1)
    outputs = tuple(
        Output(
            places[output.node], tuple(new for old in output.axes for new in ((axis, inner) if old == axis else (old,)))
        )
        for output in draft.outputs
    )
    found = replace(draft, axes=tuple(sizes), nodes=tuple(nodes), varying=tuple(varying), outputs=outputs)
    return found if size > 0 else _with_given_size(found, axis)


def _parts(term: AxisTerm, by: int, inner: int) -> tuple[AxisTerm, ...] | None:
    """A term of `by * outer + inner`, whose outer axis has the number that the axis had."""
    axis, factor, divisor, modulus = term.axis, term.factor, term.divisor, term.modulus
    if divisor % by == 0:
        return (AxisTerm(axis, factor, divisor // by, modulus),)
    if by % divisor:
        return None
    steps = by // divisor  # of the quotient, for one of the outer axis
    low = AxisTerm(inner, factor, divisor)
    if not modulus:
        return (AxisTerm(axis, factor * steps), low)
    if modulus % steps == 0:
        high = AxisTerm(axis, factor * steps, 1, modulus // steps)
        return (high, low) if modulus > steps else (low,)
    return (AxisTerm(inner, factor, divisor, modulus),) if steps % modulus == 0 else None


def _rewritten(
    node: Node,
    axis: int,
    inner: int,
    by: int,
    replaced: dict[AxisTerm, tuple[AxisTerm, ...]],
    places: Sequence[int],
    next_place: int,
    sizes: Sequence[int],
) -> list[Node]:
    """The node over both axes, after what it takes to compute it; the new places of the nodes before are `places`."""

    def moved(index: Index) -> Index:
        terms = tuple(new for term in index.terms for new in replaced.get(term, (term,)))
        return tidy(Index(index.offset, terms, tuple(places[place] for place in index.nodes)), sizes)

    match node:
        case Input(tensor=tensor, index=index):
            return [Input(tensor, tuple(map(moved, index)))]
        case Random(index=number):
            return [replace(node, index=moved(number))]
        case Position(dtype=dtype, axis=own) if own == axis:
            high, low = next_place, next_place + 3
            return [
                Position(dtype, axis),
                Constant(dtype, by),
                Elementwise("multiply", (high, high + 1)),
                Position(dtype, inner),
                Elementwise("add", (high + 2, low)),
            ]
        case Reduce(kind=kind, operand=operand, axes=axes) if axis in axes:
            return [Reduce(kind, places[operand], tuple(sorted((*axes, inner))))]
    return [renumbered(node, places.__getitem__, lambda old: old)]


def _with_given_size(draft: Draft, axis: int) -> Draft | None:
    """The draft with the unknown size of a dimension that lies along the axis; None if there is none."""
    for node in draft.nodes:
        if isinstance(node, Input):
            for index, size in zip(node.index, draft.shapes[node.tensor], strict=True):
                if index == along(axis):
                    return replace(draft, axes=(*draft.axes[:axis], size, *draft.axes[axis + 1 :]))
    return None
