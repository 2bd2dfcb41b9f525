"""Which configurations of a persistent kernel there are for a cell and a batch (GRNN, section 7.2): those that fit the
device's registers, shared memory and multiprocessors. Which of them will be fast, `ranking.py` says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import ceil
from typing import TypeAlias

from custom_ops.errors import KernelError
from custom_ops.machine import REGISTERS, SHARED_MEMORY, WARP, Machine, registers_of, shared_memory
from custom_ops.recurrent.bounds import products_are_bounded
from custom_ops.recurrent.codegen.layout import IN_REGISTERS, OTHER_REGISTERS, layout
from custom_ops.recurrent.codegen.replicated_schedule import can_replicate
from custom_ops.recurrent.codegen.schedule import schedule
from custom_ops.recurrent.codegen.sizes import GemmLayout, KernelLayout
from custom_ops.recurrent.search.grnn_model import FLOAT
from custom_ops.recurrent.spec import Configuration, Exchange, ProductMethod, RecurrentSpec

THREADS = (128, 256, 512)  # more have too few registers for weights
LANES = (2, 4, 8, 16, 32, 64, 128)
CLUSTERS = (2, 4, 8, 16)
TILES = (8, 16, 32, 64)  # units of a CTA that fill warps, whose sums stay in registers
LAUNCHED_TILE, LAUNCHED_ROWS = 8, (8, 4, 2, 1)  # units and rows of a CTA that is launched for each stage
SLICES = (1, 2, 4)  # 8 were never the fastest on an H200
MULTIPLES = (1, 2, 4, 8, 16, 32)  # of rows
MOST_ROWS = 64
LEAST_TENSOR_ROWS = 8
MOST_PARTS = 32  # numbers that a thread takes of the parts of sums; more take longer than an exchange
REGISTER_SHARES = (1.0, 0.85, 0.7, 0.5)  # for weights; the rest is for sums, and for what the compiler would spill
MOST_TILES = 8  # of 16 columns, of one warp, whose sums registers hold
CROWDED = 208  # registers of a thread from which the compiler keeps some in memory

Fitting: TypeAlias = tuple[Configuration, KernelLayout]


def enumerate_configurations(machine: Machine, spec: RecurrentSpec, batch: int) -> list[Fitting]:
    """The space that is searched, pruned by registers, shared memory and resident CTAs (GRNN, section 7.2), and how
    each configuration lies there.

    Weights go to registers first, then to shared memory, and all groups run at once. Where no configuration does both,
    some weights are streamed, or groups take turns, or both. Where nothing fits, there is a launch for each stage.
    """
    held = partial(_found, machine, spec, batch, streams=False)
    streamed = partial(_found, machine, spec, batch, streams=True)
    if found := held(turns=False):
        return found
    if found := held(turns=True) + streamed(turns=False) + streamed(turns=True):
        return found
    staged = launched(machine, spec, batch)
    return [(staged, layout(spec, staged, machine.arch))] if staged else []


def launched(machine: Machine, spec: RecurrentSpec, batch: int) -> Configuration | None:
    """What is launched for each stage of each step, for where CTAs cannot wait for each other: it keeps no weights,
    and its CTAs need not fit the device at once. One form, as many rows as shared memory holds; it is never the
    fastest (docs/benchmarks_recurrent.md). None where one CTA has all units, or shared memory holds no row."""
    ctas = ceil(spec.units / LAUNCHED_TILE)
    for rows in LAUNCHED_ROWS if ctas > 1 else ():
        found = Configuration(min(rows, batch), ctas, lanes=WARP, register_weights=0, exchange="launches")
        try:
            layout(spec, found, machine.arch)
        except KernelError:
            continue
        return found
    return None


def _found(machine: Machine, spec: RecurrentSpec, batch: int, streams: bool, turns: bool) -> list[Fitting]:
    """What fits the device, with weights that are streamed or none, with groups that take turns or none."""
    exchanges: tuple[Exchange, ...] = ("single", "cluster", "grid")
    sizes = {exchange: _group_sizes(machine, spec, exchange) for exchange in exchanges}
    if streams:  # on the whole device
        widest = next(exchange for exchange in reversed(exchanges) if sizes[exchange])
        wanted = {widest: sizes[widest][-1:]}
    else:
        wanted = {exchange: [ctas for ctas in sizes[exchange] if _holds(spec, ctas)] for exchange in exchanges}
    shapes = (
        shape for exchange, ctas in wanted.items() for shape in _shapes(machine, spec, batch, exchange, ctas, turns)
    )
    if not streams:
        if machine.clusters[-1][0] <= 1 and can_replicate(spec.cell):  # with them an exchange is short
            shapes = (each for shape in shapes for each in (shape, *_replicated(spec, shape)))
        shapes = (shape for shape in shapes if _could_hold(machine, spec, shape))
    return [fitted for shape in shapes for fitted in _fitted(machine, spec, shape, streams)]


def excess_registers(configuration: Configuration, sizes: KernelLayout, gemm: GemmLayout) -> int:
    """Registers that a thread of a product would take beyond those that the compiler uses without a spill."""
    sums = gemm.block * gemm.thread_columns * (4 if configuration.tensor_cores else 1)
    return sizes.weights + sums + OTHER_REGISTERS - CROWDED


def resident_groups(machine: Machine, configuration: Configuration) -> int:
    """Groups that run at once, one CTA on a multiprocessor."""
    clusters = [int(count) for size, count in machine.clusters if size >= configuration.cluster]
    return max(clusters, default=0) * configuration.cluster // configuration.ctas


def _shapes(
    machine: Machine, spec: RecurrentSpec, batch: int, exchange: Exchange, group_sizes: list[int], turns: bool
) -> Iterator[Configuration]:
    """Configurations before their weights are placed."""
    tensor_products: tuple[ProductMethod, ...] = ("mma",) if machine.tensor_rate else ()
    if tensor_products and (spec.precision == "bfloat16" or products_are_bounded(spec.cell)):
        tensor_products = ("half", *tensor_products)
    of_slices = SLICES if exchange == "grid" else (1,)
    operands = max((len(gemm.terms[0]) for gemm in schedule(spec.cell).gemms), default=0)
    for ctas, slices in sorted(
        {(ceil(size / slices) * slices, slices) for size in group_sizes for slices in of_slices}
    ):
        tile = ceil(spec.units / ctas / 4) * 4
        tiles = ceil(spec.cell.blocks * tile * slices / 16)
        depth = operands * ctas // slices * tile  # of the longest sum: more lanes than it has chunks are as many
        resident = resident_groups(machine, Configuration(ctas=ctas, exchange=exchange, slices=slices))
        if not resident or 1 < ctas == slices:  # that is a cluster
            continue
        for rows in _heights(batch, resident // spec.directions, turns):
            for threads, lanes in (*product(THREADS, LANES), *(_in_registers(tile) if slices == 1 else ())):
                if lanes > threads:
                    continue
                shape = Configuration(rows, ctas, threads, lanes, 0, 0, "fma", exchange, slices)
                if lanes <= max(depth // 4, LANES[0]):
                    yield shape
                if not 1 <= lanes // WARP <= ceil(depth / 16) or rows < LEAST_TENSOR_ROWS:
                    continue
                if tiles <= MOST_TILES * (threads // lanes):
                    for kind in tensor_products:
                        yield replace(shape, product=kind)


def _in_registers(tile: int) -> list[tuple[int, int]]:
    """Threads and lanes with a unit for each subgroup, and thus sums in registers, besides `THREADS`."""
    found = [(ceil(tile * lanes / WARP) * WARP, lanes) for lanes in LANES]
    most = max(threads for threads, _, _ in IN_REGISTERS)
    return [each for each in found if each[0] <= most and each[0] not in THREADS]


def _replicated(spec: RecurrentSpec, shape: Configuration) -> list[Configuration]:
    """The configuration with replicas, where they could be faster."""
    taken = shape.rows * spec.units * shape.ctas
    may = shape.exchange != "single" and shape.product == "fma" and shape.slices == 1
    return [replace(shape, replicated=True)] if may and taken <= MOST_PARTS * shape.threads else []


def _holds(spec: RecurrentSpec, ctas: int) -> bool:
    """Whether the registers and the shared memory of so many CTAs could hold all weights."""
    weights = spec.cell.blocks * spec.units * spec.units
    smallest = FLOAT if spec.precision == "highest" else FLOAT / 2
    return smallest * weights <= ctas * (FLOAT * REGISTERS + max(SHARED_MEMORY.values()))


def _group_sizes(machine: Machine, spec: RecurrentSpec, exchange: Exchange) -> list[int]:
    """CTAs of a group; in a grid those that leave no CTA idle, for each width of a tile."""
    if exchange == "single":
        return [1]
    if exchange == "cluster":
        sizes = {*CLUSTERS, *(ceil(spec.units / tile) for tile in TILES)} - {1}
        return sorted(size for size in sizes if size <= machine.clusters[-1][0] and 4 * (size - 1) < spec.units)
    most = machine.multiprocessors // spec.directions
    return sorted({ceil(spec.units / width) for width in range(4, spec.units, 4)} & set(range(2, most + 1)))


def _heights(batch: int, groups: int, turns: bool) -> list[int]:
    """Rows of a group: the fewest with which all groups run at once, and more, for products that share a load; or, if
    groups take turns, fewer than that."""
    least = ceil(batch / max(groups, 1))
    if turns:
        return [height for height in MULTIPLES if height < least]
    rows = {min(ceil(least / multiple) * multiple, batch) for multiple in MULTIPLES}
    return sorted(height for height in rows if height <= MOST_ROWS)


def _could_hold(machine: Machine, spec: RecurrentSpec, shape: Configuration) -> bool:
    """Whether registers and shared memory are enough for a CTA's weights and one copy of one operand: less than any
    layout takes, and soon said."""
    registers = registers_of(shape.threads) - OTHER_REGISTERS
    halves = shape.product == "half" and spec.precision != "highest"
    operand = shape.rows * spec.units / shape.slices
    needed = operand + spec.cell.blocks * spec.units**2 / shape.ctas
    return needed * FLOAT / (2 if halves else 1) <= FLOAT * shape.threads * registers + shared_memory(machine.arch)


def _fitted(machine: Machine, spec: RecurrentSpec, shape: Configuration, streams: bool) -> Iterator[Fitting]:
    """Forms of a configuration that fit: with all registers for weights, and with fewer.

    Fewer where the compiler would spill, or where weights are streamed, for as many rows at a time as there are sums
    for. `streams` chooses between forms that stream weights and forms that hold them all.
    """
    registers = max(0, registers_of(shape.threads) - OTHER_REGISTERS)
    before = registers + 1
    for share in REGISTER_SHARES:
        if int(share * registers) >= before:  # the same again
            continue
        try:
            fitted, sizes = _placed(machine, spec, replace(shape, register_weights=int(share * registers)))
        except KernelError:
            return
        if _streams(sizes) == streams:
            yield fitted, sizes
        elif not streams:  # nor will fewer registers hold them
            return
        crowded = shape.tensor_cores and any(excess_registers(fitted, sizes, gemm) > 0 for gemm in sizes.gemms)
        if not crowded and not _streams(sizes):
            return
        before = fitted.register_weights


def _placed(machine: Machine, spec: RecurrentSpec, configuration: Configuration) -> Fitting:
    """Weights in registers as far as the configuration says, and then in shared memory."""
    sizes = layout(spec, configuration, machine.arch)
    fitted = replace(configuration, register_weights=sizes.weights)
    if _streams(sizes):
        left = shared_memory(machine.arch) - sizes.shared
        fitted = replace(fitted, shared_weights=left // (FLOAT * configuration.threads))
        sizes = layout(spec, fitted, machine.arch)
    return fitted, sizes


def _streams(sizes: KernelLayout) -> bool:
    return any(gemm.chunks > gemm.registers + gemm.shared for gemm in sizes.gemms)
