"""Products on tensor cores against float64, at odd sizes, with numbers of all magnitudes. Needs a GPU and NVRTC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.matmul.multiplier import Multiplier, Shape, Tiling
from custom_ops.jit.device import DeviceContext
from custom_ops.matmul import kernels as matmul

pytest_plugins = ("tests.gpu_device",)

Floats = NDArray[np.float32]
Multiply = Callable[..., Floats]
SIZES = [(1, 1, 1), (7, 33, 5), (64, 64, 64), (65, 63, 129), (130, 1000, 7), (33, 1025, 257), (257, 31, 640), (3, 0, 5)]


@pytest.fixture(scope="module")
def multiply(device: DeviceContext) -> Multiply:
    """`multiply(a, b, bias, tiling, transpose_a, transpose_b)`, the operands as they are to lie."""
    if device.arch < matmul.OLDEST:
        pytest.skip(f"{device.name} has compute capability {device.arch / 10}, these need {matmul.OLDEST / 10}")
    multiplier = Multiplier(matmul.build(device.arch), device.processors)

    def run(
        a: Floats,
        b: Floats,
        bias: Floats | None = None,
        tiling: Tiling | None = None,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> Floats:
        rows, depth = a.shape[::-1] if transpose_a else a.shape
        columns = b.shape[0] if transpose_b else b.shape[1]
        shape = Shape(rows, depth, columns, transpose_a, transpose_b)
        result = np.full((rows, columns), np.nan, np.float32)
        tiling = tiling or multiplier.tiling(shape)
        place, memory = device.upload(result), device.upload(np.full(tiling.memory_bytes(shape), 0xFF, np.uint8))
        pointers = device.upload(a), device.upload(b), 0 if bias is None else device.upload(bias)
        multiplier.prepare(shape, tiling, *pointers, place, memory)(device.stream)
        return device.download(place, result)

    return run


def numbers(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def off(found: Floats, a: Floats, b: Floats, bias: Floats | None = None) -> float:
    """The largest error, relative to what the magnitudes of a number's terms add up to."""
    wanted = a.astype(np.float64) @ b + (0 if bias is None else bias)
    terms = np.abs(a.astype(np.float64)) @ np.abs(b) + (0 if bias is None else np.abs(bias))
    return float(np.max(np.abs(found - wanted) / np.maximum(terms, 1e-300), initial=0))


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize(("rows", "depth", "columns"), SIZES)
def test_as_accurate_as_float32(
    multiply: Multiply,
    rows: int,
    depth: int,
    columns: int,
    transpose_a: bool,
    transpose_b: bool,
    small: bool,
    split_k: int,
) -> None:
    """Parts without any of the depth are as good as others."""
    a, b, bias = numbers(rows, depth), numbers(depth, columns, seed=1), numbers(columns, seed=2)
    operands = a.T.copy() if transpose_a else a, b.T.copy() if transpose_b else b
    found = multiply(*operands, bias, Tiling(small, split_k), transpose_a, transpose_b)
    assert off(found, a, b, bias) < 5e-7
    assert np.isfinite(found).all()


@pytest.mark.parametrize("split_k", [1, 16])
def test_deep_sums_are_not_cut_off(multiply: Multiply, split_k: int) -> None:
    """All terms are positive, so what tensor cores cut off adds up."""
    a, b = np.abs(numbers(150, 6400)), np.abs(numbers(6400, 140, seed=1))
    assert off(multiply(a, b, tiling=Tiling(small=False, split_k=split_k)), a, b) < 1e-6


def test_rows_and_columns_of_all_magnitudes(multiply: Multiply) -> None:
    """Each is scaled by itself, and what is between does not overflow, though some results do. Below 1e-38 a number has
    fewer bits, and here too."""
    a, b = numbers(200, 100), numbers(100, 150, seed=1)
    a *= np.float32(10.0) ** np.linspace(-37, 38, 200, dtype=np.float32)[:, None] / 4
    b *= np.float32(10.0) ** np.linspace(-38, 37, 150, dtype=np.float32)
    found, wanted = multiply(a, b), a.astype(np.float64) @ b
    fits = np.abs(wanted) < 3.4e38
    assert np.array_equal(np.isinf(found), ~fits)
    assert not np.isnan(found).any()
    terms = np.abs(a.astype(np.float64)) @ np.abs(b)
    assert (np.abs(found[fits] - wanted[fits]) <= 5e-7 * terms[fits] + 1e-44).all()


def test_small_numbers_beside_large_ones(multiply: Multiply) -> None:
    """A row's largest number meets zeros: what is left of the others is what counts."""
    a, b = numbers(100, 200), numbers(200, 100, seed=1)
    a[:, 7], b[7] = 1e4, 0
    assert off(multiply(a, b), np.delete(a, 7, 1), np.delete(b, 7, 0)) < 5e-7


@pytest.mark.parametrize("split_k", [1, 2])
def test_nan_and_infinity(multiply: Multiply, split_k: int) -> None:
    a, b, bias = numbers(200, 90), numbers(90, 150, seed=1), numbers(150, seed=2)
    a[3, 5], a[7, 9], a[150], b[4, 8], b[6, 149] = np.inf, np.nan, np.nan, -np.inf, np.nan
    a[20], b[5, 30] = 1.0, np.inf  # numbers that a half holds, so that nothing of them is left to multiply
    with np.errstate(invalid="ignore"):
        wanted = a @ b + bias
    found = multiply(a, b, bias, Tiling(small=True, split_k=split_k))
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    assert np.array_equal(found[np.isinf(wanted)], wanted[np.isinf(wanted)])
    finite = np.isfinite(wanted)
    np.testing.assert_allclose(found[finite], wanted[finite], rtol=0, atol=2e-5)


@pytest.mark.parametrize("split_k", [1, 5])
def test_two_runs_are_equal_to_the_bit(multiply: Multiply, split_k: int) -> None:
    """Whichever part of a tile comes last."""
    a, b = numbers(700, 300), numbers(300, 900, seed=1)
    tiling = Tiling(small=False, split_k=split_k)
    first = multiply(a, b, tiling=tiling)
    assert all(np.array_equal(first, multiply(a, b, tiling=tiling)) for _ in range(5))


@pytest.mark.parametrize("split_k", [1, 4])
def test_both_tiles_compute_the_same_bits(multiply: Multiply, split_k: int) -> None:
    a, b = numbers(300, 500), numbers(500, 260, seed=1)
    found: list[Any] = [multiply(a, b, tiling=Tiling(small, split_k)) for small in (False, True)]
    assert np.array_equal(*found)
