"""Which configurations of a persistent kernel there are for a cell and a batch, and which will be fast.

GRNN's model (`grnn.price`), extended by what its kernel did not have: rows of the batch that share a load, weights in
shared memory or streamed from L2, tensor cores, clusters, exchanges without a barrier, passes that hide an exchange,
several stages, and more groups than fit the device at once. The sizes are those of the kernel's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import ceil
from typing import get_args

from custom_ops.cell import Cell, Elementwise, Node, arguments_of
from custom_ops.codegen.layout import OTHER_REGISTERS, SHARED_LIMIT, GemmLayout, Layout, layout
from custom_ops.errors import KernelError
from custom_ops.machine import REGISTERS, REGISTERS_PER_THREAD, SCHEDULERS, WARP, Machine, read
from custom_ops.spec import Configuration, Exchange, RecurrentSpec
from graph_passes.cost.grnn import FLOAT, Cost, Work, price

THREADS = (128, 256, 512)  # more have too few registers for weights
LANES = (2, 4, 8, 16, 32, 64, 128)
CLUSTERS = (2, 4, 8, 16)
PASSES = (1, 2, 4)
MULTIPLES = (1, 2, 4, 8, 16, 32)  # of rows
MOST_ROWS = 64
LEAST_TENSOR_ROWS = 8
MOST_TILES = 8  # of 16 columns, of one warp, whose sums registers hold
# activations are priced as such, everything else as one FMA
ACTIVATIONS = {"sigmoid", "tanh", "exp", "expm1", "log", "log1p", "erf", "softplus", "elu", "sin", "cos", "power"}
SPLIT_OPERATIONS = 5  # to cut a float32 into two TF32 numbers


@dataclass(frozen=True)
class Prediction:
    """What one configuration will take.

    Attributes:
        configuration: as the kernel takes it.
        step: nanoseconds of one step, by part.
        hidden: of those, what passes hide of the exchange.
        waves: how often the device is filled: groups that do not fit wait for others to end.
        start: nanoseconds before the first step, in which weights are read.
    """

    configuration: Configuration
    step: Cost
    hidden: float
    waves: int
    start: float

    def nanoseconds(self, time_steps: int) -> float:
        """Of the whole sweep."""
        return self.waves * (self.start + time_steps * (self.step.total - self.hidden))


def rank(machine: Machine, spec: RecurrentSpec, batch: int, time_steps: int = 100) -> list[Prediction]:
    """Every configuration, the one that should be fastest first; empty if none fits the device."""
    found = [predict(machine, spec, each, batch) for each in enumerate_configurations(machine, spec, batch)]
    return sorted(found, key=lambda prediction: prediction.nanoseconds(time_steps))


def enumerate_configurations(machine: Machine, spec: RecurrentSpec, batch: int) -> list[Configuration]:
    """The space that is searched, pruned by registers, shared memory and resident blocks (GRNN, section 7.2).

    Weights go to registers first, then to shared memory. Only where no configuration holds them all are there any that
    stream some, on the whole device.
    """
    exchanges: tuple[Exchange, ...] = get_args(Exchange)
    sizes = {exchange: _group_sizes(machine, spec, exchange) for exchange in exchanges}
    holding = {exchange: [ctas for ctas in sizes[exchange] if _holds(spec, ctas)] for exchange in exchanges}
    found = [
        fitted
        for exchange in exchanges
        for shape in _shapes(machine, spec, batch, exchange, holding[exchange])
        if (fitted := _fit(machine, spec, shape)) and not _streams(layout(spec, fitted, machine.arch))
    ]
    if found:
        return found
    widest = next(exchange for exchange in reversed(exchanges) if sizes[exchange])
    shapes = _shapes(machine, spec, batch, widest, sizes[widest][-1:])
    return [fitted for shape in shapes if (fitted := _fit(machine, spec, shape))]


def predict(machine: Machine, spec: RecurrentSpec, configuration: Configuration, batch: int) -> Prediction:
    """Price one configuration.

    Raises:
        KernelError: it does not fit the device.
    """
    sizes = layout(spec, configuration, machine.arch)
    groups = ceil(batch / configuration.rows) * spec.directions
    resident = _resident(machine, configuration)
    active = min(1.0, min(groups, resident) * configuration.ctas / machine.multiprocessors)
    warps = ceil(configuration.threads / (WARP * SCHEDULERS))
    step = Cost(0, 0, 0, 0)
    for gemm in sizes.gemms:
        step += _product(machine, spec, configuration, sizes, gemm, warps, active)
    step += Cost(0, _elementwise(machine, spec.cell, sizes.items, warps), 0, 0)
    compute, exchange = step.total, _exchange(machine, configuration, sizes)
    step = Cost(*(configuration.passes * part for part in (step.load, step.products, step.reduction, 0))) + exchange
    period = max(configuration.passes * compute, compute + exchange.total)
    weights = FLOAT * sum(gemm.columns * gemm.depth for gemm in sizes.gemms)
    return Prediction(
        configuration,
        step,
        hidden=step.total - period,
        waves=ceil(groups / resident),
        start=weights / read(machine.load_bandwidth, active),
    )


def _product(
    machine: Machine,
    spec: RecurrentSpec,
    configuration: Configuration,
    sizes: Layout,
    gemm: GemmLayout,
    warps: int,
    active: float,
) -> Cost:
    """One pass of one matrix product of a block."""
    threads = configuration.threads
    rows, at_once = (sizes.padded_rows, 8 * gemm.block) if configuration.product == "mma" else (sizes.rows, gemm.block)
    turns = rows / at_once
    streamed = gemm.chunks - gemm.registers - gemm.shared
    chunk = gemm.thread_columns * (2 if configuration.product == "mma" else 1)  # 16-byte loads of a thread
    loads = gemm.chunks * turns * (gemm.block * read(machine.shared_load, min(gemm.lanes, WARP)))
    loads += gemm.shared * turns * chunk * read(machine.shared_load, WARP)
    loads *= threads / WARP
    bytes_streamed = streamed * turns * chunk * 16 * threads
    if configuration.product == "mma":
        products, reduction = _tensor_product(machine, spec, gemm, warps, turns), 0.0
    else:
        work = Work(
            state_bytes=0,
            active=active,
            warps=warps,
            columns=gemm.thread_columns,
            reduction=1,
            sequential=4 * gemm.chunks,
            rows=rows,
            rows_at_once=gemm.block,
        )
        products = price(machine, work).products
        count, depth = _reduce_scatter(gemm.block * gemm.thread_columns, min(gemm.lanes, WARP))
        shuffles = turns * warps * count * machine.shuffle * machine.fma
        reduction = shuffles / read(machine.shuffle_speedup, warps * count / depth) if count else 0.0
    reduction += (gemm.partials - 1) * sizes.items * machine.fma + machine.block_barrier
    return Cost(bytes_streamed / read(machine.load_bandwidth, active), max(products, loads), reduction, 0)


def _tensor_product(machine: Machine, spec: RecurrentSpec, gemm: GemmLayout, warps: int, turns: float) -> float:
    """Chains of products that wait for each other, or all that a scheduler has to do, whichever is longer."""
    three = spec.precision == "highest"
    chain = turns * gemm.chunks * 2 * (3 if three else 1)
    total = chain * gemm.thread_columns * gemm.block * warps
    cut = turns * gemm.chunks * (8 * gemm.thread_columns + 4 * gemm.block) * warps * (SPLIT_OPERATIONS if three else 1)
    issue = machine.fma / machine.peak_speedup
    return max(chain * machine.tensor_chain, total * machine.tensor_rate + cut * issue)


def _reduce_scatter(values: int, lanes: int) -> tuple[int, int]:
    """Shuffles of a thread, and how many of them wait for each other (kernels/product_fma.cuh)."""
    count = depth = 0
    while lanes > 1:
        values = values // 2 if values % 2 == 0 else values
        count, depth, lanes = count + values, depth + 1, lanes // 2
    return count, max(depth, 1)


def _elementwise(machine: Machine, cell: Cell, items: int, warps: int) -> float:
    """What is done between products, for all of a thread's units."""
    count, depth, plain = _operations(cell)
    speedup = min(
        read(machine.warps_speedup, warps) * read(machine.rows_speedup, max(1.0, count / max(depth, 1))),
        machine.peak_speedup,
    )
    return items * warps * (count * machine.activation + plain * machine.fma) / speedup


