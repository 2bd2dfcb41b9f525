"""Moves what does not depend on a state out of a loop, to run on all steps at once.

A value of one step has the shape `[batch, ...]`. Outside there are three forms of it:

    FIXED   [batch, ...]           the same at every step, computed once
    FLAT    [time * batch, ...]    every step's rows below each other
    STEPS   [time, batch, ...]     every step by itself

Whatever treats rows alike is emitted verbatim on FLAT, so that the product of all inputs with a kernel is one large
MatMul. Where rows of a fixed tensor meet rows of a step (a dropout mask), or a single row of a step meets all of its
rows (a mean over the batch), STEPS lets them broadcast.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from graph_passes.graph.ir import AttrValue, DataType, Graph, Node, TensorId
from graph_passes.graph.ops import copied
from graph_passes.graph.rewrite import Names
from graph_passes.graph.writer import SHAPE_DTYPE, Dim, Writer
from graph_passes.passes.recurrent.find.counting import Linear, StepNumber, of_key
from graph_passes.passes.recurrent.find.equal_scalars import Key
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable
from graph_passes.refusals import Reason


class HoistedForm(enum.Enum):
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
    form: HoistedForm
    shape: tuple[int | None, ...]
    dtype: str
    whole: Hoisted | None = None
    start: int = 0


class Prologue(Writer):
    """The new nodes in front of a launch.

    Attributes:
        time: how many steps there are, a number or a scalar tensor of int32.
        batch: how many rows, likewise.
        drawn: what random ops of the body drew, for all steps.
    """

    def __init__(self, loop: Loop, names: Names) -> None:
        super().__init__(names, f"{loop.name}/tfmem", loop.device, loop.control)
        self.time: Dim = 0
        self.time_key: Key = 0
        self.time_form = Linear()
        self.has_batch: Callable[[TensorId], bool] = lambda tensor: False  # surely `batch` rows
        self.batch: Dim = 0
        self.drawn: dict[TensorId, Hoisted] = {}

    def end_after(self, steps: TensorId) -> None:
        """Have the loop end after its first `steps` steps: what follows reads no others."""
        self.time = self.time_key = steps
        self.time_form = of_key(steps)
        for tensor, value in self.drawn.items():
            part = self.first(value.tensor, value.dtype, len(value.shape) + 1)
            self.drawn[tensor] = replace(value, tensor=part)

    def columns(self, tensor: TensorId, dtype: str, start: int, end: int, axis: int, rank: int) -> TensorId:
        """`tensor[..., start:end]` along `axis`."""
        begin, size = [0] * rank, [-1] * rank
        begin[axis], size[axis] = start, end - start
        return self.slice(tensor, dtype, begin, size)

    def padded_to(self, tensor: TensorId, dtype: str, axis: int, rank: int, size: int, wanted: int) -> TensorId:
        """`tensor` with zeros behind its `size` numbers along `axis`, up to `wanted` numbers."""
        if size == wanted:
            return tensor
        widths = [0] * (2 * rank)
        widths[2 * axis + 1] = wanted - size
        paddings = self.constant(SHAPE_DTYPE, (rank, 2), widths)
        return self.once("Pad", [tensor, paddings], {"T": DataType(dtype), "Tpaddings": DataType(SHAPE_DTYPE)})

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

    def sum_of(self, graph: Graph, form: Linear) -> Dim:
        """A sum of scalars of `graph`, the graph around the loop."""
        if isinstance(form.key, int):
            return form.key
        if form == self.time_form:
            return self.time
        whole: dict[str, AttrValue] = {"T": DataType(SHAPE_DTYPE)}
        total = self.scalar(form.number)
        for atom, factor in sorted(form.terms, key=str):
            tensor, axis = (atom, None) if isinstance(atom, TensorId) else atom
            dtype = graph.specs[tensor].dtype if tensor in graph.specs else SHAPE_DTYPE
            value = self.cast(tensor, dtype, SHAPE_DTYPE) if axis is None else self.scalar_of_shape(tensor, dtype, axis)
            for _ in range(abs(factor)):
                total = self.once("AddV2" if factor > 0 else "Sub", [total, value], whole)
        return total

    def reached(self, graph: Graph, place: StepNumber) -> TensorId:
        """What a number of each step would be in the step after the last one."""
        if self.time_form.is_size:
            return self.scalar(self.sum_of(graph, place.start.plus(self.time_form, place.step)))
        whole: dict[str, AttrValue] = {"T": DataType(SHAPE_DTYPE)}  # a loop that begins behind its bound has no step
        more = self.once("Mul", [self.scalar(self.time), self.scalar(place.step)], whole)
        return self.once("AddV2", [self.scalar(self.sum_of(graph, place.start)), more], whole)

    def counter(self, graph: Graph, place: StepNumber, dtype: str, reverse: bool) -> TensorId:
        """A counter in every step, in the order in which the launch numbers them."""
        steps = self.counted(self.time, "steps")
        whole: dict[str, AttrValue] = {"T": DataType(SHAPE_DTYPE)}
        if reverse:
            steps = self.reversed(steps, SHAPE_DTYPE)
        if place.step != 1:
            steps = self.once("Mul", [steps, self.scalar(place.step)], whole)
        if place.start.key != 0:
            steps = self.once("AddV2", [steps, self.scalar(self.sum_of(graph, place.start))], whole)
        return self.cast(steps, SHAPE_DTYPE, dtype)

    def first_number(self, tensor: TensorId, dtype: str, rank: int) -> TensorId:
        """The first number of each item."""
        one = self.slice(tensor, dtype, [0] * rank, [-1, *[1] * (rank - 1)])
        return self.reshape(one, dtype, (-1,))

    def every(self, tensor: TensorId, dtype: str, first: int, stride: int, count: int) -> TensorId:
        """`count` items of `tensor`, `stride` apart, from the one at `first` on."""
        ends = [self.shape([end]) for end in (first, first + stride * (count - 1) + 1, stride)]
        attrs: dict[str, AttrValue] = {
            "T": DataType(dtype), "Index": DataType(SHAPE_DTYPE), "shrink_axis_mask": 0, "begin_mask": 0,
            "end_mask": 0, "ellipsis_mask": 0, "new_axis_mask": 0,
        }  # fmt: skip
        return self.once("StridedSlice", [tensor, *ends], attrs)

    def rows(self, value: Hoisted) -> Dim:
        """The first dimension of `value` in one step."""
        first = value.shape[0]
        return self.batch if first is None else first

    def steps(self, value: Hoisted, rank: int | None = None) -> TensorId:
        """`[time, ...]`; with `rank`, dimensions of 1 are put behind time until one step has that many."""
        rest = () if not value.shape else (self.rows(value), *static(value.shape[1:], "a value"))
        if value.form is HoistedForm.STEPS and rank in (None, len(value.shape)):
            return value.tensor
        ones = (1,) * ((rank or len(value.shape)) - len(value.shape))
        return self.reshape(value.tensor, value.dtype, (self.time, *ones, *rest))

    def flat(self, value: Hoisted) -> TensorId:
        """`[time * batch, ...]`."""
        if value.form is HoistedForm.FLAT:
            return value.tensor
        return self.reshape(value.tensor, value.dtype, (-1, *static(value.shape[1:], "a value")))

    def row(self, value: Hoisted) -> Hoisted:
        """A vector of each step as the one row that meets all rows of a batch; anything else as it is."""
        if value.form is HoistedForm.FIXED or len(value.shape) != 1 or value.shape[0] == 1 or self.batch == 1:
            return value
        shape = (1, *static(value.shape, "a vector"))
        made = self.reshape(value.tensor, value.dtype, (self.time, *shape))
        return Hoisted(made, HoistedForm.STEPS, shape, value.dtype)

    def fixed_rows(self, value: Hoisted) -> Hoisted:
        """A FIXED value at every step, FLAT."""
        rest = (self.rows(value), *static(value.shape[1:], "a value")) if value.shape else ()
        spread = self.broadcast(value.tensor, value.dtype, (self.time, *rest))
        return Hoisted(
            self.flat(Hoisted(spread, HoistedForm.STEPS, value.shape, value.dtype)),
            HoistedForm.FLAT,
            value.shape,
            value.dtype,
        )

    def sum(self, first: Hoisted, second: Hoisted, shape: tuple[int | None, ...], label: str) -> Hoisted:
        """Both added, whatever their forms."""
        attrs = {"T": DataType(first.dtype)}
        if first.form is second.form is HoistedForm.FIXED:
            made = self.emit("AddV2", [first.tensor, second.tensor], attrs, label)
            return Hoisted(made, HoistedForm.FIXED, shape, first.dtype)
        return self.elementwise(Node(label, "AddV2", attrs=attrs, outputs=1), (first, second), shape, first.dtype)

    def product(self, value: Hoisted, matrix: Hoisted, transposed: bool, label: str) -> Hoisted:
        """`value @ matrix`, or `value` times its transpose."""
        form = HoistedForm.FIXED if value.form is HoistedForm.FIXED else HoistedForm.FLAT
        tensor = value.tensor if form is HoistedForm.FIXED else self.flat(value)
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
        return Hoisted(made, HoistedForm.FIXED, shape, matrix.dtype)

    def elementwise(
        self, node: Node, operands: Sequence[Hoisted], shape: tuple[int | None, ...], dtype: str
    ) -> Hoisted:
        """An elementwise op of the body on all steps at once; at least one operand is not FIXED."""
        rank = len(shape)
        varying = [operand for operand in operands if operand.form is not HoistedForm.FIXED]
        fixed = [operand for operand in operands if operand.form is HoistedForm.FIXED]
        alike = len({operand.shape[:1] for operand in varying}) == 1  # no single row meets all rows of a step
        flat = all(operand.form is HoistedForm.FLAT and len(operand.shape) == rank for operand in varying)
        verbatim = flat and alike and all(len(operand.shape) < rank or operand.shape[0] == 1 for operand in fixed)
        attrs = copied(node)
        if verbatim and rank:
            return Hoisted(
                self.emit(node.op, [o.tensor for o in operands], attrs, node.name), HoistedForm.FLAT, shape, dtype
            )
        if node.op == "Select" or (node.op.startswith("BiasAdd") and rank != 2):
            raise Unreadable(Reason.RANKS.of(node))
        inputs = [o.tensor if o.form is HoistedForm.FIXED else self.steps(o, rank) for o in operands]
        op = "AddV2" if node.op.startswith("BiasAdd") else node.op
        attrs.pop("data_format", None)
        return Hoisted(self.emit(op, inputs, attrs, node.name), HoistedForm.STEPS, shape, dtype)


def static(dims: Sequence[int | None], what: str) -> tuple[int, ...]:
    """`dims`, all known.

    Raises:
        Unreadable: one is not.
    """
    if any(dim is None for dim in dims):
        raise Unreadable(Reason.WIDTH_UNKNOWN(what=what, shape=tuple(dims)))
    return tuple(dim for dim in dims if dim is not None)
