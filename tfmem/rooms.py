"""What is free of a GPU's memory before a step, and how small tensors are kept from splitting it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from graph_passes.analysis.fragmentation import SMALL, Room
from graph_passes.analysis.timeline import Timeline
from tfmem.engine import Engine
from tfmem.measuring import alone

# Rooms beyond those of the step's own small tensors: for what kernels allocate while they run.
_MORE = (256, 1 << 10, 1 << 12, 1 << 14, SMALL) * 16


def find_room(engine: Engine, timeline: Timeline, budget: int) -> Room:
    """The chunks that are free now, or a guess where the allocator does not tell; `budget` bytes may be in use."""
    with alone(), context.eager_mode(), tf.device(engine.target.name):
        rows = engine.library.chunks().numpy().tolist()
    if not rows:
        return replace(Room.guess(engine.target.memory, timeline.base), limit=budget)
    origin = rows[0][0]
    return Room(tuple((address - origin, size) for address, size, in_use in rows if not in_use), limit=budget)


def keep_apart(engine: Engine, timeline: Timeline) -> list[Any]:
    """Make rooms for the small tensors of a step; they are there as long as the result lives.

    Best fit puts a small tensor into the smallest chunk that holds it, at worst into one that a large tensor needs in
    one piece. Some of them stay: the statistics of a normalisation are a new tensor after every step. So each gets a
    chunk of its own size. They are few bytes altogether.
    """
    sizes = sorted([*(buffer.nbytes for buffer in timeline.buffers if buffer.nbytes < SMALL), *_MORE])
    with alone(), context.eager_mode(), tf.device(engine.target.name):
        try:
            return list(engine.library.rooms(sizes))
        except tf.errors.ResourceExhaustedError:
            return []
