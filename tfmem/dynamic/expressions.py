"""Expressions of vectors, with TensorFlow's names, for the functions of node kinds.

Inside such a function they write the kind's code. Elsewhere they record a graph in which every op is a node with its
kind, so that a net may be written without kinds.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from custom_ops.dynamic.node_code import Instruction
from custom_ops.errors import DynamicError
from custom_ops.expr.table import FLOAT_OPS
from tfmem.dynamic.extension import Expression, RecordedOp, use_operators
from tfmem.dynamic.recorder import Argument, Operation, Recorder

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class RecordedOperation:
    """What recorded nodes that are alike share: their operation, the width of its value, and bounds of its integers."""

    operation: Operation
    width: int
    bounds: tuple[int | None, ...]


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
    recorder = None
    for value in (*values, *integers):
        owner = getattr(value, "recorder", None)
        if owner is not None and recorder is not None and owner is not recorder:
            raise DynamicError(
                f"{name}: its values belong to different node kinds, or to different handles; use values of one node"
            )
        recorder = owner or recorder
    operation = Operation(name, settings)
    if recorder is not None:
        return expression_at(recorder, _write(recorder, operation, variables, values, integers))
    recorded = tuple(value if isinstance(value, Expression) else constant(value) for value in values)
    measured = _measure(operation, variables, tuple(value.width for value in recorded), len(integers))
    numbers = tuple(_integer(name, integer) for integer in integers)
    for integer, bound in zip(numbers, measured.bounds, strict=True):
        if not 0 <= integer < (bound or 1):
            raise DynamicError(f"{name}: {integer} is out of range; expected 0 to {(bound or 1) - 1}")
    return Expression(measured.width, None, -1, measured, variables, recorded, numbers)


def _integer(name: str, given: Any) -> int:
    try:
        return operator.index(given)
    except (TypeError, AttributeError):  # the latter of tensors of floats
        raise DynamicError(f"{name}: {given!r} is no integer; expected a value of an integer type") from None


def _measure(
    operation: Operation, variables: tuple[tf.Variable, ...], widths: tuple[int, ...], integers: int
) -> RecordedOperation:
    """The width and bounds of an op, from a kind that computes nothing else."""
    recorder = Recorder(variables, [None] * integers)
    values = tuple(
        recorder.builder.add(Instruction("child", width, (), (slot, 0))) for slot, width in enumerate(widths)
    )
    arguments = tuple(Argument(recorder, number) for number in range(integers))
    place = operation.emit(recorder, tuple(range(len(variables))), values, arguments)
    return RecordedOperation(operation, recorder.builder.width(place), tuple(recorder.bounds))


def _recorded(*roles: str) -> Callable[[Function], Function]:
    """A function that makes one op, by the roles of its parameters.

    A tree has hundreds of ops. So the function is called only for vectors, variables and settings that it was not given
    before, and inside of node kinds; else the extension makes an expression like the one that the function made.
    """

    def with_roles(function: Function) -> Function:
        op = RecordedOp(function, tuple(inspect.signature(function).parameters), roles)
        return cast(Function, functools.update_wrapper(op, function))

    return with_roles


def place_of(recorder: Recorder, value: Any) -> int:
    """The position of a value in the code of a kind; what belongs to no kind yet is written there."""
    if not isinstance(value, Expression):
        return recorder.builder.constant(float(value))
    if value.recorder is recorder:
        return value.place
    written, waiting = recorder.written, [value]  # a graph may be deeper than Python's stack
    while waiting:
        current = waiting[-1]
        if current.recorder is not None or current.measured is None:
            raise DynamicError(
                "found an expression of another node kind; a kind may use only its function's children and arguments"
            )
        missing = [each for each in current.values if each not in written]
        if missing:
            waiting += missing
        elif waiting.pop() not in written:
            written[current] = _write(
                recorder, current.measured.operation, current.variables, current.values, current.integers
            )
    return written[value]


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
            f"{operation.name} got {', '.join(map(str, integers))} in a node kind; pass the integer as an argument"
        )
    places = tuple(place_of(recorder, value) for value in values)
    return operation.emit(recorder, tuple(map(recorder.number_of, variables)), places, arguments)


@_recorded("number")
def constant(value: float) -> Expression:
    """A constant, for ops of any width."""
    return apply("constant", (float(value).hex(),), (), ())  # hex: 0 and -0 are equal, and NaN is not


def _of_table(op: str) -> Callable[..., Expression]:
    def function(*values: Any) -> Expression:
        return apply("elementwise", (op,), (), values)

    function.__name__ = function.__qualname__ = op
    function.__module__ = "tfmem.dynamic"
    function.__doc__ = f"`{op}`, an op of the table `custom_ops.expr`; vectors of one number are broadcast."
    return _recorded("operands")(function)


ELEMENTWISE = {op: _of_table(op) for op in FLOAT_OPS}
use_operators(constant, *map(ELEMENTWISE.__getitem__, ("add", "subtract", "multiply", "divide", "negate")))


def elementwise(op: str, *values: Any) -> Expression:
    """An op of the table `custom_ops.expr`; vectors of one number are broadcast."""
    return ELEMENTWISE[op](*values) if op in ELEMENTWISE else apply("elementwise", (op,), (), values)


@_recorded("variable", "value")
def matvec(a: tf.Variable, b: Expression) -> Expression:
    """`tf.linalg.matvec`: matrix `[out, in]` times vector `[in]`."""
    return apply("matvec", (True,), (a,), (b,))


@_recorded("value", "variable")
def matmul(a: Expression, b: tf.Variable) -> Expression:
    """Vector `[in]` times matrix `[in, out]`, as a Keras layer has it."""
    return apply("matvec", (False,), (b,), (a,))


def affine(a: tf.Variable, x: Expression, b: tf.Variable) -> Expression:
    """`matvec(a, x) + b`."""
    return matvec(a, x) + vector(b)


@_recorded("variable")
def vector(parameter: tf.Variable) -> Expression:
    """A parameter of one dimension, as an expression."""
    return apply("vector", (), (parameter,), ())


def add_n(inputs: Sequence[Expression]) -> Expression:
    """`tf.add_n`: the sum of vectors of one width."""
    widths = [value.width for value in inputs]
    if not widths or len(set(widths)) > 1:
        raise DynamicError(f"add_n got vectors of {widths} numbers; expected one width")
    total = inputs[0]
    for value in inputs[1:]:
        total = total + value
    return total


@_recorded("variable", "integer")
def embedding_lookup(params: tf.Variable, ids: int | Argument) -> Expression:
    """`tf.nn.embedding_lookup` of one id: a row of a table `[ids, width]`."""
    return apply("lookup", (), (params,), (), (ids,))


@_recorded("values", "sizes")
def concat(values: Sequence[Expression], axis: int = 0) -> Expression:
    """`tf.concat` of vectors."""
    _first_axis("concat", axis)
    return apply("concat", (), (), values)


@_recorded("vector", "sizes", "sizes")
def split(value: Expression, num_or_size_splits: int | Sequence[int], axis: int = 0) -> list[Expression]:
    """`tf.split` of a vector: into so many equal parts, or parts of these sizes."""
    _first_axis("split", axis)
    return [_slice(value, first, size) for first, size in _parts(value.width, num_or_size_splits)]


@_recorded("value", "sizes", "sizes")
def _slice(value: Expression, first: int, size: int) -> Expression:
    return apply("slice", (first, size), (), (value,))


def _parts(width: int, parts: int | Sequence[int]) -> list[tuple[int, int]]:
    """The first number and the size of each part of a vector."""
    equal = np.ndim(parts) == 0
    given: Any = [parts] if equal else parts
    try:
        sizes = [operator.index(size) for size in given]
    except TypeError:
        raise DynamicError(f"cannot split {width} values into {parts}; expected integers") from None
    if equal and (sizes[0] < 1 or width % sizes[0]):
        raise DynamicError(f"cannot split {width} values into {parts} equal parts; pass sizes that sum to {width}")
    if equal:
        sizes = [width // sizes[0]] * sizes[0]
    elif sum(sizes) != width or min(sizes) < 1:
        raise DynamicError(f"cannot split {width} values into parts of {sizes}; pass sizes that sum to {width}")
    return [(end - size, size) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]


@_recorded("value")
def softmax(logits: Expression) -> Expression:
    """`tf.nn.softmax`."""
    return apply("softmax", (), (), (logits,))


@_recorded("value")
def reduce_max(input_tensor: Expression) -> Expression:
    """`tf.reduce_max` of a vector."""
    return apply("reduce_max", (), (), (input_tensor,))


@_recorded("value")
def reduce_sum(input_tensor: Expression) -> Expression:
    """`tf.reduce_sum` of a vector."""
    return apply("reduce_sum", (), (), (input_tensor,))


@_recorded("value", "number")
def dropout(x: Expression, rate: float) -> Expression:
    """`tf.nn.dropout` in training, `x` in inference; what is dropped depends on the seed of the call alone."""
    if not 0 <= rate < 1:
        raise DynamicError(f"dropout has rate {rate}; expected 0 <= rate < 1")
    return apply("dropout", (float(rate),), (), (x,))


@_recorded("integer", "value")
def sparse_softmax_cross_entropy(labels: int | Argument, logits: Expression) -> Expression:
    """`tf.nn.sparse_softmax_cross_entropy_with_logits` of one label: a number."""
    return apply("cross_entropy", (), (), (logits,), (labels,))


def _first_axis(name: str, axis: int) -> None:
    if axis not in {0, -1}:
        raise DynamicError(f"{name} along axis {axis}: vectors have only axis 0; pass axis=0")
