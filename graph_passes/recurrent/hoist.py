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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph_passes.ir import AttrValue, DataType, Graph, Literal, Node, TensorId
from graph_passes.recurrent.loops import Loop, Unreadable
from graph_passes.recurrent.match import NewNode

SHAPE_DTYPE = "int32"


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


class Names:
    """Names that no node of a graph has yet, nor any other new node."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._taken: set[str] = set()

    def fresh(self, wanted: str) -> str:
        """`wanted`, or with a number behind."""
        name, suffix = wanted, 1
        while name in self._graph.nodes or name in self._taken:
            name, suffix = f"{wanted}_{suffix}", suffix + 1
        self._taken.add(name)
        return name


class Prelude:
    """The new nodes in front of a launch. `time` and `batch` are numbers or scalar tensors of int32."""

    def __init__(self, loop: Loop, names: Names) -> None:
        self.nodes: list[NewNode] = []
        self.time: int | TensorId = 0
        self.time_key: object = 0  # see `lengths.Key`
        self.has_batch: Callable[[TensorId], bool] = lambda tensor: False  # surely `batch` rows
        self.batch: int | TensorId = 0
        self._loop = loop
        self._names = names
        self._made: dict[object, TensorId] = {}

    def emit(
        self,
        op: str,
        inputs: Sequence[TensorId],
        attrs: Mapping[str, AttrValue | object],
        label: str = "",
        outputs: int = 1,
    ) -> TensorId:
        """Output 0 of a new node."""
        name = self._names.fresh(f"{self._loop.name}/tfmem/{label or op}")
        control = self._loop.control if op in READS else ()
        self.nodes.append(NewNode(name, op, tuple(inputs), attrs, self._loop.device, control, outputs))
        return TensorId(name)

    def once(self, op: str, inputs: Sequence[TensorId], attrs: Mapping[str, AttrValue], label: str = "") -> TensorId:
        """The same, but one node for all equal requests."""
        key = (op, tuple(inputs), tuple(sorted(attrs.items(), key=lambda item: item[0])))
        if key not in self._made:
            self._made[key] = self.emit(op, inputs, attrs, label)
        return self._made[key]

    def constant(self, dtype: str, shape: Sequence[int], values: Sequence[bool | int | float]) -> TensorId:
        """A Const."""
        literal = Literal(dtype, tuple(shape), tuple(values))
        return self.once("Const", (), {"dtype": DataType(dtype), "value": literal})

    def shape(self, dims: Sequence[int | TensorId]) -> TensorId:
        """A shape vector, of numbers and scalar tensors."""
        if all(isinstance(dim, int) for dim in dims):
            return self.constant(SHAPE_DTYPE, (len(dims),), [int(dim) for dim in dims])  # type: ignore[arg-type]
        parts = [self.constant(SHAPE_DTYPE, (), [dim]) if isinstance(dim, int) else dim for dim in dims]
        return self.once("Pack", parts, {"N": len(parts), "T": DataType(SHAPE_DTYPE), "axis": 0}, "shape")

    def reshape(self, tensor: TensorId, dtype: str, dims: Sequence[int | TensorId]) -> TensorId:
        """`tensor` in another shape; -1 as in TensorFlow."""
        attrs: dict[str, AttrValue] = {"T": DataType(dtype), "Tshape": DataType(SHAPE_DTYPE)}
        known = [dim for dim in dims if isinstance(dim, int) and dim > 0]
        if len(known) == len(dims) - 1:  # the last one is inferred: no op has to read it
            dims = tuple(dim if isinstance(dim, int) else -1 for dim in dims)
        return self.once("Reshape", [tensor, self.shape(dims)], attrs)

    def cast(self, tensor: TensorId, source: str, target: str) -> TensorId:
        """`tensor` as `target`."""
        if source == target:
            return tensor
        attrs: dict[str, AttrValue] = {"SrcT": DataType(source), "DstT": DataType(target), "Truncate": False}
        return self.once("Cast", [tensor], attrs)

    def scalar_of_shape(self, tensor: TensorId, dtype: str, axis: int) -> TensorId:
        """Dimension `axis` of `tensor`, as int32."""
        shape = self.once("Shape", [tensor], {"T": DataType(dtype), "out_type": DataType(SHAPE_DTYPE)})
        ends = [self.constant(SHAPE_DTYPE, (1,), [number]) for number in (axis, axis + 1, 1)]
        attrs: dict[str, AttrValue] = {
            "T": DataType(SHAPE_DTYPE), "Index": DataType(SHAPE_DTYPE), "shrink_axis_mask": 1, "begin_mask": 0,
            "end_mask": 0, "ellipsis_mask": 0, "new_axis_mask": 0,
        }  # fmt: skip
        return self.once("StridedSlice", [shape, *ends], attrs, "dimension")

    def columns(self, tensor: TensorId, dtype: str, start: int, end: int, axis: int, rank: int) -> TensorId:
        """`tensor[..., start:end]` along `axis`."""
        begin, size = [0] * rank, [-1] * rank
        begin[axis], size[axis] = start, end - start
        ends = [self.constant(SHAPE_DTYPE, (rank,), numbers) for numbers in (begin, size)]
        return self.slice(tensor, dtype, *ends)

    def slice(self, tensor: TensorId, dtype: str, begin: TensorId, size: TensorId) -> TensorId:
        """A part of `tensor`."""
        return self.once("Slice", [tensor, begin, size], {"T": DataType(dtype), "Index": DataType(SHAPE_DTYPE)})

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
        time = self.constant(SHAPE_DTYPE, (), [self.time]) if isinstance(self.time, int) else self.time
        count = self.reshape(self.cast(time, SHAPE_DTYPE, shape.dtype), shape.dtype, (1,))
        axis = self.constant(SHAPE_DTYPE, (), [0])
        attrs: dict[str, AttrValue] = {"N": 2, "T": DataType(shape.dtype), "Tidx": DataType(SHAPE_DTYPE)}
        whole = self.once("ConcatV2", [count, shape.tensor, axis], attrs)
        return self.emit(node.op, [whole], copied(node), node.name)

    def first(self, tensor: TensorId, dtype: str, rank: int) -> TensorId:
        """The first `time` items of `tensor`."""
        begin = self.constant(SHAPE_DTYPE, (rank,), [0] * rank)
        return self.slice(tensor, dtype, begin, self.shape((self.time, *[-1] * (rank - 1))))

    def difference(self, first: TensorId, second: int | TensorId) -> TensorId:
        """The first scalar less the second."""
        less = self.constant(SHAPE_DTYPE, (), [second]) if isinstance(second, int) else second
        return self.once("Sub", [first, less], {"T": DataType(SHAPE_DTYPE)})

    def reversed(self, tensor: TensorId, dtype: str) -> TensorId:
        """`tensor` with its first dimension from the end."""
        attrs: dict[str, AttrValue] = {"T": DataType(dtype), "Tidx": DataType(SHAPE_DTYPE)}
        return self.once("ReverseV2", [tensor, self.constant(SHAPE_DTYPE, (1,), [0])], attrs)

    def rows(self, value: Hoisted) -> int | TensorId:
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
        dims = self.shape((self.time, self.rows(value), *static(value.shape[1:], "a value")))
        attrs: dict[str, AttrValue] = {"T": DataType(value.dtype), "Tidx": DataType(SHAPE_DTYPE)}
        spread = self.once("BroadcastTo", [value.tensor, dims], attrs) if rank else value.tensor
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
        attrs = {"T": DataType(value.dtype), "transpose_a": False, "transpose_b": transposed}
        tensor = value.tensor if form is Form.FIXED else self.flat(value)
        made = self.emit("MatMul", [tensor, matrix.tensor], attrs, label)
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
            raise Unreadable(f"'{node.name}' ({node.op}) mixes tensors of different rank")
        inputs = [o.tensor if o.form is Form.FIXED else self.steps(o, rank) for o in operands]
        op = "AddV2" if node.op.startswith("BiasAdd") else node.op
        attrs.pop("data_format", None)
        return Hoisted(self.emit(op, inputs, attrs, node.name), Form.STEPS, shape, dtype)


# Random ops that draw anew in every step: all steps' numbers can be drawn at once.
DRAWS = frozenset({"RandomUniform", "RandomStandardNormal", "TruncatedNormal"})

# Stateful ops that may move in front of a loop: they only read, and nothing in the loop writes.
READS = frozenset({"ReadVariableOp", "ResourceGather", "VariableShape"})


def copied(node: Node) -> dict[str, Any]:
    """The attributes of a copy: those that only made sense where `node` was are left out."""
    return {key: value for key, value in node.attrs.items() if not key.startswith("_")}


def static(dims: Sequence[int | None], what: str) -> tuple[int, ...]:
    """`dims`, all known.

    Raises:
        Unreadable: one is not.
    """
    if any(dim is None for dim in dims):
        raise Unreadable(f"{what} of the loop has a width that is not known before it runs: {tuple(dims)}")
    return tuple(dim for dim in dims if dim is not None)
