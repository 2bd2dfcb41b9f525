"""Every form of kernel runs on the CPU, against the float64 definition of a cell: no GPU, only g++."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.matmul.multiplier import Multiplier, Shape, Tiling
from custom_ops import build_flags
from custom_ops.errors import KernelError
from custom_ops.jit.image import KernelImage
from custom_ops.jit.launch import LoadedKernel, Module
from custom_ops.jit.nvrtc import KERNELS
from custom_ops.matmul import kernels as matmul
from custom_ops.recurrent import cells
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from tests import addons_cells
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.gpu_kernels import (
    CLUSTER,
    GRID,
    LAUNCHED,
    SLICED,
    Sweep,
    check,
    check_that_nan_and_infinity_stay,
    compare,
    expected,
    inputs,
    launcher_of,
    run,
)
from tests.recurrent_cells import chained, side_by_side

SMALL = {"single": {}, "cluster": {"ctas": 4, "exchange": "cluster"}, "grid": {"ctas": 6, "exchange": "grid"}}
SMALL |= {"sliced": SLICED | {"ctas": 8}, "launches": LAUNCHED | {"ctas": 6}}
GRU2 = cells.gru(reset_after=False)
NORMAL = addons_cells.layer_norm_lstm(33)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    if shutil.which(build_flags.compiler()) is None:
        pytest.skip("needs a C++ compiler")
    return Compiler()


@pytest.fixture(scope="module")
def device(compiler: Compiler) -> Iterator[CpuDevice]:
    with CpuDevice(driver=Driver(), compile_source=compiler) as found:
        yield found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("units", "batch", "lanes"), [(1, 1, 8), (33, 5, 32)])
@pytest.mark.parametrize("where", SMALL.values(), ids=SMALL)
def test_exchanges(device: CpuDevice, where: dict[str, Any], units: int, batch: int, lanes: int) -> None:
    compare(device, cells.lstm(), units, batch, time=5, rows=2, lanes=lanes, shared_weights=64, **where)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("where", SMALL.values(), ids=SMALL)
def test_the_order_in_which_threads_run_does_not_matter(compiler: Compiler, where: dict[str, Any], seed: int) -> None:
    with CpuDevice(driver=Driver(seed), compile_source=compiler) as device:
        compare(device, cells.lstm(), 33, 5, time=5, rows=2, lanes=32, shared_weights=64, **where)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize(
    ("product", "precision", "bound"),
    [("mma", "highest", 1e-5), ("half", "highest", 1e-5), ("half", "tf32", 5e-3), ("half", "bfloat16", 3e-2)],
)
def test_products_on_tensor_cores(
    device: CpuDevice, where: dict[str, Any], product: str, precision: str, bound: float
) -> None:
    if product == "half" and where is SMALL["launches"]:
        pytest.skip("a launch for each stage does not look at all weights, as 'half' has to")
    cell, units = cells.lstm(), 36
    arrays = inputs(cell, units, 4, 13)
    arrays["states"] = [np.tanh(state) for state in arrays["states"]]
    options = Configuration(rows=8, threads=64, lanes=32, product=product, shared_weights=32, **where)  # type: ignore[arg-type]
    (found,), status = run(device, cell, units, options, [arrays], precision=precision)
    assert status == 0
    check(found, expected(cell, units, arrays), bound)


FORMS: dict[str, tuple[Any, int, int, dict[str, Any]]] = {
    "sums over rows": (NORMAL, 33, 5, {"rows": 2, "shared_weights": 32, **SMALL["cluster"]}),
    "sums over rows, in a grid": (NORMAL, 33, 5, {"rows": 2, "shared_weights": 32, **SMALL["grid"]}),
    "backward": (differentiate(GRU2).backward, 20, 5, {"rows": 3, "shared_weights": 32, **SMALL["cluster"]}),
    "buffers alike in two stages": (side_by_side(), 20, 9, {"rows": 8, "lanes": 32, **SMALL["grid"]}),
    "weights streamed": (cells.lstm(), 40, 5, {"rows": 4, "register_weights": 0, **SMALL["cluster"]}),
    "weights everywhere": (cells.lstm(), 40, 5, {"rows": 4, "register_weights": 16, "shared_weights": 16, **GRID}),
    "subgroups of 4 lanes": (GRU2, 40, 5, {"rows": 2, "lanes": 4, "threads": 96, **SMALL["cluster"]}),
    "subgroups of 3 warps": (cells.simple_rnn(), 100, 4, {"rows": 4, "lanes": 96, "threads": 96, **SMALL["cluster"]}),
    "replicas": (GRU2, 20, 5, {"rows": 2, "lanes": 8, "replicated": True, **SMALL["cluster"]}),
    "replicas, in a grid": (chained(), 20, 5, {"rows": 2, "lanes": 8, "replicated": True, **SMALL["grid"]}),
    "replicas of sums, in a grid": (GRU2, 20, 5, {"rows": 2, "replicated": True, **SMALL["grid"]}),
    "in registers": (cells.lstm(), 33, 3, {"threads": 96, "lanes": 2, "shared_weights": 96}),
    "in registers, cluster": (GRU2, 60, 5, {"rows": 2, "threads": 64, "lanes": 4, "shared_weights": 96, **CLUSTER}),
    "in registers, grid": (cells.gru(), 60, 3, {"threads": 64, "lanes": 16, "shared_weights": 96, **GRID}),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_forms(device: CpuDevice, form: str) -> None:
    cell, units, batch, options = FORMS[form]
    compare(device, cell, units, batch, time=5, bound=3e-5, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("time", [0, 1, 2])
@pytest.mark.parametrize("where", SMALL.values(), ids=SMALL)
def test_short_sequences(device: CpuDevice, where: dict[str, Any], time: int) -> None:
    compare(device, cells.gru(), 16, 3, time=time, **where)


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 3e-3), ("bfloat16", 2e-2)])
def test_storage_types_and_two_directions(device: CpuDevice, dtype: str, bound: float) -> None:
    cell, units = cells.lstm(), 20
    given = [inputs(cell, units, 6, 3, seed) for seed in (1, 2)]
    found, _ = run(device, cell, units, Configuration(**SMALL["cluster"]), given, dtype, reverse=(False, True))
    for arrays, results, reverse in zip(given, found, (False, True), strict=True):
        check(results, expected(cell, units, arrays, dtype, reverse), bound)


@pytest.mark.parametrize("product", ["fma", "mma"])
def test_nan_and_infinity_stay_in_their_row(device: CpuDevice, product: str) -> None:
    check_that_nan_and_infinity_stay(device, Configuration(rows=8, lanes=32, product=product, **SMALL["cluster"]))  # type: ignore[arg-type]


def test_what_a_kernel_cannot_compute_the_fallback_does(device: CpuDevice) -> None:
    cell, units = cells.gru(), 20
    arrays = inputs(cell, units, 4, 8)
    arrays["states"][0][3, 5] = 70.0  # float16 does not hold it
    (found,), status = run(device, cell, units, Configuration(rows=8, lanes=32, product="half"), [arrays])
    assert status != 0
    check(found, expected(cell, units, arrays), 1e-5)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 1, 1), (65, 63, 129), (33, 200, 70), (3, 0, 5)])
def test_products_of_float32_matrices(
    compiler: Compiler, device: CpuDevice, rows: int, depth: int, columns: int, transposed: bool, arch: int
) -> None:
    """Kernels of compute capability 8.0 and, by the instructions of a warpgroup, 9.0."""
    random = np.random.default_rng(0)
    a, b = random.normal(size=(rows, depth)).astype("float32"), random.normal(size=(depth, columns)).astype("float32")
    bias = random.normal(size=columns).astype("float32")
    multiplier = Multiplier(matmul.build(arch, compile_source=compiler), device.processors, device.driver)
    shape = Shape(rows, depth, columns, transposed, transposed)
    left, right = (device.upload(m.T.copy() if transposed else m) for m in (a, b))
    for tiling in (Tiling(False, 1), Tiling(True, 1), Tiling(True, 3)):
        result = np.full((rows, columns), np.nan, np.float32)
        place = device.upload(result)
        memory = device.upload(np.full(tiling.memory_bytes(shape), 0xFF, np.uint8))
        multiplier.prepare(shape, tiling, left, right, device.upload(bias), place, memory)(device.stream)
        terms = np.abs(a.astype("float64")) @ np.abs(b) + np.abs(bias)
        assert (np.abs(device.download(place, result) - (a.astype("float64") @ b + bias)) < 5e-7 * terms).all()


# ---- What the harness finds

HEAD = '#include "common.cuh"\nusing namespace tfmem;\nextern "C" __global__ void __launch_bounds__(64, 1)\n'
HEAD += "wrong(const __grid_constant__ Parameters<1> parameters) {\nTFMEM_DYNAMIC_SHARED(float, shared);\n"
HEAD += "float* out = reinterpret_cast<float*>(parameters.word[0]);\nconst unsigned t = threadIdx.x;\n"
FAULTS = {
    "a barrier not all reach": (
        "if (t < 40) __syncthreads(); else __syncwarp();\nout[t] = t;",
        r"(hangs: .*__syncthreads|different operations: .*__sync)",
    ),
    "a barrier that hangs": (
        "shared[t] = t;\nif (t != 7) __syncthreads();\n__syncwarp();\nout[t] = shared[63 - t];",
        r"(hangs|different operations).*__sync",
    ),
    "lanes at different operations": (
        "float x = t;\nif (t % 2) x = __shfl_xor_sync(kAllLanes, x, 1); else __syncwarp();\nout[t] = x;",
        "different operations: .*__s",
    ),
    "unwritten shared memory": ("if (t != 5) shared[t] = t;\n__syncthreads();\nout[t] = shared[63 - t] + 1;", r"\[5\]"),
    "copies no thread waited for": (
        "if (t % 4 == 0) copy_async(shared_address(shared + t), out + t, true);\n__syncthreads();\nout[t] = shared[t];",
        "no thread wrote",
    ),
    "bytes that never come": (
        "if (t == 0) { init_barrier(0); expect(0, 16); }\n__syncthreads();\nwhile (!try_wait(0, 0)) {}\nout[t] = 1;",
        "never comes: .*mbarrier",
    ),
    "a store outside of shared memory": ("store_async(4096 + t * 4, 1.0f, 0);", "no place in the 256 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_and_named(compiler: Compiler, device: CpuDevice, fault: str) -> None:
    body, message = FAULTS[fault]
    launch = wrong_kernel(compiler, device, f"{HEAD}{body}\n}}\n")
    with pytest.raises((KernelError, AssertionError), match=message):
        launch()


def wrong_kernel(compiler: Compiler, device: CpuDevice, source: str) -> Callable[[], Any]:
    driver, result = device.driver, np.zeros(64, np.float32)
    image = KernelImage(90, "wrong", 64, compiler(source, 90), shared=256)
    place = device.upload(result)
    launch = LoadedKernel(image, Module(image.code, driver)).prepare((1, 1), [place])

    def run_it() -> Any:
        launch(device.stream)
        return device.download(place, result)

    return run_it


REMOVED = {
    "end_of_stage() const { __syncthreads(); }": "exchange.cuh",
    "  __syncthreads();\n}\n\n// The whole kernel.": "recurrent.cuh",
    "    if constexpr (Sizes::template has_gemm<STAGE>() && Sizes::kSlices == 1 &&\n"
    "                  !kInRegisters<Sizes>) {\n"
    "      __syncthreads();": "recurrent.cuh",
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("barrier", REMOVED, ids=["end of a stage", "zeroed memory", "after products"])
def test_a_removed_barrier_is_found(tmp_path: Path, barrier: str) -> None:
    """By some order of the threads: each of these barriers is needed."""
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    file = kernels / REMOVED[barrier]
    assert file.read_text().count(barrier) >= 1
    file.write_text(file.read_text().replace(barrier, barrier.replace("__syncthreads();", "")))
    cell, units = cells.gru(reset_after=False), 20
    arrays = inputs(cell, units, 5, 3)
    spec, options = RecurrentSpec(cell, units), Configuration(rows=2, threads=128, lanes=8)
    compiler = Compiler(kernels)
    wrong = 0
    for seed in range(8):
        with CpuDevice(driver=Driver(seed), compile_source=compiler) as device:
            sweep = Sweep(device, launcher_of(device, spec, options), spec, [arrays])
            sweep.enqueue(device.stream)
            try:
                check(sweep.results()[0][0], expected(cell, units, arrays), 1e-5)
            except AssertionError:
                wrong += 1
    assert wrong > 0
