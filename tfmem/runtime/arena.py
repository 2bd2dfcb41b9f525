"""What is free of a device's memory before a step, and how small tensors are kept from splitting it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from graph_passes.analysis.memory.fragmentation import SMALL, Room
from graph_passes.analysis.memory.timeline import Timeline
from tfmem.runtime.engine import Engine
from tfmem.runtime.measuring_lock import alone

# Chunks beyond those of the step's own small tensors: for what kernels allocate while they run.
_MORE = (256, 1 << 10, 1 << 12, 1 << 14, SMALL) * 16


def separate(engine: Engine, variables: Iterable[tf.Variable]) -> None:
    """Give each variable memory of its own.

    Variables that began as one tensor share it until they are first written (both moments of Keras's Adam are one
    tensor of zeros). The step that writes them takes what they lack wherever there is room then: not seen by whoever
    measures before, and in the way of what is placed after. A variable that another thread writes for the first time in
    this very instant would lose that.
    """
    with alone(), context.eager_mode(), tf.device(engine.target.name):
        held = [(variable, variable.read_value()) for variable in variables if variable.dtype.is_floating]
        if not held:
            return
        owners = engine.library.sharing([value for _, value in held]).numpy().tolist()
        for index, (variable, value) in enumerate(held):
            if owners[index] != index and value.shape.num_elements():
                variable.assign(tf.raw_ops.DeepCopy(x=value))


def find_room(engine: Engine, timeline: Timeline, budget: int) -> Room:
    """The chunks that are free now, or a guess where the allocator does not tell; `budget` bytes may be in use.

    Small ones are left out: what is replayed fits none of them, and their neighbours stay. The last one is where more
    memory would be. An allocator that may grow (`set_memory_growth`) has a chunk more, apart from the others.
    """
    with alone(), context.eager_mode(), tf.device(engine.target.name):
        rows, growth = (value.numpy().tolist() for value in engine.library.chunks())  # outside of any graph
    if not rows:
        return replace(Room.guess(engine.target.memory, timeline.base), limit=budget)
    origin, end = rows[0][0], sum(rows[-1][:2])
    free = [(address - origin, size) for address, size, in_use in rows if not in_use]
    if growth >= SMALL:
        free.append((end - origin + SMALL, growth))
    large = [chunk for chunk in free[:-1] if chunk[1] >= SMALL]
    return Room((*large, *free[-1:]), limit=budget)


def keep_apart(engine: Engine, timeline: Timeline) -> list[Any]:
    """Reserve size classes for a step's small tensors, behind guard allocations; they stay as long as the result lives.

    Best fit puts a small tensor into the smallest chunk that holds it, at worst into one that a large tensor needs in
    one piece. Some of them stay: the statistics of a normalisation are a new tensor after every step. So each gets a
    chunk of its own size. They are few bytes altogether.
    """
    sizes = sorted([*(buffer.nbytes for buffer in timeline.buffers if buffer.nbytes < SMALL), *_MORE])
    with alone(), context.eager_mode(), tf.device(engine.target.name):
        try:
            return list(engine.library.reserve(sizes))
        except tf.errors.ResourceExhaustedError:
            return []
