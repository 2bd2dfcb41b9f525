"""Node kinds from TensorFlow's ops: the graph of a function over one node, read as expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
_ELEMENTWISE = {name: (op.name, False) for op in FLOAT_OPS.values() for name in op.tf_ops}
_ELEMENTWISE |= {name: (op.name, True) for op in FLOAT_OPS.values() for name in op.reversed_tf_ops}


def call_traced(
    name: str,
    function: Callable[..., Any],
    recorder: Recorder,
    states: Sequence[tuple[Expression, ...]],
    arguments: Sequence[Argument],
) -> Result:
    """What `function` returns for the states of children and the arguments, as expressions of `recorder`.

    Raises:
        DynamicError: the function uses an op that no node has, named with its position in the graph.
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
    found = [reader.expression(tensor) for tensor in traced.outputs]
    count, has_loss, _ = returned[-1]
    loss = found[count] if has_loss else None
    return Result(tuple(found[:count]), loss, tuple(found[count + has_loss :]))


def _listed(vectors: Any) -> list[Any]:
    return list(vectors) if isinstance(vectors, tuple | list) else [vectors]


def _count(vectors: Any) -> int:
    return len(_listed(vectors))


class _Reader:
    """Reads tensors of one graph, each once."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name = name
        self.recorder = recorder
        self.builder = recorder.builder
        self.known: dict[Any, Any] = {}
        self.captured: dict[Any, Any] = {}

    def expression(self, tensor: tf.Tensor) -> Expression:
        value = self.value(tensor)
        if not isinstance(value, Expression):
            raise self.error(tensor.op, "an integer, where a vector is expected")
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
        for tensor, value in zip(op.outputs, self.outputs(op), strict=False):
            self.known[tensor.ref()] = value

    def outputs(self, op: Any) -> list[Any]:
        if op.type == "ReadVariableOp":
            return [self.parameter(op)]
        if op.type in _SAME:
            return [self.input(op, 0)]
        if op.type in _ELEMENTWISE:
            name, reverse = _ELEMENTWISE[op.type]
            places = [self.place(op, number) for number in range(len(op.inputs))]
            return [self.expressed(op, name, places[::-1] if reverse else places)]
        read = getattr(self, f"read_{op.type}", None)
        if read is None:
            raise self.error(
                op,
                "no op of a node; expected elementwise ops, products with a variable, concat, split, "
                "softmax, lookups, reductions or cross-entropy of a label",
            )
        return read(op)

    # ---- inputs ----

    def input(self, op: Any, number: int) -> Any:
        tensor = op.inputs[number]
        if tensor.ref() in self.known:
            return self.known[tensor.ref()]
        constant = tf.get_static_value(tensor)
        if constant is None:
            raise self.error(op, f"input {number} is no value of this node")
        if constant.size != 1:
            raise self.error(op, f"a constant of shape {list(constant.shape)}; make it a parameter, or a number")
        place = self.builder.constant(float(constant.reshape(())))
        return expression_at(self.recorder, place)

    def place(self, op: Any, number: int) -> int:
        """Of a vector in the code; a variable of one dimension is one, too."""
        value = self.input(op, number)
        if isinstance(value, int):
            shape = self.builder.parameters[value].shape
            if len(shape) != 1:
                raise self.error(op, f"a matrix of shape {list(shape)}, where a vector is expected")
            return self.builder.add(Instruction("row", shape[0], (), (value, 0)))
        if not isinstance(value, Expression):
            raise self.error(op, "an integer argument, where a vector is expected")
        return value.place

    def parameter(self, op: Any) -> int:
        """The number of a variable that an op reads by its handle, input 0."""
        handle = self.captured.get(op.inputs[0].ref())
        for number, variable in enumerate(self.recorder.variables):
            if getattr(variable, "handle", None) is handle and handle is not None:
                return number
        raise self.error(op, "a variable that is none of the parameters that the net is specialised for")

    def constant(self, op: Any, number: int) -> np.ndarray[Any, Any]:
        value = tf.get_static_value(op.inputs[number])
        if value is None:
            raise self.error(op, f"input {number} depends on the node; expected a constant")
        return np.asarray(value)

    def axis(self, op: Any, axis: Any, rank: int) -> None:
        if any(value not in {rank - 1, -1} for value in np.atleast_1d(axis)):
            raise self.error(op, f"axis {axis} of a tensor of rank {rank}; expected the last")

    def expressed(self, op: Any, name: str, places: Sequence[int]) -> Expression:
        try:
            return expression_at(self.recorder, self.builder.elementwise(name, *places))
        except DynamicError as error:
            raise self.error(op, str(error)) from None

    def error(self, op: Any, problem: str) -> DynamicError:
        return DynamicError(f"kind '{self.name}': op '{op.name}' ({op.type}): {problem}")

    # ---- ops ----

    def read_MatMul(self, op: Any) -> list[Any]:  # noqa: N802
        flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
        a, b = self.input(op, 0), self.input(op, 1)
        if isinstance(a, int) and isinstance(b, Expression):  # matrix times a column
            number, vector, transposed = a, b, not op.get_attr(flags[0])
        elif isinstance(b, int) and isinstance(a, Expression):  # a row times a matrix
            number, vector, transposed = b, a, op.get_attr(flags[1])
        else:
            raise self.error(op, "a product that is not of one variable and one vector")
        return [expression_at(self.recorder, self.builder.product(number, vector.place, transposed))]

    read_BatchMatMulV2 = read_MatMul  # noqa: N815
    read_BatchMatMul = read_MatMul  # noqa: N815

    def read_ResourceGather(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.lookup(op, self.parameter(op), self.input(op, 1))]

    def read_GatherV2(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.lookup(op, self.input(op, 0), self.input(op, 1))]

    def lookup(self, op: Any, number: Any, argument: Any) -> Expression:
        if not isinstance(number, int) or not isinstance(argument, Argument):
            raise self.error(op, "a lookup that is not of an integer argument in a variable")
        rows, width = self.builder.parameters[number].shape
        place = self.builder.add(Instruction("lookup", width, (), (number, argument.below(rows), 0)))
        return expression_at(self.recorder, place)

    def read_ConcatV2(self, op: Any) -> list[Any]:  # noqa: N802
        places = [self.place(op, number) for number in range(len(op.inputs) - 1)]
        self.axis(op, self.constant(op, len(places)), op.inputs[0].shape.rank)
        return [expression_at(self.recorder, self.builder.concat(*places))]

    def read_Split(self, op: Any) -> list[Any]:  # noqa: N802
        self.axis(op, self.constant(op, 0), op.inputs[1].shape.rank)
        whole = self.place(op, 1)
        count = op.get_attr("num_split")
        return self.parts(whole, [self.builder.width(whole) // count] * count)

    def read_SplitV(self, op: Any) -> list[Any]:  # noqa: N802
        self.axis(op, self.constant(op, 2), op.inputs[0].shape.rank)
        whole = self.place(op, 0)
        sizes = [int(size) for size in self.constant(op, 1)]
        rest = self.builder.width(whole) - sum(size for size in sizes if size >= 0)
        return self.parts(whole, [rest if size < 0 else size for size in sizes])

    def parts(self, whole: int, sizes: Sequence[int]) -> list[Any]:
        ends = np.cumsum(sizes)
        places = [self.builder.slice(whole, int(end) - size, size) for end, size in zip(ends, sizes, strict=True)]
        return [expression_at(self.recorder, place) for place in places]

    def read_StridedSlice(self, op: Any) -> list[Any]:  # noqa: N802
        """`x[first:end]`, also where `x` has dimensions of one more, which may be indexed, or made."""
        begin, end, strides = (self.constant(op, number) for number in (1, 2, 3))
        masks = [op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis", "begin", "end")]
        index: list[Any] = []
        for axis in range(len(begin)):
            ellipsis, new, shrinks, from_first, to_last = (mask >> axis & 1 for mask in masks)
            whole = slice(None if from_first else begin[axis], None if to_last else end[axis], strides[axis])
            index.append(... if ellipsis else None if new else begin[axis] if shrinks else whole)
        shape = op.inputs[0].shape.as_list()
        places = np.arange(np.prod(shape, dtype=int)).reshape(shape)[tuple(index)].ravel()
        if not places.size or places[-1] - places[0] + 1 != places.size:
            raise self.error(op, f"elements {places.tolist()} of a vector; expected some that follow each other")
        part = self.builder.slice(self.place(op, 0), int(places[0]), places.size)
        return [expression_at(self.recorder, part)]

    def read_Softmax(self, op: Any) -> list[Any]:  # noqa: N802
        return [expression_at(self.recorder, self.builder.softmax(self.place(op, 0)))]

    def read_AddN(self, op: Any) -> list[Any]:  # noqa: N802
        total = self.place(op, 0)
        for number in range(1, len(op.inputs)):
            total = self.builder.elementwise("add", total, self.place(op, number))
        return [expression_at(self.recorder, total)]

    def read_Sum(self, op: Any) -> list[Any]:  # noqa: N802
        self.axis(op, self.constant(op, 1), op.inputs[0].shape.rank)
        return [expression_at(self.recorder, self.builder.reduce_sum(self.place(op, 0)))]

    def read_Mean(self, op: Any) -> list[Any]:  # noqa: N802
        (total,) = self.read_Sum(op)
        count = self.builder.constant(self.builder.width(self.place(op, 0)))
        return [self.expressed(op, "divide", [total.place, count])]

    def read_Max(self, op: Any) -> list[Any]:  # noqa: N802
        self.axis(op, self.constant(op, 1), op.inputs[0].shape.rank)
        return [expression_at(self.recorder, self.builder.reduce_max(self.place(op, 0)))]

    def read_SparseSoftmaxCrossEntropyWithLogits(self, op: Any) -> list[Any]:  # noqa: N802
        logits, label = self.place(op, 0), self.input(op, 1)
        if not isinstance(label, Argument):
            raise self.error(op, "labels that are no integer argument of the node")
        place = self.builder.cross_entropy(label.below(self.builder.width(logits)), logits)
        return [expression_at(self.recorder, place)]
