"""A ranking of a persistent kernel's configurations by predicted time, for a cell and a batch.

GRNN's model (`grnn_model.py` has what is read of it), extended by what its kernel did not have: rows of the batch that
share a load, weights in shared memory or streamed from L2, tensor cores, clusters, exchanges without a barrier, several
stages, and more groups than fit the device at once. The sizes are those of the kernel's own layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil

from custom_ops.machine import DEVICES, REGISTERS, REGISTERS_PER_THREAD, SCHEDULERS, WARP, Machine, read, shared_memory
from custom_ops.recurrent.codegen.layout import OTHER_REGISTERS, chunk_words, layout, operand_form, words_of
from custom_ops.recurrent.codegen.schedule import schedule
from custom_ops.recurrent.codegen.sizes import BufferLayout, GemmLayout, KernelLayout
from custom_ops.recurrent.search.elementwise_cost import elementwise
from custom_ops.recurrent.search.grnn_model import FLOAT, Cost, dot_products
from custom_ops.recurrent.search.space import enumerate_configurations, excess_registers, resident_groups
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

CLOSE = 1.3  # times the fastest, by the model
HOPELESS = 2.0  # likewise: what should take longer is not run
VECTOR = 4  # numbers that one load brings
SPLIT_OPERATIONS = 5  # to cut a float32 into two TF32 numbers


@dataclass(frozen=True)
class FittedCosts:
    """What was fitted to times of kernels on one device, whose profile says to which.

    Attributes:
        spills, tensor_spills: of a thread's products, what each register beyond `CROWDED` costs it; on tensor cores.
        shared_turn, tensor_shared_turn: FMAs for which a turn of the loop over weights in shared memory waits.
        step: nanoseconds of a loop's turn, its loads and stores.
        launch: nanoseconds of a step of next to no work, in a separate launch.
        tensor_clock: a step's time with tensor cores at work, over that at the clock without them.
    """

    spills: float
    tensor_spills: float
    shared_turn: float
    tensor_shared_turn: float
    step: float
    launch: float
    tensor_clock: float


@cache
def fitted() -> FittedCosts:
    """The part `ranking` of the H200's profile."""
    part = json.loads((DEVICES / "h200.json").read_text())["ranking"]
    return FittedCosts(**{name: value for name, value in part.items() if not name.startswith("_")})


@dataclass(frozen=True)
class Prediction:
    """What one configuration will take.

    Attributes:
        configuration: as the kernel takes it.
        step: nanoseconds of one step, by part.
        waves: how often the device is filled: groups that do not fit wait for others to end.
        start: nanoseconds before the first step, in which weights are read.
    """

    configuration: Configuration
    step: Cost
    waves: int
    start: float

    def nanoseconds(self, time_steps: int) -> float:
        """Nanoseconds of the whole sequence."""
        return self.waves * (self.start + time_steps * self.step.total)


def rank(machine: Machine, spec: RecurrentSpec, batch: int, time_steps: int = 100) -> list[Prediction]:
    """Every configuration, the one that should be fastest first; empty if none fits the device.

    The best of each other kind follows next where it is close, for the tuner to see: the model errs more between kinds
    than within one.
    """
    fitting = enumerate_configurations(machine, spec, batch)
    return in_order([_predict(machine, spec, *each, batch) for each in fitting], time_steps)


def candidates(machine: Machine, spec: RecurrentSpec, batch: int, time_steps: int) -> list[tuple[Configuration, float]]:
    """What the tuner is given: as `rank`, without what is hopeless, each with its predicted nanoseconds."""
    found = [(each.configuration, each.nanoseconds(time_steps)) for each in rank(machine, spec, batch, time_steps)]
    return [each for each in found if each[1] <= HOPELESS * found[0][1]]


