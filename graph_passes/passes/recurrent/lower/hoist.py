"""What of a loop's body depends on no state: which values, and how they come about outside.

What treats the rows of a batch alike may run on all steps' rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from graph_passes.graph import slices
from graph_passes.graph.ir import Function, Graph, Node, TensorId, boolean, integer
from graph_passes.graph.ops import DRAWS, IDENTITIES, READS, copied, passed
from graph_passes.graph.order import topological
from graph_passes.graph.writer import SHAPE_DTYPE, Dim
from graph_passes.passes.recurrent.find.equal_scalars import dimension_key
from graph_passes.passes.recurrent.find.lists import Item, item_of, list_source, read_item
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable, Variables
from graph_passes.passes.recurrent.lower.elementwise_ops import ELEMENTWISE_OPS
from graph_passes.passes.recurrent.lower.layer_norm import normalised_operand
from graph_passes.passes.recurrent.lower.prologue import Form, Hoisted, Prologue, static
from graph_passes.passes.recurrent.lower.time_reversal import unreversed
from graph_passes.refusals import Reason

_SHAPES = frozenset({"Shape", "Size", "Rank"})
FIXED, STEP, STATE = 0, 1, 2


class Hoister:
    """Emits the stateless part of one loop's body into a `Prologue`, on demand."""

    def __init__(
        self,
        graph: Graph,
        loop: Loop,
        variables: Variables,
        prologue: Prologue,
        reverse: bool = False,
        function: Function | None = None,
        given: Mapping[TensorId, Hoisted] | None = None,
    ) -> None:
        """Say what depends on what.

        Args:
            graph: the graph around the loop.
            loop: the loop.
            variables: what its variables are.
            prologue: takes the new nodes.
            reverse: every sequence is a tensor that was reversed in time; read the tensor itself.
            function: the loop's body, or its condition.
            given: values that are known outside already, of every step, whatever they depend on.
        """
        self._graph, self._loop, self._variables, self._prologue = graph, loop, variables, prologue
        self._reverse = reverse
        self._function = loop.body if function is None else function
        self._body = self._function.graph
        self._places = {name: place for place, name in enumerate(self._function.arguments)}
        self._levels: dict[str, int] = {}
        self._fixed: dict[str, str] = {}  # body node -> its copy outside
        self._done: dict[TensorId, Hoisted] = dict(given or {})
        known = {tensor.node for tensor in self._done}
        for name in topological(self._body):
            self._levels[name] = STEP if name in known else self._level(self._body[name])

    def level(self, tensor: TensorId) -> int:
        """FIXED, STEP or STATE: what the value depends on."""
        return self._levels[tensor.node]

    def _level(self, node: Node) -> int:
        place = self._places.get(node.name)
        if place is not None:
            if place in self._variables.invariants:
                return FIXED
            return STEP if place in self._variables.counters else STATE
        if node.op in _SHAPES:
            return FIXED
        if node.op in DRAWS:
            return STEP
        return max((self._levels[tensor.node] for tensor in node.inputs), default=FIXED)

    def shape(self, tensor: TensorId) -> tuple[int | None, ...]:
        """The static shape of a body's tensor in one step.

        Raises:
            Unreadable: its rank is unknown.
        """
        spec, node = self._body.specs.get(tensor), self._body[tensor.node]
        if spec is None or spec.shape is None:
            read = read_item(node)
            place = None if read is None else self._places.get(passed(self._body, read.handle).node)
            source = None if place is None else list_source(self._graph, self._loop.initial[place])
            known = None if source is None else self._graph.specs.get(source)
            if known is not None and known.shape:
                return known.shape[1:]
            raise Unreadable(Reason.RANK_UNKNOWN.of(node))
        return spec.shape

    def hoisted(self, tensor: TensorId) -> Hoisted:
        """`tensor`, which depends on no state, outside.

        Raises:
            Unreadable: it comes from an op that does not treat rows alike, or that has side effects.
        """
        if tensor not in self._done:
            self._done[tensor] = self._fixed_value(tensor) if self.level(tensor) == FIXED else self._step_value(tensor)
        return self._done[tensor]

    def _value(self, tensor: TensorId, outside: TensorId, form: Form) -> Hoisted:
        spec = self._body.specs.get(tensor)
        shape = spec.shape if spec is not None and spec.shape is not None else ()
        return Hoisted(outside, form, shape, spec.dtype if spec is not None else "")

    def _fixed_value(self, tensor: TensorId) -> Hoisted:
        place = self._places.get(tensor.node)
        if place is not None:
            return self._value(tensor, self._loop.initial[place], Form.FIXED)
        node = self._body[tensor.node]
        if node.op in IDENTITIES:
            return self.hoisted(node.inputs[tensor.index])
        if node.op in _SHAPES and self.level(node.inputs[0]) != FIXED:
            return self._value(tensor, self._shape_value(node), Form.FIXED)
        if node.name not in self._fixed:
            _refuse_effects(node)
            inputs = [self.hoisted(source).tensor for source in node.inputs]
            made = self._prologue.emit(node.op, inputs, copied(node), node.name, node.outputs)
            self._fixed[node.name] = made.node
        return self._value(tensor, TensorId(self._fixed[node.name], tensor.index), Form.FIXED)

    def _shape_value(self, node: Node) -> TensorId:
        dims = self.shape(node.inputs[0])
        rest = static(dims[1:], f"'{node.name}' ({node.op})") if dims else ()
        if node.op != "Shape" or not dims:
            raise Unreadable(Reason.SHAPE_OF_CHANGING.of(node))
        made = self._prologue.shape((self._prologue.batch if dims[0] is None else dims[0], *rest))
        spec = self._body.specs[TensorId(node.name)]
        return self._prologue.cast(made, SHAPE_DTYPE, spec.dtype)

    def _step_value(self, tensor: TensorId) -> Hoisted:
        if tensor.node in self._places:
            spec = self._body.specs[tensor]
            steps = self._prologue.counted(self._prologue.time, "steps")
            if self._reverse:
                steps = self._prologue.reversed(steps, SHAPE_DTYPE)
            return self._value(tensor, self._prologue.cast(steps, SHAPE_DTYPE, spec.dtype), Form.STEPS)
        node = self._body[tensor.node]
        if node.op in IDENTITIES:
            return self.hoisted(node.inputs[tensor.index])
        read = read_item(node)
        if read is not None:
            spec = self._body.specs[tensor]
            return Hoisted(self._sequence(node, read), Form.STEPS, self.shape(tensor), spec.dtype)
        if node.op in DRAWS and self.level(node.inputs[0]) == FIXED:
            return self._value(tensor, self._prologue.draws(node, self.hoisted(node.inputs[0])), Form.STEPS)
        _refuse_effects(node)
        item = item_of(self._body, node, self._is_counter)
        if item is not None and self.level(item[0]) == FIXED and not self._reverse:
            return self._value(tensor, self._items(*item), Form.STEPS)
        self._refuse_other_items(node, item is not None)
        if is_elementwise(node):
            operands = [self.hoisted(source) for source in node.inputs]
            spec = self._body.specs[tensor]
            return self._prologue.elementwise(node, operands, self.shape(tensor), spec.dtype)
        normalised = normalised_operand(self._body, node) if node.op == "Reshape" else None
        if normalised is not None:
            made = self._prologue.normalised(self.hoisted(normalised.tensor), normalised.epsilon)
            return self._value(tensor, made, Form.FLAT)
        return self._rowwise(node, tensor)

    def _refuse_other_items(self, node: Node, own: bool) -> None:
        """Raises Unreadable if a step takes a part of a fixed tensor that another step's number says."""
        if node.op not in ("StridedSlice", "Slice") or self.level(node.inputs[0]) != FIXED:
            return
        if all(self.level(source) == FIXED for source in node.inputs[1:]):
            return
        reason = Reason.ITEMS_BOTH_WAYS if own else Reason.OTHER_ITEMS
        raise Unreadable(reason.of(node, tensor=node.inputs[0]))

    def _is_counter(self, tensor: TensorId) -> bool:
        return self._places.get(passed(self._body, tensor).node) in self._variables.counters

    def _items(self, source: TensorId, axis: int) -> TensorId:
        """Every step's item of a fixed tensor, taken along `axis`."""
        value, prologue = self.hoisted(source), self._prologue
        if axis:
            rank = len(value.shape)
            order = [axis, *(other for other in range(rank) if other != axis)]
            return prologue.first(prologue.transposed(value.tensor, value.dtype, order), value.dtype, rank)
        if value.tensor in self._graph.specs:
            return self.whole(value.tensor)
        return prologue.first(value.tensor, value.dtype, len(value.shape))

    def _sequence(self, node: Node, read: Item) -> TensorId:
        """The tensor `[time, ...]` whose item a step reads."""
        place = self._places.get(passed(self._body, read.handle).node)
        index = self._places.get(passed(self._body, read.index).node)
        if place not in self._variables.invariants or index not in self._variables.counters:
            raise Unreadable(Reason.LIST_READ_INDEX.of(node))
        source = list_source(self._graph, self._loop.initial[place])
        if source is None:
            raise Unreadable(Reason.LIST_SOURCE.of(node))
        if self._reverse:
            return self.whole(unreversed(self._graph, self._prologue, source), source)
        return self.whole(source)

    def whole(self, sequence: TensorId, source: TensorId | None = None) -> TensorId:
        """`sequence`, cut to as many steps as the loop runs: the first ones.

        If it is what was reversed to make `source`, the last ones: the loop read them first.
        """
        spec, prologue = self._graph.specs[source or sequence], self._prologue
        time = prologue.time
        if dimension_key(self._graph, source or sequence, 0) == prologue.time_key or spec.shape is None:
            return sequence
        rest = len(spec.shape) - 1
        first: Dim = 0
        if source is not None:
            length = prologue.scalar_of_shape(sequence, spec.dtype, 0)
            first = prologue.difference(length, time)
        return prologue.slice(sequence, spec.dtype, (first, *[0] * rest), (time, *[-1] * rest))

    def _rowwise(self, node: Node, tensor: TensorId) -> Hoisted:
        operands = [self.hoisted(source) for source in node.inputs]
        shape = self.shape(tensor)
        if node.op == "Reshape":
            return self._reshaped(node, operands[0], tensor, shape)
        if node.op == "Squeeze" and operands[0].shape[:1] == (1,) and shape == operands[0].shape[1:]:
            steps = Hoisted(self._prologue.steps(operands[0]), Form.STEPS, operands[0].shape, operands[0].dtype)
            dims = (self._prologue.time, *static(shape, f"'{node.name}' ({node.op})"))
            return self._value(tensor, self._prologue.reshape(steps.tensor, steps.dtype, dims), Form.STEPS)
        if node.op == "GatherV2" and operands[1].form is Form.STEPS and operands[0].form is Form.FIXED:
            made = self._prologue.emit(node.op, [operand.tensor for operand in operands], copied(node), node.name)
            return self._value(tensor, made, Form.STEPS)
        ranks = [len(operand.shape) for operand in operands if operand.form is not Form.FIXED]
        if 0 in ranks or not keeps_rows(self._body, node, operands):
            raise Unreadable(Reason.ROWS_UNALIKE.of(node))
        if node.op == "ConcatV2":
            operands = [
                self._prologue.fixed_rows(operand) if operand.form is Form.FIXED and operand.shape else operand
                for operand in operands
            ]
        inputs = [o.tensor if o.form is Form.FIXED else self._prologue.flat(o) for o in operands]
        made = self._prologue.emit(node.op, inputs, copied(node), node.name, node.outputs)
        for index in range(node.outputs):
            output = TensorId(node.name, index)
            self._done[output] = self._value(output, TensorId(made.node, index), Form.FLAT)
        if node.op == "Split":
            self._say_whose_parts(node, operands[1])
        return self._done[tensor]

    def _say_whose_parts(self, node: Node, whole: Hoisted) -> None:
        """Record which matrix the parts are columns of: where all are read, no op has to copy them."""
        parts = [TensorId(node.name, index) for index in range(node.outputs)]
        if all(self._body.uses(part) for part in parts) and len(whole.shape) == 2:
            for part in parts:
                start, _ = column_range(self._body, node, part.index, whole.shape)
                self._done[part] = replace(self._done[part], whole=whole, start=start)

    def _reshaped(self, node: Node, operand: Hoisted, tensor: TensorId, shape: tuple[int | None, ...]) -> Hoisted:
        what = f"'{node.name}' ({node.op})"
        before, after = static(operand.shape[1:], what), static(shape[1:], what)
        if not operand.shape or not shape or prod(before) != prod(after):
            raise Unreadable(Reason.ROWS_LOST.of(node))
        flat = self._prologue.flat(operand)
        return self._value(tensor, self._prologue.reshape(flat, operand.dtype, (-1, *after)), Form.FLAT)


