"""Turns hoisted values into what a cell reads: sequences, invariants, vectors, matrices."""

from __future__ import annotations

from custom_ops.cell_builder import CellBuilder
from graph_passes.ir import TensorId
from graph_passes.recurrent.hoist import Form, Hoisted, Prelude, static
from graph_passes.recurrent.loops import Unreadable
from graph_passes.writer import Dim

_NUMBERS = frozenset({"float32", "float64", "float16", "bfloat16", "bool", "int32", "int64"})


class Leaves:
    """The tensors of one direction, each declared once, in the order in which the cell counts them."""

    def __init__(self, builder: CellBuilder, prelude: Prelude, units: int, dtype: str) -> None:
        self.sequences: list[TensorId] = []
        self.invariants: list[TensorId] = []
        self.vectors: list[TensorId] = []
        self.matrices: list[TensorId] = []
        self._builder, self._prelude, self._units, self._dtype = builder, prelude, units, dtype
        self.uniform: set[int] = set()  # nodes that hold the same number for all units
        self._columns: dict[TensorId, tuple[int, ...]] = {}
        self._indices: dict[TensorId, int] = {}

    def columns(self, value: Hoisted) -> tuple[int, ...]:
        """The nodes that read `value`, one for each column of `units`, or one scalar.

        Raises:
            Unreadable: its width is no multiple of `units`.
        """
        if value.tensor not in self._columns:
            if value.dtype not in _NUMBERS:
                raise Unreadable(f"'{value.tensor}' is {value.dtype}, not a number")
            if value.whole is not None and self._is_of_columns(value, value.whole):
                first = value.start // self._units
                return self.columns(value.whole)[first : first + self._width(value)]
            self._columns[value.tensor] = self._fixed(value) if value.form is Form.FIXED else self._sequence(value)
        return self._columns[value.tensor]

    def _is_of_columns(self, value: Hoisted, whole: Hoisted) -> bool:
        widths = (value.start, value.shape[-1], whole.shape[-1])
        return all(width is not None and width % self._units == 0 for width in widths)

    def matrix(self, value: Hoisted) -> int:
        """The index of a matrix, `[rows * units, columns * units]`."""
        if value.tensor not in self._indices:
            rows, columns = value.shape
            if rows is None or columns is None or value.dtype != self._dtype:
                raise Unreadable(f"the matrix '{value.tensor}' is {value.dtype}{value.shape}, expected {self._dtype}")
            self._indices[value.tensor] = self._builder.matrix(rows // self._units, columns // self._units)
            self.matrices.append(value.tensor)
        return self._indices[value.tensor]

    def _width(self, value: Hoisted) -> int:
        last = value.shape[-1]
        if last is None or last % self._units:
            raise Unreadable(f"'{value.tensor}' has shape {value.shape}; expected a multiple of {self._units} units")
        return last // self._units

    def _sequence(self, value: Hoisted) -> tuple[int, ...]:
        prelude = self._prelude
        tensor = prelude.cast(value.tensor, value.dtype, self._dtype)
        cast = Hoisted(tensor, value.form, value.shape, self._dtype)
        if not value.shape:  # the same number for every row
            column = prelude.reshape(tensor, self._dtype, (prelude.time, 1))
            self.sequences.append(self._repeated(column, (prelude.time, prelude.batch)))
            return self._builder.sequence(0)
        if len(value.shape) > 2:
            raise Unreadable(f"'{value.tensor}' has shape {value.shape} in one step; expected [batch, units]")
        if len(value.shape) == 1 and value.shape[0] not in (None, 1) and prelude.batch == 1:
            one_row = (1, *value.shape)
            tensor = prelude.reshape(tensor, self._dtype, (prelude.time, *static(one_row, "a value")))
            value = cast = Hoisted(tensor, Form.STEPS, one_row, self._dtype)
        scalar = len(value.shape) == 1 or (value.shape[1] == 1 and self._units != 1)
        one_for_all = value.shape[0] == 1 and prelude.batch != 1  # the same row for the whole batch
        rows = prelude.batch if one_for_all else prelude.rows(value)
        if scalar:
            column = prelude.reshape(tensor, self._dtype, (prelude.time, prelude.rows(value)))
            column = self._repeated(column, (prelude.time, rows)) if one_for_all else column
            self.sequences.append(column)
            return self._builder.sequence(0)
        width = self._width(value)
        whole = prelude.steps(cast)
        if one_for_all:
            whole = self._repeated(whole, (prelude.time, rows, width * self._units))
        self.sequences.append(whole)
        return self._builder.sequence(width)

    def _fixed(self, value: Hoisted) -> tuple[int, ...]:
        prelude, rank = self._prelude, len(value.shape)
        tensor = prelude.cast(value.tensor, value.dtype, self._dtype)
        if rank == 0 or (rank == 1 and value.shape[0] == 1 and self._units != 1):
            self.vectors.append(self._repeated(tensor, (self._units,)))
            return self._repeated_column(self._builder.vector(1))
        if rank == 1:
            self.vectors.append(tensor)
            return self._builder.vector(self._width(value))
        if rank != 2:
            raise Unreadable(f"'{value.tensor}' has shape {value.shape}; expected [batch, units]")
        narrow = value.shape[1] == 1 and self._units != 1
        if value.shape[0] == 1:
            if narrow:
                tensor = self._repeated(tensor, (1, self._units))
            width = 1 if narrow else self._width(value)
            self.vectors.append(prelude.reshape(tensor, self._dtype, (width * self._units,)))
            columns = self._builder.vector(width)
            return self._repeated_column(columns) if narrow else columns
        if narrow or not prelude.has_batch(tensor):
            width = self._units if narrow else self._width(value) * self._units
            tensor = self._repeated(tensor, (prelude.batch, width))
        self.invariants.append(tensor)
        return (
            self._repeated_column(self._builder.invariant(1)) if narrow else self._builder.invariant(self._width(value))
        )

    def _repeated_column(self, columns: tuple[int, ...]) -> tuple[int, ...]:
        self.uniform.update(columns)
        return columns

    def _repeated(self, tensor: TensorId, dims: tuple[Dim, ...]) -> TensorId:
        return self._prelude.broadcast(tensor, self._dtype, dims)
