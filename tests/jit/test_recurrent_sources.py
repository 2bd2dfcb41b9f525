"""Every kernel template compiles alone, and so do the sources of many cells, sizes and architectures; without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.recurrent import cells, gpu_program
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.codegen.layout import layout
from custom_ops.recurrent.codegen.source import generate
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from tests import addons_cells
from tests.compiled import cubin
from tests.recurrent_cells import chained, every_op

NVCC = shutil.which("nvcc")
HEADERS = sorted(nvrtc.KERNELS.glob("*.cuh"))
CELLS = {
    "lstm": cells.lstm(),
    "gru": cells.gru(),
    "gru2": cells.gru(reset_after=False),
    "rnn": cells.simple_rnn(),
    "peephole": addons_cells.peephole_lstm(),
    "layer_norm": addons_cells.layer_norm_lstm(100),
    "nas": addons_cells.nas(),
    "masked": cells.lstm(mask="repeat"),
    "lstm backward": differentiate(cells.lstm()).backward,
    "gru2 backward": differentiate(cells.gru(reset_after=False)).backward,
    "every op": every_op(),
    "every op backward": differentiate(every_op()).backward,
}
PLAIN = {
    "single": Configuration(rows=2, lanes=8, shared_weights=8),
    "grid": Configuration(rows=2, ctas=24, lanes=32, exchange="grid"),
    "launches": Configuration(rows=2, ctas=24, lanes=32, exchange="launches"),
    "single, in registers": Configuration(threads=224, lanes=2, shared_weights=64),
    "grid, in registers": Configuration(rows=4, ctas=24, threads=128, lanes=16, exchange="grid"),
}
HOPPER = {
    "cluster": Configuration(rows=2, ctas=8, lanes=16, exchange="cluster"),
    "tensor cores": Configuration(rows=8, ctas=8, lanes=64, exchange="cluster", product="mma"),
    "launches": Configuration(rows=8, ctas=24, lanes=64, exchange="launches", product="mma"),
    "slices": Configuration(rows=8, ctas=24, lanes=64, exchange="grid", slices=4),
    "in registers": Configuration(rows=2, ctas=8, threads=128, lanes=8, exchange="cluster"),
}
# What the kernels were tuned to on an H200: (hidden size, configuration).
STANDARD = {
    "64": (64, Configuration(threads=128, lanes=2)),
    "64 wide": (64, Configuration(lanes=2)),
    "256 b1": (256, Configuration(ctas=16, threads=128, lanes=8, exchange="cluster")),
    "256 b20": (256, Configuration(rows=2, ctas=8, lanes=8, exchange="cluster")),
    "256 b10": (256, Configuration(rows=2, ctas=16, threads=128, lanes=8, exchange="cluster")),
    "512 b1": (512, Configuration(ctas=64, threads=128, lanes=16, exchange="grid")),
    "512 b20": (512, Configuration(3, 16, 256, 16, 128, 128, "fma", "cluster")),
    "1024 b1": (1024, Configuration(ctas=128, lanes=32, exchange="grid")),
    "256 mma": (256, Configuration(rows=8, ctas=8, lanes=64, exchange="cluster", product="mma")),
    "1024 b20": (1024, Configuration(20, 128, 512, 128, 64, 0, "half", "grid", 2)),
    "512 mma": (512, Configuration(rows=8, ctas=32, lanes=128, exchange="grid", product="mma")),
}


@pytest.fixture(autouse=True)
def needs_nvrtc(request: pytest.FixtureRequest) -> None:
    if "nvcc" in request.keywords:
        return
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.stem)
@pytest.mark.parametrize("arch", [75, 80, 90])
def test_headers_compile_alone(header: Path, arch: int) -> None:
    assert cubin(f'#include "{header.name}"\n', arch)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        (75, "grid"),
        (80, "single"),
        (90, "grid"),
        (75, "launches"),
        (90, "launches"),
        (75, "grid, in registers"),
        (80, "single, in registers"),
        (90, "single, in registers"),
    ],
)
def test_sources_compile(cell: Cell, arch: int, kind: str) -> None:
    assert cubin(generate(RecurrentSpec(cell, 100), PLAIN[kind], arch), arch)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("kind", HOPPER)
def test_hopper_sources_compile(cell: Cell, kind: str) -> None:
    assert cubin(generate(RecurrentSpec(cell, 100), HOPPER[kind], 90), 90)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("arch", [100, 120])
@pytest.mark.parametrize("kind", HOPPER)
def test_what_came_after_hopper_compiles(kind: str, arch: int) -> None:
    """It has clusters and tensor cores too."""
    assert cubin(generate(RecurrentSpec(cells.lstm(), 100), HOPPER[kind], arch), arch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("lanes", [1, 4, 32, 96])
def test_subgroups_compile(lanes: int, arch: int) -> None:
    """A weight in each of the places, and sums of 416, so that no lane goes without."""
    exchange = Configuration(ctas=26, exchange="grid") if arch == 75 else Configuration(ctas=8, exchange="cluster")
    configuration = replace(exchange, rows=3, lanes=lanes, register_weights=64, shared_weights=32)
    (gemm,) = layout(RecurrentSpec(cells.simple_rnn(), 410), configuration, arch).gemms
    assert gemm.lanes == lanes
    assert cubin(generate(RecurrentSpec(cells.simple_rnn(), 410), configuration, arch), arch)


@pytest.mark.parametrize("product", ["mma", "half"])
def test_warps_of_any_number_compile(product: str) -> None:
    configuration = Configuration(rows=8, lanes=96, ctas=8, exchange="cluster", product=product)  # type: ignore[arg-type]
    assert cubin(generate(RecurrentSpec(cells.lstm(), 100), configuration, 90), 90)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["gru2", "chained", "training"])
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        (75, {"ctas": 24, "exchange": "grid"}),
        (80, {"ctas": 24, "exchange": "grid", "rows": 4}),
        (90, {"ctas": 8, "exchange": "cluster"}),
    ],
)
def test_replicas_compile(name: str, arch: int, options: dict[str, Any]) -> None:
    gru = cells.gru(reset_after=False)
    cell = {"gru2": gru, "chained": chained(), "training": differentiate(gru).forward}[name]
    configuration = Configuration(**{"rows": 2, "lanes": 32, "shared_weights": 32, "replicated": True, **options})
    assert cubin(generate(RecurrentSpec(cell, 100), configuration, arch), arch)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("precision", ["highest", "tf32", "float16", "bfloat16"])
def test_weights_of_16_bits_compile(precision: str, arch: int) -> None:
    spec = RecurrentSpec(cells.gru(), 100, precision=precision)  # type: ignore[arg-type]
    configuration = Configuration(rows=8, lanes=64, product="half", shared_weights=16)
    source = generate(spec, configuration, arch)
    assert cubin(source, arch)
    assert "_fallback" in source  # for what float16 cannot hold


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_storage_types_compile(dtype: str) -> None:
    spec = RecurrentSpec(cells.lstm(), 64, dtype, directions=2)  # type: ignore[arg-type]
    for arch in (75, 90):
        assert cubin(generate(spec, PLAIN["grid"], arch), arch)


@pytest.mark.skipif(NVCC is None, reason="nvcc, which reports spills, is not here")
@pytest.mark.parametrize(("units", "configuration"), STANDARD.values(), ids=STANDARD)
def test_standard_kernels_do_not_spill(units: int, configuration: Configuration, tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text(generate(RecurrentSpec(cells.lstm(), units), configuration, 90))
    options = ["-arch=sm_90", "-Xptxas", "-v", f"-I{nvrtc.KERNELS}", "-cubin", "-o", str(tmp_path / "kernel.cubin")]
    command = ["nvcc", *options, str(source)]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stderr
    main = report.split("'tfmem_recurrent'")[1].split("Compiling entry function")[0]
    assert re.findall(r"(\d+) bytes spill stores", main) == ["0"]


def test_what_is_to_stay_in_registers_does() -> None:
    """Row sums cannot, and neither can sums in more rows than a subgroup has lanes."""
    for name, cell in CELLS.items():
        found = [
            layout(RecurrentSpec(cell, 100), {**PLAIN, **HOPPER}[kind], 90).sum_lanes
            for kind in ("single, in registers", "grid, in registers", "in registers")
        ]
        assert found == ([0, 0, 0] if name == "layer_norm" else [2, 4, 4])


def test_a_compiler_error_says_what_the_compiler_said() -> None:
    with pytest.raises(KernelError, match=r"nonsense") as caught:
        nvrtc.compile_source("__global__ void f() { nonsense; }", 90)
    assert "sm_90" in str(caught.value)


def test_a_program_comes_from_the_cache_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cache = RecurrentSpec(cells.simple_rnn(), 16), Cache(tmp_path)
    first = gpu_program.build(spec, Configuration(lanes=4), 90, cache)

    def fails(source: str, arch: int) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "compile_source", fails)
    assert gpu_program.build(spec, Configuration(lanes=4), 90, cache) == first
    assert first.image.code[:4] == b"\x7fELF"
