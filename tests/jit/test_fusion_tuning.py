"""The tuner over fusion kernels, with kernels that run on the CPU and times that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from custom_ops.errors import KernelError
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.bench import FusionBench, candidates, point, shapes_of
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import DeviceContext
from custom_ops.timing.tuner import fastest, tune
from tests.cuda_on_cpu.driver import Compiler, CpuDevice, Driver
from tests.fusion_programs import programs

pytest_plugins = ("tests.fusion_device",)

PROGRAM, TENSORS = programs(20, 36)["softmax"]
SHAPES = [tensor.shape for tensor in TENSORS]


class Timed(CpuDevice):
    """Each kernel takes a millisecond less than the one before."""

    def time(self, enqueue: Callable[[], None]) -> float:
        enqueue()
        self.timed = getattr(self, "timed", 100) - 1
        return float(self.timed)


@pytest.fixture
def device(compiler: Compiler) -> Iterator[DeviceContext]:
    with Timed(driver=Driver(), compile_source=compiler) as found:
        yield found


def test_the_fastest_of_the_best_ranked_is_chosen_once(device: DeviceContext, tmp_path: Path) -> None:
    pattern = Pattern.of(PROGRAM, SHAPES)
    cache, where = Cache(tmp_path / "cache"), point(SHAPES)
    found = tune(FusionBench(pattern, device, cache), candidates(pattern, 2), cache, [where], top=3, progress=False)
    assert [trial.error for trial in found] == [""] * 3
    assert fastest(FusionBench(pattern, device, cache), found, where) == found[-1]

    def never(_: str) -> list[tuple[PatternConfiguration, float]]:
        raise AssertionError("ranked again")

    again = tune(FusionBench(pattern, device, cache), never, cache, [where], top=3, progress=False)
    assert again == found


def test_the_process_is_kept_quiet_once_for_each_kernel(compiler: Compiler, tmp_path: Path) -> None:
    """Steps wait for one of them at a time."""
    quiet: list[str] = []

    @contextmanager
    def alone() -> Iterator[None]:
        quiet.append("begun")
        yield
        quiet.append("ended")

    pattern = Pattern.of(PROGRAM, SHAPES)
    cache, where = Cache(tmp_path / "cache"), point(SHAPES)
    with Timed(driver=Driver(), compile_source=compiler, quiet=alone) as device:
        bench = FusionBench(pattern, device, cache)
        tune(bench, candidates(pattern, 2), cache, [where], top=2, progress=False)
    assert quiet == ["begun", "ended"] * 2


def test_what_cannot_be_compiled_says_why(device: DeviceContext, tmp_path: Path) -> None:
    bench = FusionBench(Pattern.of(PROGRAM, SHAPES), device, Cache(tmp_path / "cache"))
    wrong = PatternConfiguration("reduce_1[GRID_4,CTA];")
    bench.compile([wrong])
    with pytest.raises(KernelError, match="no schedule of"):
        bench.measure(wrong, point(SHAPES))


def test_a_kernel_with_wrong_results_is_no_choice(device: DeviceContext, tmp_path: Path) -> None:
    pattern = Pattern.of(PROGRAM, SHAPES)
    compile_source = device.compile_source

    def broken(source: str, *arguments: object, **options: object) -> bytes:
        return compile_source(source.replace("Sum::join", "Max::join"), *arguments, **options)

    device.compile_source = broken
    bench = FusionBench(pattern, device, Cache(tmp_path / "cache"))
    (configuration, _), *_ = candidates(pattern, 2)(point(SHAPES))
    with pytest.raises(KernelError, match="output 0 is wrong at 720 of 720 places"):
        bench.measure(configuration, point(SHAPES))


def test_integers_of_a_kernel_are_compared_exactly(device: DeviceContext, tmp_path: Path) -> None:
    """Off by one at 2^60, which float64 does not tell."""
    program = from_text(
        f"program 1\naxes 0\ntensor int64 1\ninput 0 a0\nconstant int64 {2**60 + 1}\nadd 0 1\noutput 2 0\n"
    )
    pattern, shapes, compile_source = Pattern.of(program, [(40,)]), ((40,),), device.compile_source

    def broken(source: str, *arguments: object, **options: object) -> bytes:
        return compile_source(source.replace(f"{2**60 + 1}ll", f"{2**60}ll"), *arguments, **options)

    device.compile_source = broken
    bench = FusionBench(pattern, device, Cache(tmp_path / "cache"))
    (configuration, _), *_ = candidates(pattern, 2)(point(shapes))
    with pytest.raises(KernelError, match="output 0 is wrong at 40 of 40 places"):
        bench.measure(configuration, point(shapes))


@pytest.mark.parametrize("size", [0, 1, 6, 8, 20, 31])
def test_what_is_uploaded_fills_all_of_its_memory(device: DeviceContext, size: int) -> None:
    place = device.upload(np.arange(6, dtype=np.uint8), size)
    found = device.download(place, np.empty(size, np.uint8))
    np.testing.assert_array_equal(found, np.arange(size) % 6)


def test_points_are_shapes() -> None:
    assert point([(8192, 768), (768,), ()]) == "8192x768 768 ."
    assert shapes_of("8192x768 768 .") == [(8192, 768), (768,), ()]
