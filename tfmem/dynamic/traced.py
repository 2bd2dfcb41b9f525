"""Node kinds from TensorFlow's ops: the graph of a function over one node, read as expressions.

A value of a node is a vector. Where TensorFlow has a tensor of several dimensions, the vector has its numbers row by
row, so what TensorFlow reshapes stays the same vector. Every op is read by the shapes of its tensors. It is an error if
its result differs from that of the op of `tfmem.dynamic` on vectors.
"""

from __future__ import annotations

import itertools
import linecache
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from custom_ops.dynamic.program import Instruction
from custom_ops.errors import DynamicError
from custom_ops.expr.table import FLOAT_OPS
from tfmem.dynamic.expressions import expression_at
from tfmem.dynamic.extension import Expression
from tfmem.dynamic.kinds import Result
from tfmem.dynamic.recorder import Argument, Recorder

_SAME = ("Identity", "Reshape", "ExpandDims", "Squeeze", "EnsureShape", "Snapshot")
_READS = ("Placeholder", "ReadVariableOp", "ResourceGather")  # stateful ops that change nothing
_ELEMENTWISE = {name: (op.name, False) for op in FLOAT_OPS.values() for name in op.tf_ops}
_ELEMENTWISE |= {name: (op.name, True) for op in FLOAT_OPS.values() for name in op.reversed_tf_ops}


def call_traced(
    name: str,
    function: Callable[..., Any],
    recorder: Recorder,
    states: Sequence[tuple[Expression, ...]],
    arguments: Sequence[Argument],
) -> Result:
    """The result of `function` for the children's states and the arguments, as expressions of `recorder`.

    Raises:
        DynamicError: the function uses an op that nodes do not support, or uses one on more than vectors. The error
            names the op, and the line of the user's code.
    """
    vectors = [vector for state in states for vector in state]
    specs = [tf.TensorSpec([vector.width]) for vector in vectors] + [tf.TensorSpec([], tf.int32) for _ in arguments]
    returned: list[Any] = []

    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        rest = list(tensors[: len(vectors)])
        given = []
        for state in states:
            own, rest = tuple(rest[: len(state)]), rest[len(state) :]
            given.append(own[0] if len(own) == 1 else own)
        found = function(tuple(given), *tensors[len(vectors) :])
        result = found if isinstance(found, Result) else Result(state=found)
        returned.append((_count(result.state), result.loss is not None, _count(result.outputs)))
        return [*_listed(result.state), *([] if result.loss is None else [result.loss]), *_listed(result.outputs)]

    traced = tf.function(flat, autograph=True).get_concrete_function(*specs)
    reader = _Reader(name, recorder)
    inputs = traced.inputs[: len(specs)]
    for tensor, value in zip(inputs, [*vectors, *arguments], strict=True):
        reader.known[tensor.ref()] = value
    for tensor, external in zip(traced.inputs[len(specs) :], traced.captured_inputs, strict=True):
        reader.captured[tensor.ref()] = external
    for op in traced.graph.get_operations():
        reader.check_effects(op)
    count, has_loss, outputs = returned[-1]
    if len(traced.outputs) != count + has_loss + outputs:
        raise DynamicError(f"kind '{name}' returns a value that is no vector; expected vectors, or tuples of vectors")
    for position, tensor in enumerate(traced.outputs):
        if sum(size != 1 for size in tensor.shape) > 1:
            what = "loss" if has_loss and position == count else "state" if position < count else "output"
            raise reader.error(
                tensor.op, f"its shape as {what} is {tensor.shape}; expected a vector, as tf.reshape(..., [-1]) gives"
            )
    found = [reader.expression(tensor) for tensor in traced.outputs]
    loss = found[count] if has_loss else None
    return Result(tuple(found[:count]), loss, tuple(found[count + has_loss :]))


def _listed(vectors: Any) -> list[Any]:
    return list(vectors) if isinstance(vectors, tuple | list) else [vectors]


def _count(vectors: Any) -> int:
    return len(_listed(vectors))


