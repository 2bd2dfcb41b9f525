"""Products of matrices within fusion kernels, on the CPU: in every form, beside float64 and the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from benchmarks.fusion import products
from custom_ops.errors import KernelError
from custom_ops.expr.program import Program
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.kernel import FusionKernel, make
from custom_ops.fusion.codegen.plan.contraction import refused_product
from custom_ops.fusion.codegen.plan.in_place import in_place
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.space import RowLayout, kernels, tiles
from custom_ops.jit.cache import Cache
from custom_ops.jit.cublas import MatrixProduct
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import Module
from tests.compiled import cubin
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.fusion_kernels import Shapes, normal, run
from tests.fusion_products import attention, exact, heads, layer, product, softmax, together
from tests.tiers import examples

pytest_plugins = ("tests.fusion_device",)

Tensors = Sequence[NDArray[Any]]


def forms(program: Program, tensors: Tensors, shapes: Shapes | None = None, threads: int = 128) -> list[FusionKernel]:
    """A kernel in each tile."""
    given = [tensor.shape for tensor in tensors]
    pattern = Pattern.of(program, given if shapes is None else shapes)
    layout = RowLayout(threads, 4, 4, 6, split=False, cache=False)
    return list(kernels(pattern, pattern.program.sizes(pattern.merged(given)), [layout]))


def computed(device: DeviceContext, kernel: FusionKernel, tensors: Tensors, tf32: bool = False) -> list[NDArray[Any]]:
    code = device.compile_source(kernel.source.text, device.arch, contract=False)
    return run(device, kernel, tensors, Module(code, device.driver), code, resident=5, tf32=tf32)


def compare(
    device: DeviceContext, program: Program, tensors: Tensors, kernel: FusionKernel, tf32: bool = False
) -> None:
    error = 4e-3 if tf32 else 2e-2 if tensors[0].dtype.itemsize == 2 else 2e-5
    for found, expected in zip(computed(device, kernel, tensors, tf32), exact(program, tensors), strict=True):
        scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=error * scale)


SIZES = [(32, 24, 64), (5, 7, 33), (37, 20, 50), (1, 40, 128), (4, 64, 96), (17, 1, 30), (33, 33, 1)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "columns", "depth"), SIZES)
def test_sizes(device: DeviceContext, rows: int, columns: int, depth: int) -> None:
    program, tensors = product(rows, columns, depth)
    found = forms(program, tensors)
    assert found
    for kernel in found:
        compare(device, program, tensors, kernel)
    compare(device, program, tensors, found[-1], tf32=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("left", ["a0 a2", "a2 a0"])
@pytest.mark.parametrize("right", ["a2 a1", "a1 a2"])
@pytest.mark.parametrize("size", [(32, 16, 48), (6, 12, 20), (7, 9, 11)])
def test_operands_that_lie_the_other_way(
    device: DeviceContext, left: str, right: str, size: tuple[int, int, int]
) -> None:
    program, tensors = product(*size, left, right)
    for kernel in forms(program, tensors)[::2]:
        compare(device, program, tensors, kernel)
        compare(device, program, tensors, kernel, tf32=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(device: DeviceContext, dtype: str) -> None:
    for size in ((32, 16, 64), (3, 10, 18)):
        program, tensors = product(*size, dtype=dtype)
        found = forms(program, tensors)
        for kernel in found[:: max(1, len(found) // 3)]:
            compare(device, program, tensors, kernel, tf32=dtype == "float64")


def test_half_types_are_multiplied_exactly(device: DeviceContext) -> None:
    """Products of integers that float16 holds, whose sums float32 holds."""
    program, tensors = product(32, 16, 64, dtype="float16")
    tensors = [np.round(tensor * 8).astype(np.float16) for tensor in tensors]
    (kernel, *_) = forms(program, tensors)
    (found,) = computed(device, kernel, tensors)
    expected = (tensors[0].astype(np.float64) @ tensors[1].astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("rows", "columns", "depth"), [(32, 24, 64), (5, 8, 33), (18, 6, 20)])
def test_prologue_and_epilogue(device: DeviceContext, rows: int, columns: int, depth: int) -> None:
    program, tensors = layer(rows, columns, depth)
    for kernel in forms(program, tensors)[::2]:
        compare(device, program, tensors, kernel)
        compare(device, program, tensors, kernel, tf32=True)


@pytest.mark.parametrize("sizes", [(2, 3, 20, 12, 16), (1, 8, 5, 33, 10), (3, 2, 1, 7, 4)])
def test_batches(device: DeviceContext, sizes: tuple[int, int, int, int, int]) -> None:
    program, tensors = heads(*sizes)
    for kernel in forms(program, tensors)[::2]:
        compare(device, program, tensors, kernel)


def test_products_side_by_side(device: DeviceContext) -> None:
    program, tensors = together(12, 20, 32)
    found = forms(program, tensors)
    assert [len(kernel.plan.pieces) for kernel in found] == [3] * len(found)
    for kernel in found[::2]:
        assert kernel.plan.phases == 1
        compare(device, program, tensors, kernel)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", [(2, 32, 33, 16), (3, 5, 32, 20), (2, 17, 7, 33), (4, 1, 64, 8), (1, 20, 12, 40)])
def test_reductions_of_rows_that_a_tile_has(device: DeviceContext, sizes: tuple[int, int, int, int]) -> None:
    program, tensors = softmax(*sizes)
    for threads in (64, 128):
        found = forms(program, tensors, threads=threads)
        assert found
        for kernel in found:
            assert (len(kernel.plan.pieces), kernel.plan.phases) == (1, 1)
            compare(device, program, tensors, kernel)
        compare(device, program, tensors, found[0], tf32=True)


def test_rows_that_no_tile_has_are_reduced_apart(device: DeviceContext) -> None:
    program, tensors = softmax(2, 6, 72, 8)
    (kernel, *_) = forms(program, tensors)
    assert kernel.plan.phases > 1
    compare(device, program, tensors, kernel)
    assert "waits for a product" in refused_product(kernel.plan.pattern)
    assert refused_product(Pattern.of(*_shapes(softmax(2, 6, 64, 8)))) == ""


def _shapes(given: tuple[Program, Tensors]) -> tuple[Program, list[tuple[int, ...]]]:
    return given[0], [tensor.shape for tensor in given[1]]


def test_products_that_wait_for_each_other(device: DeviceContext) -> None:
    program, tensors = attention(2, 12, 8)
    found = forms(program, tensors)
    assert found
    for kernel in found[:2]:
        assert kernel.plan.phases > 1
        compare(device, program, tensors, kernel)


def test_an_update_in_place(device: DeviceContext) -> None:
    """A variable less a product: it lies where the result lies, and is read before it is written."""
    program = from_text("""program 1
