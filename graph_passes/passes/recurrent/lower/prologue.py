"""Moves what does not depend on a state out of a loop, to run on all steps at once.

A value of one step has the shape `[batch, ...]`. Outside there are three forms of it:

    FIXED   [batch, ...]           the same at every step, computed once
    FLAT    [time * batch, ...]    every step's rows below each other
    STEPS   [time, batch, ...]     every step by itself

Whatever treats rows alike is emitted verbatim on FLAT, so that the product of all inputs with a kernel is one large
MatMul. Where rows of a fixed tensor meet rows of a step (a dropout mask), STEPS lets them broadcast.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from custom_ops.recurrent.cell_builder import CellBuilder
from graph_passes.graph.ir import AttrValue, DataType, Node, TensorId
from graph_passes.graph.ops import copied
from graph_passes.graph.rewrite import Names
from graph_passes.graph.writer import SHAPE_DTYPE, Dim, Writer
from graph_passes.passes.recurrent.find.equal_scalars import Key
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable
from graph_passes.refusals import Reason

_NUMBERS = frozenset({"float32", "float64", "float16", "bfloat16", "bool", "int32", "int64"})


class Form(enum.Enum):
    """See the module's docstring."""

    FIXED = enum.auto()
    FLAT = enum.auto()
    STEPS = enum.auto()


@dataclass(frozen=True)
class Hoisted:
    """A value of the body, outside.

    Attributes:
        tensor: of the graph around, or of a new node.
        form: how `tensor` holds it.
        shape: the value's shape in one step.
        dtype: its dtype.
        whole: what it is a part of, if that was cut along its columns and all parts are read.
        start: the first of its columns there.
    """

    tensor: TensorId
    form: Form
    shape: tuple[int | None, ...]
    dtype: str
    whole: Hoisted | None = None
    start: int = 0


