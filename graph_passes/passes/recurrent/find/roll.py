"""Writes the loop that an unrolled recurrence was: a StatelessWhile over lists, as TensorFlow would have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from graph_passes.graph.ir import DataType, Function, Graph, Literal, Node, TensorId, TensorSpec, WorkingCopy, integer
from graph_passes.graph.ops import copied
from graph_passes.graph.order import is_acyclic
from graph_passes.passes.recurrent.faults import attempt
from graph_passes.passes.recurrent.find.loops import Unreadable
from graph_passes.passes.recurrent.find.repeated import Refused, needed
from graph_passes.passes.recurrent.find.sliced import unpacked
from graph_passes.passes.recurrent.find.step_gradients import (
    STEP_GRADIENT,
    Exits,
    RolledGradient,
    StepGradient,
    ends,
    entries_of,
    step_gradient,
)
from graph_passes.passes.recurrent.find.unrolled import RecurrenceSearch, Unrolled
from graph_passes.passes.recurrent.match import Unmatched
from graph_passes.refusals import Reason

_INT, _LIST, _BOOL = TensorSpec("int32", 4, ()), TensorSpec("variant", 0, ()), TensorSpec("bool", 1, ())


@dataclass(frozen=True)
class Rolled:
    """What `roll_up` made.

    Attributes:
        graph: the plan's own copy, with loops in place of what was unrolled; None where there is nothing.
        loops: for each loop, by its name, the nodes that it stands for.
        refused: steps that were recognised, and stay.
        unmatched: steps that stay because of a fault.
        gradients: of loops that stand for steps with their gradient.
    """

    graph: WorkingCopy | None
    loops: Mapping[str, frozenset[str]]
    refused: tuple[Refused, ...]
    unmatched: tuple[Unmatched, ...]
    gradients: tuple[RolledGradient, ...] = ()


def roll_up(graph: Graph, keep: Collection[str] = (), skip: Collection[str] = (), exits: Exits | None = None) -> Rolled:
    """Make loops of what was unrolled.

    Args:
        graph: the graph; not changed.
        keep: names of nodes that are fetched.
        skip: loops, named in an earlier result, that are to stay unrolled.
        exits: see `Exits`; None: steps with their gradient stay.
    """
    rolled: WorkingCopy | None = None
    loops: dict[str, frozenset[str]] = {}
    refused: list[Refused] = []
    unmatched: list[Unmatched] = []
    gradients: list[RolledGradient] = []
    graph = unpacked(graph, keep)
    for node, backwards in product(list(graph), (False, True)):
        name = f"{node.name}/rolled"
        if node.op != "Unpack" or node.outputs < 2 or {name} & {*skip, *loops} or node.name not in graph.nodes:
            continue
        with attempt(unmatched, node.name, "unrolled"):
            search = RecurrenceSearch(graph, node, backwards)
            found, gradient = search.find(keep), None
            if found is None and exits is not None and is_acyclic(graph):
                serving = needed(graph, keep)
                search = RecurrenceSearch(graph, node, backwards, serving)
                found = search.find(keep)
            if search.refused is not None:
                refused.append(Refused(search.refused[0], node.name, search.refused[1]))
            if found is None:
                continue
            steps = frozenset(step for chain in found.chains for step in chain)
            if found.gradient and exits is not None:
                gradient = step_gradient(graph, found, serving, keep, exits)
                if gradient is None:
                    refused.append(Refused(steps, node.name, Reason.STEP_GRADIENT()))
                    continue
            roller = _Roller(graph, found, name, gradient)
            try:
                graph = rolled = roller.graph(keep)
            except Unreadable as error:
                refused.append(Refused(steps, node.name, error.refusal))
                continue
            loops[name] = steps
            gradients += roller.rolled_gradients
    return Rolled(rolled, loops, tuple(refused), tuple(dict.fromkeys(unmatched)), tuple(gradients))


@dataclass
class _Roller:
    """Writes the loop."""

    source: Graph
    found: Unrolled
    name: str
    gradient: StepGradient | None = None
    rolled_gradients: list[RolledGradient] = field(default_factory=list)
    added: list[Node] = field(default_factory=list)
    specs: dict[TensorId, TensorSpec] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    variables: list[tuple[str, TensorId]] = field(default_factory=list)  # that change, and what each begins with
    given: list[tuple[str, TensorId]] = field(default_factory=list)
    results: list[TensorId] = field(default_factory=list)  # of `variables`
    listed: list[TensorId] = field(default_factory=list)  # of each sequence the tensor of which a list is made

    def graph(self, keep: Collection[str]) -> WorkingCopy:
        """The graph with the loop.

        Raises:
            Unreadable: another node needs what only single steps have.
        """
        found, steps = self.found, len(self.found.chains[0])
        zero, bound = self._constant("zero", 0), self._constant("bound", steps)
        any_shape = self._constant("any_shape", -1)
        body, known = self._body()
        lists = {name: f"list.{place}" for place, name in enumerate(found.stacked)}
        rewired: dict[TensorId, TensorId] = {}
        second = {chain[0]: chain[1] for chain in found.chains}

        self._variable("time", zero, _INT, TensorId("next"))
        for pack, argument in lists.items():
            empty = self._node(f"{argument}.empty", "TensorListReserve", [any_shape, bound], [_LIST])
            self._variable(argument, empty, _LIST, TensorId(f"{argument}.write"))
            value = found.stacked[pack]
            inputs = [TensorId(argument), TensorId("time"), TensorId(second[value.node], value.index)]
            body.append(Node(f"{argument}.write", "TensorListSetItem", inputs, outputs=1))
            known[TensorId(f"{argument}.write")] = _LIST
        for place, tensor in enumerate(found.carried):
            initial = found.states.get(tensor, next(iter(found.states.values())))  # a value that no step reads
            result = TensorId(second[tensor.node], tensor.index)
            self._variable(f"state.{place}", initial, self.source.specs[tensor], result)
        body.append(Node("one", "Const", outputs=1))
        body.append(Node("next", "AddV2", [TensorId("time"), TensorId("one")], outputs=1))
        known |= {TensorId("one"): _INT, TensorId("next"): _INT}
        arguments = dict([*self.variables, *self.given])
        outer = [self.source.specs.get(tensor) or self.specs.get(tensor) or _INT for tensor in arguments.values()]
        function = self._function(body, known, arguments, outer)
        limit = self._limit(list(arguments), steps)
        self._node("", "StatelessWhile", list(arguments.values()), outer, unrolled=True)
        for place, (pack, argument) in enumerate(lists.items()):
            spec = self.source.specs[TensorId(pack)]
            rewired[TensorId(pack)] = self._stack(argument, TensorId(self.name, 1 + place), any_shape, spec, pack)
        ends = {chain[0]: chain[-1] for chain in found.chains}
        for place, tensor in enumerate(found.carried):
            final = TensorId(self.name, 1 + len(lists) + place)
            rewired[TensorId(ends[tensor.node], tensor.index)] = final
        if self.gradient is not None:
            rewired |= self._gradient(self.gradient, lists, rewired, arguments)
        return self._written(rewired, function, limit, keep)

    def _gradient(
        self,
        gradient: StepGradient,
        lists: Mapping[str, str],
        rewired: Mapping[TensorId, TensorId],
        arguments: Mapping[str, TensorId],
    ) -> dict[TensorId, TensorId]:
        """Write one node in place of the gradient, never to run; what takes the place of what the gradient made."""
        source, name = self.source, f"{self.name}/gradient"
        given: list[tuple[TensorId, TensorId]] = []
        for place, (result, given_start) in enumerate(gradient.starts):
            start = given_start
            stack = TensorId(f"{self.name}/{lists[result.node]}.stack") if result.node in lists else rewired[result]
            if result.node in lists and stack != rewired[result]:
                spec = source.specs[start]
                order = [1, 0, *range(2, len(spec.shape or ()))]
                start = self._transpose(f"gradient.{place}", start, order, _transposed(spec, order))
            given.append((stack, start))
        places: list[int] = []
        made: dict[TensorId, TensorId] = {}
        read = list(arguments.values())
        items = {source[unpack].inputs[0]: place for place, unpack in enumerate(self.found.sequences)}
        specs: list[TensorSpec] = []
        for number, (entry, exit_) in enumerate(gradient.exits.items()):
            old, x = TensorId(name, number), entry
            if entry in items:
                x = self.listed[items[entry]]
                places.append(list(arguments).index(f"items.{items[entry]}"))
                made[exit_] = self._turned_back(f"exit.{number}", old, source[self.found.sequences[items[entry]]])
            else:
                places.append(read.index(entry))
                made[exit_] = old
            specs.append(self.specs.get(x) or source.specs[x])
        self._node("gradient", STEP_GRADIENT, [start for _, start in given], specs)
        results = tuple(result for result, _ in given)
        self.rolled_gradients.append(RolledGradient(self.name, name, results, tuple(places)))
        return made

    def _turned_back(self, label: str, tensor: TensorId, unpack: Node) -> TensorId:
        """The gradient of what was unpacked, of that of the list of its items."""
        spec = self.source.specs[unpack.inputs[0]]
        rank = len(spec.shape or ())
        axis = integer(unpack.attrs.get("axis", 0)) % max(rank, 1)
        order = [axis, *(other for other in range(rank) if other != axis)]
        if self.found.backwards:
            tensor = self._reversed(label, tensor, _transposed(spec, order))
        back = [order.index(place) for place in range(rank)]
        return self._transpose(label, tensor, back, spec) if axis else tensor

    def _stack(self, label: str, handle: TensorId, shape: TensorId, spec: TensorSpec, pack: str) -> TensorId:
        if integer(self.source[pack].attrs.get("axis", 0)) == 0:
            return self._node(f"{label}.stack", "TensorListStack", [handle, shape], [spec])
        order = [1, 0, *range(2, len(spec.shape or ()))]
        stack = self._node(f"{label}.stack", "TensorListStack", [handle, shape], [_transposed(spec, order)])
        return self._transpose(label, stack, order, spec)

    def _transpose(self, label: str, tensor: TensorId, order: list[int], spec: TensorSpec) -> TensorId:
        inputs = [tensor, self._constant(f"{label}.order", order)]
        kinds = {"T": DataType(spec.dtype), "Tperm": DataType("int32")}
        return self._node(f"{label}.transposed", "Transpose", inputs, [spec], **kinds)

    def _variable(self, argument: str, initial: TensorId, spec: TensorSpec, result: TensorId) -> None:
        self.variables.append((argument, initial))
        self.results.append(result)
        self.specs.setdefault(initial, spec)

    def _node(self, label: str, op: str, inputs: list[TensorId], specs: list[TensorSpec], **attrs: Any) -> TensorId:
        name = f"{self.name}/{label}" if label else self.name
        self.added.append(Node(name, op, inputs, outputs=len(specs), attrs=attrs))
        self.specs |= {TensorId(name, index): spec for index, spec in enumerate(specs)}
        return TensorId(name)

    def _constant(self, label: str, value: Any) -> TensorId:
        array = np.array(value, "int32")
        literal = Literal("int32", array.shape, tuple(array.reshape(-1).tolist()))
        spec = TensorSpec("int32", 4, array.shape)
        made = self._node(label, "Const", [], [spec], dtype=DataType("int32"), value=literal)
        self.constants[made.node] = array
        return made

    def _body(self) -> tuple[list[Node], dict[TensorId, TensorSpec]]:
        """The nodes of the second step, reading arguments where they read other steps or anything outside."""
        found, source = self.found, self.source
        second = {chain[1]: chain[0] for chain in found.chains}
        first = {chain[0] for chain in found.chains}
        state = {tensor: f"state.{place}" for place, tensor in enumerate(found.carried)}
        nodes: list[Node] = []
        specs: dict[TensorId, TensorSpec] = {}
        given: dict[TensorId, str] = {}
        for place, name in enumerate(found.sequences):
            argument, tensor = f"items.{place}", self._items(source[name], place)
            self.given.append((argument, tensor))
            item = TensorId(f"{argument}.item")
            nodes.append(Node(item.node, "TensorListGetItem", [TensorId(argument), TensorId("time")], outputs=1))
            specs[item] = source.specs[TensorId(name)]
        for number, (mask, tensors) in enumerate(found.masks.items()):
            argument = f"mask.{number}"
            self.given.append((argument, self._listed(argument, tensors)))
            item = TensorId(f"{argument}.item")
            nodes.append(Node(item.node, "TensorListGetItem", [TensorId(argument), TensorId("time")], outputs=1))
            specs[item] = source.specs[mask]
            given[mask] = item.node
        places = {name: place for place, name in enumerate(found.sequences)}
        entries = entries_of(source, found)

        def inside(tensor: TensorId) -> TensorId:
            if tensor.node in second:
                return tensor
            if tensor.node in first:
                return TensorId(state[tensor])
            if tensor.node in places:
                return TensorId(f"items.{places[tensor.node]}.item")
            tensor = entries.get(tensor, tensor)
            if tensor not in given:
                given[tensor] = f"given.{len(given)}"
                self.given.append((given[tensor], tensor))
            return TensorId(given[tensor])

        for name in second:
            node = source[name]
            inputs = [inside(tensor) for tensor in node.inputs]
            nodes.append(Node(name, node.op, inputs, [], node.device, copied(node), node.outputs, node.stateful))
            specs |= {tensor: source.specs[tensor] for tensor in source.tensors(node) if tensor in source.specs}
        return nodes, specs

    def _listed(self, label: str, tensors: Sequence[TensorId]) -> TensorId:
        """A list of the tensors of the steps, one each."""
        spec = self.source.specs[tensors[1]]
        whole = replace(spec, shape=(len(tensors), *(spec.shape or ())))
        kinds = {"T": DataType(spec.dtype), "N": len(tensors), "axis": 0}
        pack = self._node(f"{label}.packed", "Pack", list(tensors), [whole], **kinds)
        any_shape = self._constant(f"{label}.any", -1)
        return self._node(label, "TensorListFromTensor", [pack, any_shape], [_LIST])

    def _items(self, unpack: Node, place: int) -> TensorId:
        """A list of what `unpack` gives, in the order of the steps."""
        source, tensor = self.source, unpack.inputs[0]
        spec = source.specs[tensor]
        rank = len(spec.shape or ())
        axis = integer(unpack.attrs.get("axis", 0)) % max(rank, 1)
        if axis and spec.shape is not None:
            order = [axis, *(other for other in range(rank) if other != axis)]
            spec = _transposed(spec, order)
            tensor = self._transpose(f"items.{place}", tensor, order, spec)
        if self.found.backwards:
            tensor = self._reversed(f"items.{place}", tensor, spec)
        self.listed.append(tensor)
        any_shape = self._constant(f"any.{place}", -1)
        return self._node(f"items.{place}", "TensorListFromTensor", [tensor, any_shape], [_LIST])

    def _reversed(self, label: str, tensor: TensorId, spec: TensorSpec) -> TensorId:
        axes = self._constant(f"{label}.axes", [0])
        kinds = {"T": DataType(spec.dtype), "Tidx": DataType("int32")}
        return self._node(f"{label}.reversed", "ReverseV2", [tensor, axes], [spec], **kinds)

    def _function(
        self,
        body: list[Node],
        specs: dict[TensorId, TensorSpec],
        arguments: Mapping[str, TensorId],
        outer: list[TensorSpec],
    ) -> Function:
        constants: dict[str, Any] = {"one": np.array(1, "int32")}
        placeholders = [Node(name, "Placeholder", outputs=1) for name in arguments]
        for name, tensor in arguments.items():  # small constants that are read inside: axes, shapes
            value = self.source.constants.get(tensor.node)
            if name.startswith("given.") and value is not None:
                constants[name] = value
        known = {TensorId(name): spec for name, spec in zip(arguments, outer, strict=True)}
        nodes = [Node(n.name, "Const", outputs=1) if n.name in constants else n for n in [*placeholders, *body]]
        results = (*self.results, *(TensorId(name) for name, _ in self.given))
        return Function(Graph(nodes, specs | known, constants), tuple(arguments), results)

    def _limit(self, arguments: list[str], steps: int) -> Function:
        nodes = [Node(name, "Placeholder", outputs=1) for name in arguments]
        nodes.append(Node("bound", "Const", outputs=1))
        nodes.append(Node("less", "Less", [TensorId("time"), TensorId("bound")], outputs=1))
        specs = {TensorId("bound"): _INT, TensorId("less"): _BOOL}
        graph = Graph(nodes, specs, {"bound": np.array(steps, "int32")})
        return Function(graph, tuple(arguments), (TensorId("less"),))

    def _written(
        self, rewired: dict[TensorId, TensorId], body: Function, condition: Function, keep: Collection[str]
    ) -> WorkingCopy:
        source = self.source
        gone = {name for chain in self.found.chains for name in chain} | set(self.found.stacked)
        gone |= self._served(gone, rewired, keep)

        def kept() -> Iterator[Node]:
            for node in source:
                if node.name not in gone:
                    copy = node.copy()
                    copy.inputs = [rewired.get(tensor, tensor) for tensor in node.inputs]
                    if node.name in self.found.zeros:
                        copy.inputs = [self.found.zeros[node.name]]
                    copy.control = [name for name in node.control if name not in gone]
                    yield copy
            for node in self.added:
                node.inputs = [rewired.get(tensor, tensor) for tensor in node.inputs]
                yield node

        specs = {tensor: spec for tensor, spec in source.specs.items() if tensor.node not in gone} | {
            tensor: spec for tensor, spec in self.specs.items() if tensor.node not in source.nodes
        }
        functions = source.functions | {(self.name, "body"): body, (self.name, "cond"): condition}
        return WorkingCopy(kept(), specs, source.constants | self.constants, functions)

    def _served(self, gone: Collection[str], rewired: Mapping[TensorId, TensorId], keep: Collection[str]) -> set[str]:
        """The readers of single steps, and the readers of those: the old gradient, and nodes that nothing needs.

        Raises:
            Unreadable: one of them is needed.
        """
        source = self.source

        def readers(node: Node) -> list[str]:
            left = (tensor for tensor in source.tensors(node) if tensor not in rewired)
            return [use.node for tensor in left for use in source.uses(tensor) if use.node not in self.found.zeros]

        found = source.reached(gone, readers) - set(gone)
        starts = {start.node for _, start in self.gradient.starts} if self.gradient else set()
        lost = next(iter(sorted(found & (ends(source, keep) | starts))), None)
        if lost is not None:
            raise Unreadable(Reason.STEP_NEEDED.of(source[lost]))
        return found


def _transposed(spec: TensorSpec, order: list[int]) -> TensorSpec:
    return replace(spec, shape=tuple((spec.shape or ())[axis] for axis in order))
