"""TensorFlow's profiler, and so TensorBoard, shows what a region runs: its kernels and calls, by the ops in them."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tests.tf.stitched_steps import Softmax, batch, optimized, require_stitched


def events(directory: Path) -> list[str]:
    """Names of all events of the host."""
    found: list[str] = []
    for file in directory.rglob("*.xplane.pb"):
        for plane in xplane_pb2.XSpace.FromString(file.read_bytes()).planes:
            used = {event.metadata_id for line in plane.lines for event in line.events}
            found += [plane.event_metadata[number].name for number in used]
    return found


def test_a_region_shows_its_members(tmp_path: Path) -> None:
    step = optimized(Softmax().step)
    x, y = batch()
    step(x, y)
    report = require_stitched(step, "MatMul", "AssignSubVariableOp")
    tf.profiler.experimental.start(str(tmp_path))
    step(x, y)
    tf.profiler.experimental.stop()
    names = events(tmp_path)
    (region,) = report.regions
    assert any(region.name in name for name in names)  # the op
    for each in region.steps:
        if each.kind in ("kernel", "call"):
            members = {op for op, _ in each.ops}
            assert any(members <= set(name.split(",")) for name in names), (each, names)
