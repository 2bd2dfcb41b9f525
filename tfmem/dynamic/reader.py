"""Reads the ops of one traced graph as the code of a node kind, each tensor once: what all ops have in common."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from custom_ops.dynamic.node_code import OPEN_ROWS, Instruction
from custom_ops.errors import DynamicError
from custom_ops.expr.table import FLOAT_OPS
from tfmem.dynamic.custom_gradients import require_usual_gradient
from tfmem.dynamic.dtypes import may_hold
from tfmem.dynamic.expressions import expression_at
from tfmem.dynamic.extension import Expression
from tfmem.dynamic.mirrored import handles_of
from tfmem.dynamic.picks import pick, table_of
from tfmem.dynamic.recorder import Recorder
from tfmem.dynamic.user_lines import line_in
from tfmem.dynamic.weights import Weights

_SAME = ("Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "EnsureShape", "Snapshot")
_OF_FIRST = ("StridedSlice",)
_READS = ("Placeholder", "RandomUniform", "ReadVariableOp", "ResourceGather")  # stateful ops that change nothing
_BRANCHES = ("If", "Case", "While")  # refused as ops that nodes do not support, whatever they do
_ELEMENTWISE = {name: (op.name, False) for op in FLOAT_OPS.values() for name in op.tf_ops}
_ELEMENTWISE |= {name: (op.name, True) for op in FLOAT_OPS.values() for name in op.reversed_tf_ops}


def line_of(op: Any) -> str:
    """The line of the user's code that made an op: the innermost one outside of TensorFlow and Keras."""
    frames = list(op.traceback or ())
    own = str(Path(__file__).parent)  # of tfmem.dynamic, where tracing began
    first = max((number for number, frame in enumerate(frames) if frame.filename.startswith(own)), default=-1)
    return line_in(frames[first + 1 :])


