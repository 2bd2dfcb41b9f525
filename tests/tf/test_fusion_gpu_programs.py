"""Kernels of regions as they are made for a GPU of this machine; here it is one that is driven on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorflow.core.framework.graph_pb2 import GraphDef

import tfmem
from custom_ops import image_functions
from custom_ops.errors import KernelError
from custom_ops.fusion import programs as programs_module
from custom_ops.fusion.programs import FusionProgram
from custom_ops.fusion.region import Region
from custom_ops.fusion.search.bench import FusionBench
from custom_ops.fusion.search.ranking import Ranking
from custom_ops.fusion.text import to_text
from custom_ops.jit import nvrtc
from custom_ops.timing.tuner import MeasuredKernel
from graph_passes.analysis.cost import device_costs as profiles
from graph_passes.passes.fuse.lower_region import Lowered
from graph_passes.passes.fuse.partition.ilp import PatternChoice
from graph_passes.passes.fuse.partition.partition import RegionSchedule
from graph_passes.passes.fuse.plan import FusionPlan, RegionPlan
from graph_passes.report import RegionRecord
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.jit.test_fusion_programs import different
from tfmem.capture.captured import Captured
from tfmem.devices import Target
from tfmem.kernels import fusion_programs as module
from tfmem.kernels import fusion_tuning
from tfmem.kernels.fusion_programs import gpu_programs
from tfmem.kernels.fusion_tuning import FusionKernels, with_programs

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
    for each in (module, fusion_tuning):
        monkeypatch.setattr(each, "DeviceContext", lambda ordinal, **given: CpuDevice(driver=Driver(), **given))
    return found


def plan_of(region: Region, programs: Sequence[FusionProgram]) -> FusionPlan:
    record = RegionRecord("fusion_0", ())
    lowered = Lowered(region, (), (), ())
    schedule = RegionSchedule((), PatternChoice((), 0.0, 0.0, (), 0, 0, 0, True))
    plan = RegionPlan("fusion_0", schedule, lowered, to_text(region), record, programs=tuple(programs))
    return FusionPlan((plan,))


def test_nothing_is_timed_before_a_plan_runs_and_its_kernels_once_afterwards(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    region, options = different("add", "multiply", "add"), tfmem.Options(cache_directory=str(tmp_path))
    times: list[str] = []
    measure = FusionBench.measure

    def counted(bench: FusionBench, configuration: Any, where: str) -> MeasuredKernel:
        times.append(configuration.template)
        found = measure(bench, configuration, where)
        return replace(found, nanoseconds=1e3 / len(times))  # the one that is timed last is the fastest

    monkeypatch.setattr(FusionBench, "measure", counted)
    kernels = FusionKernels(GPU, options, compilers=module.Compilers())
    first = kernels.programs(region, PLACE)
    assert len(compiled) == 2, "one configuration of each kernel"
    assert not times
    tuned = kernels.tuned(plan_of(region, first))
    assert tuned.timed == 2
    assert tuned.saved > 0
    assert len(times) == 2 * (module.TIMED["fast"] or 0)
    assert tuned.programs[to_text(region)] != tuple(first)
    again = FusionKernels(GPU, options, compilers=module.Compilers())
    count = len(compiled)
    assert tuple(again.programs(region, PLACE)) == tuned.programs[to_text(region)], "another process finds the times"
    assert again.tuned(plan_of(region, first)).programs == tuned.programs
    assert (len(times), len(compiled)) == (2 * (module.TIMED["fast"] or 0), count)


def made(region: Region, tmp_path: Path, tune: Any) -> list[Any]:
    options = tfmem.Options(fusion=tfmem.FusionOptions(tune=tune), cache_directory=str(tmp_path))
    return list(gpu_programs(GPU, options)(region, PLACE))


@pytest.mark.parametrize("tune", ["off", "fast"])
def test_kernels_are_ranked_once(
    tune: Any, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also those that were never timed; another version of tfmem may rank them otherwise."""
    options = tfmem.Options(fusion=tfmem.FusionOptions(tune=tune), cache_directory=str(tmp_path))
    region, rankings = different("add", "multiply"), [Ranking() for _ in range(3)]
    found = []
    for ranking, code in zip(rankings, ["this", "this", "another"], strict=True):
        monkeypatch.setattr(programs_module, "code_digest", lambda code=code: code)
        found.append(tuple(gpu_programs(GPU, options, module.Compilers(), None, ranking, untimed=True)(region, PLACE)))
    assert found[0] == found[1] == found[2]
    assert [len(ranking.found) for ranking in rankings] == [2, 0, 2]


def test_other_kernels_leave_no_code_behind(compiled: list[str], tmp_path: Path) -> None:
    """Otherwise a later process, which has these kernels from the start, would not know the graph."""
    region = different("add", "multiply")
    first = made(region, tmp_path, "off")
    code = first[0].image.code + b"tuned"
    second = [replace(each, image=replace(each.image, code=code)) for each in first]
    graph_def = GraphDef()
    graph_def.node.add(name="fusion_0", op="TfmemFusion").attr["region"].s = to_text(region).encode()
    kept = graph_def.node.add(name="lstm", op="TfmemRecurrent")  # which names code as well
    kept.attr["images"].list.func.add(name=image_functions.name_of(b"recurrent"))
    graph_def.library.function.append(image_functions.definition(b"recurrent"))
    given = Captured(graph_def, (), (), (), ())
    by_model = with_programs(given, {to_text(region): first})
    assert with_programs(by_model, {to_text(region): second}) == with_programs(given, {to_text(region): second})
    assert len(by_model.graph_def.library.function) == 1 + len({each.image.code for each in first})


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
