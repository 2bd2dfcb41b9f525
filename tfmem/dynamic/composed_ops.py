"""Reads ops of TensorFlow that are several instructions of a node: conditions, running sums, padding and the like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from custom_ops.dynamic.node_code import Instruction
from custom_ops.errors import DynamicError
from tfmem.dynamic.op_reader import OpReader
from tfmem.dynamic.picks import MOST, repeated, table_of
from tfmem.dynamic.recorder import Argument


class ComposedOpReader(OpReader):
    """A reader of these ops as well."""

    # ---- conditions, which are 0 and 1 ----

    def flipped(self, place: int) -> int:
        """The opposite of a condition."""
        return self.builder.elementwise("subtract", self.builder.constant(1), place)

    def read_LogicalNot(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.at(self.flipped(self.place(op, 0)))]

    def read_LogicalAnd(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.at(self.of_all(op, "multiply"))]

    def read_LogicalOr(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.at(self.of_all(op, "maximum"))]

    def read_NotEqual(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.at(self.flipped(self.of_all(op, "equal")))]

    read_LogicalXor = read_NotEqual  # noqa: N815

    def read_IsFinite(self, op: Any) -> list[Any]:  # noqa: N802
        place = self.vector(op, 0)
        difference = self.builder.elementwise("subtract", place, place)  # NaN, if the number is not finite
        return [self.at(self.builder.elementwise("equal", difference, self.builder.constant(0)))]

    def read_IsNan(self, op: Any) -> list[Any]:  # noqa: N802
        place = self.vector(op, 0)
        return [self.at(self.flipped(self.builder.elementwise("equal", place, place)))]

    def read_Any(self, op: Any) -> list[Any]:  # noqa: N802
        return self.read_Max(op)

    def read_All(self, op: Any) -> list[Any]:  # noqa: N802
        return self.read_Min(op)

    def read_OneHot(self, op: Any) -> list[Any]:  # noqa: N802
        number = self.input(op, 0)
        if not isinstance(number, Argument):
            raise DynamicError("its indices are no integer argument of the node; pass the index as one")
        depth = int(self.constant(op, 1))
        here = self.builder.add(Instruction("one_hot", depth, (), (number.below(depth),)))
        if (float(self.constant(op, 2)), float(self.constant(op, 3))) == (1.0, 0.0):
            return [self.at(here)]
        return [self.at(self.builder.elementwise("select", here, self.place(op, 2), self.place(op, 3)))]

    # ---- elementwise ----

    def read_LeakyRelu(self, op: Any) -> list[Any]:  # noqa: N802
        place, constant = self.vector(op, 0), self.builder.constant
        small = self.builder.elementwise("multiply", place, constant(op.get_attr("alpha")))
        positive = self.builder.elementwise("greater", place, constant(0))
        return [self.at(self.builder.elementwise("select", positive, place, small))]

    # ---- what moves numbers ----

    def read_Pad(self, op: Any) -> list[Any]:  # noqa: N802
        return self.padded(op, self.builder.constant(0))

    def read_PadV2(self, op: Any) -> list[Any]:  # noqa: N802
        return self.padded(op, self.builder.constant(float(self.constant(op, 2))))

    def padded(self, op: Any, filling: int) -> list[Any]:
        positions = self.positions(op, 0)
        both = self.builder.concat(self.vector(op, 0), self.builder.add(Instruction("broadcast", 1, (filling,))))
        wide = np.pad(positions, self.constant(op, 1).tolist(), constant_values=positions.size)
        return [self.at(self.pick(both, wide))]

    def read_Fill(self, op: Any) -> list[Any]:  # noqa: N802
        return [self.at(repeated(self.builder, self.vector(op, 1), op.outputs[0].shape.num_elements()))]

    def read_MatrixBandPart(self, op: Any) -> list[Any]:  # noqa: N802
        rows, columns = op.inputs[0].shape[-2:]
        distance = np.arange(columns) - np.arange(rows)[:, None]
        lower, upper = int(self.constant(op, 1)), int(self.constant(op, 2))
        inside = ((lower < 0) | (-distance <= lower)) & ((upper < 0) | (distance <= upper))
        mask = table_of(self.builder, np.broadcast_to(inside, op.inputs[0].shape.as_list()).ravel().astype(float))
        return [self.at(self.builder.elementwise("select", mask, self.vector(op, 0), self.builder.constant(0)))]

    def read_GatherNd(self, op: Any) -> list[Any]:  # noqa: N802
        chosen = np.moveaxis(self.constant(op, 1), -1, 0)
        return [self.part(op, 0, self.positions(op, 0)[tuple(chosen)])]

    # ---- reductions ----

    def read_L2Loss(self, op: Any) -> list[Any]:  # noqa: N802
        total = self.builder.reduce_sum(self.builder.elementwise("square", self.vector(op, 0)))
        return [self.at(self.builder.elementwise("multiply", total, self.builder.constant(0.5)))]

    def read_Prod(self, op: Any) -> list[Any]:  # noqa: N802
        return self.reduced(op, self.vector(op, 0), self.product_of_numbers, self.product_of)

    def product_of(self, vectors: Sequence[int]) -> int:
        total = vectors[0]
        for vector in vectors[1:]:
            total = self.builder.elementwise("multiply", total, vector)
        return total

    def product_of_numbers(self, vector: int) -> int:
        count = self.builder.width(vector)
        if count > MOST:
            raise DynamicError(f"it multiplies {count} numbers; expected at most {MOST}")
        return self.product_of([self.builder.slice(vector, at, 1) for at in range(count)])

    def read_Cumsum(self, op: Any) -> list[Any]:  # noqa: N802
        axis, shape = int(self.constant(op, 1)), op.inputs[0].shape.as_list()
        rows = np.moveaxis(self.positions(op, 0), axis, 0).reshape(shape[axis], -1)
        if len(rows) > MOST:
            raise DynamicError(f"it sums {len(rows)} numbers one after the other; expected at most {MOST}")
        place = self.vector(op, 0)
        steps = [self.pick(place, row) for row in (rows[::-1] if op.get_attr("reverse") else rows)]
        found = [repeated(self.builder, self.builder.constant(0.0), rows.shape[1])] if op.get_attr("exclusive") else []
        for step in steps[: len(steps) - len(found)]:
            found.append(self.builder.elementwise("add", found[-1], step) if found else step)
        found = found[::-1] if op.get_attr("reverse") else found
        wide = np.arange(rows.size).reshape([shape[axis], *np.delete(shape, axis)])
        return [self.at(self.pick(self.builder.concat(*found), np.moveaxis(wide, 0, axis)))]
