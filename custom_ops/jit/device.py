"""A GPU without a framework: memory, copies and times, for the tuner and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from custom_ops.jit.launch import Enqueue, checked, cuda_driver
from custom_ops.jit.nvrtc import CompileSource, compile_source

IN_ONE_GRAPH, REPEATS = 4, 10  # what is timed: so many in a graph, so many graphs


Quiet: TypeAlias = Callable[[], AbstractContextManager[None]]


class DeviceContext:
    """A GPU's primary context, current while `with` lasts, and what was allocated in it.

    Attributes:
        arch: compute capability, 90 for 9.0.
        processors: streaming multiprocessors.
        name: as the driver says it.
        stream: what all is enqueued on, while `with` lasts.
        driver: that works it.
        compile_source: makes code for it, as `nvrtc.compile_source`.
    """

    def __init__(
        self,
        ordinal: int = 0,
        driver: Any = None,
        compile_source: CompileSource = compile_source,
        quiet: Quiet | None = None,
    ) -> None:
        """The GPU `ordinal` of the CUDA driver, unless another driver is given; see `turn` for `quiet`.

        Raises:
            KernelError: there is no driver or no such GPU.
        """
        self.driver = driver = driver or cuda_driver()
        self.compile_source = compile_source
        self._quiet = quiet
        self._device = checked(driver, driver.cuDeviceGet(ordinal), f"find GPU {ordinal}")
        attribute = driver.CUdevice_attribute
        major = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.arch = 10 * major + minor
        self.processors = self._attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        name = checked(driver, driver.cuDeviceGetName(256, self._device), "read its name")
        self.name = name.partition(b"\0")[0].decode()  # what lies behind the end of the text is anything
        self._blocks: set[int] = set()
        self._turn = threading.RLock()
        self._turns = 0  # of one thread, within each other
        self._context: Any = None
        self.stream = 0

    def __enter__(self) -> DeviceContext:
        self._context = context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._call("cuCtxPushCurrent", context)
        self.stream = int(self._call("cuStreamCreate", 1))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call("cuStreamSynchronize", self.stream)
        for block in self._blocks:
            self._call("cuMemFree", block)
        self._blocks.clear()
        self._call("cuStreamDestroy", self.stream)
        self._call("cuCtxPopCurrent")
        self._call("cuDevicePrimaryCtxRelease", self._device)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The context is current in the thread that asks, and no other thread has its turn: what is timed runs alone.
        `quiet` keeps the rest of the process from using it meanwhile. One turn may lie within another.

        Only while `with` of the device itself lasts, in whichever thread.
        """
        with self._turn, self._quiet() if self._quiet and not self._turns else nullcontext():
            self._call("cuCtxPushCurrent", self._context)
            self._turns += 1
            try:
                yield
            finally:
                self._turns -= 1
                self._call("cuCtxPopCurrent")

    def allocate(self, size: int) -> int:
        """`size` bytes, freed by `free` or at the end of `with`; at least one, so that every pointer is one."""
        place = int(self._call("cuMemAlloc", max(size, 1)))
        self._blocks.add(place)
        return place

    def free(self, place: int) -> None:
        """Give back what `allocate` gave, after all that is enqueued."""
        self._call("cuStreamSynchronize", self.stream)
        self._blocks.remove(place)
        self._call("cuMemFree", place)

    def upload(self, array: NDArray[Any], size: int | None = None) -> int:
        """A copy of `array` in device memory, again and again until `size` bytes are full; once by default."""
        array = np.ascontiguousarray(array)
        size = array.nbytes if size is None else size
        place = self.allocate(size)
        done = min(array.nbytes, size)
        if done:
            # On the stream, and waited for: a plain copy may still be under way when it returns.
            self._call("cuMemcpyHtoDAsync", place, array.ctypes.data, done, self.stream)
            self._call("cuStreamSynchronize", self.stream)
        while 0 < done < size:
            more = min(done, size - done)
            self._call("cuMemcpyDtoDAsync", place + done, place, more, self.stream)
            done += more
        return place

    def download(self, place: int, array: NDArray[Any]) -> NDArray[Any]:
        """Fills `array` from device memory, after all that is enqueued."""
        self._call("cuStreamSynchronize", self.stream)
        if array.nbytes:
            self._call("cuMemcpyDtoH", array.ctypes.data, place, array.nbytes)
        return array

    def fill(self, place: int, size: int, byte: int) -> None:
        """Enqueue setting `size` bytes of device memory to `byte`."""
        if size:
            self._call("cuMemsetD8Async", place, byte, size, self.stream)

    def time(self, enqueue: Callable[[], None]) -> float:
        """Least milliseconds of what `enqueue` puts on `stream`; in a graph, so that the host does not count.

        The least, not the median: a step may train on the device meanwhile, and only ever makes a time longer.
        """
        enqueue()
        mode = self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self.stream, mode)
        for _ in range(IN_ONE_GRAPH):
            enqueue()
        graph = self._call("cuStreamEndCapture", self.stream)
        ready = self._call("cuGraphInstantiate", graph, 0)
        times = [self.elapsed(lambda: self._call("cuGraphLaunch", ready, self.stream)) for _ in range(REPEATS + 1)]
        self._call("cuGraphExecDestroy", ready)
        self._call("cuGraphDestroy", graph)
        return min(times[1:]) / IN_ONE_GRAPH

    @contextmanager
    def branches(self, count: int) -> Iterator[Callable[[Sequence[Enqueue]], None]]:
        """A function that enqueues up to `count` things side by side, each on a separate stream, behind the work on
        `stream`, which waits for all of them."""
        driver = self.driver
        apart, untimed = driver.CUstream_flags.CU_STREAM_NON_BLOCKING, driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        streams = [self._call("cuStreamCreate", apart.value) for _ in range(1, count)]
        begin, *ends = (self._call("cuEventCreate", untimed.value) for _ in range(count))

        def enqueue(what: Sequence[Enqueue]) -> None:
            first, *others = what
            self._call("cuEventRecord", begin, self.stream)
            for other, stream, end in zip(others, streams, ends, strict=False):
                self._call("cuStreamWaitEvent", stream, begin, 0)
                other(int(stream))
                self._call("cuEventRecord", end, stream)
            first(self.stream)
            for _, end in zip(others, ends, strict=False):
                self._call("cuStreamWaitEvent", self.stream, end, 0)

        try:
            yield enqueue
        finally:
            for event in (begin, *ends):
                self._call("cuEventDestroy", event)
            for stream in streams:
                self._call("cuStreamDestroy", stream)

    def elapsed(self, enqueue: Callable[[], None]) -> float:
        """Milliseconds from the beginning to the end of what `enqueue` puts on `stream`, once."""
        start, end = self._call("cuEventCreate", 0), self._call("cuEventCreate", 0)
        self._call("cuEventRecord", start, self.stream)
        enqueue()
        self._call("cuEventRecord", end, self.stream)
        self._call("cuEventSynchronize", end)
        milliseconds = float(self._call("cuEventElapsedTime", start, end))
        for event in (start, end):
            self._call("cuEventDestroy", event)
        return milliseconds

    def driver_version(self) -> int:
        """1000 * major + 10 * minor of the CUDA version that the driver supports."""
        return int(self._call("cuDriverGetVersion"))

    def _attribute(self, name: Any) -> int:
        return int(self._call("cuDeviceGetAttribute", name, self._device))

    def _call(self, name: str, *arguments: Any) -> Any:
        return checked(self.driver, getattr(self.driver, name)(*arguments), name)
