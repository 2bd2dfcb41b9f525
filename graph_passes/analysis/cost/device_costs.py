"""A device as data: what a step can reach on it. Profiles lie in `custom_ops/devices/*.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from custom_ops.machine import DEVICES, Machine, from_json
from graph_passes.analysis.cost.kernel_costs import KernelDevice, Small
from graph_passes.errors import OptionsError

_MEASURED = "h200"  # stands for devices of which kernels were not measured


@dataclass(frozen=True)
class Device:
    """One processor with its memory and its link to the host.

    Attributes:
        name: the profile's name.
        flops: floating-point operations a second in dense products, fp32 inputs.
        bandwidth: bytes a second to and from device memory.
        launch: seconds an op takes however small it is.
        offload: bytes a second from device to host (or to a spill file).
        prefetch: bytes a second from host to device.
        memory: bytes of device memory; 0 when it is the host's own.
    """

    name: str
    flops: float
    bandwidth: float
    launch: float
    offload: float
    prefetch: float
    memory: int = 0


@dataclass(frozen=True)
class ProductSizes:
    """The sizes from which on a product of float32 takes less time on tensor cores.

    Attributes:
        least_size: of rows, depth and columns; with fewer of one, an operand is split for too little.
        least_multiplications: of a product, unless
        large_operand: the right operand has so many numbers.
    """

    least_size: int
    least_multiplications: int
    large_operand: int


def profiles() -> list[str]:
    """Names of the profiles that exist."""
    return sorted(path.stem for path in DEVICES.glob("*.json"))


def load(name: str) -> Device:
    """Read a profile.

    Raises:
        OptionsError: there is no such profile.
    """
    known = {field.name for field in fields(Device)}
    return Device(name=name, **{key: value for key, value in _read(name).items() if key in known})


def machine(name: str) -> Machine:
    """What the profile says of kernels: its `recurrent` part. Profiles without one stand back to the v100's.

    Raises:
        OptionsError: there is no such profile.
    """
    return from_json(_read(name).get("recurrent") or _read("v100")["recurrent"])


def measured_machine(description: str, arch: int, multiprocessors: int) -> Machine | None:
    """What the profile of this very GPU says of recurrent kernels, so that it need not be measured; None without one.

    Args:
        description: as its driver names it.
        arch, multiprocessors: of the GPU; a part of one is another GPU.
    """
    known = _read(detect(description).name).get("recurrent")
    if known is None:
        return None
    found = from_json(known)
    return found if (found.arch, found.multiprocessors) == (arch, multiprocessors) else None


def product_sizes(name: str) -> ProductSizes:
    """What the profile says of float32 products on tensor cores, or that of the device on which they were measured.

    Raises:
        OptionsError: there is no such profile.
    """
    found = _part(name, "products")
    return ProductSizes(**{field.name: int(found[field.name]) for field in fields(ProductSizes)})


def l2_bytes(name: str) -> int:
    """Bytes that a multiprocessor gets from L2 in a cycle, while all ask.

    Raises:
        OptionsError: there is no such profile.
    """
    return int(_part(name, "dynamic")["l2_bytes"])


def kernel_device(profile: Device, name: str) -> KernelDevice:
    """What kernels of regions take on a device.

    Args:
        profile: of the device. Copies take what its bandwidth says, unless the profile lists some.
        name: the device's.
    """
    found = region_costs(profile)
    least, most, listed = found.pop("copy", 0.0), found.pop("most", None), found.pop("copies", None)
    sizes = (0.0, 1e6, 1e9)
    copies = listed or [(size, least + size / profile.bandwidth) for size in sizes]
    small = None if most is None else Small(**most)
    return KernelDevice(name=name, copies=tuple((size, time) for size, time in copies), most=small, **found)


def region_costs(profile: Device) -> dict[str, Any]:
    """The `regions` part of a device's profile, or that of the GPU that stands for it: fields of `KernelDevice`, and
    `copy`, the seconds of the smallest copy, where no `copies` are listed."""
    return {key: value for key, value in _part(profile.name, "regions").items() if not key.startswith("_")}


def _part(name: str, part: str) -> dict[str, Any]:
    found: dict[str, Any] = _read(name).get(part) or _read(_MEASURED)[part]
    return found


def detect(description: str) -> Device:
    """The profile for a device as its driver names it ('NVIDIA H200'); the plainest GPU if none fits."""
    text = description.lower().replace(" ", "")
    for name in sorted(profiles(), key=len, reverse=True):
        if name not in ("unit", "cpu") and name in text:
            return load(name)
    return load("v100")


def _read(name: str) -> dict[str, Any]:
    path = DEVICES / f"{name}.json"
    if not path.is_file():
        raise OptionsError(f"no device profile '{name}'; there are: {', '.join(profiles())}")
    values: dict[str, Any] = json.loads(path.read_text())
    return values
