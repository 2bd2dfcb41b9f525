"""What the elementwise ops of a recurrent kernel's step take, between its products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from custom_ops.expr.nodes import Elementwise
from custom_ops.expr.table import TABLE
from custom_ops.machine import Machine
from custom_ops.recurrent.cell import Cell, arguments_of
from custom_ops.recurrent.codegen.replicated_schedule import replicated_schedule
from custom_ops.recurrent.codegen.schedule import schedule

ACTIVATION_INSTRUCTIONS = 20  # everything else is priced as one FMA


def elementwise(machine: Machine, cell: Cell, units: int, replicas: int) -> float:
    """Nanoseconds of a step on one scheduler, whose warps do so many units, and so many replicas, of each lane."""
    if not replicas:
        return _price(machine, cell, schedule(cell).live, units)
    plan = replicated_schedule(cell)
    assert plan.replica
    # a thread does one after the other
    return _price(machine, cell, plan.live, units) + _price(machine, cell, plan.replica.live, replicas)


def _price(machine: Machine, cell: Cell, live: tuple[bool, ...], units: int) -> float:
    """The longest chain of one unit, the issue of the others."""
    work = _operations(cell, live)
    chain = work.chain_activations * machine.activation + work.chain_others * machine.fma
    issue = (ACTIVATION_INSTRUCTIONS * work.activations + work.others) * machine.fma / machine.peak_speedup
    return chain + (units - 1) * issue


@dataclass(frozen=True)
class _Operations:
    """Counts of one step: activations and all other elementwise operations, in all and in the longest chain."""

    activations: int
    others: int
    chain_activations: int
    chain_others: int


@cache
def _operations(cell: Cell, live: tuple[bool, ...]) -> _Operations:
    longest: list[tuple[int, int]] = []
    activations = others = 0
    for place, node in enumerate(cell.nodes):
        before = max((longest[argument] for argument in arguments_of(node)), default=(0, 0))
        costly = other = False
        if isinstance(node, Elementwise) and live[place]:
            costly = TABLE[node.op].cost == "activation"
            other = not costly
        activations, others = activations + costly, others + other
        longest.append((before[0] + costly, before[1] + other))
    return _Operations(activations, others, *max(longest, default=(0, 0)))
