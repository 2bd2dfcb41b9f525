"""The kernels that a step launches on a GPU, by TensorFlow's profiler, and where the step's time goes."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

STEPS = 5
STEP = "tfmem_benchmark_step"  # the profiler's name for one of them
LARGEST = 10  # kernels that are named
# copies and fills of memory, which the profiler shows among the kernels
COPIES = ("memcpy", "memset")


class Event(NamedTuple):
    """Something that took time, in picoseconds."""

    name: str
    begin: int
    end: int


def profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """What `counted` finds of some steps, and `wall_ms`, milliseconds of one while it is profiled.

    Without a GPU there are no kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        began = time.perf_counter()
        for number in range(STEPS):
            with tf.profiler.experimental.Trace(STEP, step_num=number):
                step()
        wall = time.perf_counter() - began
        tf.profiler.experimental.stop()
        found = counted([file.read_bytes() for file in sorted(Path(folder).rglob("*.xplane.pb"))], STEPS)
    return found | {"wall_ms": 1e3 * wall / STEPS}


def counted(files: list[bytes], steps: int) -> dict[str, Any]:
    """Counts from the profiler's files, the mean of some steps.

    Returns:
        `kernels`, and `copies` and fills of memory: how many. In milliseconds `kernel_ms`, of kernels alone, and
        `busy_ms`, of both; `largest`, the kernels that take the most time, each with its `name`, `count` and `ms`.
        If the steps are marked in the profile, three more, in which nothing runs: `before_ms` the step's first kernel,
        in `gaps_ms` between them, and `after_ms` the last one.
    """
    device, marks = _events(files)
    kernels = [event for event in device if not event.name.lower().startswith(COPIES)]
    found: dict[str, Any] = {
        "kernels": len(kernels) / steps,
        "copies": (len(device) - len(kernels)) / steps,
        "kernel_ms": sum(event.end - event.begin for event in kernels) / steps / 1e9,
        "busy_ms": sum(event.end - event.begin for event in device) / steps / 1e9,
        "largest": _largest(kernels, steps),
    }
    idle = [each for mark in marks if (each := _idle(mark, device))]
    if idle and len(idle) == steps:
        names = ("before_ms", "gaps_ms", "after_ms")
        found |= {name: sum(parts) / steps / 1e9 for name, parts in zip(names, zip(*idle, strict=True), strict=True)}
    return found


def _events(files: list[bytes]) -> tuple[list[Event], list[Event]]:
    """What ran on GPUs, and the steps, as marked on the host."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2  # TensorFlow 2.21 has it here

    device, marks = list[Event](), list[Event]()
    for content in files:
        for plane in xplane_pb2.XSpace.FromString(content).planes:
            on_gpu = plane.name.startswith("/device:GPU:")
            for line in plane.lines:
                if on_gpu and line.name.startswith("Stream"):  # others sum these up by op, module and step
                    device += _of_line(plane, line)
                elif plane.name.startswith("/host:CPU"):
                    marks += [event for event in _of_line(plane, line) if event.name.partition("#")[0] == STEP]
    return device, marks


def _of_line(plane: Any, line: Any) -> Iterator[Event]:
    for event in line.events:
        begin = 1000 * line.timestamp_ns + event.offset_ps
        yield Event(plane.event_metadata[event.metadata_id].name, begin, begin + event.duration_ps)


def _largest(kernels: Sequence[Event], steps: int) -> list[dict[str, Any]]:
    """The slowest kernels by name."""
    times: dict[str, list[int]] = defaultdict(list)
    for event in kernels:
        times[event.name].append(event.end - event.begin)
    order = sorted(times, key=lambda name: (-sum(times[name]), name))[:LARGEST]
    return [{"name": name, "count": len(times[name]) / steps, "ms": sum(times[name]) / steps / 1e9} for name in order]


def _idle(mark: Event, device: Sequence[Event]) -> tuple[int, int, int] | None:
    """Picoseconds of a step in which no GPU does anything: before the first kernel, between them, after the last."""
    inside = sorted((event.begin, event.end) for event in device if mark.begin <= event.begin < mark.end)
    if not inside:
        return None
    gaps, end = 0, inside[0][0]
    for begin, until in inside:  # streams may overlap
        gaps += max(0, begin - end)
        end = max(end, until)
    return inside[0][0] - mark.begin, gaps, max(0, mark.end - end)
