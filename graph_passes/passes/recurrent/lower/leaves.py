"""The tensors that a launch reads, and how the numbers of each come to lie in columns of the hidden size."""

from __future__ import annotations

from collections.abc import Sequence

from custom_ops.recurrent.cell_builder import CellBuilder
from graph_passes.graph.ir import TensorId
from graph_passes.graph.writer import Dim
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.lower.layouts import ColumnLayout
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm, Prologue, static
from graph_passes.refusals import Reason

_NUMBERS = frozenset({"float32", "float64", "float16", "bfloat16", "bool", "int32", "int64"})


class Leaves:
    """The tensors of one direction, each declared once, in the order in which the cell counts them."""

    def __init__(self, builder: CellBuilder, prologue: Prologue, units: int, dtype: str) -> None:
        self.sequences: list[TensorId] = []
        self.invariants: list[TensorId] = []
        self.vectors: list[TensorId] = []
        self.matrices: list[TensorId] = []
        self._builder, self._prologue, self._units, self._dtype = builder, prologue, units, dtype
        self.uniform: set[int] = set()  # nodes that hold the same number for all units
        self._columns: dict[TensorId, tuple[int, ...]] = {}
        self._indices: dict[TensorId, int] = {}

    def columns(self, value: Hoisted, layout: ColumnLayout | None = None) -> tuple[int, ...]:
        """The nodes that read `value`, one for each column of `units`, or one scalar.

        Args:
            value: what is read.
            layout: where its numbers lie; None: side by side.

        Raises:
            Unreadable: its width is no multiple of `units`, and no layout is given.
        """
        wide = len(value.shape) > 0 and value.shape[-1] not in (1, None)
        if layout is not None and not layout.exact and wide and value.shape[-1] == layout.width:
            return self._in_segments(value, layout)
        if value.tensor not in self._columns:
            if value.dtype not in _NUMBERS:
                raise Unreadable(Reason.NOT_A_NUMBER(tensor=value.tensor, dtype=value.dtype))
            if value.whole is not None and self._is_of_columns(value, value.whole):
                first = value.start // self._units
                return self.columns(value.whole)[first : first + self._width(value)]
            self._columns[value.tensor] = (
                self._fixed(value) if value.form is HoistedForm.FIXED else self._sequence(value)
            )
        return self._columns[value.tensor]

    def _is_of_columns(self, value: Hoisted, whole: Hoisted) -> bool:
        widths = (value.start, value.shape[-1], whole.shape[-1])
        return all(width is not None and width % self._units == 0 for width in widths)

    def _in_segments(self, value: Hoisted, layout: ColumnLayout) -> tuple[int, ...]:
        axis = len(value.shape) - (value.form is not HoistedForm.STEPS)
        if any(map(layout.is_narrow, layout.widths)):
            found: tuple[int, ...] = ()
            for segment in layout.segments():
                end = segment.start + segment.width
                part = self._prologue.columns(value.tensor, value.dtype, segment.start, end, axis, axis + 1)
                shape = (*value.shape[:-1], segment.width)
                one = ColumnLayout((segment.width,), layout.units)
                found += self.columns(Hoisted(part, value.form, shape, value.dtype), one)
            return found
        spread = spread_out(self._prologue, value.tensor, value.dtype, axis, axis + 1, layout)
        return self.columns(
            Hoisted(spread, value.form, (*value.shape[:-1], layout.columns * layout.units), value.dtype)
        )

    def matrix(self, value: Hoisted) -> int:
        """The index of a matrix, `[rows * units, columns * units]`."""
        if value.tensor not in self._indices:
            rows, columns = value.shape
            if rows is None or columns is None or value.dtype != self._dtype:
                raise Unreadable(
                    Reason.MATRIX_DTYPE(tensor=value.tensor, dtype=value.dtype, shape=value.shape, expected=self._dtype)
                )
            self._indices[value.tensor] = self._builder.matrix(rows // self._units, columns // self._units)
            self.matrices.append(value.tensor)
        return self._indices[value.tensor]

    def _width(self, value: Hoisted) -> int:
        last = value.shape[-1]
        if last is None or last % self._units:
            raise Unreadable(Reason.WIDTH(tensor=value.tensor, shape=value.shape, units=self._units))
        return last // self._units

    def _sequence(self, value: Hoisted) -> tuple[int, ...]:
        prologue = self._prologue
        tensor = prologue.cast(value.tensor, value.dtype, self._dtype)
        cast = Hoisted(tensor, value.form, value.shape, self._dtype)
        if not value.shape:  # the same number for every row
            column = prologue.reshape(tensor, self._dtype, (prologue.time, 1))
            self.sequences.append(self._repeated(column, (prologue.time, prologue.batch)))
            return self._builder.sequence(0)
        if len(value.shape) > 2:
            raise Unreadable(Reason.ROW_SHAPE(tensor=value.tensor, shape=value.shape))
        if len(value.shape) == 1 and value.shape[0] not in (None, 1) and prologue.batch == 1:
            one_row = (1, *value.shape)
            tensor = prologue.reshape(tensor, self._dtype, (prologue.time, *static(one_row, "a value")))
            value = cast = Hoisted(tensor, HoistedForm.STEPS, one_row, self._dtype)
        scalar = len(value.shape) == 1 or (value.shape[1] == 1 and self._units != 1)
        one_for_all = value.shape[0] == 1 and prologue.batch != 1  # the same row for the whole batch
        rows = prologue.batch if one_for_all else prologue.rows(value)
        if scalar:
            column = prologue.reshape(tensor, self._dtype, (prologue.time, prologue.rows(value)))
            column = self._repeated(column, (prologue.time, rows)) if one_for_all else column
            self.sequences.append(column)
            return self._builder.sequence(0)
        width = self._width(value)
        whole = prologue.steps(cast)
        if one_for_all:
            whole = self._repeated(whole, (prologue.time, rows, width * self._units))
        self.sequences.append(whole)
        return self._builder.sequence(width)

    def _fixed(self, value: Hoisted) -> tuple[int, ...]:
        prologue, rank = self._prologue, len(value.shape)
        tensor = prologue.cast(value.tensor, value.dtype, self._dtype)
        if rank == 0 or (rank == 1 and value.shape[0] == 1 and self._units != 1):
            self.vectors.append(self._repeated(tensor, (self._units,)))
            return self._repeated_column(self._builder.vector(1))
        if rank == 1:
            self.vectors.append(tensor)
            return self._builder.vector(self._width(value))
        if rank != 2:
            raise Unreadable(Reason.INVARIANT_SHAPE(tensor=value.tensor, shape=value.shape))
        narrow = value.shape[1] == 1 and self._units != 1
        if value.shape[0] == 1:
            if narrow:
                tensor = self._repeated(tensor, (1, self._units))
            width = 1 if narrow else self._width(value)
            self.vectors.append(prologue.reshape(tensor, self._dtype, (width * self._units,)))
            columns = self._builder.vector(width)
            return self._repeated_column(columns) if narrow else columns
        if narrow or not prologue.has_batch(tensor):
            width = self._units if narrow else self._width(value) * self._units
            tensor = self._repeated(tensor, (prologue.batch, width))
        self.invariants.append(tensor)
        return (
            self._repeated_column(self._builder.invariant(1)) if narrow else self._builder.invariant(self._width(value))
        )

    def _repeated_column(self, columns: tuple[int, ...]) -> tuple[int, ...]:
        self.uniform.update(columns)
        return columns

    def _repeated(self, tensor: TensorId, dims: tuple[Dim, ...]) -> TensorId:
        return self._prologue.broadcast(tensor, self._dtype, dims)


def spread_out(
    prologue: Prologue, tensor: TensorId, dtype: str, axis: int, rank: int, layout: ColumnLayout
) -> TensorId:
    """`tensor`, whose numbers along `axis` lie side by side, each segment beginning with a new column."""
    if layout.exact:
        return tensor
    widths = layout.widths
    parts = prologue.split(tensor, dtype, widths, axis) if len(widths) > 1 else (tensor,)
    padded = [
        prologue.padded_to(part, dtype, axis, rank, width, -(-width // layout.units) * layout.units)
        for part, width in zip(parts, widths, strict=True)
    ]
    return prologue.joined(padded, dtype, axis)


def side_by_side(prologue: Prologue, tensor: TensorId, dtype: str, rank: int, layout: ColumnLayout) -> TensorId:
    """What `spread_out` was given, of what it made along the last axis."""
    if layout.exact:
        return tensor
    parts = [
        prologue.columns(tensor, dtype, segment.column * layout.units, segment.column * layout.units + segment.width,
                         rank - 1, rank)
        for segment in layout.segments()
    ]  # fmt: skip
    return prologue.joined(parts, dtype, rank - 1)


def states_of(prologue: Prologue, tensor: TensorId, dtype: str, rank: int, layout: ColumnLayout) -> list[TensorId]:
    """A state before the loop, `[batch, width]` or `[batch]`, as one tensor `[batch, units]` for each column."""
    units = layout.units
    if rank == 0:
        tensor = prologue.broadcast(tensor, dtype, (prologue.batch, 1))
    tensor = prologue.expanded(tensor, dtype, 1) if rank == 1 else tensor
    if layout.columns == 1 and layout.exact:
        return [tensor]
    if layout.exact:
        return list(prologue.split(tensor, dtype, [units] * layout.columns, 1))
    found: list[TensorId] = []
    parts = prologue.split(tensor, dtype, layout.widths, 1) if len(layout.widths) > 1 else (tensor,)
    for part, width in zip(parts, layout.widths, strict=True):
        if layout.is_narrow(width):
            found.append(prologue.broadcast(part, dtype, (prologue.batch, units)))
            continue
        columns = -(-width // units)
        padded = prologue.padded_to(part, dtype, 1, 2, width, columns * units)
        found += prologue.split(padded, dtype, [units] * columns, 1) if columns > 1 else [padded]
    return found


def state_of(prologue: Prologue, finals: Sequence[TensorId], dtype: str, rank: int, layout: ColumnLayout) -> TensorId:
    """The state after the loop, of its columns."""
    whole = side_by_side(prologue, prologue.joined(finals, dtype, 1), dtype, 2, layout)
    if rank == 0:
        return prologue.reshape(prologue.slice(whole, dtype, (0, 0), (1, 1)), dtype, ())
    return prologue.reshape(whole, dtype, (-1,)) if rank == 1 else whole
