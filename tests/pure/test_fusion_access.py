"""Indices of tensors as sums over axes: what layout ops make of them."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from custom_ops.expr.nodes import AxisTerm, Index
from graph_passes.lower.access import FIRST, Access, added, along, bounds, divided, reshaped, scaled, tidy


def positions(index: Index, sizes: tuple[int, ...]) -> np.ndarray:
    """The index for every position along the axes."""
    grid = np.indices(sizes)
    total = np.full(sizes, index.offset)
    for term in index.terms:
        moved = grid[term.axis] // term.divisor
        total = total + term.factor * (moved % term.modulus if term.modulus else moved)
    return total


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_reshape_reads_the_elements_in_their_order(shape: list[int], random: object) -> None:
    """A tensor of any shape is reshaped to any other of as many elements, wherever an index says it."""
    count = prod(shape)
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    others = [other for other in product(divisors, divisors, divisors) if prod(other) == count]
    other = random.choice(others)  # type: ignore[attr-defined]
    sizes = tuple(shape)
    at = tuple(FIRST if size == 1 else along(axis) for axis, size in enumerate(shape))
    found = reshaped(at, shape, other, sizes)
    if found is None:
        return
    flat = np.zeros(sizes, int)
    for index, size in zip(found, other, strict=True):
        flat = flat * size + positions(index, sizes)
    np.testing.assert_array_equal(flat, np.arange(count).reshape(sizes))


@pytest.mark.parametrize(
    ("shape", "source"),
    [
        ((24,), (2, 3, 4)),
        ((6, 4), (24,)),
        ((12, 10), (4, 6, 5)),
        ((4, 3, 2, 5), (4, 6, 5)),
        ((1, 4, 1, 6), (4, 6)),
        ((4, 6), (4, 1, 6, 1)),
        ((), (1, 1)),
        ((-1, 8), (-1, 2, 4)),
        ((-1,), (-1, 5)),
        ((-1, 3, -2), (-1, 3, 1, -2)),
    ],
)
def test_reshapes_that_an_index_says(shape: tuple[int, ...], source: tuple[int, ...]) -> None:
    sizes = tuple(max(size, 0) for size in shape)
    at = tuple(FIRST if size == 1 else along(axis) for axis, size in enumerate(shape))
    assert reshaped(at, shape, source, sizes) is not None


def test_reshapes_that_no_index_says() -> None:
    axes = (along(0), along(1))
    assert reshaped(axes, (6, 4), (8, 3), (6, 4)) is None  # (4 a0 + a1) / 3 carries
    assert reshaped(axes, (4, 6), (8, 3), (4, 6)) is not None
    assert reshaped(axes, (4, -1), (-2,), (4, 0)) is None  # a factor that is not known
    assert reshaped((Index(nodes=(3,)), along(1)), (4, 6), (24,), (4, 6)) is None  # what is gathered has no factor


def test_parts_of_an_axis_put_together_are_the_axis() -> None:
    parts = Index(terms=(AxisTerm(0, 4, 4, 3), AxisTerm(0, 1, 1, 4)))
    assert tidy(parts, (24,)) == Index(terms=(AxisTerm(0, 1, 1, 12),))
    assert tidy(parts, (12,)) == along(0)
    assert tidy(Index(terms=(AxisTerm(0, 5), AxisTerm(1))), (1, 3)) == along(1)  # an axis of one position


def test_quotient_and_remainder() -> None:
    sizes = (4, 6)
    index = Index(12, (AxisTerm(0, 6), AxisTerm(1)))
    assert divided(index, 6, sizes) == (Index(2, (AxisTerm(0),)), along(1))
    assert divided(index, 3, sizes) == (
        Index(4, (AxisTerm(0, 2), AxisTerm(1, 1, 3))),
        Index(terms=(AxisTerm(1, 1, 1, 3),)),
    )
    assert divided(index, 7, sizes) is None
    assert divided(Index(1, (AxisTerm(1),)), 3, sizes) is None  # carries
    for divisor in range(1, 25):
        found = divided(index, divisor, sizes)
        if found is not None:
            expected = positions(index, sizes)
            np.testing.assert_array_equal(positions(found[0], sizes), expected // divisor)
            np.testing.assert_array_equal(positions(found[1], sizes), expected % divisor)


def test_bounds() -> None:
    assert bounds(Index(3, (AxisTerm(0, -2),)), (4,)) == (-3, 3)
    assert bounds(Index(0, (AxisTerm(0, 1, 1, 5),)), (0,)) == (0, 4)
    assert bounds(along(0), (0,)) is None
    assert bounds(Index(nodes=(1,)), ()) is None


def test_sums_and_multiples() -> None:
    assert scaled(Index(2, (AxisTerm(0, 3),)), 4) == Index(8, (AxisTerm(0, 12),))
    assert scaled(Index(nodes=(1,)), 2) is None
    both: Access = (along(0), along(1))
    assert added(*both, (2, 3)) == Index(terms=(AxisTerm(0), AxisTerm(1)))
    assert added(along(0), along(0), (2,)) == Index(terms=(AxisTerm(0, 2),))
