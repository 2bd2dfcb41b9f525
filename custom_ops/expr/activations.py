"""Activation functions of networks. One whose gradient in TensorFlow is no chain of the others' is an op, too."""

from __future__ import annotations

import numpy as np

from custom_ops.expr.table_entry import FRACTION, UNIT, Derivation, Op, slope, where, within

SELU_ABOVE, SELU_BELOW = 1.0507009873554805, 1.7580993408473769  # selu is these times x, and exp(x) - 1


def _elu(d: Derivation) -> tuple[int]:
    below = d.times(d.apply("add", d.result, d.number(1)))
    return (d.apply("select", d.apply("greater", d.number(0), d.result), below, d.adjoint),)


def _selu(d: Derivation) -> tuple[int]:
    # TensorFlow's result is a multiple of exp(x) - 1, which reaches 0 earlier than ours: at 0 the slope jumps.
    below = d.times(d.apply("add", d.result, d.number(SELU_BELOW)))
    is_below = d.apply("greater", d.number(1), d.apply("exp", d.x))
    return (d.apply("select", is_below, below, d.times(d.number(SELU_ABOVE))),)


def _softsign(d: Derivation) -> tuple[int]:
    square = d.apply("square", d.apply("add", d.apply("absolute", d.x), d.number(1)))
    return (d.apply("divide", d.adjoint, square),)


def _relu6(d: Derivation) -> int:
    above = d.apply("greater", d.result, d.number(0))
    return d.apply("multiply", above, d.apply("greater", d.number(6), d.result))


# fmt: off
OPS = (
    Op("sigmoid", 1, numpy=lambda x: 1 / (1 + np.exp(-x)), cuda="sigmoid({0})", cpp="Sigmoid(a)",
       derivative=slope(lambda d: d.apply("multiply", d.result, d.apply("subtract", d.number(1), d.result))),
       interval=within(FRACTION), cost="activation", tf_ops=("Sigmoid",)),
    Op("tanh", 1, numpy=np.tanh, cuda="hyperbolic_tangent({0})", cpp="Tanh(a)",
       derivative=slope(lambda d: d.apply("subtract", d.number(1), d.apply("square", d.result))),
       interval=within(UNIT), cost="activation", tf_ops=("Tanh",)),
    # of -0 it is 0, as TensorFlow's
    Op("relu", 1, numpy=lambda x: np.maximum(x, 0), cuda="maximum({0}, 0.0{f})", cpp="(a < zero ? zero : a) + zero",
       derivative=slope(lambda d: d.apply("greater", d.result, d.number(0))),
       interval=lambda a: (max(a[0], 0.0), max(a[1], 0.0)), tf_ops=("Relu",)),
    Op("relu6", 1, numpy=lambda x: np.minimum(np.maximum(x, 0), 6), cuda="minimum(maximum({0}, 0.0{f}), 6.0{f})",
       cpp="(a < zero ? zero : (a > Real(6) ? zero + Real(6) : a)) + zero", derivative=slope(_relu6),
       tf_ops=("Relu6",)),
    Op("softplus", 1, numpy=lambda x: np.logaddexp(x, 0), cuda="softplus({0})", cpp="Softplus(a)", vectorised=False,
       derivative=slope(lambda d: d.apply("sigmoid", d.x)), cost="activation", tf_ops=("Softplus",)),
    Op("elu", 1, numpy=lambda x: where(x > 0, x, np.expm1(x)), cuda="elu({0})", cpp="a < 0 ? std::expm1(a) : a",
       vectorised=False, derivative=_elu, cost="activation", tf_ops=("Elu",)),
    Op("selu", 1, numpy=lambda x: where(x < 0, SELU_BELOW * np.expm1(x), SELU_ABOVE * x), cuda="selu({0})",
       cpp=f"a < 0 ? Real({SELU_BELOW}) * std::expm1(a) : Real({SELU_ABOVE}) * a", vectorised=False, derivative=_selu,
       cost="activation", tf_ops=("Selu",)),
    Op("softsign", 1, numpy=lambda x: x / (np.abs(x) + 1), cuda="{0} / (absolute({0}) + 1.0{f})",
       cpp="a / (Absolute(a) + one)", derivative=_softsign, interval=within(UNIT), cost="activation",
       tf_ops=("Softsign",)),
)
# fmt: on
