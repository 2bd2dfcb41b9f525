"""Reads the part of a loop's body that depends on the states into a cell; the rest was hoisted (`hoist.py`).

A value `[batch, k * units]` is k columns, each a node of the cell; `[batch]` and `[batch, 1]` are one number a row.
Values of other widths are padded (`layouts.py`); what the padding holds never reaches a product or a sum.
What is added to a sum and depends on no state is not added at once but kept as its *addend*, so that
`(x @ W + h @ R) + b` becomes `(x @ W + b) + h @ R`: the first sum is computed for all steps outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from custom_ops.recurrent.cell_builder import CellBuilder
from graph_passes.graph.ir import Node, TensorId, boolean
from graph_passes.graph.ops import COPIES, FLOATS, passed, scalar_value
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable, Variables
from graph_passes.passes.recurrent.lower.elementwise_ops import CELL_OPS, is_finite, lower
from graph_passes.passes.recurrent.lower.hoist import STATE, Hoister
from graph_passes.passes.recurrent.lower.layer_norm import normalised_operand
from graph_passes.passes.recurrent.lower.layouts import PRODUCTS, ColumnLayout, Cuts, concatenation_axis
from graph_passes.passes.recurrent.lower.leaves import Leaves
from graph_passes.passes.recurrent.lower.products import Products
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm, Prologue
from graph_passes.passes.recurrent.lower.rowwise import column_range, is_column
from graph_passes.refusals import Reason

_ADDITIONS = frozenset({"Add", "AddV2", "BiasAdd", "BiasAddV1"})
# What a user may write in place of an op that no cell has.
_INSTEAD = {
    "Cumsum": "a product with a triangular matrix",
    "Conv2D": "the convolution of the input before the loop, and a product with a matrix for that of a state",
}


@dataclass(frozen=True)
class Value:
    """A value that depends on a state: its columns, and what is still to be added to them."""

    columns: tuple[int, ...]
    addend: Hoisted | None = None


@dataclass(frozen=True)
class JoinedColumns:
    """A concatenation, of tensors of the body and their widths, some of which depend on no state."""

    parts: tuple[tuple[TensorId, int], ...]


@dataclass
class CellReader:
    """Reads one body. `columns` is the way in; the cell is in `builder`."""

    loop: Loop
    variables: Variables
    units: int
    dtype: str
    hoister: Hoister
    prologue: Prologue
    cuts: Cuts
    builder: CellBuilder = field(default_factory=CellBuilder)

    def __post_init__(self) -> None:
        self._body = self.loop.body.graph
        self.leaves = Leaves(self.builder, self.prologue, self.units, self.dtype)
        self.products = Products(self.builder, self.leaves, self.prologue, self.units, self.dtype)
        self._values: dict[TensorId, Value | JoinedColumns | Unreadable] = {}
        for place in self.variables.states:
            argument = TensorId(self.loop.body.arguments[place])
            layout = self.layout(argument)
            columns = tuple(self.builder.state() for _ in range(layout.columns))
            narrow = map(layout.is_narrow, layout.widths)
            if any(narrow):
                self.leaves.uniform.update(
                    columns[segment.column] for segment in layout.segments() if layout.is_narrow(segment.width)
                )
            self._values[argument] = Value(columns)

    def read(self, wanted: Iterable[TensorId]) -> None:
        """Read all that `wanted` depends on, operands first, so that no read goes deep.

        The order follows from the structure alone, so that equal bodies give equal cells.
        """
        seen: set[str] = set()
        waiting = [(tensor.node, False) for tensor in wanted][::-1]
        while waiting:
            name, operands_read = waiting.pop()
            if operands_read:
                for tensor in self._body.tensors(self._body[name]):
                    self._try(tensor)
            elif name not in seen and self.hoister.level(TensorId(name)) == STATE:
                seen.add(name)
                waiting.append((name, True))
                waiting += [(source.node, False) for source in reversed(self._body[name].inputs)]

    def layout(self, tensor: TensorId) -> ColumnLayout:
        """Where the numbers of a value of the body lie in columns.

        Raises:
            Unreadable: its width is unknown, or no multiple of `units`, and no state depends on it.
        """
        widths = self.cuts.widths(tensor)
        if widths is None:
            shape = self.hoister.shape(tensor)
            shape = (1, *shape) if len(shape) == 1 and self._is_one_row(shape) else shape
            width = 1 if len(shape) < 2 else shape[1] if len(shape) == 2 else None
            if width is None or (width % self.units and width != 1):
                raise Unreadable(Reason.CELL_SHAPE.of(self._body[tensor.node], shape=shape, units=self.units))
            widths = (width,)
        return ColumnLayout(widths, self.units)

    def columns(self, tensor: TensorId, layout: ColumnLayout | None = None) -> tuple[int, ...]:
        """The nodes of the cell that are the columns of `tensor`, a value of the body.

        Args:
            tensor: the value.
            layout: where its numbers are to lie, if it depends on no state.

        Raises:
            Unreadable: it cannot be said in a cell.
        """
        if self.hoister.level(tensor) != STATE:
            return self._leaf(tensor, layout)
        value = self._value(tensor)
        if isinstance(value, JoinedColumns):
            return self._joined(value, self.layout(tensor))
        if value.addend is None:
            return value.columns
        added = self._spread(self.leaves.columns(value.addend, self.layout(tensor)), len(value.columns), tensor)
        whole = tuple(self.builder.apply("add", *pair) for pair in zip(value.columns, added, strict=True))
        self._values[tensor] = Value(whole)
        return whole

    def _joined(self, value: JoinedColumns, layout: ColumnLayout) -> tuple[int, ...]:
        found: tuple[int, ...] = ()
        start = 0
        for part, width in value.parts:
            inner = layout.part(start, start + width)
            found += self.columns(part, inner[2] if inner else None)
            start += width
        return found

    def _leaf(self, tensor: TensorId, layout: ColumnLayout | None) -> tuple[int, ...]:
        number = scalar_value(self._body, tensor)
        if is_finite(number):
            return (self.builder.constant(float(number or 0)),)
        return self.leaves.columns(self.hoister.hoisted(self._untiled(tensor)), layout)

    def _row(self, tensor: TensorId, layout: ColumnLayout) -> tuple[int, ...]:
        """The columns of what depends on no state; a vector of it has a number for each unit."""
        if len(self.hoister.shape(tensor)) != 1 or is_finite(scalar_value(self._body, tensor)):
            return self.columns(tensor, layout)
        return self.leaves.columns(self.prologue.row(self.hoister.hoisted(tensor)), layout)

    def _untiled(self, tensor: TensorId) -> TensorId:
        """A mask of one number a row that was repeated for every unit: the mask."""
        source = passed(self._body, tensor, COPIES)
        node = self._body[source.node]
        if node.op in ("Tile", "BroadcastTo"):
            shape = self.hoister.shape(node.inputs[0])
            if len(shape) == 2 and shape[1] == 1 and len(self.hoister.shape(tensor)) == 2:
                return node.inputs[0]
        return tensor

    def _try(self, tensor: TensorId) -> None:
        if tensor not in self._values:
            try:
                self._values[tensor] = self._evaluate(self._body[tensor.node], tensor)
            except Unreadable as reason:
                self._values[tensor] = reason

    def _value(self, tensor: TensorId) -> Value | JoinedColumns:
        self._try(tensor)
        found = self._values[tensor]
        if isinstance(found, Unreadable):
            raise found
        return found

    def _width(self, tensor: TensorId) -> int:
        """How many columns `tensor` has; 0 for one number a row."""
        layout = self.layout(tensor)
        return 0 if layout.width == 1 and (self.units != 1 or len(self.hoister.shape(tensor)) < 2) else layout.columns

    def _is_one_row(self, shape: tuple[int | None, ...]) -> bool:
        """Whether a value of rank 1 is the only row of a batch of one; Keras drops the dimension to add a bias."""
        return self.prologue.batch == 1 and shape[0] not in (None, 1)

    def _spread(self, columns: tuple[int, ...], count: int, tensor: TensorId) -> tuple[int, ...]:
        """`columns` under broadcasting to `count` columns."""
        if len(columns) == count:
            return columns
        if len(columns) == 1 and self._is_uniform(columns[0]):
            return columns * count
        node = self._body[tensor.node]
        raise Unreadable(Reason.CELL_COLUMNS.of(node, one=len(columns), two=count, units=self.units))

    def _is_uniform(self, column: int) -> bool:
        return self.builder.scalar[column] or column in self.leaves.uniform or self.units == 1

    def _evaluate(self, node: Node, tensor: TensorId) -> Value | JoinedColumns:
        if node.op in COPIES:
            return self._value(node.inputs[tensor.index])
        if node.op in _ADDITIONS and (deferred := self._deferred_sum(node, tensor)):
            return deferred
        if node.op in CELL_OPS:
            return self._elementwise(node, tensor)
        if node.op in PRODUCTS:
            return self._product(node, tensor)
        reader: Callable[[Node, TensorId], Value | JoinedColumns] | None = {
            "Split": self._part,
            "SplitV": self._part,
            "StridedSlice": self._part,
            "Slice": self._part,
            "ConcatV2": self._concatenation,
            "Mean": self._reduction,
            "Sum": self._reduction,
            "Cast": self._cast,
            "ExpandDims": self._reshaped,
            "Squeeze": self._reshaped,
            "Reshape": self._reshaped,
            "Tile": self._reshaped,
            "BroadcastTo": self._reshaped,
        }.get(node.op)
        if node.op in ("ZerosLike", "OnesLike"):
            return Value((self.builder.constant(float(node.op == "OnesLike")),))
        if reader is None:
            instead = _INSTEAD.get(node.op)
            raise Unreadable(Reason.CELL_OP_INSTEAD.of(node, instead=instead) if instead else Reason.CELL_OP.of(node))
        return reader(node, tensor)

    def _deferred_sum(self, node: Node, tensor: TensorId) -> Value | None:
        """A sum of which one side depends on no state and has the full width, or is broadcast to it."""
        levels = [self.hoister.level(source) for source in node.inputs]
        if levels.count(STATE) != 1 or not self._is_float(tensor):
            return None
        inside, outside = (node.inputs[levels.index(STATE)], node.inputs[1 - levels.index(STATE)])
        value, shape = self._value(inside), self.hoister.shape(outside)
        wide = self.hoister.shape(inside) == self.hoister.shape(tensor) and self._width(tensor) > 0
        if isinstance(value, JoinedColumns) or not wide or not shape or shape[-1] != self.hoister.shape(tensor)[-1]:
            return None
        more = self.prologue.row(self.hoister.hoisted(outside))
        if more.dtype != self.dtype:
            return None
        addend = more if value.addend is None else self._sum_outside(value.addend, more, node)
        return Value(value.columns, addend)

    def _sum_outside(self, first: Hoisted, second: Hoisted, node: Node) -> Hoisted:
        rank = max(len(first.shape), len(second.shape))
        shape = max((first.shape, second.shape), key=len)
        if rank == 2:
            rows = {value.shape[0] for value in (first, second) if len(value.shape) == 2} - {1}
            shape = (rows.pop() if len(rows) == 1 else None if rows else 1, shape[1])
        return self.prologue.sum(first, second, shape, node.name)

    def _elementwise(self, node: Node, tensor: TensorId) -> Value:
        count, shape = self._width(tensor), self.hoister.shape(tensor)
        for source in node.inputs:
            if self.hoister.level(source) == STATE:
                self._value(source)  # the first reason is the best one
        layout, columns = self.layout(tensor), list[tuple[int, ...]]()
        for place, source in enumerate(node.inputs):
            chooses = node.op == "Select" and place == 0  # which may be one number a row, [batch]
            by_row = chooses or (len(shape) == 1 and not self._is_one_row(shape))
            given = self.hoister.shape(source)
            shared = len(shape) == 2 and not by_row and self.hoister.level(source) != STATE
            if len(given) == 1 and given != (1,) and not shared and by_row != self._is_batch_vector(source):
                raise Unreadable(Reason.CELL_MIXED.of(node, tensor=source))
            columns.append(self._row(source, layout) if shared else self.columns(source, layout))
        groups = [self._spread(found, max(count, 1), tensor) for found in columns]
        made = tuple(lower(self.builder, node.op, node.attrs, arguments) for arguments in zip(*groups, strict=True))
        self.leaves.uniform.update(made if count == 0 else ())
        return Value(made)

    def _is_batch_vector(self, tensor: TensorId) -> bool:
        """Whether a tensor of rank 1 has an entry for each row, not for each unit."""
        if self._is_one_row(self.hoister.shape(tensor)):
            return False
        if self.hoister.level(tensor) == STATE:
            return True
        return self.hoister.hoisted(tensor).form is not HoistedForm.FIXED

    def _product(self, node: Node, tensor: TensorId) -> Value:
        left, right = node.inputs[:2]
        if self.hoister.level(right) == STATE or boolean(node.attrs.get("transpose_a")) or len(node.inputs) > 2:
            raise Unreadable(Reason.CELL_PRODUCT.of(node))
        matrix = self.hoister.hoisted(right)
        if matrix.form is not HoistedForm.FIXED or len(matrix.shape) != 2 or None in matrix.shape:
            raise Unreadable(Reason.CELL_MATRIX.of(node, shape=matrix.shape))
        transposed = boolean(node.attrs.get("transpose_b")) or boolean(node.attrs.get("adj_y"))
        value, layout = self._value(left), self.layout(tensor)
        if not isinstance(value, JoinedColumns):
            return Value(self.products.terms(self.columns(left), matrix, transposed, node, self.layout(left), layout))
        result: Value | None = None
        start = 0
        for part, width in value.parts:
            rows = self.prologue.rows_of(matrix, start, start + width, transposed)
            start += width
            if self.hoister.level(part) == STATE:
                columns = self.products.terms(self.columns(part), rows, transposed, node, self.layout(part), layout)
                result = self._plus(result, Value(columns), node)
            else:
                outside = self.prologue.product(self.hoister.hoisted(part), rows, transposed, node.name)
                result = self._plus(result, Value((), outside), node)
        if result is None or not result.columns:
            raise Unreadable(Reason.CELL_PRODUCT.of(node))
        return result

    def _plus(self, first: Value | None, second: Value, node: Node) -> Value:
        if first is None:
            return second
        columns = first.columns or second.columns
        if first.columns and second.columns:
            columns = tuple(
                self.builder.apply("add", *pair) for pair in zip(first.columns, second.columns, strict=True)
            )
        if first.addend is None or second.addend is None:
            return Value(columns, first.addend or second.addend)
        return Value(columns, self._sum_outside(first.addend, second.addend, node))

    def _part(self, node: Node, tensor: TensorId) -> Value:
        source = node.inputs[1 if node.op == "Split" else 0]
        columns, shape = self.columns(source), self.hoister.shape(source)
        if node.op == "StridedSlice" and len(shape) == 1 and is_column(self._body, node):
            return self._reshaped(node, tensor)
        start, end = column_range(self._body, node, tensor.index, shape)
        part = self.layout(source).part(start, end)
        if part is None:
            raise Unreadable(Reason.CELL_PART.of(node, start=start, end=end, units=self.units))
        return Value(columns[part[0] : part[1]])

    def _concatenation(self, node: Node, tensor: TensorId) -> Value | JoinedColumns:
        if concatenation_axis(self._body, node) != 1:
            raise Unreadable(Reason.CELL_JOIN.of(node))
        parts: list[tuple[TensorId, int]] = []
        for source in node.inputs[:-1]:
            width = self.hoister.shape(source)[-1]
            if width is None:
                raise Unreadable(Reason.CELL_JOIN_WIDTH.of(node, tensor=source))
            parts.append((source, width))
        return JoinedColumns(tuple(parts))

    def _reduction(self, node: Node, tensor: TensorId) -> Value:
        shape = self.hoister.shape(node.inputs[0])
        axes = self._body.constants.get(node.inputs[1].node)
        if len(shape) != 2 or axes is None or [int(axis) % 2 for axis in axes.reshape(-1)] != [1]:
            raise Unreadable(Reason.CELL_SUM_AXIS.of(node))
        columns, layout = self.columns(node.inputs[0]), self.layout(node.inputs[0])
        total = self._total(columns, layout)
        if node.op == "Mean":
            total = self.builder.apply("multiply", total, self.builder.constant(1.0 / layout.width))
        self.leaves.uniform.add(total)
        return Value((total,))

    def _total(self, columns: tuple[int, ...], layout: ColumnLayout) -> int:
        """The sum of all numbers of a row."""
        masked = zip(self.products.masked(columns, layout), layout.narrow(), strict=True)
        return self.builder.sum(
            *(
                column if narrow or self.builder.scalar[column] else self.builder.row_sum(column)
                for column, narrow in masked
            )
        )

    def _cast(self, node: Node, tensor: TensorId) -> Value:
        spec, before = self._body.specs[tensor], self._body.specs[node.inputs[0]]
        if before.dtype in FLOATS | {"bool"} and spec.dtype in FLOATS:
            return Value(self.columns(node.inputs[0]))
        raise Unreadable(Reason.CELL_CAST.of(node, before=before.dtype, after=spec.dtype))

    def _reshaped(self, node: Node, tensor: TensorId) -> Value:
        """Only what keeps every number where it is, or repeats one number for all units."""
        operand = normalised_operand(self._body, node) if node.op == "Reshape" else None
        if operand is not None:
            return Value(self._normalised(operand.tensor, operand.epsilon))
        columns = self.columns(node.inputs[0])
        before, after = self.hoister.shape(node.inputs[0]), self.hoister.shape(tensor)
        scalar = len(columns) == 1 and self._is_uniform(columns[0]) and self.layout(node.inputs[0]).width == 1
        same_width = len(before) == len(after) == 2 and before[1] == after[1] is not None
        one_row = before == (1, *after) and len(after) == 1 and self._is_one_row(after)
        one_row = one_row or (after == (1, *before) and len(before) == 1 and self._is_one_row(before))
        if same_width or one_row or (scalar and len(after) < 3 and not (len(after) == 1 and after[0] == 1)):
            return Value(columns)
        raise Unreadable(Reason.CELL_RESHAPE.of(node, before=before, after=after))

    def _normalised(self, tensor: TensorId, epsilon: float) -> tuple[int, ...]:
        """Mean 0 and variance 1 over all columns of each row."""
        columns, build, layout = self.columns(tensor), self.builder, self.layout(tensor)
        share = build.constant(1.0 / layout.width)
        mean = build.apply("multiply", self._total(columns, layout), share)
        centred = [build.apply("subtract", column, mean) for column in columns]
        squares = tuple(build.apply("square", column) for column in centred)
        variance = build.apply("multiply", self._total(squares, layout), share)
        scale = build.apply("reciprocal_sqrt", build.apply("add", variance, build.constant(epsilon)))
        return tuple(build.apply("multiply", column, scale) for column in centred)

    def _is_float(self, tensor: TensorId) -> bool:
        spec = self._body.specs.get(tensor)
        return spec is not None and spec.dtype == self.dtype
