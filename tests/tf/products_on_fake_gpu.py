"""Products by the library and in kernels, timed for plans, on the fake driver. Run by test_fusion_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cublas import CublasLt, MatrixProduct
from custom_ops.jit.launch import Enqueue
from custom_ops.jit.nvrtc import CompileSource
from graph_passes.graph.ir import Graph
from graph_passes.graph.serde import from_tf_graph
from graph_passes.lower.shapes import Shapes
from graph_passes.passes.fuse.partition.score import Measure
from tests.cuda_on_cpu.driver import CpuDevice, Driver
from tests.tf.fake_gpu import FakeGpu
from tfmem.devices import Target
from tfmem.kernels import fusion_times as measured
from tfmem.options import Options

pytest_plugins = ("tests.tf.fake_gpu",)


class OnStream(CpuDevice):
    """With a stream of the fake driver, on which its library multiplies; all else runs at once."""

    def __init__(self, gpu: FakeGpu, compile_source: CompileSource | None = None) -> None:
        super().__init__(driver=Driver(), compile_source=compile_source or gpu.compile_source)
        self._gpu = gpu

    def __enter__(self) -> OnStream:
        super().__enter__()
        self.stream = self._gpu.new_stream()
        return self


class Timed(OnStream):
    """Each call takes a microsecond more than the one before."""

    calls = 0

    def time(self, enqueue: Callable[[], None]) -> float:
        enqueue()
        Timed.calls += 1
        return Timed.calls / 1e3

    @contextmanager
    def branches(self, count: int) -> Iterator[Callable[[Sequence[Enqueue]], None]]:
        """One after the other: this driver has no streams."""

        def enqueue(what: Sequence[Enqueue]) -> None:
            assert len(what) == count
            for each in what:
                each(self.stream)

        yield enqueue


@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_library_multiplies(gpu: FakeGpu, flips: tuple[bool, bool], batch: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    left = rng.normal(size=(batch, 5, 7)).astype(dtype)
    right = rng.normal(size=(1, 7, 4)).astype(dtype)
    form = MatrixProduct(5, 4, 7, batch, dtype, *flips, right_batch=batch == 1)
    with OnStream(gpu) as device:
        given = [
            device.upload(np.ascontiguousarray(factor.swapaxes(1, 2) if flipped else factor))
            for factor, flipped in zip((left, right), flips, strict=True)
        ]
        found = np.empty((batch, 5, 4), dtype)
        to = device.allocate(found.nbytes)
        with CublasLt(device, gpu.cublas) as library, library.prepared(form, given[0], given[1], to) as calls:
            (call,) = calls
            call(device.stream)
        device.download(to, found)
    np.testing.assert_allclose(found, left @ right, rtol=1e-5, atol=1e-5)


def test_what_was_measured_is_kept(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process with the same cache measures nothing, and finds the same times."""
    monkeypatch.setattr(measured, "DeviceContext", lambda ordinal, **given: Timed(gpu))
    monkeypatch.setattr(measured, "CublasLt", lambda device: CublasLt(device, gpu.cublas))
    graph, names = step()
    times = []
    for _ in range(2):
        before = Timed.calls
        measure = of(graph, tmp_path)
        measure.prepare([names, names[:1]])
        times.append((measure.kernel(names), measure.kernel(names[:1]), measure.call(names[0])))
        counted = Timed.calls - before
    assert times[0] == times[1]
    assert counted == 0
    assert all(seconds is not None and 0 < seconds < 1e-3 for seconds in times[0])


def test_products_side_by_side_are_timed_together(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last time is that of all; a lone product's is the one that a plan asks for by its node's name."""
    monkeypatch.setattr(measured, "DeviceContext", lambda ordinal, **given: Timed(gpu))
    monkeypatch.setattr(measured, "CublasLt", lambda device: CublasLt(device, gpu.cublas))
    times = timer(tmp_path)
    forms = [MatrixProduct(6, 8, 20), MatrixProduct(6, 8, 20), MatrixProduct(6, 4, 20)]
    together = times.beside(forms)
    assert together == Timed.calls / 1e6
    assert times.beside(forms) == together
    graph, (product, _) = step()
    assert times.beside(forms[:1]) == times.of(graph, Shapes(graph), ()).call(product)


class Held(Timed):
    """Knows whether steps wait for it."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(gpu)
        self.did: list[tuple[str, bool]] = []

    def allocate(self, size: int) -> int:
        self.did.append(("allocate", self._turns > 0))
        return super().allocate(size)

    def time(self, enqueue: Callable[[], None]) -> float:
        self.did.append(("time", self._turns > 0))
        return super().time(enqueue)


def test_steps_wait_while_products_are_timed_and_not_while_they_are_prepared(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = Held(gpu)
    monkeypatch.setattr(measured, "DeviceContext", lambda ordinal, **given: device)
    monkeypatch.setattr(measured, "CublasLt", lambda device: CublasLt(device, gpu.cublas))
    timer(tmp_path).beside([MatrixProduct(6, 8, 20), MatrixProduct(6, 4, 20)])
    assert set(device.did) == {("allocate", False), ("time", True)}


def test_patterns_are_compiled_at_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By what the caller gives, from two threads: each waits until the other is there, too. Later all are known."""
    together = Barrier(2, timeout=60)
    compiled = []

    def compile_source(*source: Any, **how: Any) -> bytes:
        if len(compiled) < 2:
            compiled.append(source)
            together.wait()
        return gpu.compile_source(*source, **how)

    monkeypatch.setattr(measured, "DeviceContext", lambda ordinal, compile_source, **other: Timed(gpu, compile_source))
    monkeypatch.setattr(measured, "usable_cores", lambda: 2)
    graph, names = step()
    measure = of(graph, tmp_path, compile_source)
    measure.prepare([names, names[:1]])
    monkeypatch.setattr(measured, "DeviceContext", None)
    assert measure.kernel(names) is not None
    assert measure.kernel(names[:1]) is not None


def test_what_fails_is_not_measured(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(source: str, arch: int, features: str = "", contract: bool = False) -> bytes:
        raise KernelError("no compiler")

    monkeypatch.setattr(measured, "DeviceContext", lambda ordinal, **given: Timed(gpu, refused))
    monkeypatch.setattr(measured, "CublasLt", lambda device: CublasLt(device, gpu.cublas))
    gpu.fail("cublasLtMatmulAlgoGetHeuristic")
    graph, names = step()
    measure = of(graph, tmp_path)
    measure.prepare([names])
    assert measure.kernel(names) is None
    assert measure.call(names[0]) is None


def of(graph: Graph, folder: Path, compile_source: CompileSource = nvrtc.compile_source) -> Measure:
    return timer(folder, compile_source).of(graph, Shapes(graph), ())


def timer(folder: Path, compile_source: CompileSource = nvrtc.compile_source) -> measured.PatternTimer:
    target = Target("/device:GPU:0", "a fake GPU", 1 << 30, None)  # type: ignore[arg-type]
    return measured.PatternTimer(target, Options(cache_directory=str(folder)), True, compile_source)


def step() -> tuple[Graph, list[str]]:
    """A product with an activation, and their names."""

    @tf.function(input_signature=[tf.TensorSpec((6, 20)), tf.TensorSpec((20, 8))])
    def layer(x: Any, y: Any) -> Any:
        return tf.tanh(x @ y)

    graph = from_tf_graph(layer.get_concrete_function().graph)
    return graph, [node.name for op in ("MatMul", "Tanh") for node in graph if node.op == op]
