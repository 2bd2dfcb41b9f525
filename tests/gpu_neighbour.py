"""Work on separate streams, beside which kernels are tested."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

from custom_ops.jit import nvrtc
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import checked, cuda_driver

SOURCE = """
extern "C" __global__ void busy(long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}
"""
WHOLE_PROCESSOR = 160 << 10  # bytes of shared memory: no other block of that much fits beside it
THREADS = 128


class Neighbour:
    """A stream that keeps blocks on a device, current while `with` lasts."""

    def __init__(self, device: DeviceContext) -> None:
        self._driver = driver = cuda_driver()
        self._module = self._call("cuModuleLoadData", nvrtc.compile_source(SOURCE, device.arch))
        self._kernel = self._call("cuModuleGetFunction", self._module, b"busy")
        name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._kernel, name, WHOLE_PROCESSOR)
        self.stream = 0

    def __enter__(self) -> Neighbour:
        self.stream = int(self._call("cuStreamCreate", 1))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call("cuStreamSynchronize", self.stream)
        self._call("cuStreamDestroy", self.stream)
        self._call("cuModuleUnload", self._module)

    def enqueue(self, blocks: int, shared: int, microseconds: int, launches: int) -> None:
        """Kernels of `blocks` blocks, one after the other, each of which takes so long and so much shared memory."""
        duration = ctypes.c_longlong(1000 * microseconds)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
        address = ctypes.addressof(parameters)
        for _ in range(launches):
            self._call("cuLaunchKernel", self._kernel, blocks, 1, 1, THREADS, 1, 1, shared, self.stream, address, 0)

    @property
    def busy(self) -> bool:
        (result,) = self._driver.cuStreamQuery(self.stream)
        if result == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return True
        checked(self._driver, (result,), "ask a stream")
        return False

    def synchronize(self) -> None:
        """Wait for all that is enqueued."""
        self._call("cuStreamSynchronize", self.stream)

    def _call(self, name: str, *arguments: Any) -> Any:
        return checked(self._driver, getattr(self._driver, name)(*arguments), name)
