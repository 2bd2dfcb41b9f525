"""Einsums of two operands as transposes and one batched product, which regions call or compute in kernels.

    bthd,bshd->bhts       t, d: rows and depth of the left; s: columns; b, h: the batch
    left  [b, t, h, d] -> [b, h, t, d] -> [b h, t, d]
    right [b, s, h, d] -> [b, h, s, d] -> [b h, s, d], multiplied as its transpose
    [b h, t, s] -> [b, h, t, s]

A vector is a matrix of one row or column, and an outer product has a depth of 1:

    be,bce->bc    [b, 1, e] times [b, c, e] transposed

TensorFlow's kernel does the same, so numbers are the same; a transpose within a region costs nothing or little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from graph_passes.graph.flatten import HALF, UNKNOWN, WIDE
from graph_passes.graph.ir import Graph, Node, TensorId, text


@dataclass(frozen=True)
class Operand:
    """One factor.

    Attributes:
        input: its position among the node's inputs.
        order: of its dimensions, to be transposed to; None: as they are.
        shape: of the matrices: batch, rows and columns; without a batch two sizes. One may be `UNKNOWN`.
        flipped: whether the product is with the transpose of each matrix.
    """

    input: int
    order: tuple[int, ...] | None
    shape: tuple[int, ...]
    flipped: bool


@dataclass(frozen=True)
class EinsumProduct:
    """An einsum as a product of matrices.

    Attributes:
        name: of its node.
        left, right: its factors.
        result: the shape of the product, a size for each label.
        order: of the dimensions of `result`, to be transposed to; None: as they are.
    """

    name: str
    left: Operand
    right: Operand
    result: tuple[int, ...]
    order: tuple[int, ...] | None


def einsums(graph: Graph, keep: Collection[str]) -> tuple[EinsumProduct, ...]:
    """The einsums of a graph that are products of matrices; the nodes named in `keep` are fetched, and stay."""
    found = (_product(graph, node) for node in graph if node.op == "Einsum" and node.name not in keep)
    return tuple(each for each in found if each is not None)


def _product(graph: Graph, node: Node) -> EinsumProduct | None:
    labels = _labels(text(node.attrs["equation"]))
    specs = [graph.specs.get(tensor) for tensor in (*node.inputs, TensorId(node.name))]
    if labels is None or node.control or any(spec is None or spec.shape is None for spec in specs):
        return None
    if any(spec is not None and spec.dtype not in (*WIDE, *HALF) for spec in specs):
        return None
    sizes = _sizes(labels, [spec.shape or () for spec in specs if spec is not None])
    if sizes is None:
        return None
    first, second, made = labels
    batch = [label for label in made if label in first and label in second]
    depth = [label for label in first if label in second and label not in made]
    alone = [[label for label in made if label in own and label not in batch] for own in (first, second)]
    every = {*batch, *depth, *alone[0], *alone[1]}
    if every != {*first, *second}:
        return None  # a sum of one operand alone
    swapped = bool(made) and made[-1] in alone[0]
    places = (1, 0) if swapped else (0, 1)
    rows, columns = alone[places[0]], alone[places[1]]
    left = _operand(places[0], labels[places[0]], batch, rows, depth, sizes)
    right = _operand(places[1], labels[places[1]], batch, depth, columns, sizes)
    computed = [*batch, *rows, *columns]
    shapes = [left.shape, right.shape, tuple(sizes[label] for label in computed)]
    if any(shape.count(UNKNOWN) > 1 for shape in shapes):
        return None
    return EinsumProduct(node.name, left, right, shapes[2], _order(computed, made))


def _labels(equation: str) -> tuple[str, str, str] | None:
    """The labels of two operands and of the result, where each has each of its labels once."""
    given, arrow, made = equation.replace(" ", "").partition("->")
    operands = given.split(",")
    if not arrow or len(operands) != 2 or "." in equation:
        return None
    found = (operands[0], operands[1], made)
    return found if all(len(set(each)) == len(each) for each in found) else None


def _sizes(labels: Sequence[str], shapes: Sequence[Sequence[int | None]]) -> dict[str, int] | None:
    """The size of each label; None where they differ, or one is 0."""
    found: dict[str, int] = {}
    for own, shape in zip(labels, shapes, strict=True):
        if len(own) != len(shape):
            return None
        for label, size in zip(own, shape, strict=True):
            known = found.get(label, UNKNOWN)
            if size == 0 or (size is not None and known not in (UNKNOWN, size)):
                return None
            found[label] = known if size is None else size
    return found


def _operand(
    place: int, own: str, batch: Sequence[str], rows: Sequence[str], columns: Sequence[str], sizes: Mapping[str, int]
) -> Operand:
    flipped = list(own) == [*batch, *columns, *rows]
    first, last = (columns, rows) if flipped else (rows, columns)
    order = _order(own, [*batch, *first, *last])
    parts = [*([batch] if batch else []), first, last]
    return Operand(place, order, tuple(_count(part, sizes) for part in parts), flipped)


def _count(labels: Sequence[str], sizes: Mapping[str, int]) -> int:
    found = [sizes[label] for label in labels]
    return UNKNOWN if UNKNOWN in found else prod(found)


def _order(given: Sequence[str], wanted: Sequence[str]) -> tuple[int, ...] | None:
    return None if list(given) == list(wanted) else tuple(list(given).index(label) for label in wanted)
