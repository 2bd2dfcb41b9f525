"""Which configurations of a persistent kernel there are for a cell and a batch, and which will be fast.

GRNN's model (`grnn.price`), extended by what its kernel did not have: rows of the batch that share a load, weights in
shared memory or streamed from L2, tensor cores, clusters, exchanges without a barrier, passes that hide an exchange,
several stages, and more groups than fit the device at once. The sizes are those of the kernel's own layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil
from typing import TypeAlias, get_args

from custom_ops.bounds import products_are_bounded
from custom_ops.codegen.layout import (
    OTHER_REGISTERS,
    SHARED_LIMIT,
    GemmLayout,
    Layout,
    chunk_words,
    layout,
    operand_form,
    words_of,
)
from custom_ops.codegen.replicate import can_replicate, replicated_schedule
from custom_ops.codegen.schedule import schedule
from custom_ops.errors import KernelError
from custom_ops.machine import REGISTERS, REGISTERS_PER_THREAD, SCHEDULERS, WARP, Machine, read
from custom_ops.spec import Configuration, Exchange, Product, RecurrentSpec
from graph_passes.cost.elementwise import elementwise
from graph_passes.cost.grnn import FLOAT, Cost, Work, price

THREADS = (128, 256, 512)  # more have too few registers for weights
LANES = (2, 4, 8, 16, 32, 64, 128)
CLUSTERS = (2, 4, 8, 16)
SLICES = (1, 2, 4)  # 8 were never the fastest on an H200
PASSES = (1, 2)  # 4 were never the fastest on an H200
MULTIPLES = (1, 2, 4, 8, 16, 32)  # of rows
MOST_ROWS = 64
LEAST_TENSOR_ROWS = 8
CLOSE = 1.3  # times the fastest, by the model
MOST_REPLICAS = 2  # (row, unit) pairs of a thread; the products of more take longer than an exchange
MOST_TILES = 8  # of 16 columns, of one warp, whose sums registers hold
VECTOR = 4  # numbers that one load brings
# fitted to 1,388 times of kernels on an H200, 748 of them those of benchmarks/results/recurrent_search_h200.json
CROWDED, SPILLS = 192, 1.4  # registers of a thread from which the compiler keeps some in memory; the price
SHARED_TURN = 52  # FMAs: a turn of the loop over weights in shared memory waits for them
STEP = 200  # nanoseconds of a loop's turn, its loads and stores
HIDDEN = 0.35  # of an exchange, by each further pass
TENSOR_CLOCK = 1.25  # the clock without tensor cores (1.98 GHz) over that with them at work (1.6 GHz, measured)
SPLIT_OPERATIONS = 5  # to cut a float32 into two TF32 numbers

Kind: TypeAlias = tuple[Exchange, Product, bool]


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
    """Every configuration, the one that should be fastest first; empty if none fits the device.

    The best of each other kind follows next where it is close, for the tuner to see: the model errs more between kinds
    than within one.
    """
    found = [predict(machine, spec, each, batch) for each in enumerate_configurations(machine, spec, batch)]
    found.sort(key=lambda prediction: prediction.nanoseconds(time_steps))
    first: dict[Kind, Prediction] = {}
    for each in found:
        first.setdefault(_kind(each.configuration), each)
    close = CLOSE * found[0].nanoseconds(time_steps) if found else 0
    ahead = [each for each in first.values() if each.nanoseconds(time_steps) < close]
    chosen = {id(each) for each in ahead}
    return ahead + [each for each in found if id(each) not in chosen]


def _kind(configuration: Configuration) -> Kind:
    return configuration.exchange, configuration.product, configuration.replicated


def enumerate_configurations(machine: Machine, spec: RecurrentSpec, batch: int) -> list[Configuration]:
    """The space that is searched, pruned by registers, shared memory and resident blocks (GRNN, section 7.2).

    Weights go to registers first, then to shared memory, and all groups run at once. Where no configuration does both,
    some weights are streamed, or groups take turns; where none does either, both.
    """
    held = partial(_found, machine, spec, batch, streams=False)
    streamed = partial(_found, machine, spec, batch, streams=True)
    return held(turns=False) or held(turns=True) + streamed(turns=False) or streamed(turns=True)


def _found(machine: Machine, spec: RecurrentSpec, batch: int, streams: bool, turns: bool) -> list[Configuration]:
    """What fits the device, with weights that are streamed or none, with groups that take turns or none."""
    exchanges: tuple[Exchange, ...] = get_args(Exchange)
    sizes = {exchange: _group_sizes(machine, spec, exchange) for exchange in exchanges}
    if streams:  # on the whole device
        widest = next(exchange for exchange in reversed(exchanges) if sizes[exchange])
        wanted = {widest: sizes[widest][-1:]}
    else:
        wanted = {exchange: [ctas for ctas in sizes[exchange] if _holds(spec, ctas)] for exchange in exchanges}
    shapes = (
        shape for exchange, ctas in wanted.items() for shape in _shapes(machine, spec, batch, exchange, ctas, turns)
    )
    if not streams and can_replicate(spec.cell):
        shapes = (each for shape in shapes for each in (shape, *_replicated(spec, shape)))
    fitted = (_fit(machine, spec, shape, streams) for shape in shapes)
    return [each for each in fitted if each]


def predict(machine: Machine, spec: RecurrentSpec, configuration: Configuration, batch: int) -> Prediction:
    """Price one configuration.

    Raises:
        KernelError: it does not fit the device.
    """
    sizes = layout(spec, configuration, machine.arch)
    groups = ceil(batch / configuration.rows) * spec.directions
    resident = _resident(machine, configuration)
    sharing = min(ceil(groups / resident), _blocks(machine, configuration, sizes))  # blocks on a multiprocessor
    active = min(1.0, min(groups, resident) * configuration.ctas / machine.multiprocessors)
    warps = ceil(configuration.threads / (WARP * SCHEDULERS)) * sharing
    step = Cost(0, 0, 0, 0)
    for gemm in sizes.gemms:
        step += _product(machine, spec, configuration, sizes, gemm, warps, active)
    # results of a stage go through shared memory: stored, waited for, loaded
    step += Cost(0, 0, len({gemm.stage for gemm in schedule(spec.cell).gemms}) * 3 * machine.block_barrier, 0)
    units = ceil(sizes.rows * sizes.tile / (WARP * SCHEDULERS)) * sharing  # of a scheduler's warps, one after the other
    replicas = ceil(sizes.rows * sizes.tile * configuration.ctas / (WARP * SCHEDULERS)) * sharing
    step += Cost(0, STEP + elementwise(machine, spec.cell, units, replicas if configuration.replicated else 0), 0, 0)
    exchange = _exchange(machine, configuration, sizes, sharing, active)
    busy = step.total + exchange.load  # sending and receiving is done by the same threads
    others = configuration.passes - 1
    step = Cost(
        *(configuration.passes * part for part in (step.load + exchange.load, step.products, step.reduction, 0))
    )
    step += Cost(0, 0, 0, configuration.passes * exchange.synchronisation)
    if configuration.tensor_cores:
        step = Cost(*(TENSOR_CLOCK * part for part in (step.load, step.products, step.reduction, step.synchronisation)))
    weights = FLOAT * sum(gemm.columns * gemm.depth for gemm in sizes.gemms)
    return Prediction(
        configuration,
        step,
        hidden=HIDDEN * others * min(exchange.synchronisation, busy),
        waves=ceil(groups / (resident * sharing)),
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
    rows, at_once = (sizes.padded_rows, 8 * gemm.block) if configuration.tensor_cores else (sizes.rows, gemm.block)
    turns = rows / at_once
    streamed = gemm.chunks - gemm.registers - gemm.shared
    chunk = gemm.thread_columns * chunk_words(spec, configuration) // VECTOR  # 16-byte loads of a thread
    four = words_of(VECTOR, operand_form(spec, configuration)) / VECTOR
    loads = gemm.chunks * turns * (gemm.block * four * read(machine.shared_load, min(gemm.lanes, WARP)))
    loads += gemm.shared * turns * chunk * read(machine.shared_load, WARP)
    loads *= threads / WARP
    bytes_streamed = streamed * turns * chunk * 16 * threads
    if configuration.tensor_cores:
        products, reduction = _tensor_product(machine, spec, configuration, gemm, warps, turns), 0.0
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
    turns_of_loops = turns * (gemm.shared + streamed)
    sums = gemm.block * gemm.thread_columns * (4 if configuration.tensor_cores else 1)
    if sizes.weights + sums + OTHER_REGISTERS > CROWDED:
        products *= SPILLS
    products_and_loads = max(products, loads) + turns_of_loops * SHARED_TURN * machine.fma
    reduction += (gemm.partials - 1) * sizes.items * machine.fma
    return Cost(bytes_streamed / read(machine.load_bandwidth, active), products_and_loads, reduction, 0)


def _tensor_product(
    machine: Machine, spec: RecurrentSpec, configuration: Configuration, gemm: GemmLayout, warps: int, turns: float
) -> float:
    """Chains of products that wait for each other, or all that a scheduler has to do, whichever is longer.

    TF32 takes two instructions for a chunk and splits numbers as it goes; 16-bit numbers take one, and are stored as
    products read them.
    """
    pairs, three = configuration.product == "half", spec.precision == "highest"
    sums = gemm.thread_columns * gemm.block
    instructions = (1 if pairs else 2) * (3 if three else 1)
    # partial products of different size have sums of their own, and few sums are made in more parts
    waiting = (3 if three and sums >= 4 else 1) if pairs else (4 if three else 2) // (2 if sums == 1 else 1)
    steps = turns * gemm.chunks
    cut = 0 if pairs else steps * (4 * gemm.block + 8 * gemm.thread_columns) * (SPLIT_OPERATIONS if three else 1)
    issue = cut * warps * machine.fma / machine.peak_speedup
    return max(
        steps * waiting * machine.tensor_chain, steps * instructions * sums * warps * machine.tensor_rate + issue
    )


def _reduce_scatter(values: int, lanes: int) -> tuple[int, int]:
    """Shuffles of a thread, and how many of them wait for each other (kernels/product_fma.cuh)."""
    count = depth = 0
    while lanes > 1:
        odd = lanes % 2
        values = values if odd or values % 2 else values // 2
        count, depth, lanes = count + values, depth + 1, lanes - 1 if odd else lanes // 2
    return count, max(depth, 1)


def _exchange(machine: Machine, configuration: Configuration, sizes: Layout, sharing: int, active: float) -> Cost:
    """Handing round the results of one pass, once for each stage's buffer."""
    load = waits = 0.0
    for buffer in sizes.buffers:
        if buffer.local:  # stored, waited for, loaded
            waits += 3 * machine.block_barrier
            continue
        size = FLOAT * words_of(sizes.rows * buffer.operands * buffer.width * buffer.parts, buffer.form)
        if configuration.exchange == "cluster":
            load += size * sharing / machine.cluster_bandwidth
            waits += machine.cluster_handoff
        elif configuration.exchange == "grid":
            bandwidth = read(machine.grid_bandwidth, active * machine.multiprocessors)
            load += size * sharing / bandwidth
            waits += read(machine.grid_handoff, configuration.ctas)
        waits += machine.block_barrier
    for gemm in sizes.gemms if configuration.slices > 1 else ():  # sums from the others of the cluster
        load += FLOAT * sizes.rows * gemm.columns * sharing / machine.cluster_bandwidth
        waits += machine.cluster_handoff
    return Cost(load, 0, 0, waits)


