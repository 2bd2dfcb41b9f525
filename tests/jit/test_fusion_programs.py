"""GPU programs of a region: chosen, compiled, kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from custom_ops.errors import KernelError
from custom_ops.expr.text import from_text
from custom_ops.fusion.programs import build, by_model, by_tuner
from custom_ops.fusion.region import Call, Kernel, Region, TensorType
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import Device
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.fusion_regions import softmax_step

pytest_plugins = ("tests.fusion_device",)

DOUBLED = "program 1\naxes 0 0\ntensor float32 2\ninput 0 a0 a1\nadd 0 0\noutput 1 0 1\n"


class Timed(CpuDevice):
    """The second kernel that is timed is the fastest."""

    timed = 0

    def time(self, enqueue: Any) -> float:
        enqueue()
        self.timed += 1
        return 1.0 if self.timed == 2 else 2.0


@pytest.fixture
def device(compiler: Compiler) -> Iterator[Device]:
    with Timed(driver=Driver(), compile_source=compiler) as found:
        yield found


def product(inputs: tuple[int, int], output: int, transposed: bool) -> Call:
    return Call("MatMul", b"", inputs, (output,))


def doubled(*rows: int | None) -> Region:
    """A kernel for each number of rows."""
    values = tuple(TensorType("float32", (size, 8)) for size in rows)
    kernels = (Kernel(from_text(DOUBLED), (i,), (len(rows) + i,), ("double",)) for i in range(len(rows)))
    return Region(len(rows), (), values * 2, tuple(kernels), (len(rows),))


def test_equal_kernels_are_one(device: Device) -> None:
    found = build(doubled(4, 4, 8, None), 90, by_model(132), compile_source=device.compile_source)
    assert len(found) == 4
    assert found[0] is found[1]
    header = dict(line.split(" ", 1) for line in found[3].to_text().splitlines())
    assert header["digest"] == found[3].image.digest
    assert header["words"].startswith("tensor:0 output:0")


def test_the_fastest_is_taken(device: Device, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    region = doubled(64)
    (model,) = build(region, 90, by_model(device.processors), compile_source=device.compile_source)
    (timed,) = build(region, 90, by_tuner(device, cache, 3), compile_source=device.compile_source)
    assert timed.configuration != model.configuration
    (again,) = build(region, 90, by_tuner(device, cache, 3), compile_source=device.compile_source)
    assert again.configuration == timed.configuration


def test_what_went_wrong_names_the_kernel() -> None:
    def missing(*_: object, **__: object) -> NoReturn:
        raise KernelError("NVRTC is needed")

    with pytest.raises(KernelError, match="a kernel of double: NVRTC is needed"):
        build(doubled(4), 90, by_model(132), compile_source=missing)


def test_nvrtc_compiles_a_region_once(tmp_path: Path) -> None:
    try:
        nvrtc.compiler_version()
    except KernelError as error:
        pytest.skip(str(error))

    def never(*_: object, **__: object) -> NoReturn:
        raise AssertionError("compiled again")

    region, cache = softmax_step(product, None), Cache(tmp_path)
    made = build(region, 90, by_model(132), cache)
    assert build(region, 90, by_model(132), cache, never) == made
    assert all(program.image.code.startswith(b"\x7fELF") for program in made)