def in_order(predictions: Sequence[Prediction], time_steps: int) -> list[Prediction]:
    """The predictions in the order of `rank`."""
    found = sorted(predictions, key=lambda prediction: prediction.nanoseconds(time_steps))
    first: dict[tuple[object, ...], Prediction] = {}
    for each in found:
        first.setdefault(each.configuration.kind, each)
    close = CLOSE * found[0].nanoseconds(time_steps) if found else 0
    ahead = [each for each in first.values() if each.nanoseconds(time_steps) < close]
    chosen = {id(each) for each in ahead}
    return ahead + [each for each in found if id(each) not in chosen]


def predict(machine: Machine, spec: RecurrentSpec, configuration: Configuration, batch: int) -> Prediction:
    """Price one configuration.

    Raises:
        KernelError: it does not fit the device.
    """
    return _predict(machine, spec, configuration, layout(spec, configuration, machine.arch), batch)


def _predict(
    machine: Machine, spec: RecurrentSpec, configuration: Configuration, sizes: KernelLayout, batch: int
) -> Prediction:
    groups = ceil(batch / configuration.rows) * spec.directions
    sharing, waves, active = _occupancy(machine, configuration, sizes, groups)
    warps = ceil(configuration.threads / (WARP * SCHEDULERS)) * sharing
    step = Cost(0, 0, 0, 0)
    for gemm in sizes.gemms:
        step += _product(machine, spec, configuration, sizes, gemm, warps, active)
    step = Cost(sharing * step.load, step.products, step.reduction, 0)
    if not sizes.sum_lanes:  # results of a stage go through shared memory: stored, waited for, loaded
        step += Cost(0, 0, len({gemm.stage for gemm in schedule(spec.cell).gemms}) * 3 * machine.block_barrier, 0)
    for buffer in sizes.buffers:
        if _in_parts(buffer, sizes):  # every thread adds up those of its units
            adds = ceil(sizes.rows * buffer.width / WARP) * buffer.operands * buffer.parts * sharing
            step += Cost(0, fitted().step + adds * read(machine.shared_load, WARP) / VECTOR, 0, 0)
    computing = configuration.threads if sizes.sum_lanes else sizes.rows * sizes.tile
    units = ceil(computing / (WARP * SCHEDULERS)) * sharing  # of a scheduler's warps, one after the other
    replicas = ceil(sizes.rows * sizes.tile * configuration.ctas / (WARP * SCHEDULERS)) * sharing
    computed = elementwise(machine, spec.cell, units, replicas if configuration.replicated else 0)
    step += Cost(0, fitted().step + computed, 0, 0)
    exchange = _exchange(machine, configuration, sizes, sharing, active)
    step = Cost(step.load + exchange.load, step.products, step.reduction, exchange.synchronisation)
    if configuration.tensor_cores:
        parts = (step.load, step.products, step.reduction, step.synchronisation)
        step = Cost(*(fitted().tensor_clock * part for part in parts))
    weights = FLOAT * sum(gemm.columns * gemm.depth for gemm in sizes.gemms)
    start = weights / read(machine.load_bandwidth, active)
    if configuration.exchange == "launches":  # in every step
        step = Cost(waves * step.load, waves * step.products, waves * step.reduction, step.synchronisation)
        waves = 1
    return Prediction(configuration, step, waves, start)


def _occupancy(
    machine: Machine, configuration: Configuration, sizes: KernelLayout, groups: int
) -> tuple[int, int, float]:
    """CTAs on a multiprocessor, how often the device is filled, and the share of it that works at once. The CTAs of
    a group run at once; in a launch for each stage, any."""
    tasks, resident, ctas = groups, resident_groups(machine, configuration), configuration.ctas
    if configuration.exchange == "launches":
        tasks, resident, ctas = groups * configuration.ctas, machine.multiprocessors, 1
    sharing = min(ceil(tasks / resident), _resident(machine, configuration, sizes))
    active = min(1.0, min(tasks, resident) * ctas / machine.multiprocessors)
    return sharing, ceil(tasks / (resident * sharing)), active


