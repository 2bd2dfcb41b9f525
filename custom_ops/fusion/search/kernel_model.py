"""Ranks kernels by a model, so that a tuner times the best few: bytes moved, CTAs that move them, latencies in a row.

Times are nanoseconds on an H200 unless another device is given. The model knows no instruction; it has to tell good
kernels from bad ones, and does not say how long one takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from custom_ops.errors import KernelError
from custom_ops.expr.nodes import Elementwise, Input, Random
from custom_ops.expr.philox import group_size
from custom_ops.expr.table import TABLE
from custom_ops.fusion.codegen.kernel import FusionKernel
from custom_ops.fusion.codegen.plan.addresses import in_step, lies_along
from custom_ops.fusion.codegen.plan.arguments import storage
from custom_ops.fusion.codegen.plan.contraction import CHUNK, LANES, Tile
from custom_ops.fusion.codegen.plan.kernel_plan import Piece, RowLoop, alike, counted, tile_axes
from custom_ops.fusion.codegen.plan.pattern import Root
from custom_ops.fusion.codegen.plan.registers import ahead, ctas_at_once, keep, lane_rows
from custom_ops.fusion.codegen.plan.segment_ids import CHUNK_OPERATIONS
from custom_ops.fusion.codegen.plan.shared import SIZES, shared_bytes
from custom_ops.machine import DEVICES


@dataclass(frozen=True)
class Gpu:
    """What the model knows of a device.

    Attributes:
        processors: streaming multiprocessors.
        bandwidth, cache_bandwidth: bytes a nanosecond from device memory, and from the L2 cache.
        latency, cache_latency: of a load from them.
        launch: until a kernel has begun and ended.
        grid_barrier, cta_barrier, shuffles: a barrier; a warp's reduction.
        operations: elementary ones a nanosecond, of one multiprocessor.
        shared: bytes of shared memory of a multiprocessor.
        tensor, fma: a product of 16 x 8 x 8 on a scheduler; an FMA of a warp.
        thread: until one more thread of a CTA has begun.
        shared_load: a load from shared memory that others overlap.
    """

    processors: int
    bandwidth: float
    cache_bandwidth: float
    latency: float
    cache_latency: float
    launch: float
    grid_barrier: float
    cta_barrier: float
    shuffles: float
    operations: float
    shared: int
    tensor: float
    fma: float
    thread: float
    shared_load: float

    @classmethod
    def of(cls, profile: Path) -> Gpu:
        """What the part `fusion` of a device's profile says."""
        part = json.loads(profile.read_text())["fusion"]
        return cls(**{name: value for name, value in part.items() if name != "_note"})


@cache
def h200() -> Gpu:
    """The device whose kernels were timed."""
    return Gpu.of(DEVICES / "h200.json")


ACTIVATION = 20  # elementary operations of a function of the C library
DRAW = 80  # of a group of random numbers: ten rounds of two products of 64 bits and four other operations
UNCOALESCED = 8  # sectors that are loaded for one that is used, at most
NOT_HIDDEN = 0.1  # of the lesser of what is moved and what is waited for
FMA_OPERATIONS = 1.0  # elementary operations of an FMA
IN_FLIGHT = 4  # loads of one thread that wait at the same time


def predict(kernel: FusionKernel, shapes: Sequence[Sequence[int]], gpu: Gpu | None = None) -> float:
    """Nanoseconds that a kernel takes for tensors of these shapes, on an H200 unless another device is given."""
    gpu = gpu or h200()
    resident = _resident(kernel, gpu)
    try:
        launch = kernel.launch(shapes, resident)
    except KernelError:  # more slabs than CTAs that are sure to run at once: with few registers more of them do
        launch = kernel.launch(shapes)
    total = gpu.launch
    counts = [count for _, count in launch.of_pieces]
    for phase in range(kernel.plan.phases):
        numbers = [i for i, piece in enumerate(kernel.plan.pieces) if piece.phase == phase]
        found = [_Cost(kernel, i, counts, launch.sizes, resident, gpu) for i in numbers]
        moved = max([sum(cost.at_full_rate() for cost in found), *(cost.moving() for cost in found)])
        waited = max(cost.waiting() for cost in found)
        total += max(moved, waited) + NOT_HIDDEN * min(moved, waited) + max(cost.combining() for cost in found)
    barrier = gpu.grid_barrier if kernel.plan.cooperative else gpu.cta_barrier
    return total + (kernel.plan.phases - 1) * barrier


