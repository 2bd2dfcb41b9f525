"""TensorFlow's elementwise ops as ops of a cell: the table's, and what is composed of those."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from custom_ops.expr.table import FLOAT_OPS
from custom_ops.recurrent.cell_builder import CellBuilder
from graph_passes.graph.ir import floating
from graph_passes.lower.elementwise import RULES

_SAME = {name: op.name for op in FLOAT_OPS.values() for name in op.tf_ops}
_REVERSED = {name: op.name for op in FLOAT_OPS.values() for name in op.reversed_tf_ops}
_ON_BOOLEANS = {"LogicalAnd": "multiply", "LogicalOr": "maximum"}  # which are 1 and 0 in a cell
_COMPOSED = "AddN FloorDiv LogicalNot NotEqual LogicalXor LeakyRelu ClipByValue StopGradient"
# What TensorFlow's kernels alone compute element by element.
_WITHOUT_RULE = (
    "Tan Asin Acos Atan2 Asinh Acosh Atanh Mod ZerosLike OnesLike BitwiseAnd BitwiseOr Lgamma Digamma Igamma"
)

# Ops that a cell can hold.
CELL_OPS = frozenset((*_SAME, *_REVERSED, *_ON_BOOLEANS, *_COMPOSED.split()))

# Ops that may be moved out of a loop and run on all steps at once.
ELEMENTWISE_OPS = frozenset((*RULES, *_WITHOUT_RULE.split()))


def lower(builder: CellBuilder, op: str, attrs: Mapping[str, Any], arguments: tuple[int, ...]) -> int:
    """The value of one of `CELL_OPS` in a cell, for arguments of one column each.

    What is composed is composed so that its gradient is TensorFlow's, where that is not finite, too.
    """
    apply, constant = builder.apply, builder.constant
    if op in _SAME:
        return apply(_SAME[op], *arguments)
    if op in _REVERSED:
        return apply(_REVERSED[op], *reversed(arguments))
    if op in _ON_BOOLEANS:
        return apply(_ON_BOOLEANS[op], *arguments)
    x, y = arguments[0], arguments[-1]
    one, zero = constant(1.0), constant(0.0)
    match op:
        case "AddN":
            return builder.sum(*arguments)
        case "FloorDiv":
            return apply("floor", apply("divide", x, y))
        case "StopGradient":
            return apply("stop_gradient", x)
        case "LogicalNot":
            return apply("subtract", one, x)
        case "NotEqual" | "LogicalXor":
            return apply("subtract", one, apply("equal", x, y))
        case "LeakyRelu":
            slope = floating(attrs.get("alpha", 0.2))
            return apply("select", apply("greater", x, zero), x, apply("multiply", x, constant(slope)))
        case _:  # ClipByValue
            low, high = arguments[1:]
            from_above = apply("select", apply("greater", x, high), high, x)
            return apply("select", apply("greater", low, x), low, from_above)


def is_finite(value: object) -> bool:
    """Whether a constant can be written into a cell's text."""
    return isinstance(value, int | float) and math.isfinite(value)
