"""Reads single ops of TensorFlow: what each becomes in the code of a node kind, by the shapes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from custom_ops.dynamic.node_code import OPEN_ROWS, Instruction
from custom_ops.errors import DynamicError
from tfmem.dynamic.contractions import contract, letters_of_product, of_parameter
from tfmem.dynamic.dtypes import may_hold
from tfmem.dynamic.extension import Expression
from tfmem.dynamic.picks import MOST, is_contiguous, repeated
from tfmem.dynamic.reader import Reader
from tfmem.dynamic.recorder import Argument
from tfmem.dynamic.weights import Weights


class OpReader(Reader):
    """A reader of all ops that nodes may use; `read_X` reads an op of type X."""

    # ---- products ----

    def read_MatMul(self, op: Any) -> list[Any]:  # noqa: N802
        flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
        transposed = [bool(op.get_attr(flag)) for flag in flags]
        return self.product(op, *letters_of_product([tensor.shape.as_list() for tensor in op.inputs], transposed))

    read_BatchMatMulV2 = read_MatMul  # noqa: N815
    read_BatchMatMul = read_MatMul  # noqa: N815

    def read_Einsum(self, op: Any) -> list[Any]:  # noqa: N802
        equation = tf.compat.as_str(op.get_attr("equation"))
        given, _, result = equation.partition("->")
        operands = given.split(",")
        if len(operands) != 2 or "." in equation or any(len(set(each)) < len(each) for each in operands):
            raise DynamicError(f"its equation is '{equation}'; expected two operands, each with different letters")
        return self.product(op, operands[0], operands[1], result)

    def product(self, op: Any, first: str, second: str, result: str) -> list[Any]:
        """A product, by a letter for each dimension of its operands and of its result."""
        values, letters = [self.input(op, number) for number in range(2)], [first, second]
        shapes = [tensor.shape.as_list() for tensor in op.inputs]
        tables = [number for number, value in enumerate(values) if self.is_table(value)]
        if len(tables) == 2:
            raise DynamicError("both operands are variables; expected a value of the node in one of them")
        if tables:
            table, other = tables[0], 1 - tables[0]
            place = of_parameter(
                self.recorder,
                values[table],
                (letters[table], shapes[table]),
                self.vector(op, other),
                (letters[other], shapes[other]),
                result,
            )
        else:
            place = contract(self.builder, [self.vector(op, 0), self.vector(op, 1)], letters, result, shapes)
        return [self.at(place)]

    def is_table(self, value: Any) -> bool:
        """Whether a product with a value is one with a matrix of parameters.

        Raises:
            DynamicError: its rows come with each batch.
        """
        if not isinstance(value, Weights):
            return False
        shape = self.recorder.shape_of(value.number)
        if shape[:1] == (OPEN_ROWS,):
            name = self.builder.parameters[value.number].name
            raise DynamicError(
                f"input '{name}' has other rows in each batch; read one of them by embedding_lookup or tf.gather, with "
                "an argument of the node"
            )
        return len(shape) > 1

    # ---- tables ----

    def read_ResourceGather(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.lookup(op, Weights(self.parameter(op)), self.input(op, 1))]

    def read_GatherV2(self, op: Any) -> list[Any]:  # noqa: N802
        value, axis = self.input(op, 0), int(self.constant(op, 2))
        if op.get_attr("batch_dims"):
            raise DynamicError("it has batch dimensions; expected none")
        number = self.known.get(op.inputs[1].ref())
        if isinstance(value, Weights) and isinstance(number, Argument):
            if axis != 0:
                raise DynamicError(f"it looks up along axis {axis}; expected axis 0")
            return [self.lookup(op, value, number)]
        if not isinstance(number, Argument):
            return [self.part(op, 0, np.take(self.positions(op, 0), self.constant(op, 1), axis))]
        return [self.number_at(op, number)]

    def number_at(self, op: Any, number: Argument) -> Expression:
        """One number of a vector, by an argument."""
        if op.inputs[0].shape.rank != 1:
            raise DynamicError(f"it reads shape {op.inputs[0].shape} at an argument; expected a vector")
        place = self.vector(op, 0)
        width = self.builder.width(place)
        here = self.builder.add(Instruction("one_hot", width, (), (number.below(width),)))
        chosen = self.builder.elementwise("select", here, place, self.builder.constant(0))
        return self.at(self.builder.reduce_sum(chosen))

    def lookup(self, op: Any, weights: Weights, argument: Any) -> Expression:
        """A row of a parameter, of one number where it has one dimension."""
        shape = self.recorder.shape_of(weights.number)
        if not isinstance(argument, Argument) or (op.type == "ResourceGather" and op.get_attr("batch_dims")):
            raise DynamicError("a lookup needs an integer argument of the node; pass the row's number as one")
        found = shape[:1] if op.type == "ResourceGather" else op.inputs[0].shape[:1].as_list()
        if weights.positions is not None or found[0] not in {None, shape[0]}:
            raise DynamicError(
                f"it looks up a part of a parameter of shape {list(shape)}; expected the whole parameter"
            )
        width = math.prod(shape[1:])
        self.recorder.see_as(weights.number, width)
        place = self.builder.add(Instruction("lookup", width, (), (weights.number, argument.below(shape[0]), 0)))
        return self.at(place)

    # ---- what moves numbers ----

    def read_ConcatV2(self, op: Any) -> list[Any]:  # noqa: N802
        count = len(op.inputs) - 1
        joined, positions = self.together(op, count)
        return [self.at(self.pick(joined, np.concatenate(positions, int(self.constant(op, count)))))]

    def read_Pack(self, op: Any) -> list[Any]:  # noqa: N802
        joined, positions = self.together(op, len(op.inputs))
        return [self.at(self.pick(joined, np.stack(positions, op.get_attr("axis"))))]

    def read_Unpack(self, op: Any) -> list[Any]:  # noqa: N802
        rows = np.moveaxis(self.positions(op, 0), op.get_attr("axis"), 0)
        return [self.part(op, 0, positions) for positions in rows]

    def read_Transpose(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.part(op, 0, self.positions(op, 0).transpose(self.constant(op, 1)))]

    def read_Tile(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.part(op, 0, np.tile(self.positions(op, 0), self.constant(op, 1)))]

    def read_BroadcastTo(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.part(op, 0, np.broadcast_to(self.positions(op, 0), op.outputs[0].shape.as_list()))]

    def read_ReverseV2(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.part(op, 0, np.flip(self.positions(op, 0), tuple(self.constant(op, 1).tolist())))]

    def read_Split(self, op: Any) -> list[Any]:  # noqa: N802
        return self.parts(op, 1, int(self.constant(op, 0)))

    def read_SplitV(self, op: Any) -> list[Any]:  # noqa: N802
        return self.parts(op, 0, int(self.constant(op, 2)))

    def parts(self, op: Any, number: int, axis: int) -> list[Any]:
        ends = np.cumsum([tensor.shape[axis] for tensor in op.outputs])[:-1]
        return [self.part(op, number, positions) for positions in np.split(self.positions(op, number), ends, axis)]

    def read_StridedSlice(self, op: Any) -> list[Any]:  # noqa: N802
        if tf.get_static_value(op.inputs[1]) is None:
            return [self.at_argument(op)]
        begin, end, strides = (self.constant(op, number) for number in (1, 2, 3))
        masks = [op.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis", "begin", "end")]
        index: list[Any] = []
        for axis in range(len(begin)):
            ellipsis, new, shrinks, from_first, to_last = (mask >> axis & 1 for mask in masks)
            whole = slice(None if from_first else begin[axis], None if to_last else end[axis], strides[axis])
            index.append(... if ellipsis else None if new else begin[axis] if shrinks else whole)
        return [self.part(op, 0, self.positions(op, 0)[tuple(index)])]

    def at_argument(self, op: Any) -> Expression:
        """What `x[argument]` and `x[argument, 3]` read; TensorFlow packs all places into one tensor."""
        packed = op.inputs[1].op
        places = [self.known.get(tensor.ref()) for tensor in packed.inputs] if packed.type == "Pack" else []
        if not places or not isinstance(places[0], Argument) or op.get_attr("shrink_axis_mask") != 2 ** len(places) - 1:
            raise DynamicError("its places depend on the node; expected x[argument], or x[argument, 3]")
        rest = [tf.get_static_value(tensor) for tensor in packed.inputs[1:]]
        if any(place is None for place in rest):
            raise DynamicError("two of its places depend on the node; expected one, the first")
        value = self.input(op, 0)
        if not isinstance(value, Weights):
            return self.number_at(op, places[0])
        row = self.lookup(op, value, places[0])
        shape = op.inputs[0].shape[1:].as_list()
        chosen = np.arange(row.width).reshape(shape)[tuple(int(place) for place in rest)]
        return row if not rest else self.at(self.pick(row.place, chosen))

    def read_Slice(self, op: Any) -> list[Any]:  # noqa: N802
        begin, size = self.constant(op, 1).tolist(), self.constant(op, 2).tolist()
        index = tuple(slice(b, None if s < 0 else b + s) for b, s in zip(begin, size, strict=True))
        return [self.part(op, 0, self.positions(op, 0)[index])]

    # ---- values ----

    def read_RandomUniform(self, op: Any) -> list[Any]:  # noqa: N802
        """Read a draw of dropout; a node draws by the seed of the call."""
        count = op.outputs[0].shape.num_elements()
        return [self.at(self.builder.add(Instruction("random", count, (), (next(self.recorder.streams),))))]

    def read_StopGradient(self, op: Any) -> list[Any]:  # noqa: N802
        """Read numbers that are constant for the gradient, as the largest of a vector of one number may be."""
        place, count = self.place(op, 0), op.outputs[0].shape.num_elements()
        if self.builder.code[place].op == "constant":
            return [self.at(place)]
        if count > MOST:
            raise DynamicError(f"it stops the gradient of {count} numbers; expected at most {MOST}")
        parts = (self.builder.slice(place, at, 1) for at in range(count))
        return [self.at(self.builder.concat(*(self.builder.reduce_max(part, gradient=False) for part in parts)))]

    def read_ZerosLike(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.at(repeated(self.builder, self.builder.constant(0.0), op.outputs[0].shape.num_elements()))]

    def read_OnesLike(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.at(repeated(self.builder, self.builder.constant(1.0), op.outputs[0].shape.num_elements()))]

    def read_Cast(self, op: Any) -> list[Any]:  # noqa: N802
        if not all(may_hold(tensor.dtype, self.dtype) for tensor in (*op.inputs, *op.outputs)) or (
            op.outputs[0].dtype == tf.bool
        ):
            raise DynamicError(
                f"it makes {op.outputs[0].dtype.name} of {op.inputs[0].dtype.name}; nodes of this net compute in "
                f"{self.dtype.name}. For "
                "a real number of a node, see tfmem.dynamic.inputs"
            )
        return [self.input(op, 0)]

    def read_AddN(self, op: Any) -> list[Any]:  # noqa: N802
        total = self.place(op, 0)
        for number in range(1, len(op.inputs)):
            total = self.builder.elementwise("add", total, self.place(op, number))
        return [self.at(total)]

    # ---- softmax ----

    def by_rows(self, op: Any, number: int, compute: Callable[[int], int]) -> Expression:
        """What `compute` makes of each vector along the last dimension of an input, one behind the other."""
        rows = self.positions(op, number).reshape(-1, op.inputs[number].shape[-1])
        if len(rows) > MOST:
            raise DynamicError(f"its input has {len(rows)} vectors; expected at most {MOST}")
        place = self.vector(op, number)
        return self.at(self.builder.concat(*(compute(self.pick(place, row)) for row in rows)))

    def read_Softmax(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.by_rows(op, 0, self.builder.softmax)]

    def read_LogSoftmax(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.by_rows(op, 0, self.builder.log_softmax)]

    def read_SoftmaxCrossEntropyWithLogits(self, op: Any) -> list[Any]:  # noqa: N802
        logits, labels = self.vector(op, 0), self.place(op, 1)
        if op.inputs[0].shape.num_elements() != op.inputs[0].shape[-1]:
            raise DynamicError(f"its logits have shape {op.inputs[0].shape}; expected one vector")
        told = self.builder.elementwise("multiply", labels, self.builder.log_softmax(logits))
        return [self.at(self.builder.elementwise("negate", self.builder.reduce_sum(told)))]

    def read_SparseSoftmaxCrossEntropyWithLogits(self, op: Any) -> list[Any]:  # noqa: N802
        logits, label = self.vector(op, 0), self.input(op, 1)
        if not isinstance(label, Argument):
            raise DynamicError("the label is no integer argument of the node; pass it as one")
        return [self.at(self.builder.cross_entropy(label.below(self.builder.width(logits)), logits))]

    # ---- reductions ----

    def read_Sum(self, op: Any) -> list[Any]:  # noqa: N802
        return self.reduced(op, self.vector(op, 0), self.builder.reduce_sum, self.sum_of)

    def read_Mean(self, op: Any) -> list[Any]:  # noqa: N802
        (total,) = self.read_Sum(op)
        count = op.inputs[0].shape.num_elements() // max(1, op.outputs[0].shape.num_elements())
        return [self.at(self.builder.elementwise("divide", total.place, self.builder.constant(count)))]

    def read_Max(self, op: Any) -> list[Any]:  # noqa: N802
        return self.reduced(op, self.vector(op, 0), self.builder.reduce_max, self.max_of)

    def read_Min(self, op: Any) -> list[Any]:  # noqa: N802
        negated = self.builder.elementwise("negate", self.vector(op, 0))
        (largest,) = self.reduced(op, negated, self.builder.reduce_max, self.max_of)
        return [self.at(self.builder.elementwise("negate", largest.place))]

    def reduced(
        self, op: Any, place: int, of_vector: Callable[[int], int], of_vectors: Callable[[Sequence[int]], int]
    ) -> list[Any]:
        """A reduction over some axes: of each vector, or of several element by element."""
        rank = op.inputs[0].shape.rank
        axes = sorted({int(axis) % rank for axis in np.atleast_1d(self.constant(op, 1))}) if rank else []
        positions = np.moveaxis(self.positions(op, 0), axes, range(len(axes)))
        count = math.prod(positions.shape[: len(axes)])
        rows = positions.reshape(count, -1)
        if count == 1:
            return [self.at(place)]
        if rows.shape[1] == 1:
            return [self.at(of_vector(self.pick(place, rows)))]
        if count <= MOST and (all(map(is_contiguous, rows)) or rows.shape[1] > MOST):
            return [self.at(of_vectors([self.pick(place, row) for row in rows]))]
        if rows.shape[1] > MOST:
            raise DynamicError(f"it reduces axes {axes} of shape {op.inputs[0].shape}; expected at most {MOST} vectors")
        return [self.at(self.builder.concat(*(of_vector(self.pick(place, row)) for row in rows.T)))]

    def sum_of(self, vectors: Sequence[int]) -> int:
        total = vectors[0]
        for vector in vectors[1:]:
            total = self.builder.elementwise("add", total, vector)
        return total

    def max_of(self, vectors: Sequence[int]) -> int:
        """The largest numbers. Where several are equal, each gets an equal share of the gradient, as TensorFlow's."""
        elementwise, largest = self.builder.elementwise, vectors[0]
        for vector in vectors[1:]:
            largest = elementwise("maximum", largest, vector)
        chosen = [elementwise("equal", vector, largest) for vector in vectors]
        zero, one = self.builder.constant(0), self.builder.constant(1)
        total = self.sum_of([elementwise("select", flag, v, zero) for flag, v in zip(chosen, vectors, strict=True)])
        return elementwise("divide", total, self.sum_of([elementwise("select", flag, one, zero) for flag in chosen]))