@cache
def _operations(cell: Cell) -> tuple[int, int, int]:
    """Activations, the most of them in a row, and all other elementwise operations."""

    def is_activation(node: Node) -> bool:
        return isinstance(node, Elementwise) and node.op in ACTIVATIONS

    depth: list[int] = []
    for node in cell.nodes:
        below = max((depth[argument] for argument in arguments_of(node)), default=0)
        depth.append(below + is_activation(node))
    count = sum(map(is_activation, cell.nodes))
    return count, max(depth, default=0), sum(isinstance(node, Elementwise) for node in cell.nodes) - count


def _exchange(machine: Machine, configuration: Configuration, sizes: Layout) -> Cost:
    """Handing round the results of one pass, once for each stage's buffer."""
    load = waits = 0.0
    for buffer in sizes.buffers:
        everything = FLOAT * sizes.rows * buffer.operands * buffer.width * configuration.ctas
        if configuration.exchange == "cluster":
            load += everything / machine.cluster_bandwidth
            waits += machine.cluster_handoff
        elif configuration.exchange == "grid":
            load += everything / machine.grid_bandwidth
            waits += machine.grid_handoff
        waits += machine.block_barrier
    return Cost(load, 0, 0, waits)


def _resident(machine: Machine, configuration: Configuration) -> int:
    """Groups that run at once, one block on a multiprocessor."""
    if configuration.exchange == "cluster":
        sizes = [int(count) for size, count in machine.clusters if size >= configuration.ctas]
        return max(sizes, default=0)
    return machine.multiprocessors // configuration.ctas


