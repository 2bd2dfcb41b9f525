"""Products of a value with a variable, and of two values of a node, by letters for dimensions as in `tf.einsum`."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from custom_ops.dynamic.node_code import Builder
from custom_ops.errors import DynamicError
from tfmem.dynamic.picks import MOST, pick, runs_of
from tfmem.dynamic.recorder import Recorder
from tfmem.dynamic.weights import Weights, blocks_of

_LARGEST = 1 << 16  # numbers that are multiplied for one product of two values


def letters_of_product(shapes: Sequence[Sequence[int]], transposed: Sequence[bool]) -> tuple[str, str, str]:
    """The letters of a matrix product, whose further dimensions are those of a batch."""
    rest = [list(shape[:-2]) for shape in shapes]
    count = max(map(len, rest))
    names, spare = iter(string.ascii_uppercase), iter(string.ascii_lowercase[3:])
    batch = [next(names) for _ in range(count)]
    letters = []
    for mine, other in (rest, rest[::-1]):
        found = ""
        for at in range(len(mine)):
            place = count - len(mine) + at
            same = len(other) - (len(mine) - at)
            widened = mine[at] == 1 and same >= 0 and other[same] != 1
            found += next(spare) if widened else batch[place]
        letters.append(found)
    first = letters[0] + ("ba" if transposed[0] else "ab")
    second = letters[1] + ("cb" if transposed[1] else "bc")
    return first, second, "".join(batch) + "ac"


def of_parameter(
    recorder: Recorder,
    weights: Weights,
    of_weights: tuple[str, Sequence[int]],
    value: int,
    of_value: tuple[str, Sequence[int]],
    result: str,
) -> int:
    """A product of a parameter with a value, as products of blocks of a matrix with vectors.

    Args:
        recorder: of the kind.
        weights: the parameter.
        of_weights: its letters and its shape.
        value: the position of the value.
        of_value: its letters and its shape.
        result: the letters of the result.

    Raises:
        DynamicError: it is another one, such as an elementwise product with a matrix.
    """
    builder = recorder.builder
    sizes = dict(zip(*of_weights, strict=True)) | dict(zip(*of_value, strict=True))
    first, distances = weights.layout(of_weights[1])
    found = blocks_of(first, distances, sizes, of_weights[0], of_value[0], result, recorder.columns_of(weights.number))
    recorder.see_as(weights.number, found.columns)
    shared = [x for x in found.taken if x in of_value[0]]
    others = [x for x in of_value[0] if x not in found.summed and x not in shared]
    if any(sizes[x] != 1 for x in others if x not in result):
        raise DynamicError("it sums over a dimension of the value that the matrix has not; sum over it first")
    # Vectors of the value: for each index of the shared dimensions, then of all others.
    positions = np.arange(math.prod(of_value[1])).reshape(of_value[1])
    order = [of_value[0].index(x) for x in (*shared, *others, *found.summed)]
    vectors = positions.transpose(order).reshape(
        [*(sizes[x] for x in shared), -1, math.prod(sizes[x] for x in found.summed)]
    )
    count = len(found.blocks) * vectors.shape[-2]
    if count > MOST:
        raise DynamicError(f"it consists of {count} products of a matrix with vectors; expected at most {MOST}")
    products = []
    for block in found.blocks:
        own = tuple(i for i, x in zip(block.index, found.taken, strict=True) if x in shared)
        for vector in vectors[own]:
            operand = pick(builder, value, vector)
            products.append(
                builder.product_of_block(
                    weights.number, operand, block.row, block.column, block.transposed, block.width
                )
            )
    made = [*found.taken, *(x for x in others if x in result), *found.kept]
    made += [x for x in result if x not in made]  # of one number
    places = np.arange(sum(map(builder.width, products))).reshape([sizes[x] for x in made])
    return pick(builder, builder.concat(*products), places.transpose([made.index(x) for x in result]).ravel())


def contract(
    builder: Builder, values: Sequence[int], letters: Sequence[str], result: str, shapes: Sequence[Sequence[int]]
) -> int:
    """A product of two values of a node: numbers are multiplied in pairs and summed.

    Raises:
        DynamicError: it multiplies too many numbers.
    """
    sizes: dict[str, int] = {}
    for given, shape in zip(letters, shapes, strict=True):
        sizes.update(zip(given, shape, strict=True))
    summed = [letter for letter in dict.fromkeys("".join(letters)) if letter not in result]
    rows, terms = math.prod(sizes[x] for x in result), math.prod(sizes[x] for x in summed)
    if rows * terms > _LARGEST:
        raise DynamicError(
            f"a product of two values of a node multiplies {rows * terms} pairs; expected at most {_LARGEST}"
        )

    def spread(order: Sequence[str]) -> list[np.ndarray[Any, Any]]:
        found = []
        for given, shape in zip(letters, shapes, strict=True):
            own = np.arange(math.prod(shape)).reshape(shape).transpose([given.index(x) for x in order if x in given])
            widened = own.reshape([sizes[x] if x in given else 1 for x in order])
            found.append(np.broadcast_to(widened, [sizes[x] for x in order]).ravel())
        return found

    def cost(order: Sequence[str], more: int) -> int:
        return more + max(len(runs_of(positions)) for positions in spread(order))

    by_row, by_term = [*result, *summed], [*summed, *result]
    rows_first = cost(by_row, 0 if rows == 1 else rows) <= cost(by_term, terms)
    chosen = spread(by_row if rows_first else by_term)
    product = builder.elementwise("multiply", *(pick(builder, v, p) for v, p in zip(values, chosen, strict=True)))
    if terms == 1:
        return product
    if rows_first:
        parts = [builder.reduce_sum(builder.slice(product, row * terms, terms)) for row in range(rows)]
        return builder.concat(*parts)
    total = builder.slice(product, 0, rows)
    for term in range(1, terms):
        total = builder.elementwise("add", total, builder.slice(product, term * rows, rows))
    return total