class Prologue(Writer):
    """The new nodes in front of a launch. `time` and `batch` are numbers or scalar tensors of int32."""

    def __init__(self, loop: Loop, names: Names) -> None:
        super().__init__(names, f"{loop.name}/tfmem", loop.device, loop.control)
        self.time: Dim = 0
        self.time_key: Key = 0
        self.has_batch: Callable[[TensorId], bool] = lambda tensor: False  # surely `batch` rows
        self.batch: Dim = 0

    def columns(self, tensor: TensorId, dtype: str, start: int, end: int, axis: int, rank: int) -> TensorId:
        """`tensor[..., start:end]` along `axis`."""
        begin, size = [0] * rank, [-1] * rank
        begin[axis], size[axis] = start, end - start
        return self.slice(tensor, dtype, begin, size)

    def padded(self, tensor: TensorId, dtype: str, length: TensorId, rank: int) -> TensorId:
        """`tensor` of `time` items, with zeros behind up to `length` items."""
        zero = self.constant(SHAPE_DTYPE, (), [0])
        attrs: dict[str, AttrValue] = {"N": 2 * rank, "T": DataType(SHAPE_DTYPE), "axis": 0}
        more = self.difference(length, self.time)
        flat = self.once("Pack", [zero, more, *[zero] * (2 * rank - 2)], attrs)
        widths = self.reshape(flat, SHAPE_DTYPE, (rank, 2))
        return self.once("Pad", [tensor, widths], {"T": DataType(dtype), "Tpaddings": DataType(SHAPE_DTYPE)})

    def draws(self, node: Node, shape: Hoisted) -> TensorId:
        """What the random op `node` draws, once for every step."""
        count = self.reshape(self.cast(self.scalar(self.time), SHAPE_DTYPE, shape.dtype), shape.dtype, (1,))
        whole = self.joined([count, shape.tensor], shape.dtype, 0)
        return self.emit(node.op, [whole], copied(node), node.name)

    def first(self, tensor: TensorId, dtype: str, rank: int) -> TensorId:
        """The first `time` items of `tensor`."""
        return self.slice(tensor, dtype, [0] * rank, (self.time, *[-1] * (rank - 1)))

    def rows(self, value: Hoisted) -> Dim:
        """The first dimension of `value` in one step."""
        first = value.shape[0]
        return self.batch if first is None else first

    def steps(self, value: Hoisted, rank: int | None = None) -> TensorId:
        """`[time, ...]`; with `rank`, dimensions of 1 are put behind time until one step has that many."""
        rest = () if not value.shape else (self.rows(value), *static(value.shape[1:], "a value"))
        if value.form is Form.STEPS and rank in (None, len(value.shape)):
            return value.tensor
        ones = (1,) * ((rank or len(value.shape)) - len(value.shape))
        return self.reshape(value.tensor, value.dtype, (self.time, *ones, *rest))

    def flat(self, value: Hoisted) -> TensorId:
        """`[time * batch, ...]`."""
        if value.form is Form.FLAT:
            return value.tensor
        return self.reshape(value.tensor, value.dtype, (-1, *static(value.shape[1:], "a value")))

    def fixed_rows(self, value: Hoisted) -> Hoisted:
        """A FIXED value at every step, FLAT."""
        rank = len(value.shape)
        dims = (self.time, self.rows(value), *static(value.shape[1:], "a value"))
        spread = self.broadcast(value.tensor, value.dtype, dims) if rank else value.tensor
        return Hoisted(
            self.flat(Hoisted(spread, Form.STEPS, value.shape, value.dtype)), Form.FLAT, value.shape, value.dtype
        )

    def sum(self, first: Hoisted, second: Hoisted, shape: tuple[int | None, ...], label: str) -> Hoisted:
        """Both added, whatever their forms."""
        attrs = {"T": DataType(first.dtype)}
        if first.form is second.form is Form.FIXED:
            made = self.emit("AddV2", [first.tensor, second.tensor], attrs, label)
            return Hoisted(made, Form.FIXED, shape, first.dtype)
        return self.elementwise(Node(label, "AddV2", attrs=attrs, outputs=1), (first, second), shape, first.dtype)

    def product(self, value: Hoisted, matrix: Hoisted, transposed: bool, label: str) -> Hoisted:
        """`value @ matrix`, or `value` times its transpose."""
        form = Form.FIXED if value.form is Form.FIXED else Form.FLAT
        tensor = value.tensor if form is Form.FIXED else self.flat(value)
        made = self.matmul(tensor, matrix.tensor, value.dtype, transposed, label)
        return Hoisted(made, form, (value.shape[0], matrix.shape[0 if transposed else 1]), value.dtype)

    def normalised(self, value: Hoisted, epsilon: float) -> TensorId:
        """`value` with mean 0 and variance 1 in each row, FLAT."""
        kind = {"T": DataType(value.dtype)}
        axis = self.constant(SHAPE_DTYPE, (1,), [1])
        reduction = {**kind, "Tidx": DataType(SHAPE_DTYPE), "keep_dims": True}
        flat = self.flat(value)
        mean = self.emit("Mean", [flat, axis], reduction)
        variance = self.emit("Mean", [self.emit("SquaredDifference", [flat, mean], kind), axis], reduction)
        guarded = self.emit("AddV2", [variance, self.constant(value.dtype, (), [epsilon])], kind)
        centred = self.emit("Sub", [flat, mean], kind)
        return self.emit("Mul", [centred, self.emit("Rsqrt", [guarded], kind)], kind)

    def rows_of(self, matrix: Hoisted, start: int, end: int, transposed: bool) -> Hoisted:
        """Rows `start` to `end` of a fixed matrix; of one that is used transposed, its columns."""
        made = self.columns(matrix.tensor, matrix.dtype, start, end, int(transposed), 2)
        shape = (matrix.shape[0], end - start) if transposed else (end - start, matrix.shape[1])
        return Hoisted(made, Form.FIXED, shape, matrix.dtype)

    def elementwise(
        self, node: Node, operands: Sequence[Hoisted], shape: tuple[int | None, ...], dtype: str
    ) -> Hoisted:
        """An elementwise op of the body on all steps at once; at least one operand is not FIXED."""
        rank = len(shape)
        varying = [operand for operand in operands if operand.form is not Form.FIXED]
        verbatim = all(operand.form is Form.FLAT and len(operand.shape) == rank for operand in varying) and all(
            len(operand.shape) < rank or operand.shape[0] == 1 for operand in operands if operand.form is Form.FIXED
        )
        attrs = copied(node)
        if verbatim and rank:
            return Hoisted(self.emit(node.op, [o.tensor for o in operands], attrs, node.name), Form.FLAT, shape, dtype)
        if node.op == "Select" or (node.op.startswith("BiasAdd") and rank != 2):
            raise Unreadable(Reason.RANKS.of(node))
        inputs = [o.tensor if o.form is Form.FIXED else self.steps(o, rank) for o in operands]
        op = "AddV2" if node.op.startswith("BiasAdd") else node.op
        attrs.pop("data_format", None)
        return Hoisted(self.emit(op, inputs, attrs, node.name), Form.STEPS, shape, dtype)


def static(dims: Sequence[int | None], what: str) -> tuple[int, ...]:
    """`dims`, all known.

    Raises:
        Unreadable: one is not.
    """
    if any(dim is None for dim in dims):
        raise Unreadable(Reason.WIDTH_UNKNOWN(what=what, shape=tuple(dims)))
    return tuple(dim for dim in dims if dim is not None)


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

    def columns(self, value: Hoisted) -> tuple[int, ...]:
        """The nodes that read `value`, one for each column of `units`, or one scalar.

        Raises:
            Unreadable: its width is no multiple of `units`.
        """
        if value.tensor not in self._columns:
            if value.dtype not in _NUMBERS:
                raise Unreadable(Reason.NOT_A_NUMBER(tensor=value.tensor, dtype=value.dtype))
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
            value = cast = Hoisted(tensor, Form.STEPS, one_row, self._dtype)
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
