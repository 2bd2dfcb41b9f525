"""Writes the code of one kind of node: what every op of `tfmem.dynamic` becomes there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from custom_ops.dynamic.program import Builder, Instruction, Parameter
from custom_ops.errors import DynamicError


@dataclass(eq=False)
class Recorder:
    """Writes the code of one kind.

    Attributes:
        variables: those that the net was specialised for; their positions are the parameters' numbers.
        bounds: for each integer argument the number below which it has to be.
        training: whether dropout drops.
        written: where expressions that were recorded outside of the kind are in its code.
    """

    variables: Sequence[tf.Variable]
    bounds: list[int | None]
    training: bool = True
    streams: Any = field(default_factory=itertools.count)
    written: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = Builder(tuple(parameter_of(variable) for variable in self.variables))

    def number_of(self, variable: tf.Variable) -> int:
        """The number of a parameter."""
        for number, other in enumerate(self.variables):
            if other is variable:
                return number
        raise DynamicError(
            f"variable '{variable.name}' is none of the {len(self.variables)} parameters of this net; add it to the "
            "parameters of specialize"
        )


@dataclass(frozen=True)
class Argument:
    """An integer argument of a node, in the function of its kind."""

    recorder: Recorder
    number: int

    def below(self, bound: int) -> int:
        """The argument's position, after it has been used as one of `bound` positions."""
        known = self.recorder.bounds[self.number]
        self.recorder.bounds[self.number] = bound if known is None else min(bound, known)
        return self.number


class Operation(NamedTuple):
    """One op with all but its vectors, variables and integers: what makes two recorded nodes of one kind."""

    name: str
    settings: tuple[Any, ...] = ()

    def emit(
        self, recorder: Recorder, variables: tuple[int, ...], values: tuple[int, ...], integers: tuple[Argument, ...]
    ) -> int:
        """Write the op's instructions; returns the position of its value."""
        return EMIT[self.name](recorder, self.settings, variables, values, integers)


def parameter_of(variable: tf.Variable) -> Parameter:
    """A variable as a program declares it.

    Raises:
        DynamicError: it is no float32 variable of one dimension or two.
    """
    if isinstance(variable, keras.Variable) or not hasattr(variable, "handle"):
        raise DynamicError(
            f"parameter {variable!r} is no tf.Variable; expected one, such as `weight.value` of a Keras weight"
        )
    if variable.dtype != tf.float32 or variable.shape.rank not in {1, 2} or not variable.shape.is_fully_defined():
        raise DynamicError(
            f"parameter '{variable.name}' is {variable.dtype.name} of shape {variable.shape}; expected float32 of one "
            "dimension or two"
        )
    return Parameter(variable.name, tuple(variable.shape.as_list()), variable.trainable)


# ---- what each op writes: (recorder, settings, parameters, values, arguments) to the position of its value ----


def _lookup(recorder: Recorder, _: Any, parameters: Any, values: Any, integers: Any) -> int:
    shape = recorder.builder.parameters[parameters[0]].shape
    if len(shape) != 2:
        raise DynamicError(f"embedding_lookup reads a parameter of shape {list(shape)}; expected [ids, width]")
    return recorder.builder.add(Instruction("lookup", shape[1], (), (parameters[0], integers[0].below(shape[0]), 0)))


def _vector(recorder: Recorder, _: Any, parameters: Any, values: Any, integers: Any) -> int:
    parameter = recorder.builder.parameters[parameters[0]]
    if len(parameter.shape) != 1:
        raise DynamicError(
            f"parameter '{parameter.name}' has shape {list(parameter.shape)}; a vector needs one dimension"
        )
    return recorder.builder.add(Instruction("row", parameter.shape[0], (), (parameters[0], 0)))


def _matvec(recorder: Recorder, settings: Any, parameters: Any, values: Any, integers: Any) -> int:
    parameter = recorder.builder.parameters[parameters[0]]
    if len(parameter.shape) != 2:
        raise DynamicError(
            f"parameter '{parameter.name}' has shape {list(parameter.shape)}; a matrix product needs two dimensions"
        )
    return recorder.builder.product(parameters[0], values[0], settings[0])


def _dropout(recorder: Recorder, settings: Any, parameters: Any, values: Any, integers: Any) -> int:
    builder, (rate,) = recorder.builder, settings
    if rate == 0 or not recorder.training:
        return values[0]
    drawn = builder.add(Instruction("random", builder.width(values[0]), (), (next(recorder.streams),)))
    kept = builder.elementwise("greater_equal", drawn, builder.constant(rate))
    scaled = builder.elementwise("multiply", values[0], builder.constant(1 / (1 - rate)))
    return builder.elementwise("select", kept, scaled, builder.constant(0))


EMIT: dict[str, Callable[[Recorder, Any, Any, Any, Any], int]] = {
    "constant": lambda r, s, p, v, i: r.builder.constant(float.fromhex(s[0])),
    "elementwise": lambda r, s, p, v, i: r.builder.elementwise(s[0], *v),
    "matvec": _matvec,
    "vector": _vector,
    "lookup": _lookup,
    "concat": lambda r, s, p, v, i: r.builder.concat(*v),
    "slice": lambda r, s, p, v, i: r.builder.slice(v[0], *s),
    "softmax": lambda r, s, p, v, i: r.builder.softmax(v[0]),
    "reduce_max": lambda r, s, p, v, i: r.builder.reduce_max(v[0]),
    "reduce_sum": lambda r, s, p, v, i: r.builder.reduce_sum(v[0]),
    "dropout": _dropout,
    "cross_entropy": lambda r, s, p, v, i: r.builder.cross_entropy(i[0].below(r.builder.width(v[0])), v[0]),
}
