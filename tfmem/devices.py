"""The device a step runs on: its name, its memory, its profile."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import config as framework_config

from custom_ops.errors import OpLibraryError, warn
from custom_ops.load import Library
from custom_ops.recurrent.spec import Precision
from graph_passes.analysis.cost import device_costs as profiles
from graph_passes.analysis.memory.simulate import Link
from graph_passes.checks import shown
from graph_passes.errors import OptionsError
from tfmem.device_names import plain_name
from tfmem.gpu_ordinals import driver_ordinal
from tfmem.options import kernel_flags

_VECTOR = ("amx", "asimd", "avx", "fma", "sse", "sve")  # how names of a CPU's vector instructions begin


@dataclass(frozen=True)
class Target:
    """One device of this process.

    Attributes:
        name: as TensorFlow places ops on it, "/device:GPU:0".
        description: what it is, "NVIDIA H200".
        memory: bytes that TensorFlow may use of it; on the CPU, the memory of the machine or of its control group.
        profile: its speed, as data.
        ordinal: of a GPU, its number in the CUDA driver; that in its name is TensorFlow's own.
        precision: the rounding that TensorFlow allows products of float32 on it.
    """

    name: str
    description: str
    memory: int
    profile: profiles.Device
    ordinal: int = 0
    precision: Precision = field(default="highest", compare=False)  # a setting, no other device

    @property
    def is_gpu(self) -> bool:
        """Whether ops run on a GPU's stream."""
        return self.kind == "GPU"

    @property
    def plain_name(self) -> str:
        """Its name in options, "GPU:0"."""
        return self.name.removeprefix("/device:")

    @property
    def kind(self) -> str:
        """Its type, "CPU" or "GPU"."""
        return self.name.split(":")[1]


def find_target(wanted: str, library: Library) -> Target:
    """The device that options name, or the first GPU, or the CPU.

    Raises:
        OptionsError: the named device does not exist.
    """
    names = [f"/device:{name}" for name in device_names()]
    if wanted:
        name = f"/device:{plain_name(wanted)}"
        if name not in names:
            raise OptionsError(f"device={shown(wanted)}: there is no such device; there are: {', '.join(names)}")
    else:
        name = next((name for name in names if "GPU" in name), next(name for name in names if "CPU" in name))
    if "CPU" in name:
        return Target(name, "CPU", cpu_memory(library), profiles.load("cpu"))
    physical = tf.config.list_physical_devices("GPU")
    ordinal = _driver_ordinal(int(name.rpartition(":")[2]))
    device = next(device for device in physical if device.name.endswith(f":{ordinal}"))
    details = tf.config.experimental.get_device_details(device)
    description = str(details.get("device_name", "GPU"))
    limit = memory(library, name).bytes_limit
    return Target(name, description, limit, profiles.detect(description), ordinal, products_of_float32(details))


def device_names() -> list[str]:
    """Plain names of the CPUs and GPUs that TensorFlow may place ops on."""
    logical = [device for device in tf.config.list_logical_devices() if device.device_type in ("CPU", "GPU")]
    return [device.name[device.name.index("/device:") + len("/device:") :] for device in logical]


def _driver_ordinal(index: int) -> int:
    """The GPU, as the driver counts them, on which the logical device "GPU:<index>" lies."""
    physical, visible = tf.config.list_physical_devices("GPU"), tf.config.get_visible_devices("GPU")
    split = {
        device.name: [part.experimental_device_ordinal for part in parts]
        for device in visible
        if (parts := tf.config.get_logical_device_configuration(device))
    }
    found = driver_ordinal([d.name for d in physical], [d.name for d in visible], split, index)
    return found if found is not None else min(index, len(physical) - 1)  # a session chose the devices by itself


def wait_for_devices() -> None:
    """Wait until this process's devices have run all that was given to them.

    TensorFlow's own `sync_devices` asks the devices of other workers, too, and fails there.
    """
    context.async_wait()
    devices = [device.name for device in tf.config.list_logical_devices() if device.device_type in ("CPU", "GPU")]
    here = next(name for name in devices if "CPU" in name).partition("/device:")[0]
    for name in devices:
        if name.startswith(f"{here}/"):
            with tf.device(name):
                tf.raw_ops.SyncDevice()


