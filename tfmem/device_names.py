"""Names of devices, as users and TensorFlow write them. Pure."""

from __future__ import annotations

import re


def plain_name(given: str) -> str:
    """The type and number of a device: "GPU:1" for "/gpu:1" or "/job:localhost/replica:0/task:0/device:GPU:1".

    "" for what is not the name of a device.
    """
    match = re.fullmatch(r"(?:/job:[^/]*/replica:[0-9]+/task:[0-9]+)?/?(?:device:)?([A-Za-z]+:[0-9]+)", given)
    return match[1].upper() if match else ""


def allocator_of(name: str) -> str:
    """The device whose allocator gives a device its memory, both as `plain_name` has them: all CPUs have one."""
    return "CPU:0" if name.startswith("CPU:") else name
