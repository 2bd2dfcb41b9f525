"""Which values of a cell can never leave [-1, 1], whatever its inputs are."""

from __future__ import annotations

from functools import cache
from math import inf

from custom_ops.cell import Cell, Constant, Elementwise, Product, State

Interval = tuple[float, float]
ANY: Interval = (-inf, inf)
UNIT: Interval = (-1.0, 1.0)


@cache
def products_are_bounded(cell: Cell) -> bool:
    """Whether every operand of every product stays in [-1, 1], as long as the initial states do.

    NaN is allowed: it is no number out of bounds.
    """
    bounds = _bounds(cell)
    operands = {term.operand for node in cell.nodes if isinstance(node, Product) for term in node.terms}
    return all(_within_unit(bounds[operand]) for operand in operands)


def _bounds(cell: Cell) -> list[Interval]:
    """By induction over the steps: states are taken to be bounded until one turns out not to stay so."""
    states = [UNIT] * len(cell.states)
    while True:
        bounds: list[Interval] = []
        for node in cell.nodes:
            match node:
                case State(index=index):
                    bounds.append(states[index])
                case Constant(value=value):
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
    arguments = [bounds[argument] for argument in node.arguments]
    match node.op:
        case "sigmoid" | "greater" | "greater_equal" | "equal":
            return (0.0, 1.0)
        case "tanh" | "erf" | "sin" | "cos" | "sign" | "softsign":
            return UNIT
        case "negate":
            return (-arguments[0][1], -arguments[0][0])
        case "select":
            return _hull(arguments[1], arguments[2])
        case "maximum":
            return (max(a[0] for a in arguments), max(a[1] for a in arguments))
        case "minimum":
            return (min(a[0] for a in arguments), min(a[1] for a in arguments))
        case "relu":
            return (max(arguments[0][0], 0.0), max(arguments[0][1], 0.0))
        case "subtract":
            return (arguments[0][0] - arguments[1][1], arguments[0][1] - arguments[1][0])
        case "multiply" if all(inf not in map(abs, argument) for argument in arguments):
            corners = [a * b for a in arguments[0] for b in arguments[1]]
            return (min(corners), max(corners))
        case "add":
            mixed = _mixture(cell, node, bounds)
            return mixed or (arguments[0][0] + arguments[1][0], arguments[0][1] + arguments[1][1])
        case _:
            return ANY


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
                    return _hull(bounds[a], bounds[b])
    return None


def _is_rest(cell: Cell, place: int, z: int) -> bool:
    """Whether `place` is 1 - z."""
    node = cell.nodes[place]
    if not (isinstance(node, Elementwise) and node.op == "subtract" and node.arguments[1] == z):
        return False
    one = cell.nodes[node.arguments[0]]
    return isinstance(one, Constant) and one.value == 1.0


def _hull(a: Interval, b: Interval) -> Interval:
    return (min(a[0], b[0]), max(a[1], b[1]))