def _line(op: Any) -> str:
    """The line of the user's code that made an op: the innermost one outside of TensorFlow and Keras."""
    frames = list(op.traceback or ())
    own = max((number for number, frame in enumerate(frames) if frame.filename == __file__), default=-1)
    libraries = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (tf, keras))
    for frame in reversed(frames[own + 1 :]):
        if not frame.filename.startswith(libraries):
            text = linecache.getline(frame.filename, frame.lineno).strip()
            return f" [{frame.filename}:{frame.lineno}{f': {text}' if text else ''}]"
    return ""


class _Reader:
    """Reads tensors of one graph, each once."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name = name
        self.recorder = recorder
        self.builder = recorder.builder
        self.known: dict[Any, Any] = {}  # a vector's expression, a parameter's number, or an integer argument
        self.captured: dict[Any, Any] = {}

    def check_effects(self, op: Any) -> None:
        """Refuse ops with effects: a kind runs for many nodes at once, in an order that users do not see."""
        if op.op_def is not None and op.op_def.is_stateful and op.type not in _READS:
            raise self.error(op, "it has a state or a side effect; a node may only compute values")

    def expression(self, tensor: tf.Tensor) -> Expression:
        value = self.value(tensor)
        if not isinstance(value, Expression) or tensor.dtype != tf.float32:
            raise self.error(tensor.op, f"it is {tensor.dtype.name}; expected a vector of float32")
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
        inputs = list(op.inputs)[: 1 if op.type in _SAME else None]  # shapes are not read
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
        if tensor.dtype not in {tf.float32, tf.bool}:
            raise DynamicError(f"its result is {tensor.dtype.name}; nodes compute in float32")
        if not value.width or value.width != tensor.shape.num_elements():
            raise DynamicError(f"its result has shape {tensor.shape}, but {value.width} numbers as a vector")

    def outputs(self, op: Any) -> list[Any]:
        read = getattr(self, f"read_{op.type}", None)
        if op.type not in {"ReadVariableOp", *_SAME, *_ELEMENTWISE} and read is None:
            raise DynamicError(
                "nodes do not support this op; expected elementwise ops, products with a variable, concat, split, "
                "softmax, lookups, reductions or cross-entropy of a label"
            )
        if "_gradient_op_type" in op.node_def.attr:
            raise DynamicError("it has a custom gradient; expected TensorFlow's")
        for tensor in (*op.inputs, *op.outputs):
            if not tensor.shape.is_fully_defined():
                raise DynamicError(f"a tensor has shape {tensor.shape}; expected a static shape")
        if op.type == "ReadVariableOp":
            return [self.parameter(op)]
        if op.type in _SAME:
            return [self.input(op, 0)]
        return self.elementwise(op) if read is None else read(op)

    def elementwise(self, op: Any) -> list[Any]:
        name, reverse = _ELEMENTWISE[op.type]
        count = op.outputs[0].shape.num_elements()
        for tensor in op.inputs:
            if tensor.shape.num_elements() not in {1, count}:
                shapes = " and ".join(str(tensor.shape) for tensor in op.inputs)
                raise DynamicError(f"shapes {shapes} are broadcast; expected equal shapes, or a single number")
        places = [self.place(op, number) for number in range(len(op.inputs))]
        return [self.at(self.builder.elementwise(name, *(places[::-1] if reverse else places)))]

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
        if constant.size != 1:
            raise DynamicError(f"a constant has shape {list(constant.shape)}; make it a parameter, or a single number")
        return self.at(self.builder.constant(float(constant.reshape(()))))

    def place(self, op: Any, number: int) -> int:
        """The position of a vector in the code; a variable of one dimension is a vector as well."""
        value = self.input(op, number)
        if isinstance(value, int):
            shape = self.builder.parameters[value].shape
            if len(shape) != 1:
                raise DynamicError(f"found a matrix of shape {list(shape)}; expected a vector")
            return self.builder.add(Instruction("row", shape[0], (), (value, 0)))
        if not isinstance(value, Expression):
            raise DynamicError(f"input {number} is {op.inputs[number].dtype.name}; expected a vector")
        return value.place

    def vector(self, op: Any, number: int) -> int:
        """The position of a vector in the code, for ops that take no constants."""
        place = self.place(op, number)
        is_constant = self.builder.code[place].op == "constant"
        return self.builder.add(Instruction("broadcast", 1, (place,))) if is_constant else place

    def positions(self, op: Any, number: int) -> np.ndarray[Any, Any]:
        """The position in the vector of each number of a tensor, in the tensor's shape."""
        shape = op.inputs[number].shape
        return np.arange(shape.num_elements()).reshape(shape.as_list())

    def part(self, op: Any, number: int, positions: np.ndarray[Any, Any]) -> Expression:
        """The vector of these numbers of an input."""
        found = positions.ravel()
        if not found.size or (np.diff(found) != 1).any():
            shown = f"{found.tolist() if found.size < 9 else f'{found[:8].tolist()} and so on'}"
            raise DynamicError(f"elements {shown} of a vector are not contiguous; expected a contiguous part")
        return self.at(self.builder.slice(self.vector(op, number), int(found[0]), found.size))

    def parameter(self, op: Any) -> int:
        """The number of a variable that an op reads by its handle, input 0."""
        handle = self.captured.get(op.inputs[0].ref())
        for number, variable in enumerate(self.recorder.variables):
            if getattr(variable, "handle", None) is handle and handle is not None:
                return number
        raise DynamicError(
            "it reads a variable that is no parameter of this net; add it to the parameters of specialize"
        )

    def matrix(self, op: Any, number: int) -> tuple[int, int]:
        """Rows and columns of the parameter that input `number` is."""
        shape = self.builder.parameters[self.input(op, number)].shape
        found = op.inputs[number].shape.as_list()
        if len(shape) != 2 or found != list(shape):
            raise DynamicError(
                f"a parameter of shape {list(shape)} is used with shape {found}; expected an unreshaped matrix"
            )
        return shape[0], shape[1]

    def constant(self, op: Any, number: int) -> np.ndarray[Any, Any]:
        value = tf.get_static_value(op.inputs[number])
        if value is None:
            raise DynamicError(f"input {number} depends on the node; expected a constant")
        return np.asarray(value)

    def error(self, op: Any, problem: str) -> DynamicError:
        return DynamicError(f"kind '{self.name}': op '{op.name}' ({op.type}): {problem}{_line(op)}")

    # ---- ops ----

    def read_MatMul(self, op: Any) -> list[Any]:  # noqa: N802
        flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
        a, b = self.input(op, 0), self.input(op, 1)
        if isinstance(a, int) and isinstance(b, Expression):  # matrix times a column
            matrix, vector, transposed = 0, 1, not op.get_attr(flags[0])
        elif isinstance(b, int) and isinstance(a, Expression):  # a row times a matrix
            matrix, vector, transposed = 1, 0, op.get_attr(flags[1])
        else:
            raise DynamicError("its operands are not one variable and one vector")
        self.matrix(op, matrix)
        # as long as the matrix's side, the vector is one row or one column
        return [self.at(self.builder.product(self.input(op, matrix), self.vector(op, vector), transposed))]

    read_BatchMatMulV2 = read_MatMul  # noqa: N815
    read_BatchMatMul = read_MatMul  # noqa: N815

    def read_ResourceGather(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.lookup(op, self.parameter(op))]

    def read_GatherV2(self, op: Any) -> list[Any]:  # noqa: N802
        number = self.input(op, 0)
        if not isinstance(number, int):
            raise DynamicError("a lookup needs a variable and an integer argument of the node")
        self.matrix(op, 0)
        if self.constant(op, 2) != 0:
            raise DynamicError(f"it looks up along axis {self.constant(op, 2)}; expected axis 0")
        return [self.lookup(op, number)]

    def lookup(self, op: Any, number: int) -> Expression:
        argument, shape = self.input(op, 1), self.builder.parameters[number].shape
        if not isinstance(argument, Argument) or len(shape) != 2 or op.get_attr("batch_dims") != 0:
            raise DynamicError("a lookup needs a variable of two dimensions and an integer argument of the node")
        place = self.builder.add(Instruction("lookup", shape[1], (), (number, argument.below(shape[0]), 0)))
        return self.at(place)

    def read_ConcatV2(self, op: Any) -> list[Any]:  # noqa: N802
        count = len(op.inputs) - 1
        first = np.cumsum([0, *(tensor.shape.num_elements() for tensor in op.inputs[:count])])
        parts = [self.positions(op, number) + first[number] for number in range(count)]
        axis = int(self.constant(op, count))
        if (np.diff(np.concatenate(parts, axis).ravel()) != 1).any():
            shapes = " and ".join(str(tensor.shape) for tensor in op.inputs[:count])
            raise DynamicError(
                f"it joins shapes {shapes} along axis {axis}; expected vectors, or tensors along the first axis"
            )
        return [self.at(self.builder.concat(*(self.vector(op, number) for number in range(count))))]

    def read_Split(self, op: Any) -> list[Any]:  # noqa: N802
        return self.parts(op, 1, int(self.constant(op, 0)))

    def read_SplitV(self, op: Any) -> list[Any]:  # noqa: N802
        return self.parts(op, 0, int(self.constant(op, 2)))

    def parts(self, op: Any, number: int, axis: int) -> list[Any]:
        ends = np.cumsum([tensor.shape[axis] for tensor in op.outputs])[:-1]
        return [self.part(op, number, positions) for positions in np.split(self.positions(op, number), ends, axis)]

    def read_StridedSlice(self, op: Any) -> list[Any]:  # noqa: N802
        """Read `x[first:end]`; `x` may have further dimensions of size one, which may be indexed or made."""
        begin, end, strides = (self.constant(op, number) for number in (1, 2, 3))
        masks = [op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis", "begin", "end")]
        index: list[Any] = []
        for axis in range(len(begin)):
            ellipsis, new, shrinks, from_first, to_last = (mask >> axis & 1 for mask in masks)
            whole = slice(None if from_first else begin[axis], None if to_last else end[axis], strides[axis])
            index.append(... if ellipsis else None if new else begin[axis] if shrinks else whole)
        return [self.part(op, 0, self.positions(op, 0)[tuple(index)])]

    def read_Softmax(self, op: Any) -> list[Any]:  # noqa: N802
        shape = op.inputs[0].shape
        if shape.num_elements() != shape[-1]:
            raise DynamicError(f"its input has shape {shape}, several vectors; expected one vector")
        return [self.at(self.builder.softmax(self.vector(op, 0)))]

    def read_AddN(self, op: Any) -> list[Any]:  # noqa: N802
        total = self.place(op, 0)
        for number in range(1, len(op.inputs)):
            total = self.builder.elementwise("add", total, self.place(op, number))
        return [self.at(total)]

    def read_Sum(self, op: Any) -> list[Any]:  # noqa: N802
        return self.reduced(op, self.builder.reduce_sum)

    def read_Max(self, op: Any) -> list[Any]:  # noqa: N802
        return self.reduced(op, self.builder.reduce_max)

    def read_Mean(self, op: Any) -> list[Any]:  # noqa: N802
        count = self.builder.constant(op.inputs[0].shape.num_elements())
        return self.reduced(op, lambda place: self.builder.elementwise("divide", self.builder.reduce_sum(place), count))

    def reduced(self, op: Any, reduce: Callable[[int], int]) -> list[Any]:
        """Reduce all numbers of a vector, or none if the reduced axes have one number each."""
        shape = op.inputs[0].shape.as_list()
        axes = {int(axis) % len(shape) for axis in np.atleast_1d(self.constant(op, 1))}
        together = math.prod(shape[axis] for axis in axes)
        if together not in {1, math.prod(shape)}:
            raise DynamicError(f"it reduces axes {sorted(axes)} of shape {shape}; expected all numbers of a vector")
        place = self.vector(op, 0)
        return [self.at(place if together == 1 else reduce(place))]

    def read_SparseSoftmaxCrossEntropyWithLogits(self, op: Any) -> list[Any]:  # noqa: N802
        logits, label = self.vector(op, 0), self.input(op, 1)
        if not isinstance(label, Argument):
            raise DynamicError("the label is no integer argument of the node")
        return [self.at(self.builder.cross_entropy(label.below(self.builder.width(logits)), logits))]