def _refuse_effects(node: Node) -> None:
    if node.stateful and node.op not in READS:
        raise Unreadable(Reason.SIDE_EFFECTS.of(node))


def is_elementwise(node: Node) -> bool:
    """Whether `node` works on each number by itself, under broadcasting."""
    return node.op in ELEMENTWISE_OPS or node.op in IDENTITIES


def keeps_rows(body: Graph, node: Node, operands: Sequence[Hoisted | None]) -> bool:
    """Whether `node`, of which at least one operand holds rows, treats every row alike and keeps their order.

    `operands` has None for what says how, not what (axes, shapes).
    """
    first = operands[0] if operands else None

    def constant(index: int) -> Any:
        return body.constants.get(node.inputs[index].node)

    def axes(index: int, rank: int) -> list[int]:
        found = constant(index)
        return [0] if found is None else [int(axis) % rank for axis in found.reshape(-1)]

    def varies(index: int) -> bool:
        operand = operands[index]
        return operand is not None and operand.form is not Form.FIXED

    match node.op:
        case "Split":
            value = operands[1]
            return value is not None and 0 not in axes(0, len(value.shape))
        case "SplitV":
            return first is not None and 0 not in axes(2, len(first.shape))
        case "ConcatV2":
            known = [operand for operand in operands[:-1] if operand is not None]
            return bool(known) and 0 not in axes(len(node.inputs) - 1, len(known[0].shape))
        case "Mean" | "Sum" | "Max" | "Min" | "Prod" | "Any" | "All":
            return first is not None and 0 not in axes(1, len(first.shape))
        case "ExpandDims":
            return first is not None and 0 not in axes(1, len(first.shape) + 1)
        case "Tile":
            multiples = constant(1)
            return multiples is not None and multiples.size > 0 and int(multiples[0]) == 1
        case "Softmax" | "LogSoftmax":
            return first is not None and len(first.shape) > 1
        case "MatMul" | "_FusedMatMul" | "BatchMatMulV2":
            plain = not boolean(node.attrs.get("transpose_a")) and not boolean(node.attrs.get("adj_x"))
            ranks = [operand is not None and len(operand.shape) == 2 for operand in operands[:2]]
            return plain and all(ranks) and not varies(1)
        case "GatherV2":
            return not varies(0) and axes(2, 8) == [0]
        case "ResourceGather":
            return not varies(0)
        case "Slice":
            begin, size = constant(1), constant(2)
            return begin is not None and size is not None and int(begin[0]) == 0 and int(size[0]) == -1
        case "StridedSlice":
            return _slices_columns_only(body, node)
        case _:
            return False


