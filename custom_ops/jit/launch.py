"""Launches GPU programs through the CUDA driver, by the rules that the op library follows too.

For the tuner, benchmarks and tests; a graph runs its kernels through the op."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from custom_ops.errors import KernelError
from custom_ops.jit.program import Program

MOST_GROUPS = 65535  # blocks of a launch along its second dimension
TURN = 6  # the word of the kernel's parameter that says which stage of which step
STATUS_BYTES = 256  # in front of the scratch: the status word, and up to where the scratch is aligned


class Launcher:
    """One program, loaded into the current CUDA context (PyTorch's or TensorFlow's primary one, say).

    Attributes:
        registers, local, shared: of the kernel as it was compiled: registers a thread, bytes of local memory a thread
            (spills and stack), bytes of static shared memory.
        resident: CTAs that the device runs at once.
    """

    def __init__(self, program: Program, driver: Any = None) -> None:
        """Load `program`, with the CUDA driver unless another is given.

        Raises:
            KernelError: there is no driver, the device cannot load the program, or not one group of it fits.
        """
        self.program = program
        self._driver = driver or cuda_driver()
        self._configs: dict[tuple[int, bool], Any] = {}  # by groups, and whether the fallback's
        self._module = self._call(self._driver.cuModuleLoadData(program.image), "load a kernel")
        try:
            self._open()
        except KernelError:
            self.close()
            raise

    def close(self) -> None:
        """Unload the program, once the device is through with all that was enqueued."""
        with contextlib.suppress(KernelError):  # a context that a kernel broke unloads nothing more
            self._call(self._driver.cuCtxSynchronize(), "wait for the device")
            self._call(self._driver.cuModuleUnload(self._module), "unload a kernel")

    def _open(self) -> None:
        program, driver = self.program, self._driver
        self._kernel = self._function(program.entry)
        self._fallback = self._function(program.fallback) if program.fallback else None
        attribute = driver.CUfunction_attribute
        if program.shared > 48 << 10:
            name = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call(driver.cuFuncSetAttribute(self._kernel, name, program.shared), "get its shared memory")
        if program.cluster > 8:
            name = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._call(driver.cuFuncSetAttribute(self._kernel, name, 1), "allow clusters of 16")
        self.registers = self._attribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.local = self._attribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        self.shared = self._attribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self.resident = self._resident()
        if self.resident < (program.ctas if program.cooperative else program.cluster):
            raise KernelError(
                f"a group of {program.ctas} CTAs does not fit this device: it runs {self.resident} at once"
            )

    def groups(self, batch: int, directions: int = 1) -> int:
        return -(-batch // self.program.rows) * directions

    def memory_bytes(self, batch: int, directions: int = 1) -> int:
        """Of the status word and the scratch behind it."""
        return STATUS_BYTES + self.groups(batch, directions) * self.program.scratch

    def __call__(
        self,
        time: int,
        batch: int,
        pointers: Sequence[Sequence[int]],
        memory: int,
        stream: int = 0,
        reverse: Sequence[bool] = (),
        batch_major: bool = False,
    ) -> None:
        """Enqueue one sweep on `stream`: `prepare(...)(stream)`."""
        self.prepare(time, batch, pointers, memory, reverse, batch_major)(stream)

    def prepare(
        self,
        time: int,
        batch: int,
        pointers: Sequence[Sequence[int]],
        memory: int,
        reverse: Sequence[bool] = (),
        batch_major: bool = False,
    ) -> Callable[[int], None]:
        """One sweep, to be enqueued on a CUDA stream as often as its tensors are there, with little for Python to do.

        Args:
            time, batch: of the tensors; a batch of 0 launches nothing.
            pointers: for each direction device pointers, in the order of the kernel's parameter (jit/program.py). That
                of an initial state may be 0, for zeros.
            memory: device memory of `memory_bytes`, which each call zeroes where a kernel needs it. An int32 stands at
                its beginning, 0 before the first call, that is not 0 afterwards if the fallback had to run.
            reverse: for each direction whether it walks time backwards.
            batch_major: whether sequences, in and out, are `[batch, time, ...]` and not `[time, batch, ...]`.

        Returns:
            What takes the stream and enqueues. It raises KernelError if a launch fails.
        """
        program = self.program
        groups = self.groups(batch, len(pointers))
        zeroed = STATUS_BYTES + groups * program.scratch if groups and (program.fallback or program.scratch) else 0
        once = self.resident // program.ctas if program.cooperative else MOST_GROUPS
        words = self._words(time, batch, pointers, memory, reverse, batch_major)
        launches = []
        for turn in self._turns(time):
            words[TURN] = turn
            for first in range(0, groups, once):
                words[1] = first | groups << 32
                launches.append(self._prepared(min(once, groups - first), words, fallback=False))
        if self._fallback is not None and groups:
            words[1] = groups << 32
            launches.append(self._prepared(groups, words, fallback=True))

        def enqueue(stream: int) -> None:
            if zeroed:
                self._call(self._driver.cuMemsetD8Async(memory, 0, zeroed, stream), "zero the scratch")
            for launch in launches:
                launch(stream)

        return enqueue

    def launch_fallback(
        self,
        time: int,
        batch: int,
        pointers: Sequence[Sequence[int]],
        memory: int,
        stream: int = 0,
        reverse: Sequence[bool] = (),
    ) -> None:
        """Enqueue the fallback, which does nothing unless the status is set; arguments as of a call."""
        words = self._words(time, batch, pointers, memory, reverse)
        self._prepared(words[1] >> 32, words, fallback=True)(stream)

    def prepare_blocks(self, words: list[int], blocks: int) -> Callable[[int], None]:
        """One launch of a kernel that has no groups, to be enqueued on a CUDA stream; `words`: its parameter."""
        return self._launch_of(self._config(blocks, 1, fallback=False), self._kernel, words)

    def _words(
        self,
        time: int,
        batch: int,
        pointers: Sequence[Sequence[int]],
        memory: int,
        reverse: Sequence[bool],
        batch_major: bool = False,
    ) -> list[int]:
        groups = self.groups(batch, len(pointers))
        flags = sum(flag << place for place, flag in enumerate(reverse))
        lines = 1 | time << 32 if batch_major else batch | 1 << 32
        head = [time | batch << 32, groups << 32, memory + STATUS_BYTES, memory, flags, lines, 0]
        return [*head, *(pointer for direction in pointers for pointer in direction)]

    def _turns(self, time: int) -> list[int]:
        """Word `TURN` of each launch of all groups: one for all steps, or a stage each; without steps the last stage,
        which puts out the final states."""
        stages = self.program.stages
        if not stages or not time:
            return [max(stages - 1, 0) << 32]
        return [step | stage << 32 for step in range(time) for stage in range(stages)]

    def _prepared(self, groups: int, words: list[int], fallback: bool) -> Callable[[int], None]:
        config = self._configs.get((groups, fallback))
        if config is None:  # kept, as to make one takes longer than to launch it
            config = self._config(1 if fallback else self.program.ctas, groups, fallback)
            self._configs[groups, fallback] = config
        return self._launch_of(config, self._fallback if fallback else self._kernel, words)

    def _launch_of(self, config: Any, kernel: Any, words: list[int]) -> Callable[[int], None]:
        parameter = (ctypes.c_uint64 * len(words))(*words)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(parameter))
        driver = self._driver

        def launch(stream: int, _parameter: object = parameter) -> None:  # which `parameters` points to
            config.hStream = stream
            returned = driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(parameters), 0)
            self._call(returned, "launch a kernel")

        return launch

    def _config(self, ctas: int, groups: int, fallback: bool) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = ctas, groups, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.program.threads, 1, 1
        config.sharedMemBytes = 0 if fallback else self.program.shared
        attributes = [] if fallback else self._attributes()
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _attributes(self) -> list[Any]:
        driver, attributes = self._driver, []
        if self.program.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = cluster.value.clusterDim
            size.x, size.y, size.z = self.program.cluster, 1, 1
            attributes.append(cluster)
        if self.program.cooperative:
            cooperative = driver.CUlaunchAttribute()
            cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            cooperative.value.cooperative = 1
            attributes.append(cooperative)
        return attributes

    def _resident(self) -> int:
        driver, program = self._driver, self.program
        if program.cluster > 1:
            returned = driver.cuOccupancyMaxActiveClusters(self._kernel, self._config(program.ctas, 1, fallback=False))
            return program.cluster * int(self._call(returned, "fit its clusters"))
        returned = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._kernel, program.threads, program.shared)
        of_one = int(self._call(returned, "fit its CTAs"))
        device = self._call(driver.cuCtxGetDevice(), "find the device")
        name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return of_one * int(self._call(driver.cuDeviceGetAttribute(name, device), "count its processors"))

    def address_of(self, variable: str) -> int:
        """Where a variable of the program lies in device memory.

        Raises:
            KernelError: it has none of that name.
        """
        return int(self._call(self._driver.cuModuleGetGlobal(self._module, variable.encode()), f"find {variable}"))

    def _function(self, name: str) -> Any:
        return self._call(self._driver.cuModuleGetFunction(self._module, name.encode()), f"find {name}")

    def _attribute(self, name: Any) -> int:
        return int(self._call(self._driver.cuFuncGetAttribute(name, self._kernel), "read its registers"))

    def _call(self, returned: tuple[Any, ...], what: str) -> Any:
        return checked(self._driver, returned, what)


def checked(driver: ModuleType, returned: tuple[Any, ...], what: str) -> Any:
    """The value that a driver call returned.

    Raises:
        KernelError: it failed; with the driver's words.
    """
    result, *values = returned
    if result != driver.CUresult.CUDA_SUCCESS:
        text = driver.cuGetErrorString(result)[1]
        raise KernelError(f"CUDA could not {what}: {text.decode() if text else result}")
    return values[0] if values else None


def cuda_driver() -> ModuleType:
    """The driver API, started.

    Raises:
        KernelError: cuda-bindings, the driver or a GPU is missing.
    """
    try:
        from cuda.bindings import driver

        (result,) = driver.cuInit(0)
    except (ImportError, RuntimeError) as error:
        raise KernelError(
            f"no CUDA driver to run GPU kernels with ({error}); cuda-bindings is in tfmem[gpu]"
        ) from error
    if result != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"the CUDA driver does not start: {driver.cuGetErrorString(result)[1].decode()}")
    return driver
