"""Finds and loads the op library built for the TensorFlow that runs.

Importing this module loads nothing: planning needs no op library, and says so only when run.
"""

import ctypes
import dataclasses
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple

from custom_ops.build_flags import PACKAGE, library_name
from custom_ops.dynamic import op as dynamic_op
from custom_ops.errors import OpLibraryError
from custom_ops.fusion import gradient as fusion_gradient
from custom_ops.recurrent import op as recurrent_op

if TYPE_CHECKING:
    import tensorflow as tf


Fault = Literal["copy_out", "copy_in", "allocate"]

_FAULTS: tuple[Fault, ...] = ("copy_out", "copy_in", "allocate")  # numbered as in ops/memory/faults.h
_ERROR_BYTES = 4096
_KEY_BYTES = 64


class Counters(NamedTuple):
    """What the op library counted, in the order of ops/c_api.cc. Sizes in bytes.

    The first six grow until `Library.reset_counters`; the others say what exists now.
    `stall_ns` is how long compute waited in MemOpAwait and MemOpRelease: time of the compute
    stream on a GPU (only while `Library.set_stall_timing` is on), summed wall time on the CPU.
    """

    offloads: int
    prefetches: int
    bytes_out: int
    bytes_in: int
    stall_ns: int
    driver_errors: int
    live_tickets: int
    pinned_bytes_allocated: int
    pinned_bytes_in_use: int
    spill_bytes_allocated: int
    spill_bytes_in_use: int
    open_spill_files: int
    open_events: int
    open_streams: int


@dataclass(frozen=True)
class ProbeRow:
    """What one MemOpProbe recorded, in the order of ops/memory/probe.h.

    `host_ns` is a steady clock's; `device_ns` counts from the run's first row, -1 without a GPU.
    `peak_bytes` is the most that was in use since the probe that ran before. Bytes are -1 where
    the device's allocator keeps no statistics.
    """

    index: int
    host_ns: int
    device_ns: int
    bytes_in_use: int
    peak_bytes: int


@dataclass(frozen=True)
class LinkBandwidth:
    """Bytes per second between a GPU and pinned host memory, alone and with both ways busy."""

    to_host: float
    to_device: float
    both_to_host: float
    both_to_device: float


@dataclass(frozen=True)
class SpillBandwidth:
    """Bytes per second to and from a spill file, as the operating system caches it."""

    write: float
    read: float


class HostMemory(NamedTuple):
    """Bytes that can be allocated without swapping, and that there are at all, within the machine and the process's
    control groups; `UNKNOWN_MEMORY` where the system does not say."""

    available: int
    limit: int


UNKNOWN_MEMORY = (1 << 63) - 1


