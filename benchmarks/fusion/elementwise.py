"""Every elementwise op that a region computes: TensorFlow's op, and its exact value in more digits than it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.expr.activations import SELU_ABOVE, SELU_BELOW

Array = NDArray[Any]
SLOPE = 0.2  # of LeakyRelu, TensorFlow's default


@dataclass(frozen=True)
class Elementwise:
    """One op.

    Attributes:
        inputs: the names of its inputs in `tf.raw_ops`.
        exact: its value, of numbers of a wider type; None where no wider type has the function.
    """

    inputs: tuple[str, ...]
    exact: Callable[..., Array] | None


def _vectorised(function: Callable[[float], float]) -> Callable[[Array], Array]:
    return lambda x: np.vectorize(function, otypes=[x.dtype])(x)


def _softplus(x: Array) -> Array:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1) / (1 + small)


def _no_nan(of: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda x, y: np.where(y == 0, 0 * np.sign(y), of(x, y))


def _selected(condition: Array, x: Array, y: Any) -> Array:
    return np.where(condition, x, y)


def _x(exact: Callable[[Array], Array] | None) -> Elementwise:
    return Elementwise(("x",), exact)


def _features(exact: Callable[[Array], Array] | None) -> Elementwise:
    return Elementwise(("features",), exact)


def _xy(exact: Callable[[Array, Array], Array]) -> Elementwise:
    return Elementwise(("x", "y"), exact)


def _of_result(exact: Callable[[Array, Array], Array]) -> Elementwise:
    return Elementwise(("y", "dy"), exact)


def _of_features(exact: Callable[[Array, Array], Array]) -> Elementwise:
    return Elementwise(("gradients", "features"), exact)


OPS: Mapping[str, Elementwise] = {
    "Abs": _x(np.abs),
    "Neg": _x(np.negative),
    "Sign": _x(np.sign),
    "Square": _x(np.square),
    "Sqrt": _x(np.sqrt),
    "Rsqrt": _x(lambda x: 1 / np.sqrt(x)),
    "Reciprocal": _x(lambda x: 1 / x),
    "Floor": _x(np.floor),
    "Ceil": _x(np.ceil),
    "Rint": _x(np.rint),
    "Round": _x(np.rint),
    "AddV2": _xy(np.add),
    "Sub": _xy(np.subtract),
    "Mul": _xy(np.multiply),
    "RealDiv": _xy(np.divide),
    "Maximum": _xy(np.maximum),
    "Minimum": _xy(np.minimum),
    "SquaredDifference": _xy(lambda x, y: np.square(x - y)),
    "MulNoNan": _xy(_no_nan(np.multiply)),
    "DivNoNan": _xy(_no_nan(np.divide)),
    "Xdivy": _xy(lambda x, y: np.where(x == 0, 0, x / y)),
    "Xlogy": _xy(lambda x, y: np.where(x == 0, 0, x * np.log(y))),
    "FloorDiv": _xy(lambda x, y: np.floor(x / y)),
    "Pow": _xy(np.power),
    "Exp": _x(np.exp),
    "Expm1": _x(np.expm1),
    "Log": _x(np.log),
    "Log1p": _x(np.log1p),
    "Sin": _x(np.sin),
    "Cos": _x(np.cos),
    "Atan": _x(np.arctan),
    "Sinh": _x(np.sinh),
    "Cosh": _x(np.cosh),
    "Erf": _x(_vectorised(math.erf)),
    "Erfc": _x(_vectorised(math.erfc)),
    "Sigmoid": _x(_sigmoid),
    "Tanh": _x(np.tanh),
    "Relu": _features(lambda x: np.maximum(x, 0)),
    "Relu6": _features(lambda x: np.minimum(np.maximum(x, 0), 6)),
    "LeakyRelu": _features(lambda x: _selected(x > 0, x, x * SLOPE)),
    "Elu": _features(lambda x: _selected(x > 0, x, np.expm1(np.minimum(x, 0)))),
    "Selu": _features(lambda x: _selected(x > 0, SELU_ABOVE * x, SELU_BELOW * np.expm1(np.minimum(x, 0)))),
    "Softplus": _features(_softplus),
    "Softsign": _features(lambda x: x / (1 + np.abs(x))),
    "ReluGrad": _of_features(lambda dy, x: dy * (x > 0)),
    "Relu6Grad": _of_features(lambda dy, x: dy * ((x > 0) & (x < 6))),
    "LeakyReluGrad": _of_features(lambda dy, x: _selected(x > 0, dy, dy * SLOPE)),
    "EluGrad": Elementwise(("gradients", "outputs"), lambda dy, y: _selected(y < 0, (y + 1) * dy, dy)),
    "SeluGrad": Elementwise(
        ("gradients", "outputs"), lambda dy, y: _selected(y < 0, (y + SELU_BELOW) * dy, SELU_ABOVE * dy)
    ),
    "SoftplusGrad": _of_features(lambda dy, x: dy / (np.exp(-x) + 1)),
    "SoftsignGrad": _of_features(lambda dy, x: dy / np.square(1 + np.abs(x))),
    "SigmoidGrad": _of_result(lambda y, dy: dy * y * (1 - y)),
    "TanhGrad": _of_result(lambda y, dy: dy * (1 - y * y)),
    "ReciprocalGrad": _of_result(lambda y, dy: _no_nan(np.multiply)(-(y * y), dy)),
    "SqrtGrad": _of_result(lambda y, dy: _no_nan(np.multiply)(0.5 / y, dy)),
    "RsqrtGrad": _of_result(lambda y, dy: -0.5 * dy * y * y * y),
}
"""All whose results are floating point; comparisons and selections are exact."""
