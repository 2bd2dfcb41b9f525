"""Parameters in the function of a node, and the blocks of a matrix that a product with one comes to.

A parameter of any rank lies in memory as one row of numbers. A product needs it as a matrix: numbers that are summed
lie a fixed distance apart, and so do those that are kept. One of both distances is 1, the other the number of columns.
Dimensions that do not fit are taken one index at a time:

    d,hdk->hk   [h, d, k]: for each h a block of d rows of the matrix [h * d, k]
    d,dhk->hk   [d, h, k]: the whole matrix [d, h * k]
    hk,hkd->d   [h, k, d]: the whole matrix [h * k, d]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from custom_ops.errors import DynamicError

Positions = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Weights:
    """A parameter, or numbers of it, as a tensor.

    Attributes:
        number: of the parameter.
        positions: where each number of the tensor lies in the parameter; None: all, in order.
    """

    number: int
    positions: Positions | None = None

    def taken(self, positions: Positions) -> Weights:
        """The numbers at these positions of the tensor."""
        flat = positions.ravel()
        return Weights(self.number, flat if self.positions is None else self.positions[flat])

    def layout(self, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Where the tensor's first number lies, and how far apart numbers lie along each dimension.

        Raises:
            DynamicError: the distances differ.
        """
        distances = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        if self.positions is None:
            return 0, tuple(distances)
        found = self.positions.reshape(shape)
        first = int(found.ravel()[0])
        for axis, size in enumerate(shape):
            index = tuple(int(at == axis) for at in range(len(shape)))
            distances[axis] = int(found[index]) - first if size > 1 else 0
        even = first + sum(
            (np.arange(size) * distance).reshape([-1 if at == axis else 1 for at in range(len(shape))])
            for axis, (size, distance) in enumerate(zip(shape, distances, strict=True))
        )
        if not np.array_equal(np.broadcast_to(even, shape), found):
            raise DynamicError("it multiplies by chosen numbers of a parameter; choose them of the product instead")
        return first, tuple(distances)


@dataclass(frozen=True)
class Block:
    """A product with a block of a matrix.

    Attributes:
        index: of each dimension that is taken one index at a time.
        row: the block's first row.
        column: the block's first column.
        transposed: whether the columns are summed over, in place of the rows.
        width: how many numbers the product has.
    """

    index: tuple[int, ...]
    row: int
    column: int
    transposed: bool
    width: int


@dataclass(frozen=True)
class Blocks:
    """A product of a parameter with one value, as products with blocks of a matrix.

    Attributes:
        columns: of the matrix.
        taken: the letters of dimensions that are taken one index at a time.
        summed: the letters that are summed over, in the order in which their numbers lie.
        kept: the letters of the numbers of each product, in that order.
        blocks: a product for each index of the dimensions in `taken`.
    """

    columns: int
    taken: str
    summed: str
    kept: str
    blocks: tuple[Block, ...]


def blocks_of(
    first: int, distances: Sequence[int], sizes: dict[str, int], letters: str, value: str, result: str, columns: int
) -> Blocks:
    """The blocks of a parameter's product with a value.

    Args:
        first: where the parameter's tensor begins.
        distances: between its numbers, along each of its dimensions.
        sizes: of all dimensions.
        letters: of its dimensions.
        value: the letters of the value.
        result: the letters of the result.
        columns: of the parameter's matrix, where the product leaves them open.

    Raises:
        DynamicError: it is no product with a matrix.
    """
    apart = dict(zip(letters, distances, strict=True))
    order = sorted((x for x in letters if sizes[x] > 1), key=lambda x: -apart[x])
    summed = [x for x in order if x in value and x not in result]
    kept = [x for x in order if x in result and x not in value]
    taken = [x for x in order if x in value and x in result]
    if any(x not in value and x not in result for x in order):
        raise DynamicError("it sums over a dimension of the parameter that the value has not; sum over it first")
    if not _are_one(summed, apart, sizes):
        raise DynamicError(
            f"it sums over dimensions of the parameter that do not lie side by side; expected a parameter whose "
            f"dimensions {''.join(summed)} follow each other"
        )
    while not _are_one(kept, apart, sizes):
        taken.append(kept.pop(0))
    depth, width = (math.prod(sizes[x] for x in side) for side in (summed, kept))
    down, across = apart[summed[-1]] if summed else None, apart[kept[-1]] if kept else None
    ways = [(False, columns if down is None else down)] if across in {1, None} else []
    ways += [(True, columns if across is None else across)] if down in {1, None} else []
    for transposed, of in sorted(ways, key=lambda way: way[1] != columns):
        blocks = []
        for index in itertools.product(*(range(sizes[x]) for x in taken)):
            row, column = divmod(first + sum(i * apart[x] for i, x in zip(index, taken, strict=True)), of)
            if column + (depth if transposed else width) <= of:
                blocks.append(Block(index, row, column, transposed, width))
        if len(blocks) == math.prod(sizes[x] for x in taken):
            return Blocks(of, "".join(taken), "".join(summed), "".join(kept), tuple(blocks))
    raise DynamicError("it multiplies by numbers of a parameter that are no block of a matrix; give it another shape")


def _are_one(letters: Sequence[str], apart: dict[str, int], sizes: dict[str, int]) -> bool:
    """Whether the numbers of these dimensions lie a fixed distance apart, as those of one dimension do."""
    return all(apart[a] == apart[b] * sizes[b] for a, b in itertools.pairwise(letters))
