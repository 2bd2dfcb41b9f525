"""Times recurrent kernels on a device, for the tuner: one specification, tensors that all its kernels share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache as remember
from pathlib import Path

import numpy as np

from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache, digest
from custom_ops.jit.compilers import Compilers
from custom_ops.jit.device import DeviceContext
from custom_ops.recurrent.gpu_program import ANY_BATCH, RecurrentProgram, build
from custom_ops.recurrent.launch import Launcher
from custom_ops.recurrent.search.samples import Samples
from custom_ops.recurrent.search.tune import TIME_STEPS, SweepBench
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from custom_ops.timing.tuner import MeasuredKernel

CODEGEN = Path(__file__).parents[1] / "codegen"
CHECKED_STEPS = 7  # of a sweep that is compared: both copies of every exchange are used three times


class DeviceBench(SweepBench):
    """Times kernels on a real device, whose context is current."""

    def __init__(self, spec: RecurrentSpec, device: DeviceContext, cache: Cache, time_steps: int = TIME_STEPS) -> None:
        """
        Args:
            spec: what all kernels compute.
            device: runs them.
            cache: of compiled kernels.
            time_steps: length of the sweeps that are timed.
        """
        self.spec = spec
        self.time_steps = time_steps
        self.identity = digest(digest(*_identity(spec, device)), str(time_steps))
        self._device = device
        self._cache = cache
        self._given: dict[tuple[int, int], Samples] = {}
        self._memory = (0, 0)  # bytes, address
        self._compile_source = Compilers()
        self._refused: dict[Configuration, str] = {}  # what cannot be compiled, with the reason

    def compile(self, configurations: Sequence[Configuration]) -> None:
        """Compile into the cache, in other processes; any thread may call."""
        for configuration in configurations:
            try:
                self.build(configuration)
            except KernelError as error:
                self._refused[configuration] = str(error)

    def build(self, configuration: Configuration, max_batch: int = ANY_BATCH) -> RecurrentProgram:
        """The program, from the cache if it is there.

        Raises:
            KernelError: it cannot be generated or compiled.
        """
        if configuration in self._refused:  # what a compiler failed or died at is not tried again
            raise KernelError(self._refused[configuration])
        return build(self.spec, configuration, self._device.arch, self._cache, max_batch, self._compile_source)

    def measure(self, configuration: Configuration, point: int) -> MeasuredKernel:
        """Run it, for a few steps to see whether it is right, then for all.

        Raises:
            KernelError: it cannot be built or loaded, its CTAs did not run at once, or its results are wrong.
        """
        with contextlib.closing(Launcher(self.build(configuration))) as launcher:
            return self._measure(launcher, point)

    def close(self) -> None:
        """Give back what it holds of the device's memory; it can be used again."""
        for samples in self._given.values():
            samples.free()
        self._given.clear()
        if self._memory[0]:
            self._device.free(self._memory[1])
        self._memory = (0, 0)

    def _measure(self, launcher: Launcher, batch: int) -> MeasuredKernel:
        memory = self._memory_of(launcher.memory_bytes(batch, self.spec.directions))
        forward = (False,) * self.spec.directions

        def enqueue(samples: Samples, steps: int) -> None:
            launcher(steps, batch, samples.pointers, memory, self._device.stream, forward)

        few = self._samples(batch, CHECKED_STEPS)
        few.poison()
        enqueue(few, CHECKED_STEPS)
        self._require_success(memory)  # before it is timed: a launch that fails takes a second
        few.require_right()
        samples = self._samples(batch, self.time_steps)
        milliseconds = self._device.time(lambda: enqueue(samples, self.time_steps))
        self._require_success(memory)
        return MeasuredKernel(1e6 * milliseconds, launcher.registers, launcher.local)

    def _require_success(self, memory: int) -> None:
        if self._device.download(memory, np.zeros(1, np.int32))[0]:
            raise KernelError(
                "the kernel ended early (its CTAs did not run at once, or a value was too large), and the fallback ran"
            )

    def _memory_of(self, size: int) -> int:
        if size > self._memory[0]:
            if self._memory[0]:
                self._device.free(self._memory[1])
            self._memory = (0, 0)
            self._memory = (size, self._device.upload(np.zeros(size, np.uint8)))
        return self._memory[1]

    def _samples(self, batch: int, time: int) -> Samples:
        """The samples of one batch size at a time: kernels are timed batch by batch."""
        for other in [key for key in self._given if key[0] != batch]:
            self._given.pop(other).free()
        if (batch, time) not in self._given:
            self._given[batch, time] = Samples(self.spec, self._device, batch, time)
        return self._given[batch, time]


def _identity(spec: RecurrentSpec, device: DeviceContext) -> Iterator[str]:
    yield spec.cell.to_text()
    yield f"{spec.units} {spec.dtype} {spec.precision} {spec.directions}"
    yield f"{device.name} {device.arch} {device.driver_version()} {nvrtc.compiler_version()}"
    yield _sources()


@remember
def _sources() -> str:
    """The templates and the code generator, as one name."""
    generator = [path.read_text() for path in sorted(CODEGEN.glob("*.py"))]
    return digest(*generator, *nvrtc.header_texts())
