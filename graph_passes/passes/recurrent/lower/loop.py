"""From a loop to its `Match`: the cell, what it reads, and the readers of its results."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from graph_passes.graph.dead_code import dead_code, without_dead
from graph_passes.graph.ir import DataType, Graph, Node, TensorId
from graph_passes.graph.ops import ARRAYS, DRAWS, FLOATS, READS, checks_shape, passed, scalar_value
from graph_passes.graph.rewrite import Names, NewNode
from graph_passes.graph.writer import SHAPE_DTYPE
from graph_passes.passes.recurrent.find.equal_scalars import Key, bound_key, dimension_key, scalar_key
from graph_passes.passes.recurrent.find.lists import is_size, is_stack, list_size, list_source, read_item, written_item
from graph_passes.passes.recurrent.find.loops import Loop, Unreadable, classify
from graph_passes.passes.recurrent.lower.hoist import FIXED, STATE, Hoister
from graph_passes.passes.recurrent.lower.prologue import Form, Hoisted, Prologue
from graph_passes.passes.recurrent.lower.time_reversal import fold_outputs, is_reversed
from graph_passes.passes.recurrent.lower.to_cell import Reader
from graph_passes.passes.recurrent.match import Direction, Launch, Match
from graph_passes.refusals import Reason


@dataclass(frozen=True)
class Write:
    """What an output list is given: at the step's number in every step, or always at 0."""

    value: TensorId
    every_step: bool


@dataclass(frozen=True)
class Joinable:
    """A match, and what decides whether it may share a launch with another: how many steps, how many rows.

    `batch` has symbolic batch sizes that are equal, one for each state: two matches may be joined if theirs intersect.
    """

    match: Match
    time: Key
    batch: frozenset[Key]


def read_loop(graph: Graph, loop: Loop, names: Names, keep: Collection[str]) -> Joinable:
    """What takes the place of `loop`.

    Args:
        graph: the graph around the loop, bodies included.
        loop: one of its loops.
        names: gives names to new nodes.
        keep: names of nodes that are fetched.

    Raises:
        Unreadable: no cell can express the loop.
    """
    fetched = next((name for name in loop.nodes if name in keep and graph[name].op != "Exit"), None)
    if fetched is not None:
        raise Unreadable(Reason.LOOP_FETCHED(node=fetched))
    checking = next((node.name for node in loop.body.graph if checks_shape(loop.body.graph, node)), None)
    if checking is not None:
        raise Unreadable(Reason.SHAPE_CHECK(node=checking))
    return _LoopReader(graph, loop, names, keep).read()


