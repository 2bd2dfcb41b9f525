"""Exponentials, logarithms, error functions and trigonometry."""

from __future__ import annotations

import math

import numpy as np

from custom_ops.expr.table_entry import UNIT, Derivation, Op, slope, within

_erf = np.vectorize(math.erf, otypes=[np.float64])
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _bell(d: Derivation, factor: float) -> tuple[int]:
    """The adjoint times `factor`, times exp(-x^2)."""
    bell = d.apply("exp", d.apply("negate", d.apply("square", d.x)))
    return (d.times(d.number(factor), bell),)


# fmt: off
OPS = (
    Op("exp", 1, numpy=np.exp, cuda="exp{f}({0})", cpp="Exp(a)", derivative=slope(lambda d: d.result),
       cost="activation", tf_ops=("Exp",)),
    Op("expm1", 1, numpy=np.expm1, cuda="expm1{f}({0})", cpp="std::expm1(a)", vectorised=False,
       derivative=slope(lambda d: d.apply("exp", d.x)), cost="activation", tf_ops=("Expm1",)),
    Op("log", 1, numpy=np.log, cuda="log{f}({0})", cpp="Log(a)",
       derivative=slope(lambda d: d.apply("reciprocal", d.x)), cost="activation", tf_ops=("Log",)),
    Op("log1p", 1, numpy=np.log1p, cuda="log1p{f}({0})", cpp="std::log1p(a)", vectorised=False,
       derivative=slope(lambda d: d.apply("reciprocal", d.apply("add", d.number(1), d.x))), cost="activation",
       tf_ops=("Log1p",)),
    Op("erf", 1, numpy=_erf, cuda="erf{f}({0})", cpp="std::erf(a)", vectorised=False,
       derivative=lambda d: _bell(d, 2 / math.sqrt(math.pi)), interval=within(UNIT), cost="activation", ulps=4,
       tf_ops=("Erf",)),
    Op("erfc", 1, numpy=_erfc, cuda="erfc{f}({0})", cpp="std::erfc(a)", vectorised=False,
       derivative=lambda d: _bell(d, -2 / math.sqrt(math.pi)), cost="activation", tf_ops=("Erfc",)),
    Op("sin", 1, numpy=np.sin, cuda="sin{f}({0})", cpp="std::sin(a)", vectorised=False,
       derivative=slope(lambda d: d.apply("cos", d.x)), interval=within(UNIT), cost="activation", ulps=4,
       tf_ops=("Sin",)),
    Op("cos", 1, numpy=np.cos, cuda="cos{f}({0})", cpp="std::cos(a)", vectorised=False,
       derivative=lambda d: (d.apply("negate", d.times(d.apply("sin", d.x))),), interval=within(UNIT),
       cost="activation", ulps=4, tf_ops=("Cos",)),
    Op("atan", 1, numpy=np.arctan, cuda="atan{f}({0})", cpp="std::atan(a)", vectorised=False,
       derivative=slope(lambda d: d.apply("reciprocal", d.apply("add", d.number(1), d.apply("square", d.x)))),
       interval=within((-math.pi / 2, math.pi / 2)), cost="activation", tf_ops=("Atan",)),
    Op("sinh", 1, numpy=np.sinh, cuda="sinh{f}({0})", cpp="std::sinh(a)", vectorised=False,
       derivative=slope(lambda d: d.apply("cosh", d.x)), cost="activation", tf_ops=("Sinh",)),
    Op("cosh", 1, numpy=np.cosh, cuda="cosh{f}({0})", cpp="std::cosh(a)", vectorised=False,
       derivative=slope(lambda d: d.apply("sinh", d.x)), cost="activation", tf_ops=("Cosh",)),
)
# fmt: on
