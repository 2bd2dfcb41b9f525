"""GRNN's performance model and its own configurations (Holmes et al., EuroSys 2019, sections 5 to 7).

Figure 10 prices one CTA: loading the state (equation 10), partial dot products (11, 12), their reduction (13,
14) and the synchronisation (15), which follow each other. Its measured parameters are a `Machine`. `Work` holds what
the equations read; `price` is the equations.

The model ranks. What it leaves out (activations, loop overhead, instruction mix) is alike for the configurations of one
cell, so its total is below what a step takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2

from custom_ops.machine import REGISTERS, REGISTERS_PER_THREAD, SCHEDULERS, WARP, Machine, read
from custom_ops.recurrent.search.grnn_model import FLOAT, Cost, dot_products

GRID_BARRIER = 1000.0  # nanoseconds of the paper's barrier of a whole grid on a V100 (SC); no kernel has one any more


@dataclass(frozen=True)
class GrnnTiling:
    """The paper's tunable parameters.

    Attributes:
        width: hidden units of a CTA's output tile (TW).
        height: rows of the batch of that tile (TH).
        groups: subgroups of a CTA (GPB: the paper's work groups), which share the tile's columns.
        group_size: threads of a group (WS), which share the sum of each column.
    """

    width: int
    height: int
    groups: int
    group_size: int


@dataclass(frozen=True)
class Work:
    """What one CTA does between two synchronisations: the derived parameters of Figure 10.

    Attributes:
        state_bytes: what it reads of other CTAs' results (equation 1, in bytes).
        active: the share of the device's multiprocessors that work, up to 1 (equation 2).
        warps: on each scheduler (equation 6).
        columns: output columns that one thread sums up, one after the other: the sub-tile width (equation 7).
        reduction: threads that share a sum (equation 8).
        sequential: FMAs of one thread for one column of one row (equation 9).
        rows: of the batch (TH).
        waits: nanoseconds of its synchronisation.
    """

    state_bytes: float
    active: float
    warps: float
    columns: float
    reduction: int
    sequential: float
    rows: int
    waits: float = 0.0


def price(machine: Machine, work: Work) -> Cost:
    """Equations 10 to 14; S3 is a speed-up of throughput, too. The reduction width of Table 2 is the group size."""
    reductions = work.columns * work.rows * work.warps
    shuffles = _shuffles(work.reduction) * reductions * machine.shuffle * machine.fma
    return Cost(
        load=work.state_bytes / read(machine.load_bandwidth, work.active),
        products=dot_products(machine, work.sequential, work.columns, work.rows, work.warps),
        reduction=shuffles / read(machine.shuffle_speedup, reductions),
        synchronisation=work.waits,
    )


def _shuffles(width: int) -> float:
    """Dependent shuffles of a reduction; below a warp's 32 lanes one more, which hands the sum back (Table 2)."""
    return log2(width) + (1 if width < WARP else 0) if width > 1 else 0.0


# --- the paper's own configurations --------------------------------------------------------------------------------


def lstm_step(machine: Machine, units: int, batch: int, tiling: GrnnTiling, gates: int = 4) -> Cost:
    """Figure 10 for a cell with one synchronisation. Its cost is the same for every configuration, and left out."""
    return price(machine, _work(machine, units, batch, tiling, gates))


def gru_double_step(machine: Machine, units: int, batch: int, tiling: GrnnTiling) -> Cost:
    """The canonical GRU with two synchronisations (section 5): two gates, then the candidate."""
    first = _work(machine, units, batch, tiling, 2, GRID_BARRIER)
    return price(machine, first) + price(machine, _work(machine, units, batch, tiling, 1, GRID_BARRIER))


def gru_single_step(machine: Machine, units: int, batch: int, tiling: GrnnTiling) -> Cost:
    """The canonical GRU with one: every CTA multiplies its slice of the state with the reset gate's rows for it.

    The partial sums of all CTAs go through the L2 cache, and every CTA adds up all of them (section 5, Figure 7b).
    """
    outer = _work(machine, units, batch, tiling, 2, GRID_BARRIER)
    ctas = ceil(units / tiling.width)
    threads = tiling.groups * tiling.group_size
    partial = Work(
        state_bytes=FLOAT * units * ctas * tiling.height,
        active=outer.active,
        warps=outer.warps,
        columns=ceil(units / threads),
        reduction=1,
        sequential=tiling.width + ctas,
        rows=tiling.height,
    )
    return price(machine, outer) + price(machine, partial)


def tilings(machine: Machine, units: int, batch: int, gates: int = 4) -> Iterator[GrnnTiling]:
    """The paper's space, pruned: every CTA on a separate multiprocessor, its weights in registers (equation 5)."""
    for width in range(1, min(64, units) + 1):
        for height in (rows for rows in range(1, batch + 1) if batch % rows == 0):
            if ceil(units / width) * (batch // height) > machine.multiprocessors:
                continue
            columns = gates * width
            for groups in (count for count in range(1, columns + 1) if columns % count == 0):
                for group_size in (1, 2, 4, 8, 16, 32):
                    tiling = GrnnTiling(width, height, groups, group_size)
                    if fits_registers(units, tiling, gates):
                        yield tiling


def fits_registers(units: int, tiling: GrnnTiling, gates: int) -> bool:
    """Equation 5, for one thread and for all: weights and 32 registers for everything else."""
    threads = tiling.groups * tiling.group_size
    weights = ceil(gates * tiling.width / tiling.groups) * ceil(units / tiling.group_size)
    return threads <= 1024 and weights + WARP <= REGISTERS_PER_THREAD and (weights + WARP) * threads <= REGISTERS


def _work(machine: Machine, units: int, batch: int, tiling: GrnnTiling, gates: int, waits: float = 0.0) -> Work:
    """Equations 1 to 9."""
    ctas = ceil(units / tiling.width) * ceil(batch / tiling.height)
    threads = tiling.groups * tiling.group_size
    return Work(
        state_bytes=FLOAT * tiling.height * units,
        active=min(1.0, ctas / machine.multiprocessors),
        warps=ceil(threads / (WARP * SCHEDULERS)),
        columns=gates * tiling.width / tiling.groups,
        reduction=tiling.group_size,
        sequential=ceil(units / tiling.group_size),
        rows=tiling.height,
        waits=waits,
    )