def cpu_memory(library: Library) -> int:
    """Bytes of the machine, or of the control group that the process is in."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, library.host_memory().limit)


def products_of_float32(details: Mapping[str, Any]) -> Precision:
    """The rounding that TensorFlow allows products of float32 now, on a GPU with these `details`."""
    has_tf32 = details.get("compute_capability", (0, 0)) >= (8, 0)
    return "tf32" if has_tf32 and tf.config.experimental.tensor_float_32_execution_enabled() else "highest"


def conditions(target: Target) -> dict[str, Any]:
    """All that measurements on `target` depend on besides the graph, as JSON-able values."""
    facts: dict[str, Any] = {
        "device": target.description,
        "tensorflow": tf.__version__,
        "deterministic": is_deterministic(),
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "flags": kernel_flags(),
    }
    if target.is_gpu:
        facts |= {"driver": _first_line(Path("/proc/driver/nvidia/version")), "cudnn": _cudnn_version()}
    return facts


def instructions(target: Target) -> str:
    """The instructions that kernels on `target` may be made of: a GPU's compute capability, or what the CPU has."""
    if target.is_gpu:
        physical = tf.config.list_physical_devices("GPU")
        device = next(device for device in physical if device.name.endswith(f":{target.ordinal}"))
        details = tf.config.experimental.get_device_details(device)
        return ".".join(map(str, details.get("compute_capability", ())))
    return cpu_instructions()


def cpu_instructions() -> str:
    """The vector instructions that the CPU has; "" where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return " ".join(sorted(flag for flag in flags.split() if flag.startswith(_VECTOR)))


def is_deterministic() -> bool:
    """Whether the user asked TensorFlow for ops that give the same bits in every run."""
    return bool(framework_config.is_op_determinism_enabled())


def _first_line(path: Path) -> str:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return ""


def _cudnn_version() -> int:
    """The version of the cuDNN that TensorFlow has loaded; 0 if it has loaded none."""
    major = str(tf.sysconfig.get_build_info().get("cudnn_version", "")).partition(".")[0]
    try:
        return int(ctypes.CDLL(f"libcudnn.so.{major}").cudnnGetVersion())
    except (OSError, AttributeError):
        return 0


class Memory(NamedTuple):
    """The statistics of a device's allocator, in bytes."""

    bytes_in_use: int
    peak_bytes: int
    bytes_limit: int


def memory(library: Library, device: str, reset: bool = False) -> Memory:
    """The statistics of the allocator of `device`; `reset` resets its peak afterwards."""
    # Unlike tf.init_scope, this leaves a plain tf.Graph too.
    with context.eager_mode(), tf.device(device):
        return Memory(*(int(value) for value in library.stats(reset).numpy()))


class MeasuredLink(Link):
    """A link whose bandwidth is measured on first use.

    Measuring takes large buffers and a good part of a second, and a step in which nothing moves never needs it.
    """

    def __init__(self, measure: Callable[[], Link]) -> None:
        """Measure nothing yet; see `measured_link`."""
        self.__dict__["_measure"] = measure  # the class that it extends is frozen

    @property
    def offload(self) -> float:
        """Bytes a second out of the device's memory."""
        return self._measured.offload

    @property
    def prefetch(self) -> float:
        """Bytes a second into it."""
        return self._measured.prefetch

    @property
    def _measured(self) -> Link:
        """What was measured: kept, since plans read it thousands of times."""
        own = self.__dict__
        if "_found" not in own:
            own["_found"] = own["_measure"]()
        found: Link = own["_found"]
        return found


@functools.cache
def measured_link(target: Target, library: Library, spill_directory: str = "") -> Link:
    """Bytes a second out of and into the device's memory, measured once with both directions busy."""
    try:
        if target.is_gpu:
            link = library.link_bandwidth(target.ordinal)
            return Link(link.both_to_host, link.both_to_device)
        spill = library.spill_bandwidth(spill_directory)
        return Link(spill.write, spill.read)
    except OpLibraryError as error:
        return _assumed_link(target, error)


@functools.cache
def measured_together(targets: tuple[Target, ...], library: Library) -> tuple[Link, ...]:
    """Bytes a second out of and into the memory of each GPU, measured once with both directions of all links busy.

    GPUs of a host may share a switch or the host's memory, so that each link is slower while the others are busy.
    """
    try:
        found = library.links_bandwidth([target.ordinal for target in targets])
        return tuple(Link(*each) for each in found)
    except OpLibraryError as error:
        return tuple(_assumed_link(target, error) for target in targets)


def links_together(targets: Sequence[Target], library: Library, spill_directory: str = "") -> tuple[Link, ...]:
    """The links of devices whose tensors move in the same step, in their order; each is measured on first use."""
    gpus = tuple(target for target in targets if target.is_gpu)

    def measure(target: Target) -> Link:
        if target.is_gpu and len(gpus) > 1:
            return measured_together(gpus, library)[gpus.index(target)]
        return measured_link(target, library, spill_directory)

    return tuple(MeasuredLink(functools.partial(measure, target)) for target in targets)


def _assumed_link(target: Target, error: OpLibraryError) -> Link:
    """The link of the device's profile, where no memory or space is left to measure with; warns of it."""
    assumed = Link(target.profile.offload, target.profile.prefetch)
    warn(
        f"the bandwidth between host and {target.description} could not be measured, so plans assume "
        f"{assumed.offload / 1e9:.3g} GB/s out and {assumed.prefetch / 1e9:.3g} GB/s in: {error}"
    )
    return assumed