@dataclass(frozen=True)
class Library:
    """The loaded op library: its ops, and what it knows about itself.

    Attributes:
        path: the file.
        ops: TensorFlow's generated wrappers.
    """

    path: Path
    ops: ModuleType
    _functions: ctypes.CDLL

    def stats(self, reset: bool = False, name: str | None = None) -> "tf.Tensor":
        """MemOpStats: int64[3] of bytes in use, peak and limit of the device's allocator."""
        return self.ops.mem_op_stats(reset=reset, name=name)

    def chunks(self, name: str | None = None) -> "tuple[tf.Tensor, tf.Tensor]":
        """MemOpChunks: int64[n, 3] of how far behind the first, bytes and whether it is in use, of the device's
        allocator's chunks; and int64[] of how many bytes it may grow by."""
        return self.ops.mem_op_chunks(name=name)

    def sharing(self, tensors: "Sequence[tf.Tensor]", name: str | None = None) -> "tf.Tensor":
        """MemOpSharing: int64[n], for each tensor the first one that has its memory."""
        return self.ops.mem_op_sharing(tensors=list(tensors), name=name)

    def reserve(self, sizes: Sequence[int], name: str | None = None) -> "list[tf.Tensor]":
        """MemOpReserve: leaves free chunks of these sizes as long as the result lives."""
        return self.ops.mem_op_reserve(sizes=sizes, count=len(sizes), name=name)

    def spill_key(self, directory: str) -> str:
        """What stands for a directory of spill files in this process's graphs; "" for the system's temporary one."""
        key = ctypes.create_string_buffer(_KEY_BYTES)
        path = ctypes.c_char_p(os.fsencode(directory))
        self._functions.tfmem_spill_directory_key(path, key, ctypes.c_int64(_KEY_BYTES))
        return key.value.decode()

    def counters(self) -> Counters:
        """Reads all counters."""
        values = (ctypes.c_int64 * len(Counters._fields))()
        self._functions.tfmem_counters(values)
        return Counters(*values)

    def reset_counters(self) -> None:
        """Zeroes the counters of what flowed; those of what exists stay."""
        self._functions.tfmem_reset_counters()

    def set_stall_timing(self, enabled: bool) -> None:
        """Turns the timing of waits on GPUs on or off; off at first."""
        self._functions.tfmem_set_stall_timing(ctypes.c_bool(enabled))

    def probes(self, run: int) -> list[ProbeRow]:
        """Reads table `run`, ordered by index. Waits for the device to reach its rows."""
        capacity, fields = 0, len(dataclasses.fields(ProbeRow))
        while True:
            values = (ctypes.c_int64 * (capacity * fields))()
            count = self._functions.tfmem_read_probes(ctypes.c_int64(run), values, ctypes.c_int64(capacity))
            if count <= capacity:
                return [ProbeRow(*values[i : i + fields]) for i in range(0, count * fields, fields)]
            capacity = count

    def clear_probes(self, run: int | None = None) -> None:
        """Forgets table `run`, or all."""
        self._functions.tfmem_clear_probes(ctypes.c_int64(-1 if run is None else run))

    def inject_fault(self, kind: Fault, after: int = 0, times: int = 1) -> None:
        """Makes copies or allocations fail, for tests.

        Args:
            kind: what fails.
            after: how many succeed before.
            times: how many fail; 0 disarms.
        """
        self._functions.tfmem_inject_fault(
            ctypes.c_int(_FAULTS.index(kind)), ctypes.c_int64(after), ctypes.c_int64(times)
        )

    def limit_vector_bytes(self, size: int) -> None:
        """Keeps the CPU kernels from vectors wider than 16, 32 or 64 bytes, for tests. While no op runs."""
        self._functions.tfmem_limit_vector_bytes(ctypes.c_int(size))

    def trim(self, keep_pinned: bool = False) -> None:
        """Frees what the pools hold idle: pinned blocks, spill files, events.

        With `keep_pinned`, pinned blocks stay, since locking memory takes long: `trim_unused` frees those of them that
        nothing has taken until then.
        """
        self._functions.tfmem_trim(ctypes.c_bool(keep_pinned))

    def trim_unused(self) -> None:
        """Frees the idle pinned blocks that nothing took since `trim(keep_pinned=True)`."""
        self._functions.tfmem_trim_unused()

    def host_memory(self, root: str = "") -> HostMemory:
        """Reads what the host has left; `root` is where the system's files lie, for tests."""
        values = (ctypes.c_int64 * len(HostMemory._fields))()
        self._functions.tfmem_host_memory(ctypes.c_char_p(os.fsencode(root)), values)
        return HostMemory(*values)

    def share_op(self, op: str) -> bool:
        """Whether there is an op "TfmemShared<op>", whose kernel several graphs can share; see
        ops/random/shared_kernels.h.

        It has the attributes of `op`, and `tfmem_stream` and `tfmem_draw`.
        """
        return bool(self._functions.tfmem_share_op(ctypes.c_char_p(op.encode())))

    def open_stream(self) -> int:
        """A new value of `tfmem_stream`."""
        return int(self._functions.tfmem_open_stream())

    def close_stream(self, stream: int) -> None:
        """No graph finds the stream any more."""
        self._functions.tfmem_close_stream(ctypes.c_int64(stream))

    def link_bandwidth(self, device: int = 0, size: int = 256 << 20) -> LinkBandwidth:
        """Measures the link of GPU `device`, as the driver counts them, with copies of `size` bytes. Blocks.

        Allocates 2 * `size` bytes on the GPU, beside TensorFlow's own memory.

        Raises:
            OpLibraryError: there is no GPU, or no memory left on it.
        """
        return LinkBandwidth(*self._measure("tfmem_link_bandwidth", 4, ctypes.c_int(device), size))

    def links_bandwidth(self, devices: Sequence[int], size: int = 256 << 20) -> list[tuple[float, float]]:
        """Measures the links of several GPUs, as the driver counts them, while all are busy in both directions. Blocks.

        Allocates 2 * `size` bytes on each GPU, beside TensorFlow's own memory, and as much on the host.

        Returns:
            Bytes a second to the host and to the device, for each GPU.

        Raises:
            OpLibraryError: there is no such GPU, or no memory left on one.
        """
        values = (ctypes.c_double * (2 * len(devices)))()
        ordinals = (ctypes.c_int * len(devices))(*devices)
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        count, capacity = ctypes.c_int64(len(devices)), ctypes.c_int64(_ERROR_BYTES)
        measure = self._functions.tfmem_links_bandwidth
        if measure(ordinals, count, ctypes.c_int64(size), values, error, capacity) != 0:
            raise OpLibraryError(f"bandwidth test failed: {error.value.decode(errors='replace')}")
        return list(zip(values[::2], values[1::2], strict=True))

    def spill_bandwidth(self, directory: str = "", size: int = 64 << 20) -> SpillBandwidth:
        """Measures a spill directory with one file of `size` bytes. Blocks.

        Raises:
            OpLibraryError: the directory is missing, read-only or full.
        """
        path = ctypes.c_char_p(os.fsencode(directory))
        return SpillBandwidth(*self._measure("tfmem_spill_bandwidth", 2, path, size))

    def _measure(self, function: str, count: int, target: ctypes.c_int | ctypes.c_char_p, size: int) -> list[float]:
        values = (ctypes.c_double * count)()
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        capacity = ctypes.c_int64(_ERROR_BYTES)
        if self._functions[function](target, ctypes.c_int64(size), values, error, capacity) != 0:
            raise OpLibraryError(f"bandwidth test failed: {error.value.decode(errors='replace')}")
        return list(values)


