"""Times recurrent kernels on a device, for the tuner: one specification, tensors that all its kernels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache as remember
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.errors import KernelError
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache, digest
from custom_ops.jit.compile_ahead import compile_ahead
from custom_ops.jit.device import Device
from custom_ops.jit.launch import Launcher, checked, cuda_driver
from custom_ops.jit.program import ANY_BATCH, Program, build
from custom_ops.jit.tune import Measured
from custom_ops.spec import Configuration, RecurrentSpec

CODEGEN = Path(__file__).parents[1] / "codegen"


class DeviceBench:
    """A `tune.Bench` on a real device, whose context is current.

    Attributes:
        spec: what all kernels compute.
        identity: all that a time or a kernel depends on, as one name.
    """

    def __init__(self, spec: RecurrentSpec, device: Device, cache: Cache) -> None:
        self.spec = spec
        self.identity = digest(*_identity(spec, device))
        self._device = device
        self._cache = cache
        self._pointers: dict[tuple[int, int], list[list[int]]] = {}
        self._scratch = (0, 0)  # bytes, address
        self._status = 0

    def compile(self, configurations: Sequence[Configuration]) -> None:
        """Into the cache, in another process; any thread may call."""
        missing = [configuration for configuration in configurations if not self._is_kept(configuration)]
        if missing:
            compile_ahead(self.spec, missing, self._device.arch, self._cache)

    def build(self, configuration: Configuration, max_batch: int = ANY_BATCH) -> Program:
        """The program, from the cache if it is there.

        Raises:
            KernelError: it cannot be generated or compiled.
        """
        return build(self.spec, configuration, self._device.arch, self._cache, max_batch)

    def measure(self, configuration: Configuration, batch: int, time_steps: int) -> Measured:
        """Run it.

        Raises:
            KernelError: it cannot be built or loaded, or its blocks did not run at once.
        """
        launcher = Launcher(self.build(configuration))
        directions, device = self.spec.directions, self._device
        pointers = self._tensors(batch, time_steps)
        scratch = self._scratch_of(launcher.scratch_bytes(batch, directions))
        forward = (False,) * directions

        def enqueue() -> None:
            launcher(time_steps, batch, pointers, scratch, self._status, device.stream, forward)

        enqueue()
        self._require_success()  # before it is timed: a launch that fails takes a second
        milliseconds = device.time(enqueue)
        self._require_success()
        return Measured(1e6 * milliseconds, launcher.registers, launcher.local)

    def _is_kept(self, configuration: Configuration) -> bool:
        try:
            build(self.spec, configuration, self._device.arch, _Kept(self._cache.folder))
        except (LookupError, KernelError):
            return False
        return True

    def _require_success(self) -> None:
        if self._device.download(self._status, np.zeros(1, np.int32))[0]:
            raise KernelError(
                "it gave up (its blocks did not run at once, or a value was too large), and the fallback took over"
            )

    def _scratch_of(self, size: int) -> int:
        if not self._status:
            self._status = self._device.upload(np.zeros(1, np.int32))
        if size > self._scratch[0]:
            self._scratch = (size, self._device.allocate(size))
        return self._scratch[1]

    def _tensors(self, batch: int, time: int) -> list[list[int]]:
        """Pointers for each direction, ordered as in the kernel's parameter."""
        if (batch, time) in self._pointers:
            return self._pointers[batch, time]
        cell, units = self.spec.cell, self.spec.units
        shapes: list[tuple[int, ...]] = []
        shapes += [(time, batch, columns * units) if columns else (time, batch) for columns in cell.sequences]
        shapes += [(batch, columns * units) for columns in cell.invariants]
        shapes += [(columns * units,) for columns in cell.vectors]
        shapes += [(rows * units, columns * units) for rows, columns in cell.matrices]
        shapes += [(batch, units)] * len(cell.states)
        results: list[tuple[int, ...]] = [
            (time, batch) if cell.scalar[columns[0]] else (time, batch, len(columns) * units)
            for columns in cell.outputs
        ]
        results += [(batch, units)] * len(cell.states)
        itemsize = 4 if self.spec.dtype == "float32" else 2
        generator = np.random.default_rng(0)
        found = []
        for _ in range(self.spec.directions):
            inputs = [self._device.upload(self._random(generator, shape)) for shape in shapes]
            outputs = [self._device.allocate(itemsize * int(np.prod(shape))) for shape in results]
            found.append(inputs + outputs)
        self._pointers[batch, time] = found
        return found

    def _random(self, generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        """Numbers of the size that trained layers have, so that states neither die nor overflow."""
        values = generator.random(shape, np.float32)
        values = (2 * values - 1) * np.float32(self.spec.units**-0.5)
        if self.spec.dtype == "float16":
            return values.astype(np.float16)
        if self.spec.dtype == "bfloat16":
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values


class _Kept(Cache):
    """What a cache holds already."""

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        def missing() -> bytes:
            raise LookupError(key)

        return super().get(key, missing)


def _identity(spec: RecurrentSpec, device: Device) -> Iterator[str]:
    driver = cuda_driver()
    version = checked(driver, driver.cuDriverGetVersion(), "read the driver's version")
    yield spec.cell.to_text()
    yield f"{spec.units} {spec.dtype} {spec.precision} {spec.directions}"
    yield f"{device.name} {device.arch} {version} {nvrtc.compiler_version()}"
    yield _sources()


@remember
def _sources() -> str:
    """The templates and the code generator, as one name."""
    generator = [path.read_text() for path in sorted(CODEGEN.glob("*.py"))]
    return digest(*generator, *(text for item in sorted(nvrtc.headers().items()) for text in item))