def _shapes(
    machine: Machine, spec: RecurrentSpec, batch: int, exchange: Exchange, group_sizes: list[int]
) -> Iterator[Configuration]:
    """Configurations before their weights are placed."""
    for ctas in group_sizes:
        tiles = ceil(spec.cell.blocks * ceil(spec.units / ctas / 4) * 4 / 16)
        resident = _resident(machine, Configuration(ctas=ctas, exchange=exchange))
        for rows in _heights(batch, resident // spec.directions):
            for passes, threads, lanes in product(PASSES if ctas > 1 else (1,), THREADS, LANES):
                if rows % passes or lanes > threads:
                    continue
                yield Configuration(rows, passes, ctas, threads, lanes, 0, 0, "fma", exchange)
                mma = machine.tensor_rate and lanes >= WARP and tiles <= MOST_TILES * (threads // lanes)
                if mma and rows // passes >= LEAST_TENSOR_ROWS:
                    yield Configuration(rows, passes, ctas, threads, lanes, 0, 0, "mma", exchange)


def _holds(spec: RecurrentSpec, ctas: int) -> bool:
    """Whether the registers and the shared memory of so many blocks could hold all weights."""
    weights = spec.cell.blocks * spec.units * spec.units
    return FLOAT * weights <= ctas * (FLOAT * REGISTERS + max(SHARED_LIMIT.values()))


def _group_sizes(machine: Machine, spec: RecurrentSpec, exchange: Exchange) -> list[int]:
    """Blocks of a group; in a grid those that leave no block idle, for each width of a tile."""
    if exchange == "single":
        return [1]
    if exchange == "cluster":
        return [size for size in CLUSTERS if size <= machine.clusters[-1][0] and 4 * (size - 1) < spec.units]
    most = machine.multiprocessors // spec.directions
    return sorted({ceil(spec.units / width) for width in range(4, spec.units, 4)} & set(range(2, most + 1)))


def _heights(batch: int, groups: int) -> list[int]:
    """Rows of a group: the fewest with which all groups run at once, and more, for products that share a load."""
    least = ceil(batch / max(groups, 1))
    rows = {min(ceil(least / multiple) * multiple, batch) for multiple in MULTIPLES}
    return sorted(height for height in rows if height <= MOST_ROWS)


def _fit(machine: Machine, spec: RecurrentSpec, configuration: Configuration) -> Configuration | None:
    """Place the weights, or None where the rest does not fit."""
    registers = min(REGISTERS_PER_THREAD, REGISTERS // configuration.threads) - OTHER_REGISTERS
    try:
        sizes = layout(spec, replace(configuration, register_weights=max(registers, 0)), machine.arch)
        fitted = replace(configuration, register_weights=sizes.weights)
        if _streams(sizes):
            room = SHARED_LIMIT[machine.arch] - sizes.shared
            fitted = replace(fitted, shared_weights=room // (FLOAT * configuration.threads))
            layout(spec, fitted, machine.arch)
    except KernelError:
        return None
    return fitted


def _streams(sizes: Layout) -> bool:
    return any(gemm.chunks > gemm.registers + gemm.shared for gemm in sizes.gemms)
