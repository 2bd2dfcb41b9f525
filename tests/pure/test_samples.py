"""A kernel that is not right is found out, on a device of NumPy arrays."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from custom_ops.errors import KernelError
from custom_ops.recurrent import cells, reference
from custom_ops.recurrent.search.bench import DeviceBench
from custom_ops.recurrent.search.samples import Samples
from custom_ops.recurrent.spec import RecurrentSpec

STEPS, BATCH, UNITS = 7, 3, 5
MEMORY = 1 << 20


class HostDevice:
    """Memory as `custom_ops.jit.device.DeviceContext` has it, in arrays of bytes."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.free_bytes = MEMORY

    def allocate(self, size: int) -> int:
        if size > self.free_bytes:
            raise KernelError("out of memory")
        self.free_bytes -= size
        self.blocks.append(np.zeros(size, np.uint8))
        return len(self.blocks) - 1

    def free(self, place: int) -> None:
        self.free_bytes += self.blocks[place].nbytes
        self.blocks[place] = None

    def upload(self, array: Any) -> int:
        place = self.allocate(array.nbytes)
        self.store(place, array)
        return place

    def store(self, place: int, array: Any) -> None:
        self.blocks[place][:] = np.ascontiguousarray(array).view(np.uint8).ravel()

    def download(self, place: int, array: Any) -> Any:
        array.view(np.uint8).reshape(-1)[:] = self.blocks[place]
        return array

    def fill(self, place: int, size: int, byte: int) -> None:
        self.blocks[place][:size] = byte


def load(device: HostDevice, place: int, shape: tuple[int, ...], dtype: str) -> Any:
    raw = device.blocks[place]
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return raw.view(dtype).reshape(shape)


def store(device: HostDevice, place: int, array: Any, dtype: str) -> None:
    if dtype == "bfloat16":
        array = (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    device.store(place, array.astype(np.uint16 if dtype == "bfloat16" else dtype))


def compute(device: HostDevice, spec: RecurrentSpec, samples: Samples, spoil: float = 0.0) -> None:
    """What a kernel does: the LSTM of the samples, in float32; `spoil` is added to one number."""
    for gates, matrix, *states, outputs, h, c in samples.pointers:
        shapes = [(STEPS, BATCH, 4 * UNITS), (UNITS, 4 * UNITS)]
        given = [load(device, place, shape, spec.dtype) for place, shape in zip((gates, matrix), shapes, strict=True)]
        first = [load(device, place, (BATCH, UNITS), spec.dtype).astype(np.float32) for place in states]
        arrays = [[given[0].astype(np.float32)], [], [], [given[1].astype(np.float32)], first]
        (found,), finals = reference.run(spec.cell, UNITS, *arrays)
        found[3, 1, 2] += spoil
        for place, array in zip((outputs, h, c), (found, *finals), strict=True):
            store(device, place, array, spec.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("directions", [1, 2])
def test_right_results_pass(dtype: Any, directions: int) -> None:
    device, spec = HostDevice(), RecurrentSpec(cells.lstm(), UNITS, dtype, directions=directions)
    samples = Samples(spec, device, BATCH, STEPS)  # type: ignore[arg-type]
    samples.poison()
    compute(device, spec, samples)
    samples.require_right()


@pytest.mark.parametrize("spoil", [1e-3, float("nan"), float("inf")])
def test_one_wrong_number_is_found(spoil: float) -> None:
    device, spec = HostDevice(), RecurrentSpec(cells.lstm(), UNITS)
    samples = Samples(spec, device, BATCH, STEPS)  # type: ignore[arg-type]
    compute(device, spec, samples, spoil)
    with pytest.raises(KernelError, match="wrong"):
        samples.require_right()


def test_what_is_not_written_is_found() -> None:
    """Also when an earlier kernel wrote it."""
    device, spec = HostDevice(), RecurrentSpec(cells.lstm(), UNITS)
    samples = Samples(spec, device, BATCH, STEPS)  # type: ignore[arg-type]
    compute(device, spec, samples)
    samples.poison()
    with pytest.raises(KernelError, match="wrong"):
        samples.require_right()


def test_a_precision_explains_its_own_error() -> None:
    device, spec = HostDevice(), RecurrentSpec(cells.lstm(), UNITS, precision="tf32")
    samples = Samples(spec, device, BATCH, STEPS)  # type: ignore[arg-type]
    compute(device, spec, samples, 5e-4)
    samples.require_right()


def test_memory_is_given_back() -> None:
    device, spec = HostDevice(), RecurrentSpec(cells.lstm(), UNITS)
    samples = Samples(spec, device, BATCH, STEPS)  # type: ignore[arg-type]
    assert device.free_bytes < MEMORY
    samples.free()
    samples.free()
    assert device.free_bytes == MEMORY
    device.free_bytes = 1000  # too little for all of them
    with pytest.raises(KernelError, match="out of memory"):
        Samples(spec, device, BATCH, STEPS)  # type: ignore[arg-type]
    assert device.free_bytes == 1000


def test_a_bench_holds_the_samples_of_one_batch_size() -> None:
    device, spec = HostDevice(), RecurrentSpec(cells.lstm(), UNITS)
    bench = DeviceBench.__new__(DeviceBench)  # without asking a driver what it is
    bench.spec, bench._device, bench._given, bench._memory = spec, device, {}, (0, 0)  # type: ignore[assignment]
    with contextlib.closing(bench):
        bench._samples(BATCH, STEPS)
        bench._samples(BATCH, 2 * STEPS)
        of_one = device.free_bytes
        bench._samples(2 * BATCH, STEPS)
        assert list(bench._given) == [(2 * BATCH, STEPS)]
        bench._memory_of(100)
        bench._memory_of(200)
        bench._samples(BATCH, STEPS)
        bench._samples(BATCH, 2 * STEPS)
        assert device.free_bytes == of_one - 200
    assert device.free_bytes == MEMORY