def find_library(tensorflow_version: str, directory: Path = PACKAGE) -> Path:
    """The op library for a version of TensorFlow.

    Raises:
        OpLibraryError: there is none; names the versions that there are, and how to build one.
    """
    path = directory / library_name(tensorflow_version)
    if path.exists():
        return path
    built = ", ".join(sorted(other.name for other in directory.glob("_tfmem_ops.tf*.so")))
    raise OpLibraryError(
        f"no op library for TensorFlow {tensorflow_version} in {directory} (found: "
        f"{built or 'none'}, expected: {path.name}). {build_hint(directory)}"
    )


def build_hint(directory: Path = PACKAGE) -> str:
    """What to do where a library is missing in `directory`: in a checkout another cure helps than elsewhere."""
    if not (directory.parent / "setup.py").exists():
        return "Build one: `pip install --no-build-isolation .` in a checkout."
    return (
        f"{directory.parent} is a checkout, and Python imports tfmem from it even if tfmem is installed. "
        f"Build in it: `cd {directory.parent} && python setup.py build_ext --inplace`, or start Python elsewhere."
    )


@functools.cache
def load() -> Library:
    """Loads the op library for the TensorFlow that runs, once.

    Raises:
        OpLibraryError: there is none, or it does not load.
    """
    import tensorflow as tf

    path = find_library(tf.__version__)
    try:
        ops = tf.load_op_library(str(path))
        functions = ctypes.CDLL(str(path))
    except (tf.errors.OpError, OSError) as error:
        raise OpLibraryError(
            f"{path.name} does not load into TensorFlow {tf.__version__}, so it was built for "
            f"another one: {error}. {build_hint(path.parent)}"
        ) from error
    functions.tfmem_read_probes.restype = ctypes.c_int64
    functions.tfmem_share_op.restype = ctypes.c_bool
    functions.tfmem_open_stream.restype = ctypes.c_int64
    recurrent_op.register_gradient(ops)
    fusion_gradient.register_gradient()
    dynamic_op.register_gradient(ops)
    tf.no_gradient("TfmemStepDraws")  # numbers that are drawn depend on no other numbers
    return Library(path, ops, functions)
