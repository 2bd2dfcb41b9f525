"""What of a loop's body depends on no state: which values, and how they come about outside.

What treats the rows of a batch alike may run on all steps' rows at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from graph_passes.graph.ir import DataType, Function, Graph, Node, TensorId
from graph_passes.graph.ops import COPIES, DRAWS, READS, copied, passed
from graph_passes.graph.order import topological
from graph_passes.graph.writer import SHAPE_DTYPE, Dim
from graph_passes.passes.recurrent.find.counting import FORWARDS, Linear, StepNumber, of_key
from graph_passes.passes.recurrent.find.equal_scalars import Key, dimension_key
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable, Variables
from graph_passes.passes.recurrent.find.step_items import ListItem, item_of, list_source, read_item
from graph_passes.passes.recurrent.find.stepped_variables import Stepped
from graph_passes.passes.recurrent.lower.layer_norm import normalised_operand
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm, Prologue, static
from graph_passes.passes.recurrent.lower.rowwise import column_range, is_elementwise, keeps_rows
from graph_passes.passes.recurrent.lower.step_axes import of_all_steps
from graph_passes.passes.recurrent.lower.step_draws import SEEDED, drawn_by_steps
from graph_passes.passes.recurrent.lower.stepped_values import assigned, in_steps
from graph_passes.passes.recurrent.lower.time_reversal import is_reversed, unreversed
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
        self._numbers = variables.numbers(graph, loop, self._function)
        self._levels: dict[str, int] = {}
        self._fixed: dict[str, str] = {}  # body node -> its copy outside
        self._done: dict[TensorId, Hoisted] = dict(given or {})
        in_body = self._function is loop.body
        self._stepped = {name: each for each in variables.stepped if in_body for name in each.reads}
        known = {tensor.node for tensor in self._done}
        for name in topological(self._body):
            self._levels[name] = STEP if name in known else self._level(self._body[name])

    def level(self, tensor: TensorId) -> int:
        """FIXED, STEP or STATE: what the value depends on."""
        return self._levels[tensor.node]

    def is_item(self, tensor: TensorId) -> bool:
        """Whether `tensor` is the item of a sequence that the step reads."""
        node = self._body[tensor.node]
        if read_item(node) is not None:
            return True
        item = item_of(self._body, node, self._numbers.place)
        return item is not None and self.level(item[0]) == FIXED

    def _level(self, node: Node) -> int:
        place = self._places.get(node.name)
        if place is not None:
            if place in self._variables.invariants:
                return FIXED
            return STEP if place in self._variables.counters else STATE
        if node.op in _SHAPES:
            return FIXED
        if node.op in DRAWS or node.name in self._stepped:
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

    def _value(self, tensor: TensorId, outside: TensorId, form: HoistedForm) -> Hoisted:
        spec = self._body.specs.get(tensor)
        shape = spec.shape if spec is not None and spec.shape is not None else ()
        return Hoisted(outside, form, shape, spec.dtype if spec is not None else "")

    def _fixed_value(self, tensor: TensorId) -> Hoisted:
        place = self._places.get(tensor.node)
        if place is not None:
            return self._value(tensor, self._loop.initial[place], HoistedForm.FIXED)
        node = self._body[tensor.node]
        if node.op in COPIES:
            return self.hoisted(node.inputs[tensor.index])
        if node.op in _SHAPES and self.level(node.inputs[0]) != FIXED:
            return self._value(tensor, self._shape_value(node), HoistedForm.FIXED)
        if node.name not in self._fixed:
            _refuse_effects(node)
            inputs = [self.hoisted(source).tensor for source in node.inputs]
            made = self._prologue.emit(node.op, inputs, copied(node), node.name, node.outputs)
            self._fixed[node.name] = made.node
        return self._value(tensor, TensorId(self._fixed[node.name], tensor.index), HoistedForm.FIXED)

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
            counter = self._variables.counters[self._places[tensor.node]]
            made = self._prologue.counter(self._graph, counter, spec.dtype, self._reverse)
            return self._value(tensor, made, HoistedForm.STEPS)
        node = self._body[tensor.node]
        if node.op in COPIES:
            return self.hoisted(node.inputs[tensor.index])
        read = read_item(node)
        if read is not None:
            spec = self._body.specs[tensor]
            return Hoisted(self._sequence(node, read), HoistedForm.STEPS, self.shape(tensor), spec.dtype)
        if node.op in DRAWS and self.level(node.inputs[0]) == FIXED:
            return self._drawn(tensor, node)
        if node.name in self._stepped:
            stepped = self._stepped[node.name]
            resource, added = self._loop.initial[stepped.place], self._added(stepped)
            count = stepped.reads[node.name]
            made = in_steps(self._prologue, stepped, resource, added, count, self._reverse)
            return self._value(tensor, made, HoistedForm.STEPS)
        _refuse_effects(node)
        item = item_of(self._body, node, self._numbers.place)
        if item is not None and self.level(item[0]) == FIXED:
            return self._value(tensor, self._items(node, *item), HoistedForm.STEPS)
        self._refuse_other_items(node)
        if is_elementwise(node):
            operands = [self.hoisted(source) for source in node.inputs]
            spec = self._body.specs[tensor]
            return self._prologue.elementwise(node, operands, self.shape(tensor), spec.dtype)
        normalised = normalised_operand(self._body, node) if node.op == "Reshape" else None
        if normalised is not None:
            made = self._prologue.normalised(self.hoisted(normalised.tensor), normalised.epsilon)
            return self._value(tensor, made, HoistedForm.FLAT)
        return self._rowwise(node, tensor)

    def _drawn(self, tensor: TensorId, node: Node) -> Hoisted:
        """What a random op of the body draws: once, also where states and outputs read it."""
        drawn = self._prologue.drawn if self._function is self._loop.body else {}
        if tensor not in drawn:
            made = self._prologue.draws(node, self.hoisted(node.inputs[0]))
            drawn[tensor] = Hoisted(made, HoistedForm.STEPS, self.shape(tensor), self._body.specs[tensor].dtype)
        return drawn[tensor]

    def assignments(self) -> list[str]:
        """Nodes that give stepped variables their values behind the last step."""
        return [
            assigned(self._prologue, each, self._loop.initial[each.place], self._added(each))
            for each in self._variables.stepped
        ]

    def _added(self, stepped: Stepped) -> list[TensorId]:
        """What a step adds to a stepped variable.

        Raises:
            Unreadable: each step adds something else.
        """
        for assign, tensor in zip(stepped.assigns, stepped.added, strict=True):
            if self.level(tensor) != FIXED:
                raise Unreadable(Reason.STEP_ASSIGNS.of(self._body[assign]))
        return [self.hoisted(tensor).tensor for tensor in stepped.added]

    def _refuse_other_items(self, node: Node) -> None:
        """Raises Unreadable if a step takes a part of a fixed tensor that another step's number says."""
        if node.op not in ("StridedSlice", "Slice") or self.level(node.inputs[0]) != FIXED:
            return
        if any(self.level(source) != FIXED for source in node.inputs[1:]):
            raise Unreadable(Reason.OTHER_ITEMS.of(node, tensor=node.inputs[0]))

    def _items(self, node: Node, source: TensorId, axis: int, place: StepNumber) -> TensorId:
        """Every step's item of a fixed tensor, taken along `axis`."""
        value, prologue = self.hoisted(source), self._prologue
        rank = len(value.shape)
        tensor, length = value.tensor, value.shape[axis]
        known = tensor in self._graph.specs
        if axis:
            order = [axis, *(other for other in range(rank) if other != axis)]
            tensor = prologue.transposed(tensor, value.dtype, order)
        elif known and place == FORWARDS and not self._reverse:
            return self.whole(tensor)
        key: Key = length if length is not None else (value.tensor, axis)
        if length is None and known:
            key = dimension_key(self._graph, value.tensor, axis)
        return self._taken(node, tensor, value.dtype, rank, of_key(key), place)

    def _taken(
        self, node: Node, tensor: TensorId, dtype: str, rank: int, length: Linear, place: StepNumber
    ) -> TensorId:
        """The items of `tensor`, `length` many, at `place`, in the order in which the launch numbers steps.

        Raises:
            Unreadable: they are not known to be there.
        """
        prologue, last = self._prologue, self._prologue.time_form.plus(-1)
        start, step = place.start, place.step
        if self._reverse:
            start, step = start.plus(last, step), -step
        low = start if step > 0 else start.plus(last, step)
        after = length.plus(low.plus(last, abs(step)), -1).plus(-1).key  # so many items are left behind the last one
        inside = low.key == 0 or (isinstance(low.key, int) and low.key > 0) or low == length.plus(last, -1).plus(-1)
        if not inside or (isinstance(after, int) and after < 0) or (after is None and (low.key != 0 or abs(step) > 1)):
            raise Unreadable(Reason.OTHER_ITEMS.of(node, tensor=tensor))
        if abs(step) > 1:
            count = self._prologue.time_form.key
            if not isinstance(low.key, int) or not isinstance(count, int) or count == 0:
                raise Unreadable(Reason.OTHER_ITEMS.of(node, tensor=tensor))
            made = prologue.every(tensor, dtype, low.key, abs(step), count)
        elif low.key == 0 and after == 0:
            made = tensor
        else:
            first = prologue.sum_of(self._graph, low)
            if not (isinstance(low.key, int) and isinstance(length.key, int)):  # without a step it may lie outside
                sides = [prologue.scalar(first), prologue.scalar_of_shape(tensor, dtype, 0)]
                first = prologue.once("Minimum", sides, {"T": DataType(SHAPE_DTYPE)})
            made = prologue.slice(tensor, dtype, (first, *[0] * (rank - 1)), (prologue.time, *[-1] * (rank - 1)))
        return prologue.reversed(made, dtype) if step < 0 else made

    def _sequence(self, node: Node, read: ListItem) -> TensorId:
        """The tensor `[time, ...]` whose item a step reads."""
        variable = self._places.get(passed(self._body, read.handle).node)
        place = self._numbers.place(read.index)
        if variable not in self._variables.invariants or place is None or not place.step:
            raise Unreadable(Reason.LIST_READ_INDEX.of(node))
        source = list_source(self._graph, self._loop.initial[variable])
        if source is None:
            raise Unreadable(Reason.LIST_SOURCE.of(node))
        if place == FORWARDS and not self._reverse:
            return self.whole(source)
        if place == FORWARDS and is_reversed(self._graph, source):
            return self.whole(unreversed(self._graph, self._prologue, source), source)
        spec = self._graph.specs[source]
        length = of_key(dimension_key(self._graph, source, 0))
        return self._taken(node, source, spec.dtype, len(spec.shape or ()), length, place)

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
        if node.op in ("ExpandDims", "StridedSlice") and shape == (1, *operands[0].shape):  # one row for all
            dims = (self._prologue.time, *static(shape, f"'{node.name}' ({node.op})"))
            whole = self._prologue.steps(operands[0])
            return self._value(tensor, self._prologue.reshape(whole, operands[0].dtype, dims), HoistedForm.STEPS)
        if node.op == "Squeeze" and operands[0].shape[:1] == (1,) and shape == operands[0].shape[1:]:
            steps = Hoisted(self._prologue.steps(operands[0]), HoistedForm.STEPS, operands[0].shape, operands[0].dtype)
            dims = (self._prologue.time, *static(shape, f"'{node.name}' ({node.op})"))
            return self._value(tensor, self._prologue.reshape(steps.tensor, steps.dtype, dims), HoistedForm.STEPS)
        if node.op == "GatherV2" and operands[1].form is HoistedForm.STEPS and operands[0].form is HoistedForm.FIXED:
            made = self._prologue.emit(node.op, [operand.tensor for operand in operands], copied(node), node.name)
            return self._value(tensor, made, HoistedForm.STEPS)
        ranks = [len(operand.shape) for operand in operands if operand.form is not HoistedForm.FIXED]
        if 0 in ranks or not keeps_rows(self._body, node, operands):
            return self._by_steps(node, tensor, operands)
        if node.op == "ConcatV2":
            operands = [
                self._prologue.fixed_rows(operand) if operand.form is HoistedForm.FIXED and operand.shape else operand
                for operand in operands
            ]
        inputs = [o.tensor if o.form is HoistedForm.FIXED else self._prologue.flat(o) for o in operands]
        made = self._prologue.emit(node.op, inputs, copied(node), node.name, node.outputs)
        for index in range(node.outputs):
            output = TensorId(node.name, index)
            self._done[output] = self._value(output, TensorId(made.node, index), HoistedForm.FLAT)
        if node.op == "Split":
            self._say_whose_parts(node, operands[1])
        return self._done[tensor]

    def _by_steps(self, node: Node, tensor: TensorId, operands: Sequence[Hoisted]) -> Hoisted:
        """What `node`, which does not treat rows alike, makes in every step: of each step by itself.

        Raises:
            Unreadable: it cannot be computed of all steps at once.
        """
        outputs = [TensorId(node.name, index) for index in range(node.outputs)]
        if node.op in SEEDED:
            specs = [replace(self._body.specs[output], shape=self.shape(output)) for output in outputs]
            made = drawn_by_steps(self._prologue, node, operands, specs)
        else:
            made = of_all_steps(self._body, self._prologue, node, operands)
        for output in outputs:
            self._done[output] = self._value(output, TensorId(made.node, output.index), HoistedForm.STEPS)
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
        return self._value(tensor, self._prologue.reshape(flat, operand.dtype, (-1, *after)), HoistedForm.FLAT)


def _refuse_effects(node: Node) -> None:
    if node.stateful and node.op not in READS:
        raise Unreadable(Reason.SIDE_EFFECTS.of(node))
