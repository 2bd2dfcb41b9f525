"""How TfmemMatMul divides a product among CTAs; needs a C++ compiler."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.matmul.multiplier import Shape, Tiling, best_tiling
from custom_ops import build_flags
from custom_ops.matmul.kernels import LARGE, SMALL

if shutil.which(build_flags.compiler()) is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "tiling"),
    [
        (100, 1024, 4096, Tiling(small=True, split_k=1)),  # 32 large tiles for 132 multiprocessors, 128 small ones
        (1000, 1024, 2048, Tiling(small=False, split_k=1)),  # 128 large tiles
        (6400, 1024, 4096, Tiling(small=False, split_k=1)),
        (100, 4096, 1024, Tiling(small=True, split_k=8)),  # 32 small tiles
        (1000, 4096, 1024, Tiling(small=False, split_k=2)),  # 64 large ones
        (256, 6400, 1024, Tiling(small=False, split_k=8)),  # 16 large ones
    ],
)
def test_as_many_blocks_as_there_are_multiprocessors(rows: int, depth: int, columns: int, tiling: Tiling) -> None:
    """What was the fastest on an H200, or within 5% of it, of all tilings."""
    assert best_tiling(Shape(rows, depth, columns), processors=132) == tiling


@given(
    rows=st.integers(1, 5000), depth=st.integers(0, 9000), columns=st.integers(1, 5000), processors=st.integers(1, 200)
)
def test_each_part_has_some_of_the_depth_and_room_for_its_sums(
    rows: int, depth: int, columns: int, processors: int
) -> None:
    shape = Shape(rows, depth, columns)
    tiling, pairs = best_tiling(shape, processors), shape.lines // 2
    assert tiling.split_k == 1 or -(-pairs // tiling.split_k) * (tiling.split_k - 1) < pairs
    assert tiling.sums_bytes(shape) <= 2 * processors * tiling.tile**2 * 4


def test_what_a_product_needs() -> None:
    shape = Shape(rows=3, depth=65, columns=5)
    assert shape.lines == 4  # of 32 numbers, an even number of them
    assert Tiling(small=True, split_k=1).memory_bytes(shape) == (3 + 5) * (4 * 128 + 4) + 4
    assert Tiling(small=True, split_k=2).memory_bytes(shape) == (3 + 5) * (4 * 128 + 4) + 2 * 64 * 64 * 4 + 4
    assert (shape.tiles(128), Shape(129, 1, 257).tiles(128)) == (1, 6)
    assert (LARGE.shared, SMALL.shared) == (96 << 10, 64 << 10)
