"""The values of a cell that never leave [-1, 1], for any inputs."""

from __future__ import annotations

from functools import cache

from custom_ops.expr.nodes import Elementwise
from custom_ops.expr.table import TABLE
from custom_ops.expr.table_entry import ANY, UNIT, Interval, hull
from custom_ops.recurrent.cell import Cell, CellConstant, Product, State


@cache
def products_are_bounded(cell: Cell) -> bool:
    """Whether every operand of every product stays in [-1, 1], as long as the initial states do.

    NaN is allowed: it is no number out of bounds.
    """
    bounds = _bounds(cell)
    operands = {term.operand for node in cell.nodes if isinstance(node, Product) for term in node.terms}
    return all(_within_unit(bounds[operand]) for operand in operands)


def _bounds(cell: Cell) -> list[Interval]:
    """Bounds by induction over the steps: a state counts as bounded until a step may unbound it."""
    states = [UNIT] * len(cell.states)
    while True:
        bounds: list[Interval] = []
        for node in cell.nodes:
            match node:
                case State(index=index):
                    bounds.append(states[index])
                case CellConstant(value=value):
                    bounds.append((value, value))
                case Elementwise():
                    bounds.append(_elementwise(cell, node, bounds))
                case _:
                    bounds.append(ANY)
        new = [state if _within_unit(bounds[place]) else ANY for state, place in zip(states, cell.states, strict=True)]
        if new == states:
            return bounds
        states = new


def _within_unit(interval: Interval) -> bool:
    return interval[0] >= -1.0 and interval[1] <= 1.0


def _elementwise(cell: Cell, node: Elementwise, bounds: list[Interval]) -> Interval:
    mixed = _mixture(cell, node, bounds) if node.op == "add" else None
    return mixed or TABLE[node.op].interval(*(bounds[argument] for argument in node.arguments))


def _mixture(cell: Cell, node: Elementwise, bounds: list[Interval]) -> Interval | None:
    """The hull of a and b for z a + (1 - z) b with z in [0, 1], as a GRU mixes; else None."""
    parts = [cell.nodes[argument] for argument in node.arguments]
    if not all(isinstance(part, Elementwise) and part.op == "multiply" for part in parts):
        return None
    first, second = (part.arguments for part in parts if isinstance(part, Elementwise))
    for left, right in ((first, second), (second, first)):
        for z, a in (left, left[::-1]):
            for rest, b in (right, right[::-1]):
                if _is_rest(cell, rest, z) and bounds[z][0] >= 0.0 and bounds[z][1] <= 1.0:
                    return hull(bounds[a], bounds[b])
    return None


def _is_rest(cell: Cell, place: int, z: int) -> bool:
    """Whether `place` is 1 - z."""
    node = cell.nodes[place]
    if not (isinstance(node, Elementwise) and node.op == "subtract" and node.arguments[1] == z):
        return False
    one = cell.nodes[node.arguments[0]]
    return isinstance(one, CellConstant) and one.value == 1.0
