"""Unified memory of a CUDA GPU, through the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from custom_ops.errors import KernelError
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.image import KernelImage, code_of
from custom_ops.jit.launch import LoadedKernel, Module, checked

BUFFERS = 4  # at once, at most
THREADS, CTAS = 256, 1024
ATTACH_GLOBAL = 1
SOURCE = """
extern "C" __global__ void add_one(const float* x, float* y, unsigned long long count) {
  const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) y[i] = x[i] + 1;
}
"""


class CudaMemory:
    """Buffers of one size in unified memory; see `benchmarks.offload.unified.Memory`.

    Attributes:
        size: bytes of a buffer.
    """

    def __init__(self, device: DeviceContext, size: int, kernel: LoadedKernel) -> None:
        self.size = size
        self._driver, self._kernel = device.driver, kernel
        self._streams = [int(self._call("cuStreamCreate", 1)) for _ in range(2)]
        self._buffers: list[int] = []

    @classmethod
    @contextmanager
    def opened(cls, size: int) -> Iterator[CudaMemory]:
        """The memory of GPU 0, while the block lasts.

        Raises:
            KernelError: there is no GPU, or too little of its memory is free.
        """
        with DeviceContext() as device:
            free, total = _values(device.driver.cuMemGetInfo())
            if BUFFERS * size > free // 2:
                raise KernelError(
                    f"{BUFFERS} buffers of {size:,} bytes would take more than half of the {free:,} bytes that are "
                    f"free of {total:,}; give a smaller --mib"
                )
            module = Module(code_of(SOURCE, device.arch), device.driver)
            image = KernelImage(device.arch, "add_one", THREADS, b"")
            memory = cls(device, size, LoadedKernel(image, module))
            try:
                yield memory
            finally:
                memory.free_all()
                module.close()

    def allocate(self) -> int:
        """See `Memory`."""
        buffer = int(self._call("cuMemAllocManaged", self.size, ATTACH_GLOBAL))
        self._buffers.append(buffer)
        return buffer

    def free_all(self) -> None:
        """See `Memory`."""
        self.wait()
        for buffer in self._buffers:
            self._call("cuMemFree", buffer)
        self._buffers.clear()

    def to_device(self, buffer: int, stream: int) -> None:
        """See `Memory`."""
        self._move(buffer, self._place("DEVICE"), stream)

    def to_host(self, buffer: int, stream: int) -> None:
        """See `Memory`."""
        self._move(buffer, self._place("HOST"), stream)

    def advise_host(self, buffer: int) -> None:
        """See `Memory`."""
        advice = self._driver.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION
        self._call(self._latest("cuMemAdvise"), buffer, self.size, advice, self._place("HOST"))

    def touch(self, buffer: int) -> None:
        """See `Memory`."""
        ctypes.memset(buffer, 1, self.size)

    def compute(self, read: int, written: int, stream: int) -> None:
        """See `Memory`."""
        self._kernel.prepare((CTAS, 1), (read, written, self.size // 4))(self._streams[stream])

    def wait(self, stream: int | None = None) -> None:
        """See `Memory`."""
        for each in self._streams if stream is None else [self._streams[stream]]:
            self._call("cuStreamSynchronize", each)

    def _move(self, buffer: int, place: Any, stream: int) -> None:
        self._call(self._latest("cuMemPrefetchAsync"), buffer, self.size, place, 0, self._streams[stream])

    def _place(self, kind: str) -> Any:
        place = self._driver.CUmemLocation()
        place.type = getattr(self._driver.CUmemLocationType, f"CU_MEM_LOCATION_TYPE_{kind}")
        place.id = 0
        return place

    def _latest(self, name: str) -> str:
        """The form of a call that takes a location: bindings of CUDA 12 call it `_v2`."""
        return f"{name}_v2" if hasattr(self._driver, f"{name}_v2") else name

    def _call(self, name: str, *arguments: Any) -> Any:
        return checked(self._driver, getattr(self._driver, name)(*arguments), name)


def _values(returned: tuple[Any, ...]) -> tuple[int, int]:
    """The two values of a call."""
    _, first, second = returned
    return int(first), int(second)
