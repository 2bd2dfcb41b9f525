"""Elements that are gathered through a reshape: which dimensions are computed apart from the others."""

from __future__ import annotations

from math import prod

import hypothesis.strategies as st
import pytest
from hypothesis import given

from graph_passes.lower.pick import _matching as matching

Sizes = tuple[int, ...]


@pytest.mark.parametrize(
    ("shape", "source", "groups"),
    [
        ((12800, 64), (128, 100, 64), [((12800,), (128, 100)), ((64,), (64,))]),
        ((64, 128, 100), (64, 12800), [((64,), (64,)), ((128, 100), (12800,))]),
        ((2, 3, 4), (4, 6), [((2, 3, 4), (4, 6))]),
        ((-1, 64), (-2, 100, 64), [((-1,), (-2, 100)), ((64,), (64,))]),
        ((-1, 4, 5), (-1, 20), [((-1,), (-1,)), ((4, 5), (20,))]),
        ((2, 0, 3), (0, 6), [((2, 0, 3), (0, 6))]),
        ((), (), []),
    ],
)
def test_dimensions_that_are_computed_apart(shape: Sizes, source: Sizes, groups: list[tuple[Sizes, Sizes]]) -> None:
    assert [(shape[after], source[before]) for after, before in matching(shape, source)] == groups


SIZES = st.lists(st.integers(2, 6), min_size=1, max_size=4)


@given(st.lists(SIZES, min_size=1, max_size=3), st.data())
def test_groups_cover_all_dimensions_and_agree(parts: list[list[int]], data: st.DataObject) -> None:
    shape = [size for part in parts for size in part]
    source = [
        size
        for part in parts
        for size in (data.draw(st.permutations(part)) if data.draw(st.booleans()) else [prod(part)])
    ]
    groups = matching(shape, source)
    assert len(groups) >= 1
    assert [size for after, _ in groups for size in shape[after]] == shape
    assert [size for _, before in groups for size in source[before]] == source
    assert all(prod(shape[after]) == prod(source[before]) for after, before in groups)
