"""Expressions of vectors, by TensorFlow's names: what a node computes is written with them.

Inside of the function of a node kind they write its code. Elsewhere they record a graph, in which every op is a node of
a kind of its own, so that a net may be written without functions of nodes, too.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from custom_ops.dynamic.program import Builder, Instruction, Parameter
from custom_ops.errors import DynamicError
from tfmem.dynamic.recorder import Argument, Operation, Recorder, parameter_of


@dataclass(frozen=True, eq=False)
class Measured:
    """What recorded nodes that are alike share: their operation, the width of its value, and bounds of its integers."""

    operation: Operation
    width: int
    bounds: tuple[int | None, ...]


@dataclass(eq=False, slots=True)
class Expression:
    """A vector of `width` numbers.

    Attributes:
        width: how many numbers.
        recorder: of the kind whose code it is part of; None where a graph is recorded.
        place: in that code.
        measured, variables, values, integers: of a recorded node; `measured` is one object for all that have its
            operation, and variables and values of its sizes.
    """

    width: int
    recorder: Recorder | None = None
    place: int = -1
    measured: Measured | None = None
    variables: tuple[tf.Variable, ...] = ()
    values: tuple[Expression, ...] = ()
    integers: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """As TensorFlow's; a vector of one number is a scalar, too."""
        return (self.width,)

    def __add__(self, other: Any) -> Expression:
        return elementwise("add", self, other)

    def __radd__(self, other: Any) -> Expression:
        return elementwise("add", other, self)

    def __sub__(self, other: Any) -> Expression:
        return elementwise("subtract", self, other)

    def __rsub__(self, other: Any) -> Expression:
        return elementwise("subtract", other, self)

    def __mul__(self, other: Any) -> Expression:
        return elementwise("multiply", self, other)

    def __rmul__(self, other: Any) -> Expression:
        return elementwise("multiply", other, self)

    def __truediv__(self, other: Any) -> Expression:
        return elementwise("divide", self, other)

    def __rtruediv__(self, other: Any) -> Expression:
        return elementwise("divide", other, self)

    def __neg__(self) -> Expression:
        return elementwise("negate", self)


def expression_at(recorder: Recorder, place: int) -> Expression:
    """The value at a place of a kind's code."""
    return Expression(recorder.builder.width(place), recorder, place)


def apply(
    name: str,
    settings: tuple[Any, ...],
    variables: tuple[tf.Variable, ...],
    values: Sequence[Any],
    integers: tuple[int | Argument, ...] = (),
) -> Expression:
    """The value of an op: written into the code of a kind, or recorded.

    Raises:
        DynamicError: shapes do not fit, or expressions of different kinds or a variable of another net meet.
    """
    # Most calls record, and a tree has hundreds of them: nothing is asked twice, and no object made that can be shared.
    for value in values:
        if value.__class__ is not Expression or value.recorder is not None:
            return _apply_to_any(name, settings, variables, values, integers)
    for integer in integers:
        if integer.__class__ is Argument:
            return _apply_to_any(name, settings, variables, values, integers)
    parameters = tuple(map(_PARAMETERS.of, variables)) if variables else ()
    widths = tuple([value.width for value in values])
    measured = _measure(name, settings, parameters, widths, len(integers))
    if not integers:
        return Expression(measured.width, None, -1, measured, variables, tuple(values))
    numbers = tuple(map(int, integers))  # type: ignore[arg-type]
    for integer, bound in zip(numbers, measured.bounds, strict=True):
        if not 0 <= integer < (bound or 1):
            raise DynamicError(f"{name}: {integer} is out of range; expected 0 to {(bound or 1) - 1}")
    return Expression(measured.width, None, -1, measured, variables, tuple(values), numbers)


def _apply_to_any(
    name: str,
    settings: tuple[Any, ...],
    variables: tuple[tf.Variable, ...],
    values: Sequence[Any],
    integers: tuple[int | Argument, ...],
) -> Expression:
    """The same, where something belongs to a kind, or is a number."""
    recorder = None
    for value in (*values, *integers):
        owner = getattr(value, "recorder", None)
        if owner is not None and recorder is not None and owner is not recorder:
            raise DynamicError(f"{name}: its values belong to different node kinds, or to different handles")
        recorder = owner or recorder
    if recorder is not None:
        return expression_at(recorder, _write(recorder, Operation(name, settings), variables, values, integers))
    recorded = [value if isinstance(value, Expression) else constant(value) for value in values]
    return apply(name, settings, variables, recorded, integers)


def place_of(recorder: Recorder, value: Any) -> int:
    """The position of a value in the code of a kind; what belongs to no kind yet is written there."""
    if not isinstance(value, Expression):
        return recorder.builder.constant(float(value))
    if value.recorder is recorder:
        return value.place
    if value.recorder is not None or value.measured is None:
        raise DynamicError("an expression of another node kind; a kind may use what its own function was given")
    return _write(recorder, value.measured.operation, value.variables, value.values, value.integers)


def _write(
    recorder: Recorder,
    operation: Operation,
    variables: Sequence[tf.Variable],
    values: Sequence[Any],
    integers: Sequence[int | Argument],
) -> int:
    arguments = tuple(integer for integer in integers if isinstance(integer, Argument))
    if len(arguments) < len(integers):
        raise DynamicError(
            f"{operation.name} of {', '.join(map(str, integers))} in a node kind: make it an argument of the kind"
        )
    places = tuple(place_of(recorder, value) for value in values)
    return operation.emit(recorder, tuple(map(recorder.number_of, variables)), places, arguments)


