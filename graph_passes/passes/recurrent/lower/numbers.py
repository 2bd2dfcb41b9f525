"""Reads a small step with every number of a row as a column: a hidden size of 1.

So a state may have any shape, and a step may do with the numbers of a row what it likes: sum and take the largest along
any axis, join, shift and transpose. A recurrence without a batch is one of a single row. It is for small states, as of
a CRF, of a mixture, or of a filter: a cell of this form has an op for each number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np

from custom_ops.recurrent.cell_builder import CellBuilder
from graph_passes.graph.ir import Node, TensorId
from graph_passes.graph.ops import COPIES, passed
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable, Variables
from graph_passes.passes.recurrent.lower.elementwise_ops import CELL_OPS, is_finite, lower
from graph_passes.passes.recurrent.lower.hoist import FIXED, STATE, Hoister
from graph_passes.passes.recurrent.lower.layouts import ColumnLayout
from graph_passes.passes.recurrent.lower.leaves import Leaves
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm, Prologue
from graph_passes.refusals import Reason

Numbers = Any  # an array of nodes of the cell

MOST_NUMBERS = 128  # of all states
MOST_NODES = 4096
_WHOLE = ("int32", "int64")
_ON_WHOLE = frozenset(
    {"Cast", "ArgMax", "Select", "SelectV2", "Minimum", "Maximum", "Less", "LessEqual", "Greater", "GreaterEqual"}
) | {"Equal", "NotEqual"}


@dataclass(frozen=True)
class Row:
    """A value of one row.

    Attributes:
        numbers: its nodes, in the tensor's shape without the batch.
        batch: which axis of the tensor is the batch; -1: it has none.
    """

    numbers: Numbers
    batch: int

    def axis(self, axis: int) -> int:
        """The axis of `numbers` that an axis of the tensor is."""
        return axis - (0 <= self.batch < axis)


# What an op makes: the reader, the node, the tensor.
Rule: TypeAlias = "Callable[[NumberReader, Node, TensorId], Row]"


@dataclass
class NumberReader:
    """Reads one body; see `Reader`, whose place it takes.

    Attributes:
        loop, variables, hoister, prologue: what is read, and what is known of it.
        dtype: of all states that are no whole numbers.
        batched: whether the first dimension of every state is the batch.
        rules: what ops make that are not elementwise (`number_moves.py`, `number_sums.py`).
        builder: of the cell.
        units: the hidden size.
    """

    loop: Loop
    variables: Variables
    dtype: str
    hoister: Hoister
    prologue: Prologue
    batched: bool
    rules: Mapping[str, Rule]
    builder: CellBuilder = field(default_factory=CellBuilder)
    units: int = 1

    def __post_init__(self) -> None:
        self.body = self.loop.body.graph
        self.leaves = Leaves(self.builder, self.prologue, 1, self.dtype)
        self._rows: dict[TensorId, Row | Unreadable] = {}
        shapes = [self._dims(TensorId(self.loop.body.arguments[place])) for place in self.variables.states]
        count = sum(map(prod, shapes))
        if count > MOST_NUMBERS:
            raise Unreadable(Reason.CELL_NUMBERS(count=count, most=MOST_NUMBERS))
        for place, dims in zip(self.variables.states, shapes, strict=True):
            states = np.array([self.builder.state() for _ in range(prod(dims))], object).reshape(dims)
            self._rows[TensorId(self.loop.body.arguments[place])] = Row(states, 0 if self.batched else -1)

    def layout(self, tensor: TensorId) -> ColumnLayout:
        """All numbers of a row, one behind the other."""
        return ColumnLayout((prod(self._dims(tensor)),), 1)

    def read(self, wanted: Iterable[TensorId]) -> None:
        """Read all that `wanted` depends on, operands first."""
        seen: set[str] = set()
        waiting = [(tensor.node, False) for tensor in wanted][::-1]
        while waiting:
            name, operands_read = waiting.pop()
            if operands_read:
                for tensor in self.body.tensors(self.body[name]):
                    self._try(tensor)
            elif name not in seen and not self._is_leaf(TensorId(name)):
                seen.add(name)
                waiting.append((name, True))
                waiting += [(source.node, False) for source in reversed(self.body[name].inputs)]

    def columns(self, tensor: TensorId, layout: ColumnLayout | None = None) -> tuple[int, ...]:
        """The nodes of all numbers of a row of `tensor`.

        Raises:
            Unreadable: it cannot be said in a cell.
        """
        del layout
        row = self.row(tensor, len(self.hoister.shape(tensor)))
        if row.batch > 0:
            raise Unreadable(Reason.ROWS_LOST.of(self.body[tensor.node]))
        return tuple(row.numbers.reshape(-1).tolist())

    def row(self, tensor: TensorId, rank: int) -> Row:
        """The numbers of a row of `tensor`, for an op of that rank."""
        if self._is_leaf(tensor):
            return self._leaf(tensor, rank)
        self._try(tensor)
        found = self._rows[tensor]
        if isinstance(found, Unreadable):
            raise found
        return found

    def _dims(self, tensor: TensorId) -> tuple[int, ...]:
        """The shape of `tensor` without the batch, which is its first dimension."""
        shape = self.hoister.shape(tensor)
        dims = shape[1:] if self.batched else shape
        if any(dim is None for dim in dims):
            node = self.body[tensor.node]
            raise Unreadable(Reason.CELL_SHAPE.of(node, shape=shape, units=1))
        return tuple(dim for dim in dims if dim is not None)

    def _is_leaf(self, tensor: TensorId) -> bool:
        level = self.hoister.level(tensor)
        if level == STATE:
            return False
        return self.batched or level == FIXED or self.hoister.is_item(tensor) or tensor.node in self.loop.body.arguments

    def _leaf(self, tensor: TensorId, rank: int) -> Row:
        constant = self.body.constants.get(passed(self.body, tensor).node)
        if (
            constant is not None
            and constant.dtype.kind in "biuf"
            and all(map(is_finite, constant.reshape(-1).tolist()))
        ):
            nodes = [self.builder.constant(float(number)) for number in constant.reshape(-1).tolist()]
            numbers = np.array(nodes, object).reshape(constant.shape)
            if not (self.batched and numbers.ndim == rank > 0 and len(numbers) != 1):
                return Row(numbers, -1)
            if (numbers == numbers[:1]).all():  # filled, for each row of the batch
                return Row(numbers[0], 0)
        value = self.hoister.hoisted(tensor)
        shape, prologue = value.shape, self.prologue
        own_batch = (
            self.batched
            and bool(shape)
            and (value.form is not HoistedForm.FIXED or (len(shape) == rank and shape[0] != 1))
        )
        dims = shape[1:] if own_batch else shape
        if any(dim is None for dim in dims):
            raise Unreadable(Reason.ROW_SHAPE(tensor=tensor, shape=shape))
        count = prod(dim or 0 for dim in dims)
        if own_batch:
            if value.form is HoistedForm.FIXED:
                flat = prologue.reshape(value.tensor, value.dtype, (prologue.batch, count))
                value = Hoisted(flat, HoistedForm.FIXED, (shape[0], count), value.dtype)
            else:
                steps = prologue.steps(value)
                rows = prologue.rows(value)
                flat = prologue.reshape(steps, value.dtype, (prologue.time, rows, count))
                value = Hoisted(flat, HoistedForm.STEPS, (shape[0], count), value.dtype)
        elif value.form is HoistedForm.FIXED:
            flat = prologue.reshape(value.tensor, value.dtype, (count,))
            value = Hoisted(flat, HoistedForm.FIXED, (count,), value.dtype)
        else:  # of a step without a batch, or one number for all rows
            flat = prologue.reshape(prologue.steps(value), value.dtype, (prologue.time, 1, count))
            value = Hoisted(flat, HoistedForm.STEPS, (1, count), value.dtype)
        columns = self.leaves.columns(value)
        return Row(np.array(columns, object).reshape(tuple(dim or 0 for dim in dims)), 0 if own_batch else -1)

    def _try(self, tensor: TensorId) -> None:
        if tensor not in self._rows:
            try:
                self._rows[tensor] = self._evaluate(self.body[tensor.node], tensor)
            except Unreadable as reason:
                self._rows[tensor] = reason
            if len(self.builder.nodes) > MOST_NODES:
                self._rows[tensor] = Unreadable(Reason.CELL_NODES(count=len(self.builder.nodes), most=MOST_NODES))

    def _evaluate(self, node: Node, tensor: TensorId) -> Row:
        if node.op in COPIES:
            return self.row(node.inputs[tensor.index], len(self.hoister.shape(tensor)))
        spec = self.body.specs.get(tensor)
        if spec is not None and spec.dtype in _WHOLE and node.op not in _ON_WHOLE:
            raise Unreadable(Reason.CELL_OP.of(node))
        if node.op in CELL_OPS:
            return self._elementwise(node, tensor)
        rule = self.rules.get(node.op)
        if rule is None:
            raise Unreadable(Reason.CELL_OP.of(node))
        return rule(self, node, tensor)

    def _elementwise(self, node: Node, tensor: TensorId) -> Row:
        rank = len(self.hoister.shape(tensor))
        rows = [self.row(source, rank) for source in node.inputs]
        batches = {
            row.batch + rank - len(self.hoister.shape(source))
            for row, source in zip(rows, node.inputs, strict=True)
            if row.batch >= 0 and not (node.op == "Select" and len(self.hoister.shape(source)) == 1)
        }
        if len(batches) > 1:
            raise Unreadable(Reason.ROWS_UNALIKE.of(node))
        batch = batches.pop() if batches else -1
        arrays = [self._aligned(row, batch, rank) for row in rows]
        return Row(each(lambda *nodes: lower(self.builder, node.op, node.attrs, nodes), *arrays), batch)

    def _aligned(self, row: Row, batch: int, rank: int) -> Numbers:
        """The numbers of an operand, to be broadcast: one without a batch loses the dimension that is 1 for it."""
        if row.batch < 0 <= batch and row.numbers.ndim == rank:
            return row.numbers.reshape(row.numbers.shape[:batch] + row.numbers.shape[batch + 1 :])
        return row.numbers

    def constant(self, tensor: TensorId) -> Any:
        found = self.body.constants.get(passed(self.body, tensor).node)
        if found is None:
            raise Unreadable(Reason.PART_RANGE.of(self.body[tensor.node]))
        return found

    def axes(self, row: Row, tensor: TensorId, node: Node, rank: int) -> tuple[int, ...]:
        """Axes of the numbers, of a constant with axes of a tensor; none of these is the batch."""
        axes = [int(axis) % rank for axis in self.constant(tensor).reshape(-1)]
        if row.batch in axes:
            raise Unreadable(Reason.CELL_SUM_AXIS.of(node))
        return tuple(row.axis(axis) for axis in axes)

    def operand(self, node: Node, place: int = 0) -> Row:
        return self.row(node.inputs[place], len(self.hoister.shape(node.inputs[place])))

    def widened(self, node: int) -> int:
        """`node` as one number for each unit, which products and states are made of."""
        if not self.builder.scalar[node]:
            return node
        return self.builder.apply("select", self.builder.constant(0.0), self.builder.state_before(0), node)


def each(function: Callable[..., int], *arrays: Numbers) -> Numbers:
    """`function` of the numbers at each place."""
    together = np.broadcast_arrays(*(np.asarray(array, object) for array in arrays))
    made = [function(*nodes) for nodes in zip(*(array.reshape(-1).tolist() for array in together), strict=True)]
    return np.array(made, object).reshape(together[0].shape)
