"""The device a step runs on: its name, its memory, its profile."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import config as framework_config

from custom_ops.errors import OpLibraryError
from custom_ops.load import Library
from custom_ops.spec import Precision
from graph_passes.analysis.simulate import Link
from graph_passes.cost import device as profiles
from graph_passes.errors import OptionsError
from tfmem.config import kernel_flags


@dataclass(frozen=True)
class Target:
    """One device of this process.

    Attributes:
        name: as TensorFlow places ops on it, "/device:GPU:0".
        description: what it is, "NVIDIA H200".
        memory: bytes TensorFlow may use of it; on the CPU, the machine's memory.
        profile: what it can do.
        ordinal: which of its type it is, as the driver counts them.
        precision: what TensorFlow lets products of float32 round to on it.
    """

    name: str
    description: str
    memory: int
    profile: profiles.Device
    ordinal: int = 0
    precision: Precision = field(default="highest", compare=False)  # a setting, no other device

    @property
    def is_gpu(self) -> bool:
        """Whether ops run on a stream of their own."""
        return self.kind == "GPU"

    @property
    def kind(self) -> str:
        """Its type, "CPU" or "GPU"."""
        return self.name.split(":")[1]


def find_target(wanted: str, library: Library) -> Target:
    """The device that options name, or the first GPU, or the CPU.

    Raises:
        OptionsError: the named device does not exist.
    """
    logical = tf.config.list_logical_devices()
    gpus = [device.name for device in logical if device.device_type == "GPU"]
    names = {device.name: device for device in logical if device.device_type in ("CPU", "GPU")}
    if wanted:
        matches = [name for name in names if name.endswith(wanted.removeprefix("/device:").upper())]
        if not matches:
            raise OptionsError(f"device={wanted!r}: there is no such device; there are: {', '.join(names)}")
        name = matches[0]
    else:
        name = gpus[0] if gpus else next(name for name in names if "CPU" in name)
    short = name[name.index("/device:") :]
    if "CPU" in name:
        return Target(short, "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), profiles.load("cpu"))
    index = [device.name for device in logical if device.device_type == "GPU"].index(name)
    physical = tf.config.list_physical_devices("GPU")
    ordinal = min(index, len(physical) - 1)
    details = tf.config.experimental.get_device_details(physical[ordinal])
    description = str(details.get("device_name", "GPU"))
    limit = memory(library, short).bytes_limit
    return Target(short, description, limit, profiles.detect(description), ordinal, products_of_float32(details))


def products_of_float32(details: Mapping[str, Any]) -> Precision:
    """What TensorFlow lets them round to by now, on a GPU of which it says `details`."""
    has_tf32 = details.get("compute_capability", (0, 0)) >= (8, 0)
    return "tf32" if has_tf32 and tf.config.experimental.tensor_float_32_execution_enabled() else "highest"


def conditions(target: Target) -> dict[str, Any]:
    """What measurements on `target` depend on besides the graph, as JSON-able values."""
    facts: dict[str, Any] = {
        "device": target.description,
        "tensorflow": tf.__version__,
        "deterministic": framework_config.is_op_determinism_enabled(),
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "flags": kernel_flags(),
    }
    if target.is_gpu:
        facts |= {"driver": _first_line(Path("/proc/driver/nvidia/version")), "cudnn": _cudnn_version()}
    return facts


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return ""


def _cudnn_version() -> int:
    """Of the cuDNN that TensorFlow has loaded; 0 if it has loaded none."""
    major = str(tf.sysconfig.get_build_info().get("cudnn_version", "")).partition(".")[0]
    try:
        return int(ctypes.CDLL(f"libcudnn.so.{major}").cudnnGetVersion())
    except (OSError, AttributeError):
        return 0


class Memory(NamedTuple):
    """What a device's allocator says, in bytes."""

    bytes_in_use: int
    peak_bytes: int
    bytes_limit: int


def memory(library: Library, device: str, reset: bool = False) -> Memory:
    """Ask the allocator of `device`; with `reset`, its peak starts anew."""
    # Unlike tf.init_scope, this leaves a plain tf.Graph too.
    with context.eager_mode(), tf.device(device):
        return Memory(*(int(value) for value in library.stats(reset).numpy()))


@functools.cache
def measured_link(target: Target, library: Library, spill_directory: str = "") -> Link:
    """Bytes a second out of and into the device's memory, measured once with both directions busy."""
    try:
        if target.is_gpu:
            link = library.link_bandwidth(int(target.name.rpartition(":")[2]))
            return Link(link.both_to_host, link.both_to_device)
        spill = library.spill_bandwidth(spill_directory)
        return Link(spill.write, spill.read)
    except OpLibraryError:  # no memory or space left to measure with; planning will say so if it matters
        return Link(target.profile.offload, target.profile.prefetch)
