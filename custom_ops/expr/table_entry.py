"""What an entry in the table of elementwise ops says: all that any reader of programs needs to know about one op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Interval: TypeAlias = tuple[float, float]

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int32", "int64")
INTEGER_RANGES = {name: (int(np.iinfo(name).min), int(np.iinfo(name).max)) for name in INTEGERS}
BOOL = ("bool",)
NUMBERS = FLOATS + INTEGERS

ANY: Interval = (-inf, inf)
UNIT: Interval = (-1.0, 1.0)
FRACTION: Interval = (0.0, 1.0)


@dataclass(frozen=True)
class Derivation:
    """What the derivative of `result = op(*arguments)` is written with: values by number, and how to make new ones.

    Attributes:
        apply: the value of an op, by its name and its arguments.
        number: the value of a constant.
        adjoint: the gradient with respect to the result.
        result: the op's result; what can be said by it should be, because it is often kept anyway.
        arguments: the op's arguments.
    """

    apply: Callable[..., int]
    number: Callable[[float], int]
    adjoint: int
    result: int
    arguments: tuple[int, ...]

    @property
    def x(self) -> int:
        """The first argument."""
        return self.arguments[0]

    @property
    def y(self) -> int:
        """The last argument."""
        return self.arguments[-1]

    def times(self, *factors: int) -> int:
        """The adjoint times all of them, from left to right: what overflows on the way depends on the order."""
        product = self.adjoint
        for factor in factors:
            product = self.apply("multiply", product, factor)
        return product

    def where(self, condition: int) -> int:
        """The adjoint where the condition holds, else 0."""
        return self.apply("select", condition, self.adjoint, self.number(0))

    def where_not(self, condition: int) -> int:
        """The adjoint where the condition does not hold, else 0."""
        return self.apply("select", condition, self.number(0), self.adjoint)


# For each argument what it gets of the adjoint; None: nothing, ever.
Derivative: TypeAlias = Callable[[Derivation], tuple[int | None, ...]]


def slope(of: Callable[[Derivation], int]) -> Derivative:
    """The derivative of an op of one argument, whose gradient is the adjoint times `of`."""
    return lambda d: (d.times(of(d)),)


def no_derivative(d: Derivation) -> tuple[None, ...]:
    """The derivatives of an op that is constant wherever it has a derivative."""
    return (None,) * len(d.arguments)


def unbounded(*_: Interval) -> Interval:
    """The interval of an op whose result is unbounded."""
    return ANY


def within(interval: Interval) -> Callable[..., Interval]:
    """The bound of an op whose result stays in `interval` for all arguments."""
    return lambda *_: interval


def hull(a: Interval, b: Interval) -> Interval:
    """The smallest interval that holds both."""
    return (min(a[0], b[0]), max(a[1], b[1]))


@dataclass(frozen=True)
class Op:
    """One elementwise op. Adding one is adding an entry to a module of this folder, and nothing else.

    Attributes:
        name: as programs and cells write it.
        arity: its number of arguments, all of one dtype (but for the condition of `select`).
        numpy: its definition, on arrays.
        cuda: a CUDA expression; `{0}`, `{1}` and `{2}` are its arguments, and `{f}` ends a literal or the name of a
            function of the C library: `f` for float, nothing for double. Functions that the C library lacks are in
            kernels/math.cuh.
        cpp: a C++ expression for the CPU (ops/cpu/vector_math_body.h): of vectors `a`, `b` and `c`, and of `zero` and
            `one`; or of numbers `a`, `b` and `c`, if `vectorised` is False.
        vectorised: whether `cpp` is an expression of vectors. A comparison's is a mask.
        derivative: TensorFlow's gradient, also where there is no derivative, and where numbers are not finite
            (math_grad.py, nn_grad.py, cwise_ops_gradients.h): whether zero times infinity is 0 or NaN depends on the
            op.
        interval: bounds on the result for bounds on the arguments; NaN is no number out of bounds.
        dtypes: of the arguments, and of the result unless it is a comparison.
        comparison: whether the result is bool; a cell, whose values have one dtype, has 1 and 0.
        wraps: whether integers that are too large wrap around, as TensorFlow's do; `cuda` holds for unsigned ones, too.
        commutative: whether the order of the arguments does not matter, to the bit.
        cost: an "activation" takes as long as a function of the C library, the rest is about one instruction.
        ulps: how far float32 results on the CPU may be from the exact ones, in units in the last place.
        tf_ops: TensorFlow's ops that mean this one, in floating point.
        reversed_tf_ops: those whose two arguments are the other way round.
    """

    name: str
    arity: int
    numpy: Callable[..., Array]
    cuda: str
    cpp: str
    derivative: Derivative
    vectorised: bool = True
    interval: Callable[..., Interval] = unbounded
    dtypes: tuple[str, ...] = FLOATS
    comparison: bool = False
    wraps: bool = False
    commutative: bool = False
    cost: Literal["arithmetic", "activation"] = "arithmetic"
    ulps: int = 2
    tf_ops: tuple[str, ...] = ()
    reversed_tf_ops: tuple[str, ...] = ()


def where(condition: Any, a: Any, b: Any) -> Array:
    """`a` where the condition holds, else `b`."""
    return np.where(condition, a, b)