axes 0 0 0
tensor float32 2
tensor float32 2
tensor float32 2
input 0 a0 a1
input 1 a2 a0
input 2 a2 a1
multiply 1 2
reduce dot 3 2
subtract 0 4
output 5 0 1
""")
    tensors = [normal(20, 12), normal(33, 20, seed=1), normal(33, 12, seed=2)]
    (expected,) = exact(program, tensors)
    for kernel in forms(program, tensors):
        assert in_place(kernel.plan) == {(0, 0)}
        code = device.compile_source(kernel.source.text, device.arch, contract=False)
        (found,) = run(device, kernel, tensors, Module(code, device.driver), code, in_place={0: 0})
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_sizes_that_are_known_when_it_runs(device: DeviceContext) -> None:
    program, tensors = layer(18, 12, 20)
    unknown: Shapes = [(None, None), (None, None), (None, 12), (12,), (None, 12), (None,)]
    kernel = forms(program, tensors, unknown)[-1]
    for size in ((18, 12, 20), (1, 12, 7), (40, 12, 64)):
        compare(device, *layer(*size), kernel)


def test_64_bit_indices(device: DeviceContext) -> None:
    program, tensors = layer(18, 12, 33)
    for kernel in forms(program, tensors)[:2]:
        compare(device, program, tensors, replace(kernel, wide=True))


def test_no_rows_and_no_depth(device: DeviceContext) -> None:
    program, tensors = product(18, 12, 20)
    kernel = forms(program, tensors, [(None, None), (None, 12)])[-1]
    (found,) = computed(device, kernel, product(0, 12, 20)[1])
    assert found.shape == (0, 12)
    (found,) = computed(device, kernel, product(5, 12, 0)[1])
    np.testing.assert_array_equal(found, np.zeros((5, 12)))


@pytest.mark.parametrize("tf32", [False, True])
def test_numbers_that_are_not_finite(device: DeviceContext, tf32: bool) -> None:
    """They reach their own row and column, and nothing beside them or beyond the edges."""
    program, tensors = product(21, 13, 37)
    tensors[0][3, 5], tensors[0][20, 36] = np.inf, np.nan
    tensors[1][36, 12] = -np.inf
    tensors[0][:, 36] += 0.5
    expected = tensors[0].astype(np.float64) @ tensors[1].astype(np.float64)
    for kernel in forms(program, tensors):
        (found,) = computed(device, kernel, tensors, tf32)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        np.testing.assert_array_equal(np.isposinf(found), np.isposinf(expected))
        np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))


def test_results_do_not_depend_on_the_order_of_threads(compiler: Compiler) -> None:
    program, tensors = layer(33, 12, 90)
    kernel = forms(program, tensors)[0]
    results = []
    for seed in (0, 1, 2):
        with CpuDevice(driver=Driver(seed), compile_source=compiler) as device:
            results.append(computed(device, kernel, tensors, tf32=True))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


@settings(max_examples=examples(12))
@given(st.data())
def test_random_products(device: DeviceContext, data: st.DataObject) -> None:
    size = [data.draw(st.integers(1, most)) for most in (40, 40, 70)]
    made = data.draw(st.sampled_from([layer, product, together, lambda *sizes: softmax(2, *sizes)]))
    program, tensors = made(*size)
    threads = data.draw(st.sampled_from([64, 128]))
    found = forms(program, tensors, threads=threads)
    assert found
    compare(device, program, tensors, data.draw(st.sampled_from(found)), data.draw(st.booleans()))


def test_tiles_are_no_larger_than_results() -> None:
    pattern = Pattern.of(*_shapes(product(4, 512, 512)))
    found = tiles(pattern, pattern.sizes, 256)
    assert {(tile.rows, tile.tensor) for tile in found} == {(4, False)}
    pattern = Pattern.of(*_shapes(product(32, 512, 512)))
    found = tiles(pattern, pattern.sizes, 256)
    assert {(tile.rows, tile.tensor) for tile in found} == {(16, True), (32, True)}


@pytest.mark.parametrize("arch", [75, 80, 90, 120])
def test_nvrtc_takes_the_sources(arch: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    for made in (layer(32, 64, 128), layer(4, 20, 33), product(32, 16, 64, dtype="bfloat16"), softmax(2, 9, 33, 16)):
        kernel = forms(*made)[0]
        for each in (kernel, replace(kernel, wide=True)):
            assert cubin(each.source.text, arch, contract=False)


def test_an_attribute_without_meaning_is_refused() -> None:
    pattern = Pattern.of(*_shapes(product(32, 64, 128)))
    tile = "GRID_9-CTA_8-THREAD_3,GRID_9-CTA_8-THREAD_4"
    template = f"reduce_3[{tile},WARP];output_0[{tile}];"
    with pytest.raises(KernelError, match="no tile"):
        make(pattern, PatternConfiguration(template, 128))
    with pytest.raises(KernelError, match="depth of a product"):
        make(pattern, PatternConfiguration(template.replace("WARP", "CTA").replace("_3,", "_2,"), 128))


class Untimed(CpuDevice):
    """A launch takes a millisecond."""

    def time(self, enqueue: Callable[[], None]) -> float:
        enqueue()
        return 1.0


CASES = (
    products.Case(MatrixProduct(4, 24, 64), count=2),
    products.Case(MatrixProduct(20, 12, 32, 2, right_transposed=True)),
    products.Case(MatrixProduct(18, 16, 48), layer=True),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_the_benchmark_compares_results(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: Any
) -> None:
    monkeypatch.setattr(products, "by_cublas", lambda *given: (2e-6, 3e-6))
    monkeypatch.setattr(products, "COPIES", 2)
    library: Any = None
    with Untimed(driver=Driver(), compile_source=compiler) as device:
        compiled = products.compiled_case(case, device, Cache(tmp_path))
        compiled = replace(compiled, configurations=compiled.configurations[:3])
        assert products.timed_case("small", compiled, device, library, every=False)
        monkeypatch.setattr(products, "expected", lambda *given: np.ones(1))
        assert not products.timed_case("small", compiled, device, library, every=False)
    shown = capsys.readouterr().out
    assert "2.00 (3.00)  500.00" in shown
    assert "of the largest result" in shown
