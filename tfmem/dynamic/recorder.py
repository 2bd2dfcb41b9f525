"""Writes the code of one kind of node: what every op of `tfmem.dynamic` becomes there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from custom_ops.dynamic.node_code import Builder, Instruction, Parameter
from custom_ops.errors import DynamicError
from tfmem.dynamic.dtypes import NAMES, is_type, type_of
from tfmem.dynamic.inputs import is_open, rows_of
from tfmem.dynamic.mirrored import is_mirrored


@dataclass(eq=False)
class Recorder:
    """Writes the code of one kind.

    Attributes:
        variables: those that the net was specialised for; their positions are the parameters' numbers.
        bounds: for each integer argument the number below which it has to be.
        training: whether dropout drops.
        dtype: of the net's numbers.
        views: the columns of the matrix that a parameter is seen as, by its number; 0: it is seen as a vector. All
            kinds of a net share them.
        written: where expressions that were recorded outside of the kind are in its code.
    """

    variables: Sequence[tf.Variable]
    bounds: list[int | None]
    training: bool = True
    streams: Any = field(default_factory=itertools.count)
    views: dict[int, int] = field(default_factory=dict)
    written: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.builder = Builder(parameters_of(self.variables, self.views))
        self.dtype = type_of(self.variables)

    def shape_of(self, number: int) -> tuple[int, ...]:
        """A parameter's shape; rows that come with each batch are `OPEN_ROWS`."""
        return rows_of(self.variables[number].shape.as_list())

    def columns_of(self, number: int) -> int:
        """The columns of a parameter's matrix; of one that is used for the first time, its last dimension."""
        return self.views.get(number) or int(self.variables[number].shape[-1])

    def see_as(self, number: int, columns: int) -> None:
        """Use a parameter as a matrix of so many columns; 0: as a vector of all its numbers.

        Raises:
            DynamicError: it is used in another way elsewhere.
        """
        variable = self.variables[number]
        first = self.views.setdefault(number, columns)
        if first != columns or (variable.shape.rank == 2 and columns not in {0, variable.shape[-1]}):
            raise DynamicError(
                f"it uses parameter '{variable.name}' of shape {variable.shape} as {_seen(columns)}; it is "
                f"{_seen(first if first != columns else variable.shape[-1])} elsewhere. Make it two parameters, or "
                "give it another shape"
            )
        found = list(self.builder.parameters)
        found[number] = parameter_of(variable, columns)
        self.builder.parameters = tuple(found)

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


def parameters_of(variables: Sequence[tf.Variable], views: Mapping[int, int]) -> tuple[Parameter, ...]:
    """All variables as a program declares them; `views` are those of `Recorder`."""
    return tuple(parameter_of(variable, views.get(number)) for number, variable in enumerate(variables))


def parameter_of(variable: tf.Variable, columns: int | None = None) -> Parameter:
    """A variable as a program declares it: as a matrix of so many columns, or, for 0, as a vector.

    Raises:
        DynamicError: it is no variable, or its type is none that nets have.
    """
    if isinstance(variable, keras.Variable) or not (is_mirrored(variable) or hasattr(variable, "handle")):
        raise DynamicError(
            f"parameter {variable!r} is no tf.Variable; expected one, such as `weight.value` of a Keras weight"
        )
    known = variable.shape.is_fully_defined() or (is_open(variable) and not variable.trainable)
    if not is_type(variable.dtype) or not known:
        raise DynamicError(
            f"parameter '{variable.name}' is {variable.dtype.name} of shape {variable.shape}; expected {NAMES} of "
            "known shape, or what tfmem.dynamic.inputs makes"
        )
    shape = rows_of(variable.shape.as_list()) or (1,)  # a number is a vector of one
    if columns == 0:
        shape = (math.prod(shape),)
    elif columns or len(shape) > 2:
        columns = columns or shape[-1]
        shape = (math.prod(shape) // columns, columns)
    return Parameter(variable.name, shape, variable.trainable)


def _seen(columns: int) -> str:
    return f"a matrix of {columns} columns" if columns else "a vector"


# ---- what each op writes: (recorder, settings, parameters, values, arguments) to the position of its value ----


def _lookup(recorder: Recorder, _: Any, parameters: Any, values: Any, integers: Any) -> int:
    shape = recorder.shape_of(parameters[0])
    if len(shape) != 2:
        raise DynamicError(f"embedding_lookup reads a parameter of shape {list(shape)}; expected [ids, width]")
    recorder.see_as(parameters[0], shape[1])
    return recorder.builder.add(Instruction("lookup", shape[1], (), (parameters[0], integers[0].below(shape[0]), 0)))


def _vector(recorder: Recorder, _: Any, parameters: Any, values: Any, integers: Any) -> int:
    shape = recorder.shape_of(parameters[0])
    if len(shape) != 1:
        name = recorder.builder.parameters[parameters[0]].name
        raise DynamicError(f"parameter '{name}' has shape {list(shape)}; a vector needs one dimension")
    recorder.see_as(parameters[0], 0)
    return recorder.builder.add(Instruction("row", shape[0], (), (parameters[0], 0)))


def _matvec(recorder: Recorder, settings: Any, parameters: Any, values: Any, integers: Any) -> int:
    shape = recorder.shape_of(parameters[0])
    if len(shape) != 2:
        name = recorder.builder.parameters[parameters[0]].name
        raise DynamicError(f"parameter '{name}' has shape {list(shape)}; a matrix product needs two dimensions")
    recorder.see_as(parameters[0], shape[1])
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
