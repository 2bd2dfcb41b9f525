"""TensorFlow's elementwise ops in the words of a cell (`custom_ops.cell.ELEMENTWISE`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from custom_ops.cell_builder import CellBuilder
from graph_passes.ir import floating

_SAME = {
    "Add": "add", "AddV2": "add", "BiasAdd": "add", "BiasAddV1": "add", "Sub": "subtract", "Mul": "multiply",
    "RealDiv": "divide", "Div": "divide", "Maximum": "maximum", "Minimum": "minimum", "Pow": "power",
    "Greater": "greater", "GreaterEqual": "greater_equal", "Equal": "equal", "LogicalAnd": "multiply",
    "LogicalOr": "maximum", "Neg": "negate", "Abs": "absolute", "Sign": "sign", "Square": "square", "Sqrt": "sqrt",
    "Rsqrt": "reciprocal_sqrt", "Reciprocal": "reciprocal", "Inv": "reciprocal", "Exp": "exp", "Log": "log",
    "Log1p": "log1p", "Expm1": "expm1", "Erf": "erf", "Erfc": "erfc", "Sin": "sin", "Cos": "cos", "Sigmoid": "sigmoid",
    "Tanh": "tanh", "Relu": "relu", "Softplus": "softplus", "Elu": "elu", "SelectV2": "select", "Select": "select",
    "SquaredDifference": "squared_difference", "Relu6": "relu6", "Selu": "selu", "Softsign": "softsign",
    "DivNoNan": "divide_no_nan", "MulNoNan": "multiply_no_nan", "Xdivy": "xdivy", "Sinh": "sinh", "Cosh": "cosh",
}  # fmt: skip
_SWAPPED = {"Less": "greater", "LessEqual": "greater_equal"}
_COMPOSED = "AddN LogicalNot NotEqual LogicalXor LeakyRelu ClipByValue"
_ELSEWHERE = (
    "Cast Floor Ceil Round Rint Tan Asin Acos Atan Atan2 Asinh Acosh Atanh FloorDiv FloorMod Mod TruncateDiv IsNan "
    "IsInf IsFinite ZerosLike OnesLike BitwiseAnd BitwiseOr Lgamma Digamma Igamma Xlogy"
)

# Ops that a cell can hold.
CELL_OPS = frozenset((*_SAME, *_SWAPPED, *_COMPOSED.split()))

# Ops that may be moved out of a loop and run on all steps at once.
ELEMENTWISE_OPS = CELL_OPS | frozenset(_ELSEWHERE.split())


def lower(builder: CellBuilder, op: str, attrs: Mapping[str, Any], arguments: tuple[int, ...]) -> int:
    """The value of one of `CELL_OPS` in a cell, for arguments of one column each.

    What is composed is composed so that its gradient is TensorFlow's, where that is not finite, too.
    """
    apply, constant = builder.apply, builder.constant
    if op in _SAME:
        return apply(_SAME[op], *arguments)
    if op in _SWAPPED:
        return apply(_SWAPPED[op], *reversed(arguments))
    x, y = arguments[0], arguments[-1]
    one, zero = constant(1.0), constant(0.0)
    match op:
        case "AddN":
            return builder.sum(*arguments)
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
