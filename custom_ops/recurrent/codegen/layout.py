"""Sizes and places of a recurrent kernel: how its work maps to threads, and where things lie in shared memory.

The kernel templates take these numbers as they are; nothing is computed twice."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from operator import le
from typing import NamedTuple

from custom_ops.errors import KernelError
from custom_ops.machine import WARP, registers_of, shared_memory
from custom_ops.pow2 import round_down_pow2
from custom_ops.recurrent.bounds import products_are_bounded
from custom_ops.recurrent.codegen.replicated_schedule import replicated_schedule
from custom_ops.recurrent.codegen.schedule import CellSchedule, Gemm, StageBuffer, schedule
from custom_ops.recurrent.codegen.sizes import BufferLayout, GemmLayout, KernelLayout
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

FORMS = {"floats": 0, "pairs": 1, "halves": 2, "bfloats": 3}  # enum Form of kernels/operands.cuh
# The most threads, lanes and rows with which sums stay in registers: with more, to compute the cell in all warps was
# slower on an H200 than the way through shared memory. 16 lanes leave two units to a warp, fewer a grid cannot send.
IN_REGISTERS = ((128, 16, 4), (256, 8, 1))
OTHER_REGISTERS = 56  # of a thread, besides weights and sums; measured on the standard cells


def needs_bounds(spec: RecurrentSpec, configuration: Configuration) -> bool:
    """Whether operands have to stay in [-1, 1]: float16 holds no others, scaled as they are."""
    return configuration.product == "half" and spec.precision != "bfloat16"


def operand_form(spec: RecurrentSpec, configuration: Configuration) -> int:
    """The form in which products read their operands."""
    if configuration.product != "half":
        return FORMS["floats"]
    return FORMS[{"highest": "pairs", "bfloat16": "bfloats"}.get(spec.precision, "halves")]


def words_of(numbers: int, form: int) -> int:
    """Words of 32 bits of so many numbers in a form, an even count of them where they are of 16 bits."""
    return numbers // 2 if form in (FORMS["halves"], FORMS["bfloats"]) else numbers


def chunk_words(spec: RecurrentSpec, configuration: Configuration) -> int:
    """32-bit words of a thread's weights in one chunk, for one of its columns (fma) or tiles (tensor cores)."""
    if not configuration.tensor_cores:
        return 4
    return 4 if configuration.product == "half" and spec.precision != "highest" else 8


def scheduled(spec: RecurrentSpec, configuration: Configuration) -> CellSchedule:
    """What a kernel does in each stage.

    Raises:
        KernelError: it is to replicate, and nothing can be.
    """
    if not configuration.replicated:
        return schedule(spec.cell)
    return replicated_schedule(spec.cell)


@lru_cache(maxsize=1 << 14)  # of one search, and no more
def layout(spec: RecurrentSpec, configuration: Configuration, arch: int) -> KernelLayout:
    """Place everything.

    Raises:
        KernelError: the configuration does not fit the device or the cell, with the number that is too large.
    """
    plan = scheduled(spec, configuration)
    result = _Layouter(spec, configuration, plan).layout()
    if configuration.cluster > 1 and arch < 90:
        raise KernelError(f"thread-block clusters need compute capability 9.0, this is {arch / 10}")
    if configuration.tensor_cores and arch < 80:
        raise KernelError(f"product '{configuration.product}' needs compute capability 8.0, this is {arch / 10}")
    if needs_bounds(spec, configuration) and not products_are_bounded(spec.cell):
        raise KernelError(
            "product 'half' needs cells whose products read bounded values; this cell's values are unbounded"
        )
    limit = shared_memory(arch)
    if result.shared > limit:
        raise KernelError(f"{result.shared} bytes of shared memory: compute capability {arch / 10} has {limit}")
    registers = registers_of(configuration.threads)
    if result.weights + OTHER_REGISTERS > registers:
        raise KernelError(
            f"{result.weights} weights in the registers of each of {configuration.threads} threads: "
            f"there are {registers} registers, {OTHER_REGISTERS} for the rest"
        )
    return result


def fallback_layout(spec: RecurrentSpec, configuration: Configuration) -> KernelLayout:
    """One CTA for each group, everything in its scratch: what runs when a grid barrier failed."""
    return _in_scratch(spec, configuration.rows, configuration.threads)


