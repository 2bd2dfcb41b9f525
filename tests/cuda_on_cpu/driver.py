"""The CUDA driver's functions that `custom_ops.jit` calls, with kernels that run on the CPU.

`compile_source` takes the place of NVRTC and makes shared objects with g++; `Driver` takes the place of
`cuda.bindings.driver`. Device memory is the host's. Launches run at once, whatever the stream.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from custom_ops import build_flags
from custom_ops.errors import KernelError
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.nvrtc import KERNELS
from tests.compiled import compiler_key, kept

HERE = Path(__file__).parent
PROCESSORS = 132
UNWRITTEN = 0x7FEA0000  # see threads.cc
SECONDS = 110  # for one call of the compiler
FLAGS = ("-std=c++17", "-O1", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w", "-DTFMEM_ON_CPU")


class Compiler:
    """g++, for kernels; what it makes is kept (`tests.compiled`), and so are the headers of all kernels, precompiled.

    Args:
        kernels: the folder of the templates.
    """

    def __init__(self, kernels: Path = KERNELS) -> None:
        self._key = [*compiler_key(), _instructions(), *sorted(HERE.glob("*.h")), *sorted(kernels.glob("*.cuh"))]
        command = [build_flags.compiler(), "-std=c++17", "-O2", "-fPIC", "-c", str(HERE / "threads.cc"), "-o"]
        self._threads = kept(
            "threads.o",
            [*self._key, *command, HERE / "threads.cc"],
            lambda target: _require([*command, str(target)]),
        )
        # Where the compiler cannot use it, it finds the header itself in the next folder.
        header = [build_flags.compiler(), *FLAGS, "-x", "c++-header", str(HERE / "on_cpu.h"), "-o"]
        precompiled = kept("on_cpu.h.gch", [*self._key, *header], lambda target: _require([*header, str(target)]))
        self._command = [build_flags.compiler(), *FLAGS, *(f"-I{at}" for at in (precompiled.parent, HERE, kernels))]

    def __call__(self, source: str, arch: int, features: str = "", contract: bool = False) -> bytes:
        """As `nvrtc.compile_source`, but that nothing is contracted; the code is the path of a shared object."""
        entries = re.findall(r'extern "C" __global__ void [^;{]*?(\w+)\(const __grid_constant__', source)
        calls = "".join(f"ON_CPU_ENTRY({entry})\n" for entry in entries)
        text = f'#include "on_cpu.h"\n{source}\n{calls}'

        def make(target: Path) -> None:
            unit = target.with_name("kernel.cc")
            unit.write_text(text)
            _require([*self._command, str(unit), str(self._threads), "-o", str(target)])

        return os.fsencode(kept("kernel.so", [*self._key, self._threads, *FLAGS, text], make))


def _require(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    if done.returncode:
        raise KernelError(f"g++ rejects a kernel:\n{done.stderr[:4000]}")


def _instructions() -> str:
    """The instructions that this processor has: -march=native compiles for them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint),
        ("cooperative", ctypes.c_bool),
        ("shared", ctypes.c_uint),
        ("seed", ctypes.c_uint64),
    )


class _Enumeration:
    """Any of the driver's: a name stands for itself."""

    CUDA_SUCCESS = 0

    def __getattr__(self, name: str) -> str:
        return name


_ANSWERS = {
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": PROCESSORS,
}


class Driver:
    """What `custom_ops.jit` uses of `cuda.bindings.driver`.

    Attributes:
        seed: of the order in which threads run.
    """

    CUresult = CUdevice_attribute = CUfunction_attribute = CUlaunchAttributeID = CUstreamCaptureMode = _Enumeration()

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._memory: dict[int, Any] = {}
        self._libraries: dict[bytes, Any] = {}

    def CUlaunchConfig(self) -> Any:  # noqa: N802 - the driver's own name
        return SimpleNamespace(attrs=[], hStream=0)

    def CUlaunchAttribute(self) -> Any:  # noqa: N802
        return SimpleNamespace(id="", value=SimpleNamespace(clusterDim=SimpleNamespace(), cooperative=0))

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *_: (0, 0)  # contexts, streams and attributes that mean nothing here

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[int, int]:  # noqa: N802
        return 0, _ANSWERS[name]

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"CPU\0".ljust(size, b"?")  # the driver fills no more than the name

    def cuGetErrorString(self, result: Any) -> tuple[int, bytes]:  # noqa: N802
        return 0, str(result).encode()

    def cuMemAlloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        block = np.full(size + 256, 0xFF, np.uint8)
        place = -(-block.ctypes.data // 256) * 256
        self._memory[place] = block
        return 0, place

    def cuMemFree(self, place: int) -> tuple[int]:  # noqa: N802
        del self._memory[place]
        return (0,)

    def cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> tuple[int]:  # noqa: N802
        ctypes.memmove(to, source, size)
        return (0,)

    def cuMemcpyDtoDAsync(self, to: int, source: int, size: int, stream: int) -> tuple[int]:  # noqa: N802
        ctypes.memmove(to, source, size)
        return (0,)

    def cuMemcpyDtoH(self, to: int, source: int, size: int) -> tuple[int]:  # noqa: N802
        ctypes.memmove(to, source, size)
        return (0,)

    def cuMemsetD8Async(self, to: int, byte: int, size: int, stream: int) -> tuple[int]:  # noqa: N802
        ctypes.memset(to, byte, size)
        return (0,)

    def cuModuleLoadData(self, image: bytes) -> tuple[int, Any]:  # noqa: N802
        if image not in self._libraries:
            self._libraries[image] = ctypes.CDLL(os.fsdecode(image))
        return 0, self._libraries[image]

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[int, Any]:  # noqa: N802
        function = getattr(module, f"run_{name.decode()}")
        function.restype = ctypes.c_char_p
        return 0, function

    def cuOccupancyMaxActiveClusters(self, kernel: Any, config: Any) -> tuple[int, int]:  # noqa: N802
        return 0, PROCESSORS // _cluster(config)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_: Any) -> tuple[int, int]:  # noqa: N802
        return 0, 1

    def cuLaunchKernelEx(self, config: Any, kernel: Any, parameters: int, extra: int) -> tuple[Any]:  # noqa: N802
        launch = _Launch(
            grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
            block=(config.blockDimX, config.blockDimY, config.blockDimZ),
            cluster=_cluster(config),
            cooperative=any(attribute.value.cooperative for attribute in config.attrs),
            shared=config.sharedMemBytes,
            seed=self.seed,
        )
        (parameter,) = (ctypes.c_void_p * 1).from_address(parameters)
        error = kernel(ctypes.byref(launch), ctypes.c_void_p(parameter))
        return (error.decode() or 0,)


def _cluster(config: Any) -> int:
    return next((a.value.clusterDim.x for a in config.attrs if hasattr(a.value.clusterDim, "x")), 1)


class CpuDevice(DeviceContext):
    """A `DeviceContext` whose kernels run on the CPU."""

    def download(self, place: int, array: Any) -> Any:
        """As a device's; numbers that came from shared memory which no thread had written are an error."""
        found = super().download(place, array)
        if found.dtype == np.float32:
            bits = np.ascontiguousarray(found).view(np.uint32) & 0x7FFFFFFF
            strange = bits[(bits & 0xFFFF0000) == UNWRITTEN]
            if strange.size:
                words = sorted({int(word) & 0xFFFF for word in strange})[:8]
                raise AssertionError(f"{strange.size} results come from shared memory that no thread wrote: {words}")
        return found
