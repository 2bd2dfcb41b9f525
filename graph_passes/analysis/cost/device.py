"""A device as data: what a step can reach on it. Profiles lie in `devices/*.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from custom_ops.machine import Machine, from_json
from graph_passes.errors import OptionsError

_PROFILES = Path(__file__).parent / "devices"


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


def profiles() -> list[str]:
    """Names of the profiles that exist."""
    return sorted(path.stem for path in _PROFILES.glob("*.json"))


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


def detect(description: str) -> Device:
    """The profile for a device as its driver names it ('NVIDIA H200'); the plainest GPU if none fits."""
    text = description.lower().replace(" ", "")
    for name in sorted(profiles(), key=len, reverse=True):
        if name not in ("unit", "cpu") and name in text:
            return load(name)
    return load("v100")


def _read(name: str) -> dict[str, Any]:
    path = _PROFILES / f"{name}.json"
    if not path.is_file():
        raise OptionsError(f"no device profile '{name}'; there are: {', '.join(profiles())}")
    values: dict[str, Any] = json.loads(path.read_text())
    return values
