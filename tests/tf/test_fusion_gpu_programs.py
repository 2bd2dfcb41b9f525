"""Kernels of regions as they are made for a GPU of this machine; here it is one that is driven on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tfmem
from custom_ops.errors import KernelError
from custom_ops.fusion.region import Region
from custom_ops.jit import nvrtc
from graph_passes.analysis.cost import device as profiles
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.jit.test_fusion_programs import different
from tfmem.devices import Target
from tfmem.kernels import fusion_programs as module
from tfmem.kernels.fusion_programs import gpu_programs

pytest_plugins = ("tests.fusion_device",)

GPU = Target("/device:GPU:0", "NVIDIA H200", 1 << 30, profiles.load("h200"))
PLACE = "/job:localhost/replica:0/task:0/device:GPU:0"


@pytest.fixture(name="compiled")
def fixture_compiled(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were compiled."""
    found: list[str] = []

    def compile_source(source: str, *given: Any, **more: Any) -> bytes:
        found.append(source)
        return compiler(source, *given, **more)

    monkeypatch.setattr(nvrtc, "compiler_version", lambda: "12.9")  # part of a key of the cache
    monkeypatch.setattr(module, "Compilers", lambda: compile_source)
    monkeypatch.setattr(module, "Device", lambda ordinal, **given: CpuDevice(driver=Driver(), **given))
    return found


def made(region: Region, tmp_path: Path, tune: Any) -> list[Any]:
    options = tfmem.Options(fusion=tfmem.FusionOptions(tune=tune), cache_directory=str(tmp_path))
    return list(gpu_programs(GPU, options)(region, PLACE))


@pytest.mark.parametrize("tune", ["off", "fast", "full"])
def test_kernels_are_chosen_once(tune: Any, compiled: list[str], tmp_path: Path) -> None:
    region = different("add", "multiply", "add")
    first = made(region, tmp_path, tune)
    assert [program.image.arch for program in first] == [CpuDevice(driver=Driver()).arch] * 3
    assert first[0].image.digest == first[2].image.digest != first[1].image.digest
    count = len(compiled)
    assert count == 2 if tune == "off" else count > 2
    assert count == len(set(compiled))
    assert made(region, tmp_path, tune) == first
    assert len(compiled) == count, "a second process finds all of it"


def test_a_cpu_needs_none(compiled: list[str], tmp_path: Path) -> None:
    options = tfmem.Options(cache_directory=str(tmp_path))
    assert list(gpu_programs(GPU, options)(different("add"), PLACE.replace("GPU", "CPU"))) == []
    assert not compiled


def test_an_error_names_the_ops(compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: Any, **__: Any) -> bytes:
        raise KernelError("expected a ';'")

    monkeypatch.setattr(module, "Compilers", lambda: broken)
    for tune in ("off", "fast"):
        with pytest.raises(KernelError, match=r"a kernel of multiply: .*expected a ';'"):
            made(different("multiply"), tmp_path, tune)
    assert not compiled
