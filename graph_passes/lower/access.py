"""Where an element is: one index for each dimension of a tensor, as a sum over axes, and what layout ops make of it.

A layout op is a map of indices. The element `[i, j]` of the transpose of `x` is `x[j, i]`, so what reads the transpose
at `a0 a1` reads `x` at `a1 a0`. Sizes are those of `custom_ops.expr.program`: 0 is an axis whose size is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

from custom_ops.expr.nodes import AxisTerm, Index

Access: TypeAlias = tuple[Index, ...]
Sizes: TypeAlias = Sequence[int]

FIRST = Index()  # the only position along a dimension of size 1


def along(axis: int) -> Index:
    """The position along an axis, as it is."""
    return Index(terms=(AxisTerm(axis),))


def shifted(index: Index, offset: int) -> Index:
    """An index plus a number."""
    return index._replace(offset=index.offset + offset)


def scaled(index: Index, factor: int) -> Index | None:
    """An index times a number; None for a gather, whose values have no factor."""
    if factor == 1:
        return index
    if index.nodes:
        return None
    return Index(factor * index.offset, tuple(term._replace(factor=factor * term.factor) for term in index.terms))


def added(one: Index, other: Index, sizes: Sizes) -> Index:
    """The sum of two indices."""
    return tidy(Index(one.offset + other.offset, one.terms + other.terms, one.nodes + other.nodes), sizes)


def bounds(index: Index, sizes: Sizes) -> tuple[int, int] | None:
    """The least and the largest position; None where a size or a value is not known."""
    if index.nodes:
        return None
    low = high = index.offset
    for term in index.terms:
        last = _last(term, sizes)
        if last is None:
            return None
        low, high = low + min(0, term.factor * last), high + max(0, term.factor * last)
    return low, high


def tidy(index: Index, sizes: Sizes) -> Index:
    """A normal form of an index: terms that are always 0 left out, parts of one axis put together, in order."""
    terms = [_plainest(term, sizes) for term in index.terms]
    merged = True
    while merged:
        merged = False
        for i, j in ((i, j) for i in range(len(terms)) for j in range(len(terms)) if i != j):
            if (sum_ := _sum(terms[i], terms[j])) is not None:
                rest = [term for place, term in enumerate(terms) if place not in (i, j)]
                terms, merged = [*rest, _plainest(sum_, sizes)], True
                break
    kept = [term for term in terms if term.factor and _last(term, sizes) != 0]
    order: Callable[[AxisTerm], tuple[int, ...]] = lambda term: (-abs(term.factor), term.axis, term.divisor)  # noqa: E731
    return Index(index.offset, tuple(sorted(kept, key=order)), tuple(sorted(index.nodes)))


def divided(index: Index, divisor: int, sizes: Sizes) -> tuple[Index, Index] | None:
    """Quotient and remainder of positions that are not negative; None where no index says them."""
    if divisor == 1:
        return index, FIRST
    above: list[AxisTerm] = []
    below: list[AxisTerm] = []
    for term in index.terms:
        step = divisor // abs(term.factor)
        if term.factor % divisor == 0:
            above.append(term._replace(factor=term.factor // divisor))
        elif term.factor > 0 and divisor % term.factor == 0 and term.modulus % step == 0:
            above.append(AxisTerm(term.axis, 1, term.divisor * step, term.modulus // step))
            below.append(term._replace(modulus=step))
        else:
            below.append(term)
    rest = tidy(Index(index.offset % divisor, tuple(below), index.nodes), sizes)
    found = bounds(rest, sizes)
    if found is None or not 0 <= found[0] <= found[1] < divisor:
        return None
    return tidy(Index(index.offset // divisor, tuple(above)), sizes), rest


def reshaped(at: Access, shape: Sequence[int], source: Sequence[int], sizes: Sizes) -> Access | None:
    """Where the element `at` of a tensor of `shape` is in the tensor of shape `source` that it is a reshape of.

    Negative sizes are not known; equal ones are equal. None where no index says it.
    """
    wide = [place for place, size in enumerate(source) if size != 1]
    before = [source[place] for place in wide]
    after, indices = [size for size in shape if size != 1], [at[place] for place, size in enumerate(shape) if size != 1]
    front: list[Index] = []
    while before and after and before[0] == after[0]:
        front.append(indices.pop(0))
        del before[0], after[0]
    back: list[Index] = []
    while before and after and before[-1] == after[-1]:
        back.insert(0, indices.pop())
        del before[-1], after[-1]
    if any(size < 0 for size in (*before[1:], *after[1:])):
        return None  # a size that is not known would be a factor
    flat = FIRST
    for place, index in enumerate(indices):
        part = scaled(index, prod(after[place + 1 :]))
        if part is None:
            return None
        flat = added(flat, part, sizes)
    middle: list[Index] = []
    for place in range(len(before)):
        pair = divided(flat, prod(before[place + 1 :]), sizes)
        if pair is None:
            return None
        middle.append(pair[0])
        flat = pair[1]
    found = dict(zip(wide, (*front, *middle, *back), strict=True))
    return tuple(found.get(place, FIRST) for place in range(len(source)))


def _last(term: AxisTerm, sizes: Sizes) -> int | None:
    """The largest value of a term without its factor."""
    if sizes[term.axis] <= 0:
        return term.modulus - 1 if term.modulus else None
    last = (sizes[term.axis] - 1) // term.divisor
    return min(last, term.modulus - 1) if term.modulus else last


def _plainest(term: AxisTerm, sizes: Sizes) -> AxisTerm:
    if term.modulus and 0 < sizes[term.axis] <= term.divisor * term.modulus:
        return term._replace(modulus=0)
    return term


def _sum(high: AxisTerm, low: AxisTerm) -> AxisTerm | None:
    """One term for two of the same axis."""
    if high.axis != low.axis:
        return None
    if (high.divisor, high.modulus) == (low.divisor, low.modulus):
        return high._replace(factor=high.factor + low.factor)
    if low.modulus and high.factor == low.factor * low.modulus and high.divisor == low.divisor * low.modulus:
        return low._replace(modulus=low.modulus * high.modulus)
    return None