def _product(
    machine: Machine,
    spec: RecurrentSpec,
    configuration: Configuration,
    sizes: KernelLayout,
    gemm: GemmLayout,
    warps: int,
    active: float,
) -> Cost:
    """One matrix product of a CTA."""
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
        products = dot_products(machine, 4 * gemm.chunks, gemm.thread_columns, rows, warps, gemm.block)
        together = gemm.thread_columns if sizes.sum_lanes else 1
        count, depth = _reduce_scatter(gemm.block * gemm.thread_columns, min(gemm.lanes, WARP), together)
        shuffles = turns * warps * count * machine.shuffle * machine.fma
        reduction = shuffles / read(machine.shuffle_speedup, warps * count / depth) if count else 0.0
    turns_of_loops = turns * (gemm.shared + streamed)
    exact = configuration.tensor_cores and spec.precision == "highest"
    spills = fitted().tensor_spills if exact else fitted().spills
    products *= 1 + spills * max(0, excess_registers(configuration, sizes, gemm))
    waiting = fitted().tensor_shared_turn if configuration.tensor_cores else fitted().shared_turn
    products_and_loads = max(products, loads) + turns_of_loops * waiting * machine.fma
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
    # partial products of different size have separate sums, and few sums are made in more parts
    waiting = (3 if three and sums >= 4 else 1) if pairs else (4 if three else 2) // (2 if sums == 1 else 1)
    steps = turns * gemm.chunks
    cut = 0 if pairs else steps * (4 * gemm.block + 8 * gemm.thread_columns) * (SPLIT_OPERATIONS if three else 1)
    issue = cut * warps * machine.fma / machine.peak_speedup
    return max(
        steps * waiting * machine.tensor_chain, steps * instructions * sums * warps * machine.tensor_rate + issue
    )


def _reduce_scatter(values: int, lanes: int, together: int) -> tuple[int, int]:
    """Shuffles of a thread, and how many of them wait for each other (kernels/product_fma.cuh)."""
    count = depth = 0
    while lanes > 1:
        values = values if values // together % 2 else values // 2
        count, depth, lanes = count + values, depth + 1, lanes // 2
    return count, max(depth, 1)


def _exchange(machine: Machine, configuration: Configuration, sizes: KernelLayout, sharing: int, active: float) -> Cost:
    """Handing round results, once for each stage's buffer."""
    load = waits = 0.0
    if configuration.exchange == "cluster":
        bandwidth, handoff = machine.cluster_bandwidth, machine.cluster_handoff
    else:
        bandwidth = read(machine.grid_bandwidth, active * machine.multiprocessors)
        launched = configuration.exchange == "launches"
        handoff = fitted().launch if launched else read(machine.grid_handoff, configuration.ctas)
    for buffer in sizes.buffers:
        if buffer.local:  # stored, waited for, loaded
            waits += 3 * machine.block_barrier
            continue
        size = FLOAT * words_of(sizes.rows * buffer.operands * buffer.width * buffer.parts, buffer.form)
        if configuration.exchange != "single":
            load += size * sharing / bandwidth
            waits += 0 if _in_parts(buffer, sizes) else handoff  # parts come with the states
        waits += machine.block_barrier
    for gemm in sizes.gemms if configuration.slices > 1 else ():  # sums from the others of the cluster
        load += FLOAT * sizes.rows * gemm.columns * sharing / machine.cluster_bandwidth
        waits += machine.cluster_handoff
    return Cost(load, 0, 0, waits)


def _in_parts(buffer: BufferLayout, sizes: KernelLayout) -> bool:
    """Whether it brings the parts of sums, of all units from each CTA."""
    return buffer.width > sizes.tile


def _resident(machine: Machine, configuration: Configuration, sizes: KernelLayout) -> int:
    """CTAs that one multiprocessor holds."""
    registers = min(REGISTERS_PER_THREAD, sizes.weights + OTHER_REGISTERS)
    shared = shared_memory(machine.arch) // max(sizes.shared, 1)
    return max(1, min(REGISTERS // (configuration.threads * registers), shared))