class Reader:
    """Reads tensors of one graph, each once."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name = name
        self.recorder = recorder
        self.dtype = recorder.dtype
        self.builder = recorder.builder
        self.known: dict[Any, Any] = {}  # a vector's expression, a parameter, or an integer argument
        self.captured: dict[Any, Any] = {}

    def check_effects(self, op: Any) -> None:
        """Refuse ops with effects: a kind runs for many nodes at once, in an order that users do not see."""
        if op.op_def is not None and op.op_def.is_stateful and op.type not in _READS and op.type not in _BRANCHES:
            raise self.error(op, "it has a state or a side effect; a node may only compute values")

    def expression(self, tensor: tf.Tensor) -> Expression:
        value = self.value(tensor)
        if not isinstance(value, Expression) or not may_hold(tensor.dtype, self.dtype):
            raise self.error(tensor.op, f"it is {tensor.dtype.name}; expected a vector of {self.dtype.name}")
        return value

    def value(self, tensor: tf.Tensor) -> Any:
        if tensor.ref() not in self.known:
            waiting = [tensor.op]  # a chain may be longer than Python's stack
            while waiting:
                op = waiting[-1]
                missing = [t for t in self.needed(op) if t.ref() not in self.known]
                if missing:
                    waiting += [missing[0].op]
                    continue
                waiting.pop()
                self.read(op)
        return self.known[tensor.ref()]

    def needed(self, op: Any) -> list[Any]:
        """The inputs that are values of nodes: neither constants nor variables."""
        if op.type in {"Const", "ReadVariableOp", "Placeholder"}:
            return []
        alone = op.type in _OF_FIRST or (op.type in _SAME and op.type != "IdentityN")
        inputs = list(op.inputs)[: 1 if alone else None]  # neither shapes nor places are read
        return [tensor for tensor in inputs if tensor.dtype != tf.resource and tf.get_static_value(tensor) is None]

    def read(self, op: Any) -> None:
        """Read all outputs of an op.

        Raises:
            DynamicError: as for `call_traced`.
        """
        try:
            values = self.outputs(op)
            for tensor, value in itertools.zip_longest(op.outputs, values):  # None: what no node has
                self.check(tensor, value)
                self.known[tensor.ref()] = value
        except DynamicError as error:
            raise self.error(op, str(error)) from None

    def check(self, tensor: tf.Tensor, value: Any) -> None:
        """Check that a vector has as many numbers as TensorFlow's tensor, of a type that nodes compute in."""
        if not isinstance(value, Expression):
            return
        if not may_hold(tensor.dtype, self.dtype):
            raise DynamicError(f"its result is {tensor.dtype.name}; nodes of this net compute in {self.dtype.name}")
        if not value.width or value.width != tensor.shape.num_elements():
            raise DynamicError(
                f"its result has shape {tensor.shape}, but {value.width} numbers as a vector; expected as many"
            )

    def outputs(self, op: Any) -> list[Any]:
        read = getattr(self, f"read_{op.type}", None)
        if op.type not in {"ReadVariableOp", *_SAME, *_ELEMENTWISE} and read is None:
            raise DynamicError(
                "nodes do not support this op; expected elementwise ops, products, concat, stack, split, transpose, "
                "softmax, lookups, reductions or cross-entropy"
            )
        if "_gradient_op_type" in op.node_def.attr:
            require_usual_gradient(op)
        if op.type == "ReadVariableOp":
            return [Weights(self.parameter(op))]
        for tensor in (*op.inputs, *op.outputs):
            if not tensor.shape.is_fully_defined() and not isinstance(self.known.get(tensor.ref()), Weights):
                raise DynamicError(f"a tensor has shape {tensor.shape}; expected a static shape")
        if op.type == "IdentityN":
            return [self.input(op, number) for number in range(len(op.inputs))]
        if op.type in _SAME:
            return [self.input(op, 0)]
        return self.elementwise(op) if read is None else read(op)

    def elementwise(self, op: Any) -> list[Any]:
        name, reverse = _ELEMENTWISE[op.type]
        return [self.at(self.of_all(op, name, reverse))]

    def of_all(self, op: Any, name: str, reverse: bool = False) -> int:
        """An elementwise op of the inputs, broadcast to the result; `reverse`: from the last to the first."""
        shape = op.outputs[0].shape
        places = []
        for number, tensor in enumerate(op.inputs):
            place = self.place(op, number)
            if tensor.shape.num_elements() not in {1, shape.num_elements()}:
                place = self.pick(place, np.broadcast_to(self.aligned(op, number), shape.as_list()))
            places.append(place)
        return self.builder.elementwise(name, *(places[::-1] if reverse else places))

    def aligned(self, op: Any, number: int) -> np.ndarray[Any, Any]:
        """The positions of an input that is broadcast; the first Select of TensorFlow chooses rows by a vector."""
        positions, rank = self.positions(op, number), op.outputs[0].shape.rank
        if op.type == "Select" and number == 0:
            return positions.reshape(-1, *[1] * (rank - 1))
        if op.type == "BiasAdd" and op.get_attr("data_format") == b"NCHW":
            return positions.reshape(-1, *[1] * (rank - 2))
        return positions

    # ---- inputs ----

    def at(self, place: int) -> Expression:
        return expression_at(self.recorder, place)

    def input(self, op: Any, number: int) -> Any:
        tensor = op.inputs[number]
        if tensor.ref() in self.known:
            return self.known[tensor.ref()]
        constant = tf.get_static_value(tensor)
        if constant is None:
            raise DynamicError(f"input {number} is no value of this node; pass it as a child or an argument")
        if not constant.size:
            raise DynamicError(
                f"input {number} has shape {list(constant.shape)}, without a number; leave out what is empty"
            )
        if constant.size > 1:
            if not op.inputs[number].dtype.is_floating:
                raise DynamicError(
                    f"a constant has shape {list(constant.shape)} and type {constant.dtype}; expected floats"
                )
            return self.at(table_of(self.builder, constant.ravel().astype(np.float64)))
        return self.at(self.builder.constant(float(constant.reshape(()))))

    def place(self, op: Any, number: int) -> int:
        """The position of a vector in the code; a parameter that is no matrix elsewhere is a vector as well."""
        value = self.input(op, number)
        if isinstance(value, Weights):
            return self.number_by_number(value)
        if not isinstance(value, Expression):
            raise DynamicError(f"input {number} is {op.inputs[number].dtype.name}; expected a vector")
        return value.place

    def number_by_number(self, weights: Weights) -> int:
        shape = self.recorder.shape_of(weights.number)
        if shape[:1] == (OPEN_ROWS,):
            raise DynamicError("it reads all rows of an input; read one of them by tf.gather, with an argument")
        self.recorder.see_as(weights.number, 0)
        whole = self.builder.add(Instruction("row", math.prod(shape), (), (weights.number, 0)))
        return whole if weights.positions is None else self.pick(whole, weights.positions)

    def vector(self, op: Any, number: int) -> int:
        """The position of a vector in the code, for ops that take no constants."""
        place = self.place(op, number)
        is_constant = self.builder.code[place].op == "constant"
        return self.builder.add(Instruction("broadcast", 1, (place,))) if is_constant else place

    def positions(self, op: Any, number: int) -> np.ndarray[Any, Any]:
        """The position in the vector of each number of a tensor, in the tensor's shape."""
        shape = op.inputs[number].shape
        return np.arange(shape.num_elements()).reshape(shape.as_list())

    def pick(self, place: int, positions: np.ndarray[Any, Any]) -> int:
        """The position in the code of a vector of these numbers of another."""
        return pick(self.builder, place, positions.ravel())

    def part(self, op: Any, number: int, positions: np.ndarray[Any, Any]) -> Expression | Weights:
        """The vector of these numbers of an input."""
        value = self.input(op, number)
        if isinstance(value, Weights):
            return value.taken(positions)
        return self.at(self.pick(self.vector(op, number), positions))

    def together(self, op: Any, count: int) -> tuple[int, list[np.ndarray[Any, Any]]]:
        """The first inputs as one vector, and where the numbers of each lie in it."""
        sizes = [tensor.shape.num_elements() for tensor in op.inputs[:count]]
        first = np.cumsum([0, *sizes])
        joined = self.builder.concat(*(self.vector(op, number) for number in range(count) if sizes[number]))
        return joined, [self.positions(op, number) + first[number] for number in range(count)]

    def parameter(self, op: Any) -> int:
        """The number of a variable that an op reads by its handle, input 0."""
        handle = self.captured.get(op.inputs[0].ref())
        for number, variable in enumerate(self.recorder.variables):
            if any(handle is each for each in handles_of(variable)):
                return number
        raise DynamicError(
            "it reads a variable that is no parameter of this net; add it to the parameters of specialize"
        )

    def constant(self, op: Any, number: int) -> np.ndarray[Any, Any]:
        value = tf.get_static_value(op.inputs[number])
        if value is None:
            raise DynamicError(f"input {number} depends on the node; expected a constant")
        return np.asarray(value)

    def error(self, op: Any, problem: str) -> DynamicError:
        return DynamicError(f"kind '{self.name}': op '{op.name}' ({op.type}): {problem}{line_of(op)}")
