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
    "Log1p": "log1p", "Expm1": "expm1", "Erf": "erf", "Sin": "sin", "Cos": "cos", "Sigmoid": "sigmoid",
    "Tanh": "tanh", "Relu": "relu", "Softplus": "softplus", "Elu": "elu", "SelectV2": "select", "Select": "select",
}  # fmt: skip
_SWAPPED = {"Less": "greater", "LessEqual": "greater_equal"}
_COMPOSED = (
    "SquaredDifference AddN LogicalNot NotEqual Relu6 LeakyRelu Selu Softsign Erfc ClipByValue DivNoNan MulNoNan "
    "Sinh Cosh Xdivy LogicalXor"
)
_ELSEWHERE = (
    "Cast Floor Ceil Round Rint Tan Asin Acos Atan Atan2 Asinh Acosh Atanh FloorDiv FloorMod Mod TruncateDiv IsNan "
    "IsInf IsFinite ZerosLike OnesLike BitwiseAnd BitwiseOr Lgamma Digamma Igamma Xlogy"
)
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772

# Ops that a cell can hold.
CELL_OPS = frozenset((*_SAME, *_SWAPPED, *_COMPOSED.split()))

# Ops that may be moved out of a loop and run on all steps at once.
ELEMENTWISE_OPS = CELL_OPS | frozenset(_ELSEWHERE.split())


def lower(builder: CellBuilder, op: str, attrs: Mapping[str, Any], arguments: tuple[int, ...]) -> int:
    """The value of one of `CELL_OPS` in a cell, for arguments of one column each."""
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
        case "SquaredDifference":
            return apply("square", apply("subtract", x, y))
        case "LogicalNot":
            return apply("subtract", one, x)
        case "NotEqual" | "LogicalXor":
            return apply("subtract", one, apply("equal", x, y))
        case "Relu6":
            return apply("minimum", apply("relu", x), constant(6.0))
        case "LeakyRelu":
            slope = floating(attrs.get("alpha", 0.2))
            return apply("select", apply("greater", x, zero), x, apply("multiply", x, constant(slope)))
        case "Selu":
            below = apply("multiply", constant(_SELU_ALPHA), apply("expm1", x))
            return apply("multiply", constant(_SELU_SCALE), apply("select", apply("greater_equal", x, zero), x, below))
        case "Softsign":
            return apply("divide", x, apply("add", one, apply("absolute", x)))
        case "Erfc":
            return apply("subtract", one, apply("erf", x))
        case "ClipByValue":
            return apply("maximum", apply("minimum", x, y), arguments[1])
        case "DivNoNan" | "Xdivy":
            guard = y if op == "DivNoNan" else x
            return apply("select", apply("equal", guard, zero), zero, apply("divide", x, y))
        case "MulNoNan":
            return apply("select", apply("equal", y, zero), zero, apply("multiply", x, y))
        case _:  # Sinh, Cosh
            there, back = apply("exp", x), apply("exp", apply("negate", x))
            joined = apply("subtract" if op == "Sinh" else "add", there, back)
            return apply("multiply", joined, constant(0.5))


def is_finite(value: object) -> bool:
    """Whether a constant can be written into a cell's text."""
    return isinstance(value, int | float) and math.isfinite(value)
