"""Products and reductions on a piece of the batch: what contracts the batch makes a part of a sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from graph_passes.analysis.batch.labels import Asked, Label, Rows, Separation, Summed
from graph_passes.graph.ir import TensorId, boolean, text, texts
from graph_passes.graph.ops import FLOATS


def _turned(asked: Asked) -> tuple[bool, bool]:
    attrs = asked.node.attrs
    return (
        boolean(attrs.get("transpose_a")) or boolean(attrs.get("adj_x")),
        boolean(attrs.get("transpose_b")) or boolean(attrs.get("adj_y")),
    )


def matrices(asked: Asked) -> Separation:
    """MatMul and batched products: the batch is among the rows, the columns, the contracted dimension or the stack."""
    asked.require(not {"Add"}.intersection(texts(asked.node.attrs.get("fused_ops"))))
    left, right = asked.sizes(0), asked.sizes(1)
    made, rank = asked.made(), len(asked.made())
    asked.require(min(len(left), len(right)) >= 2)
    asked.whole(*range(2, len(asked.node.inputs)))
    turn_left, turn_right = _turned(asked)
    rest: tuple[Rows | None, ...] = (None,) * (len(asked.node.inputs) - 2)
    # For each operand: where its dimensions are in the product; None: contracted.
    places = (
        _places(len(left), rank, rank - 2, None, turn_left),
        _places(len(right), rank, None, rank - 1, turn_right),
    )
    labels = asked.labels[:2]
    found = {places[side][label.axis] for side, label in enumerate(labels) if label is not None}
    asked.require(len(found) == 1)
    (place,) = found
    if place is None:
        rows = [asked.rows(sizes, places[side].index(None)) for side, sizes in enumerate((left, right))]
        asked.require(rows[0].inner == rows[1].inner and all(labels[side] in (None, rows[side]) for side in (0, 1)))
        asked.require(not rest)  # a bias would be added in each piece
        return Separation(tuple(rows), (Summed(),))
    rows_made = asked.rows(made, place)
    asked.require(not rest or place != rank - 1)
    inputs = [_sliced(asked, side, places[side], place, rows_made) for side in (0, 1)]
    return Separation((*inputs, *rest), (rows_made,))


def _places(count: int, rank: int, row: int | None, column: int | None, turned: bool) -> list[int | None]:
    stack: list[int | None] = list(range(rank - count, rank - 2))
    last = [column, row] if turned else [row, column]
    return [*stack, *last]


def _sliced(asked: Asked, side: int, places: list[int | None], place: int, made: Rows) -> Rows | None:
    sizes, label = asked.sizes(side), asked.labels[side]
    if place not in places or sizes[places.index(place)] == 1:
        asked.require(label is None)
        return None
    rows = Rows(places.index(place), made.inner)
    asked.require(sizes[rows.axis] == asked.made()[place] and label in (None, rows))
    return rows


def einsum(asked: Asked) -> Separation:
    """Einsum: the letter that stands for the batch."""
    equation = text(asked.node.attrs["equation"]).replace(" ", "")
    asked.require("." not in equation and "->" in equation)
    before, _, after = equation.partition("->")
    terms = before.split(",")
    letters = {(terms[index][label.axis], label.inner) for index, label in enumerate(asked.labels) if label is not None}
    asked.require(len(letters) == 1)
    ((letter, inner),) = letters
    asked.require(all(term.count(letter) <= 1 for term in (*terms, after)))
    inputs: list[Rows | None] = []
    for index, term in enumerate(terms):
        rows = Rows(term.index(letter), inner) if letter in term else None
        asked.require(asked.labels[index] in (None, rows))
        asked.require(rows is None or asked.rows(asked.sizes(index), rows.axis) == rows)
        inputs.append(rows)
    output: Label = Rows(after.index(letter), inner) if letter in after else Summed()
    return Separation(tuple(inputs), (output,))


def reduction(weighted: bool | None) -> Callable[[Asked], Separation]:
    """Rules of reductions: (input, dimensions).

    Args:
        weighted: over the batch, pieces add up, as they are or as means; None: they do not.
    """

    def rule(asked: Asked) -> Separation:
        asked.whole(1)
        label, sizes = asked.labels[0], asked.sizes(0)
        assert label is not None
        axes = {axis % len(sizes) for axis in asked.numbers(1)}
        if label.axis in axes:
            asked.require(weighted is not None and (not weighted or _is_float(asked)))
            return Separation((label, None), (Summed(bool(weighted)),))
        keeps = boolean(asked.node.attrs.get("keep_dims"))
        axis = label.axis if keeps else label.axis - sum(each < label.axis for each in axes)
        return Separation((label, None), (asked.rows(asked.made(), axis),))

    return rule


def _is_float(asked: Asked) -> bool:
    spec = asked.graph.specs.get(TensorId(asked.node.name))
    return spec is not None and spec.dtype in FLOATS


def all_of_it(asked: Asked) -> Separation:
    """L2Loss: a sum over all."""
    return Separation((asked.labels[0],), (Summed(),))


def segments(asked: Asked) -> Separation:
    """UnsortedSegmentSum: (numbers, segments, how many), a sum over the examples."""
    asked.whole(2)
    rows = [asked.rows(asked.sizes(index), 0) for index in (0, 1)]
    asked.require(rows[0] == rows[1] and all(asked.labels[index] in (None, rows[index]) for index in (0, 1)))
    return Separation((rows[0], rows[1], None), (Summed(),))


RULES: Mapping[str, Callable[[Asked], Separation]] = {
    **dict.fromkeys(["MatMul", "_FusedMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"], matrices),
    "Einsum": einsum,
    "Sum": reduction(weighted=False),
    "Mean": reduction(weighted=True),
    **dict.fromkeys(["Max", "Min", "Prod", "Any", "All", "ArgMax", "ArgMin"], reduction(weighted=None)),
    "L2Loss": all_of_it,
    "UnsortedSegmentSum": segments,
}
