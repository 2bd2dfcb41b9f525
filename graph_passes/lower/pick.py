"""Elements chosen by where they are: of which part of a concatenation, inside of a padding or not."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate
from math import prod

from custom_ops.expr.nodes import Index
from custom_ops.expr.table_entry import INTEGER_RANGES
from graph_passes.graph.ir import Node, TensorId
from graph_passes.lower.access import FIRST, Access, bounds, divided, scaled, shifted
from graph_passes.lower.program_writer import Demand, LoweringError, ProgramWriter
from graph_passes.refusals import Reason


def require_known(node: Node, sizes: Sequence[int]) -> None:
    """Raise LoweringError if one of the sizes is not known."""
    if any(size < 0 for size in sizes):
        raise LoweringError(Reason.PICKED.of(node))


def range_of(w: ProgramWriter, index: Index, size: int) -> tuple[int, int]:
    """The least and the largest value of an index of a dimension of `size`."""
    found = bounds(index, w.sizes)
    return (0, size - 1) if found is None else (max(found[0], 0), min(found[1], size - 1))


def within(w: ProgramWriter, index: Index, low: int, end: int) -> list[int]:
    """Conditions that hold where the index is at least `low` and below `end`; none where that is always so."""
    found = bounds(index, w.sizes)
    conditions = []
    if found is None or found[0] < low:
        position = w.position(index)
        conditions.append(w.apply("greater_equal", position, w.like(position, low)))
    if found is None or found[1] >= end:
        position = w.position(index)
        conditions.append(w.apply("greater", w.like(position, end), position))
    return conditions


def clamped(w: ProgramWriter, index: Index, size: int) -> Index:
    """The index where it is a position of a dimension of `size`, and any such position elsewhere."""
    found = bounds(index, w.sizes)
    if found is not None and 0 <= found[0] <= found[1] < size:
        return index
    position = w.position(index)
    if found is None or found[0] < 0:
        position = w.apply("maximum", position, w.like(position, 0))
    if found is None or found[1] >= size:
        position = w.apply("minimum", position, w.like(position, size - 1))
    return Index(nodes=(position,))


def turned(w: ProgramWriter, index: Index, shift: int, size: int) -> Index:
    """Where what is at the index was before a dimension of `size` was turned by `shift`, which is below it."""
    low, high = range_of(w, index, size)
    if low >= shift:
        return shifted(index, -shift)
    if high < shift:
        return shifted(index, size - shift)
    position = w.position(index)
    before, after = (w.apply("add", position, w.like(position, by)) for by in (size - shift, -shift))
    return Index(nodes=(w.apply("select", w.apply("greater", w.like(position, shift), position), before, after),))


def times(w: ProgramWriter, index: Index, factor: int) -> Index:
    """The index times a number."""
    found = scaled(index, factor)
    if found is not None:
        return found
    position = w.position(index)
    return Index(nodes=(w.apply("multiply", position, w.like(position, factor)),))


def is_multiple(w: ProgramWriter, index: Index, number: int) -> int:
    """Whether the index is a multiple of a number."""
    position = w.position(index)
    return w.apply("equal", w.remainder(position, number), w.like(position, 0))


def quotient(w: ProgramWriter, index: Index, number: int) -> Index:
    """The index divided by a number, rounded down."""
    pair = divided(index, number, w.sizes)
    if pair is not None:
        return pair[0]
    return Index(nodes=(w.quotient(w.position(index), number),))


def reshaped(w: ProgramWriter, at: Access, shape: Sequence[int], source: Sequence[int]) -> Access:
    """Where an element that is gathered from a reshape is in the tensor that was reshaped: computed, one by one.

    Dimensions that are as many elements before and after are computed apart from the others, so what chooses a row does
    not vary along the row.
    """
    wide = [place for place, size in enumerate(source) if size != 1]
    indices = [index for index, size in zip(at, shape, strict=True) if size != 1]
    sizes, inner = [size for size in shape if size != 1], [source[place] for place in wide]
    found: list[Index] = []
    for after, before in _matching(sizes, inner):
        if after.stop - after.start == before.stop - before.start == 1:
            found.append(indices[after.start])
        else:
            found += _divided(w, indices[after], sizes[after], inner[before])
    moved = dict(zip(wide, found, strict=True))
    return tuple(moved.get(place, FIRST) for place in range(len(source)))


def _matching(shape: Sequence[int], source: Sequence[int]) -> list[tuple[slice, slice]]:
    """Dimensions side by side, none of size 1, that are as many elements in both: as few as can be, in order.

    The first size of each may be negative: not known.
    """
    found: list[tuple[slice, slice]] = []
    end, source_end = len(shape), len(source)
    while end > 0:
        first, source_first = end - 1, source_end - 1
        while first > 0 and source_first > 0 and prod(shape[first:end]) != prod(source[source_first:source_end]):
            if prod(shape[first:end]) < prod(source[source_first:source_end]):
                first -= 1
            else:
                source_first -= 1
        if first == 0 or source_first == 0 or 0 in (*shape, *source):
            first = source_first = 0
        found.insert(0, (slice(first, end), slice(source_first, source_end)))
        end, source_end = first, source_first
    return found


def _divided(w: ProgramWriter, at: Sequence[Index], shape: Sequence[int], source: Sequence[int]) -> list[Index]:
    flat: int | None = None
    largest = prod(max(size, 1) for size in source)
    if largest > INTEGER_RANGES["int32"][1]:
        raise LoweringError(Reason.GATHER_RANGE(count=largest))
    for place, index in enumerate(at):
        position = w.position(times(w, index, prod(shape[place + 1 :])))
        flat = position if flat is None else w.apply("add", flat, position)
    assert flat is not None
    found = []
    for place in range(len(source)):
        inner = prod(source[place + 1 :])
        found.append(Index(nodes=(w.quotient(flat, inner) if inner != 1 else flat,)))
        flat = w.remainder(flat, inner)
    return found


def where_all(w: ProgramWriter, conditions: Sequence[int], element: int, otherwise: int) -> int:
    """The element where all conditions hold."""
    if not conditions:
        return element
    first, *rest = dict.fromkeys(conditions)
    for condition in rest:
        first = w.apply("logical_and", first, condition)
    return w.apply("select", first, element, otherwise)


def where_below(w: ProgramWriter, index: Index, end: int, element: int, otherwise: int) -> int:
    """The element where the index is below `end`."""
    position = w.position(index)
    return w.apply("select", w.apply("greater", w.like(position, end), position), element, otherwise)


def joined(
    w: ProgramWriter, node: Node, parts: Sequence[TensorId], place: int, at: Access
) -> Generator[Demand, int, int]:
    """An element of parts that lie one after the other along a dimension."""
    sizes = [w.shapes[part][place] for part in parts]
    require_known(node, sizes)
    ends = list(accumulate(sizes))
    index = at[place]
    low, high = range_of(w, index, ends[-1])
    same = len(set(sizes)) == 1
    element: int | None = None
    for part, size, end in reversed(list(zip(parts, sizes, ends, strict=True))):
        if end > low and end - size <= high:
            moved = shifted(index, size - end)
            alone = end - size <= low and high < end
            pair = divided(index, size, w.sizes) if same and not alone else None
            # of parts that are as large the remainder is a position of any of them
            inside = pair[1] if pair is not None else clamped(w, moved, size)
            found = yield part, (*at[:place], inside, *at[place + 1 :])
            element = found if element is None else where_below(w, index, end, found, element)
    assert element is not None
    return element