def _slices_columns_only(body: Graph, node: Node) -> bool:
    taken = slices.axes(body, node)
    if not taken or any(isinstance(end, TensorId) for axis in taken for end in (axis.begin, axis.end)):
        return False
    first = taken[0]
    return first.begin in (None, 0) and first.end is None and first.step == 1 and not (first.single or first.new)


def column_range(body: Graph, node: Node, output: int, shape: tuple[int | None, ...]) -> tuple[int, int]:
    """Which columns of an operand of `shape` output `output` of a Split, SplitV, Slice or StridedSlice is.

    Raises:
        Unreadable: not a fixed range of columns, in order and without gaps.
    """
    width = shape[-1]
    constants = [body.constants.get(source.node) for source in node.inputs]
    if len(shape) != 2 or width is None:
        raise Unreadable(Reason.PART_OF.of(node, shape=shape))
    if node.op == "Split":
        count = integer(node.attrs["num_split"])
        if constants[0] is not None and int(constants[0].reshape(())) % 2 == 1 and width % count == 0:
            return output * width // count, (output + 1) * width // count
    elif node.op == "SplitV":
        axis, sizes = constants[2], constants[1]
        if axis is not None and sizes is not None and int(axis.reshape(())) % 2 == 1:
            left = width - int(sizes[sizes >= 0].sum())  # for the one size that may be -1
            ends = [0, *np.cumsum(np.where(sizes < 0, left, sizes))]
            return int(ends[output]), int(ends[output + 1])
    elif node.op == "Slice":
        begin, size = constants[1:3]
        if begin is not None and size is not None and int(begin[0]) == 0 and int(size[0]) == -1:
            start = int(begin[1])
            return start, width if int(size[1]) == -1 else start + int(size[1])
    elif (taken := slices.axes(body, node)) and _slices_columns_only(body, node):
        return _strided_columns(node, taken, width)
    raise Unreadable(Reason.PART_RANGE.of(node))


def _strided_columns(node: Node, taken: Sequence[slices.Axis], width: int) -> tuple[int, int]:
    if len(taken) == 1:
        return 0, width
    columns = taken[1]
    if columns.single or columns.new or columns.step != 1:
        raise Unreadable(Reason.PART_SINGLE.of(node))
    first, last, _ = slice(columns.begin, columns.end).indices(width)
    return first, max(first, last)
