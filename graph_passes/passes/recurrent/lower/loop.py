"""From a loop to its `Match`: the cell, what it reads, and the readers of its results."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from graph_passes.graph.dead_code import dead_code, without_dead
from graph_passes.graph.ir import AttrValue, DataType, Graph, TensorId
from graph_passes.graph.ops import ARRAYS, DRAWS, LOOPS, READS, passed
from graph_passes.graph.rewrite import Names, NewNode
from graph_passes.graph.writer import SHAPE_DTYPE
from graph_passes.passes.recurrent.find.counting import FORWARDS, Linear, StepNumber
from graph_passes.passes.recurrent.find.equal_scalars import dimension_key
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable, classify, without_sums
from graph_passes.passes.recurrent.find.plain_steps import MOST_INNER_STEPS, with_plain_steps
from graph_passes.passes.recurrent.find.step_items import is_size, is_stack
from graph_passes.passes.recurrent.lower.cell_states import CellForm, States
from graph_passes.passes.recurrent.lower.extent import Counted, count_steps, is_read_backwards
from graph_passes.passes.recurrent.lower.hoist import FIXED, STATE, Hoister
from graph_passes.passes.recurrent.lower.layouts import ColumnLayout, Cuts
from graph_passes.passes.recurrent.lower.leaves import side_by_side
from graph_passes.passes.recurrent.lower.number_convolutions import CONVOLUTIONS
from graph_passes.passes.recurrent.lower.number_moves import MOVES
from graph_passes.passes.recurrent.lower.number_sums import SUMS
from graph_passes.passes.recurrent.lower.numbers import NumberReader
from graph_passes.passes.recurrent.lower.prologue import Hoisted, HoistedForm, Prologue
from graph_passes.passes.recurrent.lower.time_reversal import fold_outputs
from graph_passes.passes.recurrent.lower.to_cell import CellReader
from graph_passes.passes.recurrent.lower.writes import (
    Items,
    Write,
    items_of,
    of_list,
    readers_of,
    require_single,
    write_of,
)
from graph_passes.passes.recurrent.match import Direction, Joinable, Match, RecurrentNode, Results
from graph_passes.refusals import Reason

RULES = MOVES | SUMS | CONVOLUTIONS  # of ops that small states alone may have


class LoopReader:
    """Reads one loop, in one form of its states (`States`)."""

    def __init__(
        self,
        graph: Graph,
        loop: Loop,
        names: Names,
        keep: Collection[str],
        form: CellForm = "columns",
        counted: Counted | None = None,
    ) -> None:
        self.form = form
        loop, self.carried = with_plain_steps(graph, loop)
        self.graph, self.loop, self.keep = graph, loop, keep
        self.variables, self.sums = without_sums(graph, loop, classify(graph, loop))
        self.states = States(graph, loop, self.variables, form)
        self.dtype = self.states.dtype()
        self.prologue = Prologue(loop, names)
        self.counted = counted
        count_steps(graph, loop, self.variables, self.prologue, counted)
        self.batch = self.states.count_rows(self.prologue)
        self.prologue.has_batch = self._has_batch
        self.numbers = self.variables.numbers(graph, loop, loop.body)
        backwards = is_read_backwards(graph, loop, self.numbers, self.prologue.time_form)
        self.reverse = backwards and not self.variables.going
        self.hoister = Hoister(graph, loop, self.variables, self.prologue, self.reverse)
        self.reader: CellReader | NumberReader
        if form != "columns":
            self.units = 1
            self.reader = NumberReader(
                loop, self.variables, self.dtype, self.hoister, self.prologue, form == "numbers", RULES
            )
        else:
            self.reader = self._column_reader()
        self.launch_name = names.fresh(f"{loop.name}/tfmem/recurrent")
        self.outputs: dict[int, dict[TensorId, int]] = {}  # for each list, the cell's outputs that make it
        self.last: dict[int, list[int]] = {}  # for each list of one item, the states that it is made of
        self.rewired: list[tuple[TensorId, TensorId]] = []

    def _column_reader(self) -> CellReader:
        cuts = Cuts(self.loop, self.variables, self.hoister, self.prologue.batch == 1)
        self.units = cuts.units()
        return CellReader(self.loop, self.variables, self.units, self.dtype, self.hoister, self.prologue, cuts)

    def _has_batch(self, tensor: TensorId) -> bool:
        return tensor.node in self.graph.nodes and dimension_key(self.graph, tensor, 0) in self.batch

    def read(self) -> Joinable:
        self._refuse_side_effects()
        nodes, launch = self._run()
        before, number = len(self.prologue.nodes), 0
        for place in self.variables.states:
            final, layout = self.loop.finals[place], self._layout(place)
            if final is not None:
                finals = [launch.final(number + column) for column in range(layout.columns)]
                state = self.states.final(self.prologue, finals, place, layout, self.dtype)
                if place in self.carried:
                    self.rewired += of_list(self.graph, self.keep, self.prologue, final, state, self.dtype)
                else:
                    self.rewired.append((final, state))
            number += layout.columns
        self._rewire_outputs(launch)
        self._rewire_rest()
        return Joinable(self._match([*nodes, *self.prologue.nodes[before:]]), self.prologue.time_key, self.batch)

    def _match(self, nodes: list[NewNode | RecurrentNode]) -> Match:
        """The match, without unneeded rewirings and new nodes, and with all old nodes that are then dead."""
        graph, loop, keep = self.graph, self.loop, self.keep
        dead = dead_code(graph, loop.nodes, nodes, dict(self.rewired), keep)
        taken = [(old, new) for old, new in self.rewired if old.node in loop.nodes and old.node in keep]
        alive = [(old, new) for old, new in self.rewired if any(use.node not in dead for use in graph.uses(old))]
        alive += [pair for pair in taken if not graph.uses(pair[0])]
        needed = {new.node for _, new in alive}
        needed |= {name for node in nodes if isinstance(node, RecurrentNode) for name in (node.name, *node.control)}
        kept = without_dead(nodes, needed)
        return Match(
            name=loop.name,
            carrier=loop.carrier,
            nodes=tuple(kept),
            rewired=tuple(alive),
            removed=tuple(sorted(dead_code(graph, loop.nodes, kept, dict(alive), keep))),
            renamed=tuple((old.node, new) for old, new in taken),
        )

    def _refuse_side_effects(self) -> None:
        summed = {name for each in self.variables.stepped for name in each.assigns}
        harmless = READS | DRAWS | ARRAYS | {"Placeholder"}
        for node in self.loop.body.graph:
            if node.op in LOOPS and (node.stateful or self.hoister.level(TensorId(node.name)) != FIXED):
                raise Unreadable(Reason.INNER_LOOP.of(node, most=MOST_INNER_STEPS))
            if node.stateful and node.op not in harmless and node.name not in summed:
                reason = Reason.STEP_ASSIGNS if node.op.startswith("Assign") else Reason.SIDE_EFFECTS
                raise Unreadable(reason.of(node))
        for node in self.loop.condition.graph:
            if node.stateful and node.op not in harmless:
                raise Unreadable(Reason.SIDE_EFFECTS.of(node))

    def _run(self) -> tuple[list[NewNode | RecurrentNode], Results]:
        """What runs the steps, and what it gives."""
        after, initial, outputs = self._results(self.prologue.time_form)
        control = tuple(self.hoister.assignments())  # what waited for the loop waits for the launch
        launch = self._launched(after, initial, outputs, control)
        return [*(self.counted.nodes if self.counted else ()), *self.prologue.nodes, launch], launch

    def _results(self, steps: Linear) -> tuple[list[int], list[TensorId], list[tuple[int, ...]]]:
        """The columns of all states after one of so many steps, the states before the loop, the columns of outputs."""
        loop, body, reader, variables = self.loop, self.loop.body, self.reader, self.variables
        results = [body.results[place] for place in variables.states]
        self.writes = {
            place: write_of(loop, self.numbers, steps, place, node) for place, node in variables.writes.items()
        }
        self.writes |= {place: Write(value, FORWARDS) for place, value in self.sums.items()}
        written = {place: write.value for place, write in self.writes.items()}
        reader.read([*results, *written.values()])
        after, initial = self._carried()
        outputs: list[tuple[int, ...]] = []
        for place, write in self.writes.items():
            if write.every_step:
                self.outputs[place] = {}
                for source in self._frontier(write.value):
                    self.outputs[place][source] = len(outputs)
                    outputs.append(self._output(source))
            else:
                require_single(self.graph, self.loop.initial[place])
                self.last[place] = [self._keep(column, after, initial) for column in self._spread(write.value)]
        return after, initial, outputs

    def _carried(self) -> tuple[list[int], list[TensorId]]:
        """The columns of all states after a step, and the states before the loop."""
        after = [column for place in self.variables.states for column in self._state(place)]
        initial: list[TensorId] = []
        for place in self.variables.states:
            initial += self.states.initial(self.prologue, place, self._layout(place), self.dtype)
        return after, initial

    def _launched(
        self,
        after: Sequence[int],
        initial: Sequence[TensorId],
        outputs: Sequence[tuple[int, ...]],
        control: tuple[str, ...],
    ) -> RecurrentNode:
        reader = self.reader
        if not reader.leaves.sequences:  # the op counts steps by its sequences
            reader.leaves.sequences.append(self.prologue.zeros(self.dtype, (self.prologue.time, self.prologue.batch)))
            reader.builder.sequence(0)
        leaves = reader.leaves
        direction = Direction(
            tuple(leaves.sequences), tuple(leaves.invariants), tuple(leaves.vectors), tuple(leaves.matrices),
            tuple(initial), self.reverse,
        )  # fmt: skip
        cell = reader.builder.build(after, outputs)
        batch = self.prologue.batch if isinstance(self.prologue.batch, int) else None
        return RecurrentNode(
            self.launch_name, cell, self.units, self.dtype, (direction,), self.loop.device, control, batch=batch
        )

    def _layout(self, place: int) -> ColumnLayout:
        return self.reader.layout(TensorId(self.loop.body.arguments[place]))

    def _state(self, place: int) -> list[int]:
        """The columns that a state becomes."""
        result, layout = self.loop.body.results[place], self._layout(place)
        columns = self.reader.columns(result, layout)
        shape = self.hoister.shape(result)
        width = shape[-1] if len(shape) == 2 and self.form == "columns" else layout.width
        if len(columns) != layout.columns or layout.width != width:
            node = self.loop.body.graph[result.node]
            raise Unreadable(Reason.STATE_COLUMNS.of(node, columns=len(columns), wanted=layout.columns))
        return list(map(self._wide, columns))

    def _wide(self, column: int) -> int:
        """`column` with a number in each lane, as a state has."""
        builder = self.reader.builder
        if not builder.scalar[column]:
            return column
        return builder.apply("select", builder.constant(0), builder.state_before(0), column)

    def _frontier(self, value: TensorId) -> list[TensorId]:
        """What the cell has to give out so that `value` can be computed from it behind the loop, of all steps at once.

        `value` itself, where a cell can say it: nothing depends on an output but other outputs.
        """
        found: dict[TensorId, None] = {}
        waiting = [value]
        while waiting:
            tensor = waiting.pop()
            if self.hoister.level(tensor) != STATE or tensor in found:
                continue
            try:
                self._output(tensor)
            except Unreadable:
                node = self.loop.body.graph[tensor.node]
                if not node.inputs:
                    raise
                waiting += node.inputs
            else:
                found[tensor] = None
        return list(found)

    def _output(self, value: TensorId) -> tuple[int, ...]:
        """The columns of an output.

        Raises:
            Unreadable: its numbers do not fill columns, and no state depends on it.
        """
        spec, node = self.loop.body.graph.specs.get(value), self.loop.body.graph[value.node]
        exact = value.node in self.loop.body.arguments or (spec is not None and spec.dtype == "bool")
        if spec is None or (spec.dtype != self.dtype and not exact):
            raise Unreadable(Reason.CELL_CAST.of(node, before=self.dtype, after=spec.dtype if spec else "another type"))
        columns, layout = self.reader.columns(value), self.reader.layout(value)
        if isinstance(self.reader, NumberReader) and len(columns) > 1:
            columns = tuple(map(self.reader.widened, columns))
        scalars = [self.reader.builder.scalar[column] for column in columns]
        if len(columns) != layout.columns or (any(scalars) and layout.width > 1):
            raise Unreadable(Reason.CELL_SHAPE.of(node, shape=self.hoister.shape(value), units=self.units))
        return columns

    def _spread(self, value: TensorId) -> tuple[int, ...]:
        """The columns of an output of which only the last step's is read."""
        columns, layout = self.reader.columns(value), self.reader.layout(value)
        return columns * layout.columns if len(columns) == 1 else columns

    def _keep(self, column: int, after: list[int], initial: list[TensorId]) -> int:
        """The state whose last value is that of `column`; a new one if there is none."""
        column = self._wide(column)
        if column not in after:
            self.reader.builder.state()
            after.append(column)
            initial.append(self.prologue.zeros(self.dtype, (self.prologue.batch, self.units), "zeros"))
        return after.index(column)

    def _rewire_outputs(self, launch: Results) -> None:
        for place, write in self.writes.items():
            if place in self.sums:
                self._rewire_sum(launch, place, write)
                continue
            handle, reserve = self.loop.finals[place], self.graph[passed(self.graph, self.loop.initial[place]).node]
            if handle is None:
                continue
            whole, ordered = self._whole(launch, place, write)
            items, dtype = Items(), self.dtype
            if write.every_step:
                items = items_of(self.graph, self.loop.initial[place], write, self.prologue.time_form)
                dtype = self.loop.body.graph.specs[write.value].dtype
            if items.before is not None:
                whole, ordered = self._with_item(whole, ordered, items.before, items.is_first), True
            length = items.length_behind(self.graph, self.prologue)
            if length is not None:
                if self.reverse and not ordered:  # what is not written lies behind the last step's item
                    whole, ordered = self.prologue.reversed(whole, dtype), True
                rank = max(len(self.hoister.shape(write.value)), 1) + 1
                whole = self.prologue.padded(whole, dtype, length, rank)
            readers = list(readers_of(self.graph, self.keep, handle))
            stacks = [name for name in readers if is_stack(self.graph, name, handle) and name not in self.keep]
            sizes = [name for name in readers if is_size(self.graph, name)]
            for name in sizes if write.every_step else []:
                count = length or self._count(self.graph.specs[TensorId(name)].dtype, items.before is not None)
                self.rewired.append((TensorId(name), count))
            for stack in stacks:
                if self.reverse and not ordered:
                    stacked = TensorId(stack)
                    self.rewired += fold_outputs(self.graph, self.prologue, stacked, whole, dtype)
                else:
                    self.rewired.append((TensorId(stack), whole))
            if len(stacks) + len(sizes) < len(readers):
                if reserve.op != "TensorListReserve":
                    other = next(name for name in readers if name not in (*stacks, *sizes))
                    raise Unreadable(Reason.SINGLE_OUTPUT.of(self.graph[other]))
                in_order = whole if ordered or not self.reverse else self.prologue.reversed(whole, dtype)
                spec = self.graph.specs.get(reserve.inputs[0])
                shape_type = DataType(spec.dtype if spec is not None else SHAPE_DTYPE)
                attrs = {"element_dtype": DataType(dtype), "shape_type": shape_type}
                made = self.prologue.emit("TensorListFromTensor", [in_order, reserve.inputs[0]], attrs, "list")
                self.rewired.append((handle, made))

    def _rewire_sum(self, launch: Results, place: int, write: Write) -> None:
        """A number that each step adds to, and that no step reads."""
        prologue, final, start = self.prologue, self.loop.finals[place], self.loop.initial[place]
        if final is None:
            return
        dtype = self.graph.specs[start].dtype
        steps, _ = self._whole(launch, place, write)
        kinds: dict[str, AttrValue] = {"T": DataType(dtype), "Tidx": DataType(SHAPE_DTYPE), "keep_dims": False}
        total = prologue.once("Sum", [steps, prologue.constant(SHAPE_DTYPE, (1,), [0])], kinds)
        self.rewired.append((final, prologue.once("AddV2", [start, total], {"T": DataType(dtype)})))

    def _count(self, dtype: str, more: bool = False) -> TensorId:
        """The number of steps, or one more."""
        count = self.prologue.reached(self.graph, StepNumber(Linear(number=int(more)), 1))
        return self.prologue.cast(count, SHAPE_DTYPE, dtype)

    def _with_item(self, whole: TensorId, ordered: bool, item: TensorId, first: bool) -> TensorId:
        """The steps' items behind one that was written before the loop, or before it."""
        dtype = self.graph.specs[item].dtype
        steps = whole if ordered or not self.reverse else self.prologue.reversed(whole, dtype)
        parts = [self.prologue.expanded(item, dtype, 0), steps]
        return self.prologue.joined(parts if first else parts[::-1], dtype, 0)

    def _whole(self, launch: Results, place: int, write: Write) -> tuple[TensorId, bool]:
        """The list's items as one tensor, and whether it is in the loop's order whatever the direction."""
        prologue = self.prologue
        if place not in self.last:
            given = {source: self._given(launch, source, index) for source, index in self.outputs[place].items()}
            behind = Hoister(self.graph, self.loop, self.variables, prologue, self.reverse, given=given)
            hoisted = behind.hoisted(write.value)
            made = prologue.steps(prologue.fixed_rows(hoisted) if hoisted.form is HoistedForm.FIXED else hoisted)
            if not write.from_end:
                return made, False
            return made if self.reverse else prologue.reversed(made, hoisted.dtype), True
        finals = [launch.final(index) for index in self.last[place]]
        whole = prologue.joined(finals, self.dtype, 1)
        shape = self.hoister.shape(write.value)
        if self.form == "columns":
            layout = self.reader.layout(write.value)
            whole = side_by_side(prologue, whole, self.dtype, 2, layout)
            whole = prologue.reshape(whole, self.dtype, (-1,)) if len(shape) == 1 else whole
        else:
            whole = prologue.reshape(whole, self.dtype, self.states.dims(prologue, shape))
        return prologue.expanded(whole, self.dtype, 0), True

    def _given(self, launch: Results, source: TensorId, index: int) -> Hoisted:
        shape, tensor, layout = self.hoister.shape(source), launch.output(index), self.reader.layout(source)
        if self.form != "columns":
            dims = (self.prologue.time, *self.states.dims(self.prologue, shape))
            return self._exact(source, self.prologue.reshape(tensor, self.dtype, dims))
        wide = launch.cell.output_columns[index] > 0
        if wide and not layout.exact:
            tensor = side_by_side(self.prologue, tensor, self.dtype, 3, layout)
        if len(shape) == 2 and shape[1] == 1 and not wide:
            tensor = self.prologue.reshape(tensor, self.dtype, (self.prologue.time, self.prologue.batch, 1))
        elif len(shape) == 1 and wide:
            tensor = self.prologue.reshape(tensor, self.dtype, (self.prologue.time, self.prologue.batch))
        elif not shape:
            tensor = self.prologue.first_number(tensor, self.dtype, 3 if wide else 2)
        return self._exact(source, tensor)

    def _exact(self, source: TensorId, tensor: TensorId) -> Hoisted:
        """What a launch gave of a value of the body, whole numbers and booleans as such."""
        dtype = self.loop.body.graph.specs[source].dtype
        return Hoisted(
            self.prologue.cast(tensor, self.dtype, dtype), HoistedForm.STEPS, self.hoister.shape(source), dtype
        )

    def _rewire_rest(self) -> None:
        """Counters and invariants behind the loop."""
        for place, final in enumerate(self.loop.finals):
            if final is None or not (self.graph.uses(final) or final.node in self.keep):
                continue
            if place in self.variables.invariants:
                self.rewired.append((final, self.loop.initial[place]))
            elif place in self.variables.counters:
                counter, dtype = self.variables.counters[place], self.graph.specs[self.loop.initial[place]].dtype
                end = self.prologue.reached(self.graph, counter)
                self.rewired.append((final, self.prologue.cast(end, SHAPE_DTYPE, dtype)))
