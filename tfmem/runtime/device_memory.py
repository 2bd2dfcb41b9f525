"""A device's memory: what is in use and free before a step, and how small tensors are kept from splitting it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from custom_ops.load import Library
from graph_passes.analysis.memory.fragmentation import SMALL, Room
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import OffloadPlan
from tfmem.devices import Target, memory
from tfmem.runtime.host_memory import require_room
from tfmem.runtime.measuring_lock import alone

# Chunks beyond those of the step's own small tensors: for what kernels allocate while they run.
_MORE = (256, 1 << 10, 1 << 12, 1 << 14, SMALL) * 16
_PIECE = 1 << 20  # bytes; no dimension of a tensor that takes memory away exceeds 31 bits


def spare(free: Sequence[int], in_use: int, budget: int) -> int:
    """Bytes to take away, in one piece, so that a budget is what is left; 0 where none are beyond it.

    Args:
        free: size of each free chunk.
        in_use: bytes that are taken.
        budget: bytes, those in use among them.
    """
    return max(0, min(max(free, default=0), sum(free) + in_use - budget))


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, read from its allocator, and the host memory for tensors that move.

    Attributes:
        library: the op library.
        target: the device.
        offload: where tensors move, and how many bytes may.
    """

    library: Library
    target: Target
    offload: OffloadOptions = field(default_factory=OffloadOptions)

    @property
    def counts(self) -> bool:
        """Whether the allocator counts bytes."""
        return memory(self.library, self.target.name).bytes_in_use >= 0

    @property
    def in_use(self) -> int:
        """Bytes that are taken now; 0 where the allocator does not count."""
        return self._in_use()[0]

    @property
    def in_use_alone(self) -> int | None:
        """Bytes that are taken now; None if a step that is measured ran meanwhile: what it takes would be counted."""
        size, known = self._in_use()
        return size if known else None

    @property
    def free(self) -> int:
        """Bytes that are not in use now: on a CPU, within the control group."""
        if not self.target.is_gpu:
            return self.library.host_memory().available
        found = memory(self.library, self.target.name)
        return found.bytes_limit - found.bytes_in_use

    def _in_use(self) -> tuple[int, bool]:
        with alone(reads=True) as turn:
            return max(0, memory(self.library, self.target.name).bytes_in_use), turn.alone

    def reclaimed(self) -> bool:
        """Collect Python's cycles; whether less is in use afterwards.

        A tensor that only a cycle of objects holds is in use until Python's collector finds it, which depends on all
        else that the process did. A step that has no room beside such tensors would be refused, or divided, by chance.
        """
        before = self.in_use
        gc.collect()
        return self.in_use < before

    def require_host_room(self, timeline: Timeline, plan: OffloadPlan) -> None:
        """Raise if the host cannot take what `plan` moves; see `tfmem.runtime.host_memory`."""
        self.require_host_bytes(sum(timeline.buffers[move.buffer].nbytes for move in plan.moves))

    def require_host_bytes(self, moved: int) -> None:
        """Raise if the host cannot take so many bytes; see `tfmem.runtime.host_memory`."""
        require_room(moved, self.offload, self.target.is_gpu, self.library)

    def separate(self, variables: Iterable[tf.Variable]) -> None:
        """Copy variables that share a buffer, so that each has a separate one.

        Variables that began as one tensor share its buffer until they are first written: both moments of Keras's Adam
        are one tensor of zeros. The step that writes them would allocate the missing buffers wherever there is room. An
        earlier measurement would miss them, and they could block the place of a planned tensor. A first write by
        another thread at the same time would be lost.
        """
        with alone(), context.eager_mode(), tf.device(self.target.name):
            held = [(variable, variable.read_value()) for variable in variables if variable.dtype.is_floating]
            if not held:
                return
            owners = self.library.sharing([value for _, value in held]).numpy().tolist()
            for index, (variable, value) in enumerate(held):
                if owners[index] != index and value.shape.num_elements():
                    variable.assign(tf.raw_ops.DeepCopy(x=value))

    def room(self, timeline: Timeline, budget: int) -> Room:
        """The chunks that are free now, or a guess if the allocator reports none; `budget` bytes may be in use.

        Small ones are left out: what is replayed fits none of them, and their neighbours stay. The last one is where
        more memory would be. An allocator that may grow (`set_memory_growth`) has a chunk more, apart from the others.
        """
        with alone(), context.eager_mode(), tf.device(self.target.name):
            rows, growth = (value.numpy().tolist() for value in self.library.chunks())  # outside of any graph
        if not rows:
            return replace(Room.guess(self.target.memory, timeline.base), limit=budget)
        origin, end = rows[0][0], sum(rows[-1][:2])
        free = [(address - origin, size) for address, size, in_use in rows if not in_use]
        if growth >= SMALL:
            free.append((end - origin + SMALL, growth))
        large = [chunk for chunk in free[:-1] if chunk[1] >= SMALL]
        return Room((*large, *free[-1:]), limit=budget)

    @contextmanager
    def within(self, budget: int) -> Iterator[bool]:
        """Leave `budget` bytes of a GPU's memory, those in use now among them, to what runs in the block.

        cuDNN tries its algorithms when they first run, among those whose workspace finds room, and keeps the fastest.
        In more memory than the budget it chooses one whose workspace no plan has room for. An allocator that grows on
        demand is left alone: it would take the memory from other processes, and never return it.

        Yields:
            Whether there is less memory than before.
        """
        held = self._taken(budget) if self.target.is_gpu else None
        yield held is not None

    def _taken(self, budget: int) -> tf.Tensor | None:
        """A tensor that takes what is beyond `budget`, in one piece; None where nothing is, or finds no room."""
        with alone(), context.eager_mode(), tf.device(self.target.name):
            rows, growth = (value.numpy().tolist() for value in self.library.chunks())
            free = [size for _, size, in_use in rows if not in_use]
            size = spare(free, sum(size for _, size, in_use in rows if in_use), budget)
            if growth >= SMALL or size < _PIECE:
                return None
            try:
                return tf.raw_ops.Empty(shape=[size // _PIECE, _PIECE], dtype=tf.uint8)
            except tf.errors.ResourceExhaustedError:
                return None

    def keep_apart(self, timeline: Timeline) -> list[Any]:
        """Reserve size classes for a step's small tensors, behind guard allocations; they stay as long as the result
        lives.

        Best fit puts a small tensor into the smallest chunk that holds it, at worst into one that a large tensor needs
        in one piece. Some small tensors outlive the step: normalisation statistics are a new tensor after every step.
        So each small tensor gets a chunk of exactly its size. Together they take few bytes.
        """
        sizes = sorted([*(buffer.nbytes for buffer in timeline.buffers if buffer.nbytes < SMALL), *_MORE])
        with alone(), context.eager_mode(), tf.device(self.target.name):
            try:
                return list(self.library.reserve(sizes))
            except tf.errors.ResourceExhaustedError:
                return []
