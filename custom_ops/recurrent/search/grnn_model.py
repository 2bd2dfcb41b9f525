"""What the model that ranks configurations has of GRNN's (Holmes et al., EuroSys 2019, Figure 10).

The model ranks. What it leaves out (activations, loop overhead, instruction mix) is alike for the configurations of one
cell, so its total is below what a step takes. tests/grnn_model.py has all of the paper's equations, which its Tables 2
and 3 are reproduced with."""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.machine import Machine, read

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of one step, by part."""

    load: float
    products: float
    reduction: float
    synchronisation: float

    @property
    def total(self) -> float:
        """Equation 15."""
        return self.load + self.products + self.reduction + self.synchronisation

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.load + other.load,
            self.products + other.products,
            self.reduction + other.reduction,
            self.synchronisation + other.synchronisation,
        )


def dot_products(
    machine: Machine, sequential: float, columns: float, rows: int, warps: float, rows_at_once: int = 1
) -> float:
    """Nanoseconds of partial sums (equations 11 and 12).

    A thread sums up `columns` output columns, one after the other (the sub-tile width), of `rows` rows of the batch,
    with `sequential` FMAs for each sum; `warps` are on each scheduler.

    The speed-ups S1 and S2 are of throughput: the baseline is all that a scheduler has to do, one after the other, at
    the speed of one warp with one sum. With the sub-tile and the warps in the baseline, Table 2 of the paper comes out;
    as printed, equation 11 holds one thread's share alone. `rows_at_once`: how many of the rows a thread works on at
    once; the paper's threads do one.
    """
    speedup = read(machine.warps_speedup, warps) * read(machine.columns_speedup, columns)
    speedup *= read(machine.rows_speedup, rows_at_once)
    return machine.fma * rows * sequential * columns * warps / min(speedup, machine.peak_speedup)