class _Parameters:
    """What programs say of variables, each asked once: that takes TensorFlow microseconds. Keeps no variable alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[tf.Variable], Parameter]] = {}

    def of(self, variable: tf.Variable) -> Parameter:
        """The same object each time."""
        number = id(variable)
        known = self._known.get(number)
        if known is None or known[0]() is not variable:
            gone = weakref.ref(variable, lambda _: self._known.pop(number, None))
            known = self._known[number] = gone, parameter_of(variable)
        return known[1]


_PARAMETERS = _Parameters()


@functools.lru_cache(1 << 12)
def _measure(
    name: str, settings: tuple[Any, ...], parameters: tuple[Parameter, ...], widths: tuple[int, ...], integers: int
) -> Measured:
    """From a kind that computes nothing else."""
    operation, recorder = Operation(name, settings), Recorder((), [None] * integers)
    recorder.builder = Builder(parameters)
    values = tuple(
        recorder.builder.add(Instruction("child", width, (), (slot, 0))) for slot, width in enumerate(widths)
    )
    arguments = tuple(Argument(recorder, number) for number in range(integers))
    place = operation.emit(recorder, tuple(range(len(parameters))), values, arguments)
    return Measured(operation, recorder.builder.width(place), tuple(recorder.bounds))


def constant(value: float) -> Expression:
    """A number, for ops of any width."""
    return apply("constant", (float(value).hex(),), (), ())  # hex: 0 and -0 are equal, and NaN is not


def elementwise(op: str, *values: Any) -> Expression:
    """An op of the table `custom_ops.expr`; vectors of one number are broadcast."""
    return apply("elementwise", (op,), (), values)


def matvec(a: tf.Variable, b: Expression) -> Expression:
    """`tf.linalg.matvec`: matrix `[out, in]` times vector `[in]`."""
    return apply("matvec", (True,), (a,), (b,))


def matmul(a: Expression, b: tf.Variable) -> Expression:
    """Vector `[in]` times matrix `[in, out]`, as a Keras layer has it."""
    return apply("matvec", (False,), (b,), (a,))


def affine(a: tf.Variable, x: Expression, b: tf.Variable) -> Expression:
    """`matvec(a, x) + b`."""
    return matvec(a, x) + vector(b)


def vector(parameter: tf.Variable) -> Expression:
    """A parameter of one dimension, as an expression."""
    return apply("vector", (), (parameter,), ())


def add_n(inputs: Sequence[Expression]) -> Expression:
    """`tf.add_n`: the sum of vectors of one width."""
    widths = [value.width for value in inputs]
    if not widths or len(set(widths)) > 1:
        raise DynamicError(f"add_n of vectors of {widths} numbers; expected one width")
    total = inputs[0]
    for value in inputs[1:]:
        total = total + value
    return total


def embedding_lookup(params: tf.Variable, ids: int | Argument) -> Expression:
    """`tf.nn.embedding_lookup` of one id: a row of a table `[ids, width]`."""
    return apply("lookup", (), (params,), (), (ids,))


def concat(values: Sequence[Expression], axis: int = 0) -> Expression:
    """`tf.concat` of vectors."""
    _first_axis("concat", axis)
    return apply("concat", (), (), values)


def split(value: Expression, num_or_size_splits: int | Sequence[int], axis: int = 0) -> list[Expression]:
    """`tf.split` of a vector: into so many equal parts, or parts of these sizes."""
    _first_axis("split", axis)
    sizes = num_or_size_splits if isinstance(num_or_size_splits, int) else tuple(num_or_size_splits)
    return [apply("slice", part, (), (value,)) for part in _parts(value.width, sizes)]


@functools.lru_cache(1 << 12)
def _parts(width: int, parts: int | tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The first number and the size of each part of a vector."""
    if isinstance(parts, int):
        if parts < 1 or width % parts:
            raise DynamicError(f"split of a vector of {width} numbers into {parts} equal parts")
        sizes = [width // parts] * parts
    else:
        sizes = list(parts)
        if sum(sizes) != width or min(sizes) < 1:
            raise DynamicError(f"split of a vector of {width} numbers into parts of {sizes}")
    return tuple((end - size, size) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True))


def softmax(logits: Expression) -> Expression:
    """`tf.nn.softmax`."""
    return apply("softmax", (), (), (logits,))


def reduce_max(input_tensor: Expression) -> Expression:
    """`tf.reduce_max` of a vector."""
    return apply("reduce_max", (), (), (input_tensor,))


def reduce_sum(input_tensor: Expression) -> Expression:
    """`tf.reduce_sum` of a vector."""
    return apply("reduce_sum", (), (), (input_tensor,))


def dropout(x: Expression, rate: float) -> Expression:
    """`tf.nn.dropout` in training, `x` in inference; what is dropped depends on the seed of the call alone."""
    if not 0 <= rate < 1:
        raise DynamicError(f"dropout at rate {rate}; expected at least 0 and below 1")
    return apply("dropout", (float(rate),), (), (x,))


def sparse_softmax_cross_entropy(labels: int | Argument, logits: Expression) -> Expression:
    """`tf.nn.sparse_softmax_cross_entropy_with_logits` of one label: a number."""
    return apply("cross_entropy", (), (), (logits,), (labels,))


def _first_axis(name: str, axis: int) -> None:
    if axis not in {0, -1}:
        raise DynamicError(f"{name} along axis {axis}; vectors have axis 0 alone")