@lru_cache(maxsize=1 << 10)  # a search asks for the same few again and again
def _in_scratch(spec: RecurrentSpec, rows: int, threads: int) -> KernelLayout:
    plan = schedule(spec.cell)
    tile = _round_up(spec.units, 4)
    place, buffers = 0, []
    for index, buffer in enumerate(plan.buffers):
        width = 1 if buffer.kind == "sums" else tile
        stride = _round_up(len(buffer.operands) * width, 4)
        states, floats = plan.state_masks[index], FORMS["floats"]
        buffers.append(BufferLayout(len(buffer.operands), width, 1, stride, place, 0, 0, states, floats, local=False))
        place += 2 * rows * stride * 4
    sums = max((len(buffer.operands) for buffer in plan.buffers if buffer.kind == "sums"), default=0)
    staging, place = place, place + sums * rows * tile * 4
    items = -(-rows * tile // threads)
    return KernelLayout(tile, rows, rows, items, 0, 0, (), tuple(buffers), staging, 0, 0, place, 0)


class _Mapping(NamedTuple):
    """How the threads share a product, as in `GemmLayout`."""

    columns: int
    depth: int
    lanes: int
    thread_columns: int
    chunks: int


class _Layouter:
    """Hands out shared memory and scratch, front to back."""

    def __init__(self, spec: RecurrentSpec, configuration: Configuration, plan: CellSchedule) -> None:
        self.spec, self.configuration, self.plan = spec, configuration, plan
        self.form = operand_form(spec, configuration)
        self.tile = _round_up(-(-spec.units // configuration.ctas), 4)
        self.rows = configuration.rows
        self.padded_rows = _round_up(self.rows, 8) if configuration.tensor_cores else self.rows
        self.sum_lanes = self._sum_lanes()
        span = self.rows * configuration.ctas * self.tile
        self.replica_items = -(-span // configuration.threads) if plan.replica else 0
        # What replicas keep of a step takes registers from weights.
        kept = self.replica_items * len(plan.replica.kept) if plan.replica else 0
        self.registers_left = max(0, configuration.register_weights - kept)
        self.shared_left = configuration.shared_weights
        self.shared = 0
        self.scratch = 0
        self.places: dict[tuple[int, int], list[int]] = {}  # by operands and stride, see `_place`
        self.places_used: Counter[tuple[tuple[int, int], int]] = Counter()  # of them, by a stage so far

    def layout(self) -> KernelLayout:
        c = self.configuration
        barriers = [
            self._take(16 if c.exchange == "cluster" and buffer.exchanged else 0) for buffer in self.plan.buffers
        ]
        slice_barriers = [self._take(16) if c.slices > 1 else 0 for _ in self.plan.gemms]
        strides: dict[int, int] = {}
        mappings = [self._mapping(gemm) for gemm in self.plan.gemms]
        for gemm, mapping in zip(self.plan.gemms, mappings, strict=True):
            strides[gemm.buffer] = max(strides.get(gemm.buffer, 0), self._stride(mapping))
        buffers: list[BufferLayout] = []
        for index, buffer in enumerate(self.plan.buffers):
            width = 1 if buffer.kind == "sums" else self.tile * (c.ctas if buffer.kind == "parts" else 1)
            form = FORMS["floats"] if buffer.kind == "sums" else self.form
            row = words_of(len(buffer.operands) * (1 if buffer.kind == "own" else c.ctas) * width, form)
            stride = strides.get(index, _round_up(row, 4))
            copies = 2 if self.sum_lanes or (c.exchange == "cluster" and buffer.exchanged) else 1
            offset = self._place(buffer, stride, copies * self.padded_rows * stride * 4)
            exchanged = self.scratch
            if c.through_l2 and buffer.exchanged:
                self.scratch += _round_up(2 * self.rows * row * 4, 128)
            states = self.plan.state_masks[index]
            parts = 1 if buffer.kind == "own" else c.ctas if buffer.kind == "sums" else c.ctas // c.slices
            place = (offset, barriers[index], exchanged)
            local = not buffer.exchanged
            buffers.append(BufferLayout(len(buffer.operands), width, parts, stride, *place, states, form, local))
        gemms = tuple(map(self._gemm, mappings, slice_barriers))
        sums = max((len(buffer.operands) for buffer in self.plan.buffers if buffer.kind == "sums"), default=0)
        staging = self._take(sums * self.rows * self.tile * 4)
        items = -(-self.rows * self.tile // c.threads)
        kept = _round_up(self.scratch, 128)
        if c.exchange == "launches":
            self.scratch = kept + 4 * self.plan.kept_between_launches * c.ctas * c.threads * items
        if c.needs_fallback:  # it starts over in the same scratch
            self.scratch = max(self.scratch, fallback_layout(self.spec, c).scratch)
        weights = c.register_weights - self.registers_left
        return KernelLayout(
            self.tile, self.rows, self.padded_rows, items, self.sum_lanes, self.replica_items, gemms, tuple(buffers),
            staging, kept, self.shared, self.scratch, weights,
        )  # fmt: skip

    def _place(self, buffer: StageBuffer, stride: int, size: int) -> int:
        """Where a buffer lies. In a grid it takes the place of one of an earlier stage.

        Only the products of that stage read the earlier one, and the CTA waits after them. A buffer gets a new place
        where other CTAs write the numbers unasked, or read them. Buffers that share a place have equal shapes, so that
        what products read beyond a row's numbers stays zero."""
        c = self.configuration
        if not c.through_l2 or c.replicated or buffer.kind == "sums" or self.sum_lanes:
            return self._take(size)
        shape = len(buffer.operands), stride
        places = self.places.setdefault(shape, [])
        used = self.places_used[shape, buffer.stage]
        self.places_used[shape, buffer.stage] += 1
        if used == len(places):
            places.append(self._take(size))
        return places[used]

    def _take(self, size: int) -> int:
        place = self.shared
        self.shared += _round_up(size, 16)
        return place

    def _mapping(self, gemm: Gemm) -> _Mapping:
        c = self.configuration
        columns = len(gemm.products) * self.tile * (c.ctas if gemm.replicated else c.slices)
        depth = len(gemm.terms[0]) * c.ctas // c.slices * self.tile
        lanes = c.lanes
        if gemm.parts is not None:  # a few units for all columns: short sums, split as little as can be
            depth = len(gemm.terms[0]) * self.tile
            lanes = round_down_pow2(max(1, min(c.threads // columns, WARP)))
        elif c.replicated and not gemm.replicated:  # few columns beside those of replicas: more lanes for each
            lanes = max(lanes, round_down_pow2(max(min(c.threads // columns, WARP), 1)))
        if c.tensor_cores:
            tiles, pieces = -(-columns // 16), -(-depth // 16)
            warps = c.threads // WARP
            split = _lanes_with_work(lanes // WARP, pieces)
            return _Mapping(columns, depth, split * WARP, -(-tiles // (warps // split)), -(-pieces // split))
        lanes = _lanes_with_work(lanes, depth // 4)
        thread_columns = len(gemm.products) if self.sum_lanes else -(-columns // (c.threads // lanes))
        return _Mapping(columns, depth, lanes, thread_columns, -(-depth // 4 // lanes))

    def _sum_lanes(self) -> int:
        """`KernelLayout.sum_lanes`: sums stay in registers where each subgroup has one unit of all products, no warp is
        without units, and each lane has one row. Not with more threads, lanes and rows than `IN_REGISTERS` says."""
        c, gemms = self.configuration, self.plan.gemms
        if c.tensor_cores or c.replicated or c.slices > 1 or c.exchange == "launches" or not gemms:
            return 0
        shortest = min(len(gemm.terms[0]) for gemm in gemms) * c.ctas * self.tile
        if any(buffer.kind == "sums" for buffer in self.plan.buffers) or 4 * c.lanes > shortest:
            return 0
        if c.threads != _round_up(self.tile * c.lanes, WARP) or c.lanes & c.lanes - 1 or c.lanes % self.rows:
            return 0
        fits = any(all(map(le, (c.threads, c.lanes, self.rows), most)) for most in IN_REGISTERS)
        return c.lanes // self.rows if fits else 0

    def _stride(self, mapping: _Mapping) -> int:
        """A row of operands, as far as the product reads it, and without bank conflicts."""
        if self.configuration.tensor_cores:  # 4 rows at a time if of 16 bits, else 2: all banks
            numbers = mapping.lanes // WARP * mapping.chunks * 16
            return _round_up(words_of(numbers, self.form), 32) + words_of(16, self.form)
        return mapping.lanes * mapping.chunks * 4

    def _gemm(self, mapping: _Mapping, slice_barrier: int) -> GemmLayout:
        c = self.configuration
        columns, depth, lanes, thread_columns, chunks = mapping
        chunk = chunk_words(self.spec, c) * thread_columns
        registers = min(chunks, self.registers_left // chunk)
        self.registers_left -= registers * chunk
        shared = min(chunks - registers, self.shared_left // chunk)
        self.shared_left -= shared * chunk
        # As many rows at a time as registers allow: their sums do not wait for each other.
        free = registers_of(c.threads) - OTHER_REGISTERS - registers * chunk
        if c.tensor_cores:
            block, partials = min(4, self.padded_rows // 8), lanes // WARP
            result_stride = _round_up(columns, 16) + 4
            while (self.padded_rows // 8) % block or (block > 1 and block * 8 * (thread_columns + 1) > free):
                block -= 1
        else:
            block, partials = min(8, self.rows), max(1, lanes // WARP)
            result_stride = _round_up(c.threads // lanes * thread_columns, 4 if c.slices > 1 else 1)
            while self.rows % block or (block > 1 and block * thread_columns > min(32, free)):
                block -= 1
            block = self.rows if self.sum_lanes else block
        results = self._take(0 if self.sum_lanes else partials * self.padded_rows * result_stride * 4)
        received = self._take(2 * self.rows * columns * 4) if c.slices > 1 else 0
        weights = self._take(shared * chunk * c.threads * 4)
        streamed = _round_up(self.scratch, 128)
        rest = chunks - registers - shared
        if rest:
            self.scratch = streamed + c.ctas * rest * chunk * c.threads * 4
        return GemmLayout(
            columns, depth, lanes, thread_columns, chunks, registers, shared, block, partials, result_stride, results,
            weights, streamed, received, slice_barrier,
        )  # fmt: skip


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _lanes_with_work(lanes: int, chunks: int) -> int:
    """Lanes that split so many chunks, and have one each at least."""
    return lanes if lanes <= chunks else round_down_pow2(chunks)