def _resident(machine: Machine, configuration: Configuration) -> int:
    """Groups that run at once, one block on a multiprocessor."""
    clusters = [int(count) for size, count in machine.clusters if size >= configuration.cluster]
    return max(clusters, default=0) * configuration.cluster // configuration.ctas


def _blocks(machine: Machine, configuration: Configuration, sizes: Layout) -> int:
    """Blocks that one multiprocessor has room for."""
    registers = min(REGISTERS_PER_THREAD, sizes.weights + OTHER_REGISTERS)
    shared = SHARED_LIMIT[machine.arch] // max(sizes.shared, 1)
    return max(1, min(REGISTERS // (configuration.threads * registers), shared))


def _shapes(
    machine: Machine, spec: RecurrentSpec, batch: int, exchange: Exchange, group_sizes: list[int], turns: bool
) -> Iterator[Configuration]:
    """Configurations before their weights are placed."""
    tensor_products: tuple[Product, ...] = ("mma",) if machine.tensor_rate else ()
    if tensor_products and (spec.precision == "bfloat16" or products_are_bounded(spec.cell)):
        tensor_products = ("half", *tensor_products)
    of_slices = SLICES if exchange == "grid" else (1,)
    for ctas, slices in sorted(
        {(ceil(size / slices) * slices, slices) for size in group_sizes for slices in of_slices}
    ):
        tiles = ceil(spec.cell.blocks * ceil(spec.units / ctas / 4) * 4 * slices / 16)
        resident = _resident(machine, Configuration(ctas=ctas, exchange=exchange, slices=slices))
        if not resident or 1 < ctas == slices:  # that is a cluster
            continue
        for rows in _heights(batch, resident // spec.directions, turns):
            for passes, threads, lanes in product(PASSES if ctas > 1 == slices else (1,), THREADS, LANES):
                if rows % passes or lanes > threads:
                    continue
                shape = Configuration(rows, passes, ctas, threads, lanes, 0, 0, "fma", exchange, slices)
                yield shape
                if lanes >= WARP and rows // passes >= LEAST_TENSOR_ROWS and tiles <= MOST_TILES * (threads // lanes):
                    for kind in tensor_products:
                        yield replace(shape, product=kind)


def _replicated(spec: RecurrentSpec, shape: Configuration) -> list[Configuration]:
    """The same with replicas, where one multiprocessor could hold their weights."""
    if shape.exchange == "single" or shape.product == "half" or shape.slices > 1:
        return []
    products = sum(len(gemm.products) for gemm in replicated_schedule(spec.cell).gemms if gemm.replicated)
    weights = (products + (spec.cell.blocks - products) / shape.ctas) * spec.units**2
    if FLOAT * weights > FLOAT * REGISTERS + max(SHARED_LIMIT.values()):
        return []
    if shape.rows * spec.units > MOST_REPLICAS * shape.threads:
        return []
    tiles = ceil(products * spec.units / 16)
    if shape.tensor_cores and tiles > MOST_TILES * (shape.threads // shape.lanes):
        return []
    return [replace(shape, replicated=True)]


def _holds(spec: RecurrentSpec, ctas: int) -> bool:
    """Whether the registers and the shared memory of so many blocks could hold all weights."""
    weights = spec.cell.blocks * spec.units * spec.units
    smallest = FLOAT if spec.precision == "highest" else FLOAT / 2
    return smallest * weights <= ctas * (FLOAT * REGISTERS + max(SHARED_LIMIT.values()))


def _group_sizes(machine: Machine, spec: RecurrentSpec, exchange: Exchange) -> list[int]:
    """Blocks of a group; in a grid those that leave no block idle, for each width of a tile."""
    if exchange == "single":
        return [1]
    if exchange == "cluster":
        return [size for size in CLUSTERS if size <= machine.clusters[-1][0] and 4 * (size - 1) < spec.units]
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


def _fit(machine: Machine, spec: RecurrentSpec, configuration: Configuration, streams: bool) -> Configuration | None:
    """Place the weights, or None where the rest does not fit, or where some are streamed against `streams`."""
    registers = min(REGISTERS_PER_THREAD, REGISTERS // configuration.threads) - OTHER_REGISTERS
    try:
        sizes = layout(spec, replace(configuration, register_weights=max(registers, 0)), machine.arch)
        fitted = replace(configuration, register_weights=sizes.weights)
        if _streams(sizes):
            room = SHARED_LIMIT[machine.arch] - sizes.shared
            fitted = replace(fitted, shared_weights=room // (FLOAT * configuration.threads))
            sizes = layout(spec, fitted, machine.arch)
    except KernelError:
        return None
    return fitted if _streams(sizes) == streams else None


def _streams(sizes: Layout) -> bool:
    return any(gemm.chunks > gemm.registers + gemm.shared for gemm in sizes.gemms)
