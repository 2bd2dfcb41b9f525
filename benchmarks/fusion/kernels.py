"""The kernels that a step launches on a GPU, by TensorFlow's profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

STEPS = 5
# copies and fills of memory, which the profiler shows among the kernels
COPIES = ("memcpy", "memset")


def profiled(step: Callable[[], Any]) -> dict[str, float]:
    """Kernels of a step, copies and fills of memory, and milliseconds that they take together; the mean of some steps.

    Without a GPU there are none.
    """
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        for _ in range(STEPS):
            step()
        tf.profiler.experimental.stop()
        return counted([file.read_bytes() for file in sorted(Path(folder).rglob("*.xplane.pb"))], STEPS)


def counted(files: list[bytes], steps: int) -> dict[str, float]:
    """The same, from the profiler's files."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2  # TensorFlow 2.21 has it here

    kernels, copies, picoseconds = 0, 0, 0
    for content in files:
        for plane in xplane_pb2.XSpace.FromString(content).planes:
            if not plane.name.startswith("/device:GPU:"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):  # others sum these up by op, module and step
                    continue
                for event in line.events:
                    is_copy = plane.event_metadata[event.metadata_id].name.lower().startswith(COPIES)
                    kernels, copies = kernels + (not is_copy), copies + is_copy
                    picoseconds += event.duration_ps
    return {"kernels": kernels / steps, "copies": copies / steps, "busy_ms": picoseconds / steps / 1e9}
