"""Sums, products, powers, signs and extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import inf

import numpy as np

from custom_ops.expr.table_entry import (
    NUMBERS,
    UNIT,
    Derivation,
    Interval,
    Op,
    no_derivative,
    slope,
    unbounded,
    where,
    within,
)


def _product(a: Interval, b: Interval) -> Interval:
    if inf in map(abs, (*a, *b)):
        return unbounded()
    corners = [x * y for x in a for y in b]
    return (min(corners), max(corners))


def _rounded(function: Callable[[float], int], bound: float) -> float:
    return bound if math.isinf(bound) else float(function(bound))


def _quotient(d: Derivation, divide: str) -> tuple[int, int]:
    return d.apply(divide, d.adjoint, d.y), d.times(d.apply(divide, d.apply("negate", d.result), d.y))


def _xdivy(d: Derivation) -> tuple[int, int]:
    not_zero = d.apply("subtract", d.number(1), d.apply("equal", d.x, d.number(0)))
    first = d.times(d.apply("xdivy", not_zero, d.y))
    return first, d.times(d.apply("xdivy", d.apply("negate", d.x), d.apply("square", d.y)))


def _squared_difference(d: Derivation) -> tuple[int, int]:
    first = d.apply("multiply", d.times(d.number(2)), d.apply("subtract", d.x, d.y))
    return first, d.apply("negate", first)


def _maximum(d: Derivation) -> tuple[int, int]:
    first = d.apply("greater_equal", d.x, d.y)
    return d.where(first), d.where_not(first)


def _minimum(d: Derivation) -> tuple[int, int]:
    first = d.apply("greater_equal", d.y, d.x)
    return d.where(first), d.where_not(first)


def _power(d: Derivation) -> tuple[int, int]:
    first = d.times(d.y, d.apply("power", d.x, d.apply("subtract", d.y, d.number(1))))
    logarithm = d.apply("select", d.apply("greater", d.x, d.number(0)), d.apply("log", d.x), d.number(0))
    return first, d.times(d.result, logarithm)


def _floor_mod(d: Derivation) -> tuple[int, int]:
    return d.adjoint, d.times(d.apply("negate", d.apply("floor", d.apply("divide", d.x, d.y))))


def _reciprocal_sqrt(d: Derivation) -> tuple[int]:
    square = d.apply("multiply", d.number(-0.5), d.apply("square", d.result))
    return (d.apply("multiply_no_nan", square, d.apply("multiply_no_nan", d.result, d.adjoint)),)


# fmt: off
OPS = (
    Op("add", 2, numpy=np.add, cuda="{0} + {1}", cpp="a + b", derivative=lambda d: (d.adjoint, d.adjoint),
       interval=lambda a, b: (a[0] + b[0], a[1] + b[1]), dtypes=NUMBERS, wraps=True, commutative=True,
       tf_ops=("Add", "AddV2", "BiasAdd", "BiasAddV1")),
    Op("subtract", 2, numpy=np.subtract, cuda="{0} - {1}", cpp="a - b",
       derivative=lambda d: (d.adjoint, d.apply("negate", d.adjoint)),
       interval=lambda a, b: (a[0] - b[1], a[1] - b[0]), dtypes=NUMBERS, wraps=True, tf_ops=("Sub",)),
    Op("multiply", 2, numpy=np.multiply, cuda="{0} * {1}", cpp="a * b",
       derivative=lambda d: (d.times(d.y), d.times(d.x)), interval=_product, dtypes=NUMBERS, wraps=True,
       commutative=True, tf_ops=("Mul",)),
    Op("divide", 2, numpy=np.divide, cuda="{0} / {1}", cpp="a / b",
       derivative=lambda d: _quotient(d, "divide"), tf_ops=("RealDiv", "Div")),
    # a NaN on either side is kept, as TensorFlow does
    Op("maximum", 2, numpy=np.maximum, cuda="maximum({0}, {1})", cpp="((a > b) | (a != a)) ? a : b",
       derivative=_maximum, interval=lambda a, b: (max(a[0], b[0]), max(a[1], b[1])), dtypes=NUMBERS,
       tf_ops=("Maximum",)),
    Op("minimum", 2, numpy=np.minimum, cuda="minimum({0}, {1})", cpp="((a < b) | (a != a)) ? a : b",
       derivative=_minimum, interval=lambda a, b: (min(a[0], b[0]), min(a[1], b[1])), dtypes=NUMBERS,
       tf_ops=("Minimum",)),
    Op("power", 2, numpy=np.power, cuda="pow{f}({0}, {1})", cpp="std::pow(Flushed(a), Flushed(b))", vectorised=False,
       derivative=_power, cost="activation", ulps=8, tf_ops=("Pow",)),
    # 0 where the second argument is 0
    Op("multiply_no_nan", 2, numpy=lambda x, y: where(y == 0, 0 * y, x * y),
       cuda="{1} == 0.0{f} ? 0.0{f} : {0} * {1}", cpp="b == zero ? zero : a * b",
       derivative=lambda d: (d.apply("multiply_no_nan", d.adjoint, d.y), d.apply("multiply_no_nan", d.x, d.adjoint)),
       tf_ops=("MulNoNan",)),
    # 0 where the second argument is 0
    Op("divide_no_nan", 2, numpy=lambda x, y: where(y == 0, 0 * y, x / y), cuda="{1} == 0.0{f} ? 0.0{f} : {0} / {1}",
       cpp="b == zero ? zero : a / b", derivative=lambda d: _quotient(d, "divide_no_nan"), tf_ops=("DivNoNan",)),
    # 0 where the first argument is 0
    Op("xdivy", 2, numpy=lambda x, y: where(x == 0, 0 * x, x / y), cuda="{0} == 0.0{f} ? 0.0{f} : {0} / {1}",
       cpp="a == zero ? a * zero : a / b", derivative=_xdivy, tf_ops=("Xdivy",)),
    Op("squared_difference", 2, numpy=lambda x, y: np.square(x - y), cuda="({0} - {1}) * ({0} - {1})",
       cpp="(a - b) * (a - b)", derivative=_squared_difference, dtypes=NUMBERS, wraps=True,
       tf_ops=("SquaredDifference",)),
    Op("negate", 1, numpy=np.negative, cuda="-{0}", cpp="-a", derivative=lambda d: (d.apply("negate", d.adjoint),),
       interval=lambda a: (-a[1], -a[0]), dtypes=NUMBERS, wraps=True, tf_ops=("Neg",)),
    # the same number, which is a constant for the gradient
    Op("stop_gradient", 1, numpy=lambda x: 1 * x, cuda="{0}", cpp="a", derivative=no_derivative,
       interval=lambda a: a),
    Op("absolute", 1, numpy=np.abs, cuda="absolute({0})", cpp="Absolute(a)",
       derivative=slope(lambda d: d.apply("sign", d.x)), dtypes=NUMBERS, tf_ops=("Abs",)),
    Op("sign", 1, numpy=np.sign, cuda="sign({0})", cpp="a > zero ? one : (a < zero ? -one : Absolute(a))",
       derivative=no_derivative, interval=within(UNIT), dtypes=NUMBERS, tf_ops=("Sign",)),
    Op("square", 1, numpy=np.square, cuda="{0} * {0}", cpp="a * a",
       derivative=slope(lambda d: d.apply("multiply", d.number(2), d.x)), dtypes=NUMBERS, wraps=True,
       tf_ops=("Square",)),
    Op("sqrt", 1, numpy=np.sqrt, cuda="sqrt{f}({0})", cpp="Sqrt(a)",
       derivative=lambda d: (d.apply("multiply_no_nan", d.apply("divide", d.number(0.5), d.result), d.adjoint),),
       tf_ops=("Sqrt",)),
    Op("reciprocal_sqrt", 1, numpy=lambda x: 1 / np.sqrt(x), cuda="rsqrt{f}({0})", cpp="one / Sqrt(a)",
       derivative=_reciprocal_sqrt, tf_ops=("Rsqrt",)),
    Op("floor", 1, numpy=np.floor, cuda="floor{f}({0})", cpp="std::floor(a)", vectorised=False,
       derivative=no_derivative, interval=lambda a: (_rounded(math.floor, a[0]), _rounded(math.floor, a[1])),
       tf_ops=("Floor",)),
    # the rest of a quotient that was rounded down: it has the sign of the second argument
    Op("floor_mod", 2, numpy=np.mod, cuda="floor_mod({0}, {1})", cpp="FloorMod(a, b)", vectorised=False,
       derivative=_floor_mod, cost="activation", tf_ops=("FloorMod",)),
    Op("ceil", 1, numpy=np.ceil, cuda="ceil{f}({0})", cpp="std::ceil(a)", vectorised=False,
       derivative=no_derivative, interval=lambda a: (_rounded(math.ceil, a[0]), _rounded(math.ceil, a[1])),
       tf_ops=("Ceil",)),
    # to the nearest integer, halves to even
    Op("round", 1, numpy=np.rint, cuda="rint{f}({0})", cpp="std::nearbyint(a)", vectorised=False,
       derivative=no_derivative, interval=lambda a: (_rounded(round, a[0]), _rounded(round, a[1])),
       tf_ops=("Rint", "Round")),
    Op("reciprocal", 1, numpy=lambda x: 1 / x, cuda="1.0{f} / {0}", cpp="one / a",
       derivative=lambda d: (d.apply("multiply_no_nan", d.apply("negate", d.apply("square", d.result)), d.adjoint),),
       tf_ops=("Reciprocal", "Inv")),
)
# fmt: on