def surely_runs(kernel: FusionKernel, shapes: Sequence[Sequence[int]], gpu: Gpu | None = None) -> bool:
    """Whether CTAs that wait for each other are sure to run at once; of others only the compiled kernel tells."""
    try:
        kernel.launch(shapes, _resident(kernel, gpu or h200()))
    except KernelError:
        return False
    return True


def _resident(kernel: FusionKernel, gpu: Gpu) -> int:
    """CTAs that are sure to run at once."""
    on_one = min(ctas_at_once(kernel.plan), gpu.shared // max(shared_bytes(kernel.plan), 1))
    return max(1, on_one) * gpu.processors


class _Cost:
    """The cost of one piece."""

    def __init__(
        self,
        kernel: FusionKernel,
        number: int,
        counts: Sequence[int],
        sizes: Sequence[int],
        resident: int,
        gpu: Gpu,
    ) -> None:
        """`counts`: the CTAs of each piece; `resident`: those that are sure to run at once."""
        self.plan, self.piece, self.sizes, self.gpu = kernel.plan, kernel.plan.pieces[number], sizes, gpu
        self.counts, self.ctas = counts, counts[number]
        self.pattern = kernel.plan.pattern
        threads = kernel.plan.configuration.threads
        self.resident = min(self.ctas, resident)
        own = {root.node for root in self.piece.roots if root.output is None}
        self.kept, self.ahead = (frozenset[int](),) * len(self.piece.loops), 0
        if self.piece.looped:
            kept = keep(self.pattern, self.piece, own)
            self.kept, self.ahead = kept.values, len(kept.ahead) * max(kept.elements[:1], default=0)
        self.threads = threads
        self.bytes = self.pattern.once(("bytes", alike(self.plan, self.piece), self.sizes), self._bytes)

    def at_full_rate(self) -> float:
        """Nanoseconds to move all bytes and to do all operations where the whole device does."""
        first, again, operations = self.bytes
        gpu = self.gpu
        return max(first / gpu.bandwidth + again / gpu.cache_bandwidth, operations / (gpu.operations * gpu.processors))

    def moving(self) -> float:
        """The time to move the piece's bytes, with the loads that its CTAs have in flight."""
        first, again, operations = self.bytes
        gpu = self.gpu
        in_flight = self.resident * self.threads * self._in_flight()
        bandwidth = min(gpu.bandwidth, in_flight / gpu.latency)
        cached = min(gpu.cache_bandwidth, in_flight / gpu.cache_latency)
        busy = min(self.resident, gpu.processors)
        return max(first / bandwidth + again / cached, operations / (gpu.operations * busy))

    def _in_flight(self) -> float:
        """Bytes that a thread waits for at the same time."""
        piece = self.piece
        if piece.tile is None:
            return 4 * (IN_FLIGHT * max([piece.vector, *(loop.vector for loop in piece.loops)]) + self.ahead)
        found, _ = self.pattern.tiles[piece.roots[0].name]
        chunks = ahead(self.pattern, found, piece.tile, self.threads // 32)
        return 16 * chunks * (lane_rows(piece.tile) + piece.tile.columns // LANES)

    def waiting(self) -> float:
        """Nanoseconds of what one thread waits for, one after the other."""
        piece, gpu = self.piece, self.gpu
        rows = prod(self.sizes[axis] for axis in piece.rows)
        if piece.tile is not None:
            return self._product_waits()
        if piece.flat or piece.tiled:
            turns = -(-rows // max(1, self.ctas * self.threads * piece.vector))
            return gpu.latency * (1 + (turns - 1) / IN_FLIGHT)
        groups = max(1, self.ctas // piece.slabs) * piece.owner.rows
        row = loads = 0.0
        for loop, kept in zip(piece.loops, self.kept, strict=True):
            positions = prod(self.sizes[axis] for axis in loop.axes)
            turns = -(-positions // (piece.owner.threads * loop.vector * piece.slabs))
            turns *= prod(self.sizes[axis] for axis in loop.serial)
            if counted(self.pattern, piece, loop):
                turns = -(-positions // self.threads)
            reads = any(isinstance(node, Input) for node in self._nodes(loop, kept))
            load = (gpu.latency if loop is piece.loops[0] else gpu.cache_latency) * reads * max(1.0, turns / IN_FLIGHT)
            if loop is piece.loops[0] and self.ahead:
                loads = load  # while the row before is computed
            else:
                row += load
            row += turns * loop.vector * 2.0
            reductions = sum(bool(root.reduced) for root in loop.roots)
            row += reductions * self._reduction()
        # Rows of other groups are computed meanwhile, so that of the latencies of a group's own rows some overlap.
        return max(row, loads) * -(-rows // groups)

    def combining(self) -> float:
        """Nanoseconds until parts of reductions are put together, before which nothing that reads these begins."""
        return max((self._parts(place) for place in self.piece.combined), default=0.0)

    def _product_waits(self) -> float:
        """A tile's loads, one time after the other as many as a warp has under way, a barrier, and what is stored."""
        plan, gpu, tile = self.plan, self.gpu, self.piece.tile
        assert tile is not None
        warps, total = self.threads // 32, gpu.thread * self.threads
        for root in self.piece.roots:
            if root.node in self.pattern.products and root.reduced:
                found = self.pattern.products[root.node]
                chunks = -(-prod(self.sizes[axis] for axis in found.depth) // (CHUNK * warps))
                turns = -(-chunks // ahead(self.pattern, found, tile, warps))
                total += gpu.latency + (turns - 1) * gpu.cache_latency + chunks * self._chunk(tile)
                total += 2 * gpu.cta_barrier + tile.rows * tile.columns / self.threads * warps * gpu.shared_load
        outputs = any(isinstance(node, Input) for root in self.piece.roots for node in self._others(root))
        total += gpu.cache_latency * outputs
        batch, rows, columns = (prod(self.sizes[axis] for axis in axes) for axes in tile_axes(plan, self.piece))
        return total * -(-batch * -(-rows // tile.rows) * -(-columns // tile.columns) // self.ctas)

    def _others(self, root: Root) -> list[object]:
        """What an output reads beside products."""
        return [] if root.reduced else [self.pattern.program.nodes[place] for place in self.pattern.needs(root)]

    def _chunk(self, tile: Tile) -> float:
        """Nanoseconds of a warp to multiply 16 of the depth, where the others of its scheduler do, too."""
        beside = max(1.0, self.threads / 128)
        if tile.tensor:
            return beside * tile.rows / 16 * tile.columns / 8 * 2 * self.gpu.tensor
        return beside * tile.rows * tile.columns / 8 * 4 * self.gpu.fma

    def _reduction(self) -> float:
        kind, gpu = self.piece.owner.kind, self.gpu
        if kind == "thread":
            return 0.0
        if kind == "lanes":
            return gpu.shuffles
        return gpu.shuffles + 2 * gpu.cta_barrier

    def _parts(self, place: int) -> float:
        """Nanoseconds to put together the parts of a reduction."""
        source = self.plan.pieces[self.plan.parts[place]]
        count = source.slabs if source.slabs > 1 else self.counts[self.plan.parts[place]]
        number = not self.pattern.program.types[place].axes
        share = self.threads if number else self.piece.owner.threads
        return self.gpu.cache_latency * max(1.0, count / share / IN_FLIGHT)

    def _nodes(self, loop: RowLoop, kept: frozenset[int]) -> list[object]:
        nodes = self.pattern.program.nodes
        own = {root.node for root in self.piece.roots if root.output is None} | kept
        return [nodes[place] for place in {p for root in loop.roots for p in self.pattern.needs(root, own)} - own]

    def _bytes(self) -> tuple[float, float, float]:
        """Bytes that are read first or written, bytes that are read again, and operations."""
        if self.piece.tile is not None:
            return self._product_bytes(self.piece.tile)
        first, again, operations = 0.0, 0.0, 0.0
        seen: set[Input] = set()
        types = self.pattern.program.types
        for loop, kept in zip(self.piece.loops, self.kept, strict=True):
            axes = {*self.piece.rows, *loop.axes, *loop.serial}
            marked = counted(self.pattern, self.piece, loop)
            if marked:
                looked_at = prod(self.sizes[axis] for axis in axes) / self.threads
                operations += CHUNK_OPERATIONS * looked_at
                axes -= {marked.axis}
            for node in self._nodes(loop, kept):
                if isinstance(node, Input):
                    size = self._read(self.piece, loop, node, axes)
                    first, again = (first, again + size) if node in seen else (first + size, again)
                    seen.add(node)
                elif isinstance(node, Random):
                    operations += self._drawing(loop, node) * prod(self.sizes[axis] for axis in axes)
                elif isinstance(node, Elementwise):
                    cost = ACTIVATION if TABLE[node.op].cost == "activation" else 1
                    operations += cost * prod(self.sizes[axis] for axis in axes)
            for root in loop.roots:
                if root.output is not None:
                    first += prod(self.sizes[axis] for axis in root.axes) * _size(types[root.node].dtype)
        return first, again, operations

    def _drawing(self, loop: RowLoop, node: Random) -> float:
        """Operations for one random number: those of a group, shared by the elements that a thread sees at once."""
        axes = (*self.piece.rows, *loop.axes)
        width = max(loop.vector, self.piece.vector)
        shared = width if axes and width > 1 and in_step(node, axes[-1], width) else 1
        return DRAW / min(shared, group_size(node.dtype))

    def _product_bytes(self, tile: Tile) -> tuple[float, float, float]:
        """Each factor is read from the cache by as many tiles as lie along the other one."""
        first = again = operations = 0.0
        program, types = self.pattern.program, self.pattern.program.types

        def count(axes: Iterable[int]) -> int:
            return prod(self.sizes[axis] for axis in axes)

        for root in self.piece.roots:
            if root.output is not None:
                first += count(root.axes) * _size(types[root.node].dtype)
                for place in self.pattern.needs(root):
                    if isinstance(node := program.nodes[place], Input):
                        first += count(types[place].axes) * _size(program.tensors[node.tensor].dtype)
                continue
            if root.node not in self.pattern.products:
                continue
            found = self.pattern.products[root.node]
            shares = (
                (found.left, -(-count(found.columns) // tile.columns)),
                (found.right, -(-count(found.rows) // tile.rows)),
            )
            for factor, times in shares:
                for place in self.pattern.closure([factor]):
                    if isinstance(node := program.nodes[place], Input):
                        size = count(types[place].axes) * _size(program.tensors[node.tensor].dtype)
                        first, again = first + size, again + size * (times - 1)
            if not tile.tensor:
                operations += count(root.axes) * FMA_OPERATIONS
        return first, again, operations

    def _read(self, piece: Piece, loop: RowLoop, node: Input, axes: set[int]) -> float:
        """Bytes of what a loop reads: once what does not vary along some of its axes, which caches hold."""
        along = {term.axis for index in node.index for term in index.terms}
        size = _size(self.pattern.program.tensors[node.tensor].dtype)
        count = prod(self.sizes[axis] for axis in axes & along or axes)
        strided = (piece.owner.kind in ("thread", "strided") and bool(piece.rows)) or not loop.axes
        neighbours = (piece.rows if strided else loop.axes) or (*piece.rows, *loop.axes)
        far = bool(neighbours) and neighbours[-1] in along and not lies_along(self.pattern, node, neighbours[-1])
        far = far or (piece.owner.kind == "thread" and bool(loop.axes) and bool(set(loop.axes) & along))
        return count * size * (min(UNCOALESCED, 32 // size) if far else 1)


def _size(dtype: str) -> int:
    return {"Half": 2, "Bfloat16": 2, **SIZES}[storage(dtype)]


def ranked(
    kernels: Sequence[FusionKernel], shapes: Sequence[Sequence[int]], gpu: Gpu | None = None
) -> list[tuple[FusionKernel, float]]:
    """The kernels with their times, the fastest first; those alike in the order in which they were given."""
    return sorted(((kernel, predict(kernel, shapes, gpu)) for kernel in kernels), key=lambda pair: pair[1])