class _LoopReader:
    def __init__(self, graph: Graph, loop: Loop, names: Names, keep: Collection[str]) -> None:
        self.graph, self.loop, self.keep = graph, loop, keep
        self.variables = classify(graph, loop)
        self.units, self.dtype = self._states()
        self.prologue = Prologue(loop, names)
        self._count_steps()
        self.batch = self._count_rows()
        self.prologue.has_batch = self._has_batch
        sources = self._sources()
        self.reverse = is_reversed(graph, sources)
        self.hoister = Hoister(graph, loop, self.variables, self.prologue, self.reverse)
        self.reader = Reader(loop, self.variables, self.units, self.dtype, self.hoister, self.prologue)
        self.launch_name = names.fresh(f"{loop.name}/tfmem/recurrent")
        self.outputs: dict[int, dict[TensorId, int]] = {}  # for each list, the cell's outputs that make it
        self.last: dict[int, list[int]] = {}  # for each list of one item, the states that it is made of
        self.longer: dict[int, TensorId] = {}  # lists with more items than the loop has steps
        self.rewired: list[tuple[TensorId, TensorId]] = []

    def _states(self) -> tuple[int, str]:
        """The hidden size and dtype of all states."""
        found: dict[tuple[object, str], str] = {}
        if not self.variables.states:
            raise Unreadable(Reason.NO_STATE())
        for place in self.variables.states:
            name = self.loop.body.arguments[place]
            spec = self.graph.specs.get(self.loop.initial[place])
            inside = self.loop.body.graph.specs.get(TensorId(name))
            shape = next((s.shape for s in (spec, inside) if s and s.shape and s.shape[-1] is not None), None)
            dtype = spec.dtype if spec is not None else ""
            if dtype not in FLOATS:
                raise Unreadable(Reason.STATE_DTYPE(node=name, dtype=dtype))
            if shape is None or len(shape) != 2:
                raise Unreadable(Reason.STATE_SHAPE(node=name, shape=spec and spec.shape))
            found[shape[1], dtype] = name
        if len(found) > 1:
            sizes = ", ".join(f"'{name}' {size} {dtype}" for (size, dtype), name in found.items())
            raise Unreadable(Reason.STATE_WIDTHS(sizes=sizes))
        (units, dtype), name = found.popitem()
        if not isinstance(units, int) or units == 0:
            raise Unreadable(Reason.STATE_UNITS(node=name, units=units))
        return units, dtype

    def _count_steps(self) -> None:
        """Tell the prologue how many steps there are: the least of the bounds."""
        prologue, variables = self.prologue, self.variables
        numbers: list[int] = []
        counts: dict[Key, TensorId] = {}
        outside = Hoister(self.graph, self.loop, variables, prologue, function=self.loop.condition)
        for bound in variables.bounds:
            key = bound_key(self.graph, self.loop, bound, variables.invariants)
            if isinstance(key, int):
                numbers.append(key)
                continue
            if outside.level(bound) != FIXED:
                node = self.loop.condition.graph[bound.node]
                raise Unreadable(Reason.LOOP_BOUND.of(node))
            value = outside.hoisted(bound)
            counts[value.tensor if key is None else key] = prologue.cast(value.tensor, value.dtype, SHAPE_DTYPE)
        if not counts:
            prologue.time = prologue.time_key = max(min(numbers), 0)
            return
        parts = list(counts.values())
        if numbers:
            parts.append(prologue.constant(SHAPE_DTYPE, (), [min(numbers)]))
        least = parts[0]
        for part in parts[1:]:
            least = prologue.once("Minimum", [least, part], {"T": DataType(SHAPE_DTYPE)})
        prologue.time = least
        prologue.time_key = next(iter(counts)) if len(parts) == 1 else least

    def _count_rows(self) -> frozenset[Key]:
        states = [self.loop.initial[place] for place in self.variables.states]
        keys = frozenset(dimension_key(self.graph, state, 0) for state in states)
        number = min((key for key in keys if isinstance(key, int)), default=None)
        self.prologue.batch = self.prologue.scalar_of_shape(states[0], self.dtype, 0) if number is None else number
        return keys

    def _has_batch(self, tensor: TensorId) -> bool:
        return tensor.node in self.graph.nodes and dimension_key(self.graph, tensor, 0) in self.batch

    def _sources(self) -> list[TensorId]:
        """The tensors whose items the body reads, step by step."""
        body = self.loop.body.graph
        places = {name: place for place, name in enumerate(self.loop.body.arguments)}
        found = []
        for node in body:
            read = read_item(node)
            place = None if read is None else places.get(passed(body, read.handle).node)
            source = list_source(self.graph, self.loop.initial[place]) if place is not None else None
            if source is not None and source not in found:
                found.append(source)
        return found

    def read(self) -> Joinable:
        self._refuse_side_effects()
        launch = self._launch()
        before = len(self.prologue.nodes)
        for number, place in enumerate(self.variables.states):
            final = self.loop.finals[place]
            if final is not None:
                self.rewired.append((final, launch.final(number)))
        self._rewire_outputs(launch)
        self._rewire_rest()
        nodes: list[NewNode | Launch] = [*self.prologue.nodes[:before], launch, *self.prologue.nodes[before:]]
        return Joinable(self._match(nodes), self.prologue.time_key, self.batch)

    def _match(self, nodes: list[NewNode | Launch]) -> Match:
        """The match, without unneeded rewirings and new nodes, and with all old nodes that are then dead."""
        graph, loop, keep = self.graph, self.loop, self.keep
        dead = dead_code(graph, loop.nodes, nodes, dict(self.rewired), keep)
        taken = [(old, new) for old, new in self.rewired if old.node in loop.nodes and old.node in keep]
        alive = [(old, new) for old, new in self.rewired if any(use.node not in dead for use in graph.uses(old))]
        alive += [pair for pair in taken if not graph.uses(pair[0])]
        needed = {new.node for _, new in alive} | {node.name for node in nodes if isinstance(node, Launch)}
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
        for node in self.loop.body.graph:
            if node.stateful and node.op not in READS | DRAWS | ARRAYS and node.op != "Placeholder":
                raise Unreadable(Reason.SIDE_EFFECTS.of(node))

    def _launch(self) -> Launch:
        body, reader, variables = self.loop.body, self.reader, self.variables
        results = [body.results[place] for place in variables.states]
        self.writes = {place: self._write(place, node) for place, node in variables.writes.items()}
        written = {place: write.value for place, write in self.writes.items()}
        reader.read([*results, *written.values()])
        after = [self._state(result) for result in results]
        initial = [self.loop.initial[place] for place in variables.states]
        outputs: list[tuple[int, ...]] = []
        for place, write in self.writes.items():
            if write.every_step:
                self._require_length(place, self.prologue.time_key)
                self.outputs[place] = {}
                for source in self._frontier(write.value):
                    self.outputs[place][source] = len(outputs)
                    outputs.append(self._output(source))
            else:
                self._require_length(place, 1)
                self.last[place] = [self._keep(column, after, initial) for column in self._output(write.value)]
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
        return Launch(self.launch_name, cell, self.units, self.dtype, (direction,), self.loop.device, batch=batch)

    def _write(self, place: int, node: Node) -> Write:
        argument, body = self.loop.body.arguments[place], self.loop.body.graph
        item = written_item(node)
        if item is None or item.value is None or passed(body, item.handle) != TensorId(argument):
            raise Unreadable(Reason.LIST_CHANGED.of(node, other=argument))
        index = passed(body, item.index).node
        if index in [self.loop.body.arguments[counter] for counter in self.variables.counters]:
            return Write(item.value, True)
        if scalar_value(body, item.index) == 0:
            return Write(item.value, False)
        raise Unreadable(Reason.LIST_INDEX.of(node))

    def _state(self, result: TensorId) -> int:
        columns = self.reader.columns(result)
        node = self.loop.body.graph[result.node]
        if len(columns) != 1 or self.reader.builder.scalar[columns[0]]:
            raise Unreadable(Reason.STATE_COLUMNS.of(node, columns=len(columns)))
        return columns[0]

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
        columns = self.reader.columns(value)
        shape, scalars = self.hoister.shape(value), [self.reader.builder.scalar[column] for column in columns]
        node = self.loop.body.graph[value.node]
        width = 1 if len(shape) < 2 else shape[1]
        wanted = 1 if any(scalars) else len(columns) * self.units
        if width != wanted or (any(scalars) and len(columns) > 1):
            raise Unreadable(Reason.OUTPUT_SHAPE.of(node, shape=shape, units=self.units))
        return columns

    def _keep(self, column: int, after: list[int], initial: list[TensorId]) -> int:
        """The state whose last value is that of `column`; a new one if there is none."""
        if self.reader.builder.scalar[column]:
            raise Unreadable(Reason.OUTPUT_OF_ROWS())
        if column not in after:
            self.reader.builder.state()
            after.append(column)
            initial.append(self.prologue.zeros(self.dtype, (self.prologue.batch, self.units), "zeros"))
        return after.index(column)

    def _require_length(self, place: int, wanted: Key) -> None:
        maker = self.graph[passed(self.graph, self.loop.initial[place]).node]
        size = list_size(self.graph, self.loop.initial[place])
        if size is not None and scalar_key(self.graph, size) == wanted:
            return
        if size is None or wanted != self.prologue.time_key or self.reverse:
            raise Unreadable(Reason.LIST_SIZE.of(maker))
        self.longer[place] = size  # what the loop does not reach stays zero

    def _rewire_outputs(self, launch: Launch) -> None:
        for place, write in self.writes.items():
            handle, reserve = self.loop.finals[place], self.graph[passed(self.graph, self.loop.initial[place]).node]
            if handle is None:
                continue
            whole, ordered = self._whole(launch, place, write.value)
            if place in self.longer:
                size = self.longer[place]
                length = self.prologue.cast(size, self.graph.specs[size].dtype, SHAPE_DTYPE)
                whole = self.prologue.padded(
                    whole, self.dtype, length, max(len(self.hoister.shape(write.value)), 1) + 1
                )
            readers = list(self._readers(handle))
            stacks = [name for name in readers if is_stack(self.graph, name, handle) and name not in self.keep]
            sizes = [name for name in readers if is_size(self.graph, name)]
            for name in sizes if write.every_step else []:
                count = self.longer.get(place) or self._count(self.graph.specs[TensorId(name)].dtype)
                self.rewired.append((TensorId(name), count))
            for stack in stacks:
                if self.reverse and not ordered:
                    stacked = TensorId(stack)
                    self.rewired += fold_outputs(self.graph, self.prologue, stacked, whole, self.dtype)
                else:
                    self.rewired.append((TensorId(stack), whole))
            if len(stacks) + len(sizes) < len(readers):
                if reserve.op != "TensorListReserve":
                    other = next(name for name in readers if name not in (*stacks, *sizes))
                    raise Unreadable(Reason.SINGLE_OUTPUT.of(self.graph[other]))
                in_order = whole if ordered or not self.reverse else self.prologue.reversed(whole, self.dtype)
                spec = self.graph.specs.get(reserve.inputs[0])
                shape_type = DataType(spec.dtype if spec is not None else SHAPE_DTYPE)
                attrs = {"element_dtype": DataType(self.dtype), "shape_type": shape_type}
                made = self.prologue.emit("TensorListFromTensor", [in_order, reserve.inputs[0]], attrs, "list")
                self.rewired.append((handle, made))

    def _readers(self, handle: TensorId) -> Iterator[str]:
        """The readers of a list, or of a copy of it: outside functions, TensorFlow copies a loop's results."""
        for use in self.graph.uses(handle):
            copy = TensorId(use.node)
            if self.graph[use.node].op == "Identity" and use.node not in self.keep and self.graph.uses(copy):
                yield from self._readers(copy)
            else:
                yield use.node

    def _count(self, dtype: str) -> TensorId:
        return self.prologue.cast(self.prologue.scalar(self.prologue.time), SHAPE_DTYPE, dtype)

    def _whole(self, launch: Launch, place: int, value: TensorId) -> tuple[TensorId, bool]:
        """The list's items as one tensor, and whether it is in the loop's order whatever the direction."""
        prologue = self.prologue
        if place not in self.last:
            given = {source: self._given(launch, source, index) for source, index in self.outputs[place].items()}
            behind = Hoister(self.graph, self.loop, self.variables, prologue, self.reverse, given=given)
            hoisted = behind.hoisted(value)
            return prologue.steps(prologue.fixed_rows(hoisted) if hoisted.form is Form.FIXED else hoisted), False
        finals = [launch.final(index) for index in self.last[place]]
        return prologue.expanded(prologue.joined(finals, self.dtype, 1), self.dtype, 0), True

    def _given(self, launch: Launch, source: TensorId, index: int) -> Hoisted:
        shape, tensor = self.hoister.shape(source), launch.output(index)
        if len(shape) == 2 and shape[1] == 1 and self.units != 1:
            tensor = self.prologue.reshape(tensor, self.dtype, (self.prologue.time, self.prologue.batch, 1))
        return Hoisted(tensor, Form.STEPS, shape, self.dtype)

    def _rewire_rest(self) -> None:
        """Counters and invariants behind the loop."""
        for place, final in enumerate(self.loop.finals):
            if final is None or not (self.graph.uses(final) or final.node in self.keep):
                continue
            if place in self.variables.invariants:
                self.rewired.append((final, self.loop.initial[place]))
            elif place in self.variables.counters:
                self.rewired.append((final, self._count(self.graph.specs[self.loop.initial[place]].dtype)))
