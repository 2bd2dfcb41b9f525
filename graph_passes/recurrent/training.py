"""Swaps a recurrence together with its gradient: a pair of loops, or a `CudnnRNN` with its `CudnnRNNBackprop`.

The forward half is read as in inference, and then launched with the forward cell of its gradient, which keeps what the
backward cell needs. The gradient of all that the match inserts is taken anew (`Gradients`): hoisted products, the
recurrence and casts alike. What the old backward half made of the gradients of the old results, the new one makes of
the same gradients; so who else computes gradients, before or after, sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from custom_ops.cell import Cell
from custom_ops.differentiate import differentiate
from custom_ops.errors import CellError
from graph_passes.errors import GraphError
from graph_passes.ir import DataType, Graph, TensorId
from graph_passes.recurrent.cudnn import CUDNN, match_cudnn
from graph_passes.recurrent.layout import is_zero
from graph_passes.recurrent.loops import Loop, Unreadable, passed
from graph_passes.recurrent.match import Launch, Match, NewNode, RecurrentPlan, Unmatched
from graph_passes.recurrent.pairs import Pair, gradient_loops, invariants, read_pair, without_lists

# How new nodes are differentiated: graph, nodes, (result, its gradient) ..., inputs, prefix -> nodes, gradients. This
# takes TensorFlow (`tfmem/capture/differentiate.py`), so it is handed in.
Gradients = Callable[
    [Graph, Sequence[NewNode | Launch], Sequence[tuple[TensorId, TensorId]], Sequence[TensorId], str],
    tuple[tuple[NewNode, ...], tuple[TensorId | None, ...]],
]
ReadLoop = Callable[[Graph, Loop], Match]

BACKPROP = frozenset({"CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"})


@dataclass(frozen=True)
class Wanted:
    """A tensor that the old backward half made.

    Attributes:
        old: the tensor.
        x: what it is the gradient of.
        zero: what it is where nothing depends on `x`.
        listed: the `TensorListFromTensor` that made a list of `x`, if `old` is a list.
    """

    old: TensorId
    x: TensorId
    zero: TensorId | None = None
    listed: str = ""


@dataclass(frozen=True)
class Backward:
    """An old backward half.

    Attributes:
        name: its node.
        given: results of the forward half, old ones, each with its gradient.
        wanted: what has to be made.
    """

    name: str
    given: tuple[tuple[TensorId, TensorId], ...]
    wanted: tuple[Wanted, ...]


def plan_training(
    graph: Graph, fetched: Collection[str], read_loop: ReadLoop, gradients: Gradients
) -> tuple[RecurrentPlan, frozenset[str]]:
    """Find every recurrence that is there with its gradient.

    Args:
        graph: the graph, with functions.
        fetched: names of the nodes that somebody outside the graph reads or runs.
        read_loop: makes a match of a loop, or raises Unreadable.
        gradients: see `Gradients`.

    Returns:
        The plan, and the names of the nodes that belong to such a pair, matched or not: they are no inference.
    """
    matches, unmatched, seen = [], [], set[str]()
    groups: dict[str, list[str]] = {}
    for forward, backward in [*gradient_loops(graph), *_cudnn_pairs(graph)]:
        groups.setdefault(forward, []).append(backward)
    inner = {backward for backwards in groups.values() for backward in backwards}
    for forward, backwards in groups.items():
        seen |= {forward, *backwards}
        carrier = f"{graph[forward].op} and its gradient"
        if forward in inner or any(backward in groups for backward in backwards):
            unmatched.append(Unmatched(forward, carrier, "the gradient of its gradient is taken too"))
            continue
        try:
            match = _Swap(graph, fetched, forward, backwards, read_loop, gradients).match()
            matches.append(replace(match, carrier=carrier))
        except (Unreadable, GraphError, CellError) as error:
            unmatched.append(Unmatched(forward, carrier, str(error)))
    return RecurrentPlan(tuple(matches), tuple(unmatched)), frozenset(seen)


def _cudnn_pairs(graph: Graph) -> Iterator[tuple[str, str]]:
    for node in graph:
        if node.op in BACKPROP:
            output = node.inputs[5 if node.op == "CudnnRNNBackpropV3" else 4]
            forward = graph[passed(graph, output).node]
            if forward.op in CUDNN:
                yield forward.name, node.name


class _Swap:
    """One forward half with its backward halves; usually one."""

    def __init__(
        self,
        graph: Graph,
        fetched: Collection[str],
        forward: str,
        backwards: Sequence[str],
        read_loop: ReadLoop,
        gradients: Gradients,
    ) -> None:
        self.graph = graph
        self.fetched = frozenset(fetched)
        self.forward = forward
        self.backwards = backwards
        self.read_loop = read_loop
        self.gradients = gradients
        self.removed = {forward, *backwards}
        self.known: dict[str, bool] = {}

    def match(self) -> Match:
        """
        Raises:
            Unreadable, GraphError, CellError: why there is none.
        """
        if self.graph[self.forward].op in CUDNN:
            ahead, backwards = self.cudnn()
        else:
            ahead, backwards = self.loops()
        ahead = differentiable(ahead)
        new = dict(ahead.rewired)
        nodes: list[NewNode | Launch] = list(ahead.nodes)
        for backward in backwards:
            made, gradients = self.backward(ahead, new, backward)
            nodes += made
            new |= gradients
        removed = self.with_dead({*ahead.removed, *self.removed}, new)
        return replace(ahead, nodes=tuple(nodes), rewired=tuple(new.items()), removed=tuple(sorted(removed)))

    def loops(self) -> tuple[Match, list[Backward]]:
        pairs = [read_pair(self.graph, self.forward, backward) for backward in self.backwards]
        loop = without_lists(self.graph, pairs[0])
        match = self.read_loop(self.as_inference(pairs[0]), loop)
        old = dict(match.rewired)
        still = [(output, entered) for output, entered in invariants(self.graph, self.forward) if output not in old]
        match = replace(match, rewired=(*match.rewired, *still))
        return match, [self.half(pair, match) for pair in pairs]

    def as_inference(self, pair: Pair) -> Graph:
        """A graph in which no gradient reads the forward loop; only to be read."""
        copy = self.graph.copy()
        node = copy[self.forward]
        replaced = {TensorId(node.name, place): node.inputs[place] for place in pair.lists}
        replaced |= dict(invariants(self.graph, self.forward))
        for old, new in replaced.items():
            for use in list(copy.uses(old)):
                copy.rewire(use.node, use.index, new)
        for backward in self.backwards:
            for index, tensor in enumerate(copy[backward].inputs):
                if tensor.node == node.name:
                    copy.rewire(backward, index, node.inputs[tensor.index])
        dead = [name for name in self.dead_readers({self.forward}, ()) if name != self.forward]
        copy.remove([name for name in dead if name not in self.removed and name in copy.nodes])
        return copy

    def half(self, pair: Pair, match: Match) -> Backward:
        graph, ahead, back = self.graph, self.graph[pair.forward], self.graph[pair.backward]
        still = {output.index for output, _ in invariants(graph, pair.forward)}
        given: list[tuple[TensorId, TensorId]] = []
        wanted: list[Wanted] = []
        for place, variable in pair.variables.items():
            start = passed(graph, back.inputs[place])
            spec = graph.specs.get(ahead.inputs[variable])
            listed = spec is not None and spec.dtype == "variant"
            if variable in still and not is_zero(graph, start):
                raise Unreadable(f"'{start}' is a gradient of something that the loop does not change")
            if variable not in still:
                given += self.given(match, TensorId(pair.forward, variable), start, listed)
            items = list(self.wanted(match, TensorId(pair.backward, place), ahead.inputs[variable], start, listed))
            if items:
                self.enters_once(items[0].x, variable)
            wanted += items
        return Backward(pair.backward, tuple(given), tuple(wanted))

    def given(self, match: Match, old: TensorId, start: TensorId, listed: bool) -> Iterator[tuple[TensorId, TensorId]]:
        """The gradients of a result of the forward loop."""
        graph = self.graph
        if is_zero(graph, start):
            return
        if not listed:
            yield old, start
            return
        node = graph[start.node]
        if node.op == "AddN":
            for part in node.inputs:
                yield from self.given(match, old, passed(graph, part), listed)
            return
        if node.op != "TensorListFromTensor":
            raise Unreadable(f"the gradient of a list comes from '{node.name}' ({node.op}), not from a tensor")
        stacks = [before for before, _ in match.rewired if self.is_stack_of(before, old)]
        if not stacks:
            raise Unreadable(f"'{node.name}' is the gradient of a list that nobody stacked")
        yield stacks[0], node.inputs[0]

    def is_stack_of(self, tensor: TensorId, listed: TensorId) -> bool:
        node = self.graph[tensor.node]
        return node.op == "TensorListStack" and passed(self.graph, node.inputs[0]) == listed

    def wanted(self, match: Match, old: TensorId, x: TensorId, start: TensorId, listed: bool) -> Iterator[Wanted]:
        """The tensors that hold the gradient of `x`, where somebody reads it."""
        graph = self.graph
        if not self.is_read(old):
            return
        if not listed:
            yield Wanted(old, self.read_as(match, x), start)
            return
        made = graph[passed(graph, x).node]
        if made.op != "TensorListFromTensor":
            raise Unreadable(f"'{old}' is the gradient of a list that '{made.name}' ({made.op}) made, not of a tensor")
        source = self.read_as(match, made.inputs[0])
        waiting = [old]
        while waiting:  # where the list is stacked again at once, no list is needed
            current = waiting.pop()
            for use in graph.uses(current):
                reader = graph[use.node]
                if reader.op == "Identity" and reader.name not in self.fetched:
                    waiting.append(TensorId(reader.name))
                elif reader.op == "TensorListStack":
                    yield Wanted(TensorId(reader.name), source)
                elif self.needed(reader.name):
                    yield Wanted(current, source, None, made.name)

    def read_as(self, match: Match, x: TensorId) -> TensorId:
        """The tensor that the match reads for `x`: itself, or what it is a copy of."""
        read = set(_read(match))
        node = self.graph[x.node]
        while x not in read and node.op == "Identity":
            x = node.inputs[0]
            node = self.graph[x.node]
        if x not in read:
            raise Unreadable(f"a gradient of '{x}' is needed, which the recurrence does not read as it is")
        return x

    def enters_once(self, x: TensorId, place: int) -> None:
        """Raises Unreadable if the gradients of two inputs of the forward half would be one."""
        source = passed(self.graph, x)
        for other, tensor in enumerate(self.graph[self.forward].inputs):
            entered = passed(self.graph, tensor)
            made = self.graph[entered.node]
            if made.op == "TensorListFromTensor":
                entered = passed(self.graph, made.inputs[0])
            if other != place and entered == source:
                raise Unreadable(f"'{x}' enters the recurrence twice, and the gradient of one entry is wanted")

    def cudnn(self) -> tuple[Match, list[Backward]]:
        match = match_cudnn(self.graph, self.forward, {*self.backwards}, gradient=True)
        if isinstance(match, Unmatched):
            raise Unreadable(match.reason)
        halves = []
        for name in self.backwards:
            node = self.graph[name]
            first = 8 if node.op == "CudnnRNNBackpropV3" else 7
            given = []
            for index, (old, _) in enumerate(match.rewired):
                start = passed(self.graph, node.inputs[first + index])
                if not is_zero(self.graph, start):
                    given.append((old, start))
            kept = [index for index in range(4) if self.is_read(TensorId(name, index))]
            wanted = [Wanted(TensorId(name, index), self.graph[self.forward].inputs[index]) for index in kept]
            for index, item in zip(kept, wanted, strict=True):
                self.enters_once(item.x, index)
            halves.append(Backward(name, tuple(given), tuple(wanted)))
        return match, halves

    def backward(
        self, ahead: Match, new: dict[TensorId, TensorId], backward: Backward
    ) -> tuple[list[NewNode], dict[TensorId, TensorId]]:
        """The new backward half, and what takes the place of the tensors that the old one made."""
        for old, _ in backward.given:
            if old not in new:
                raise Unreadable(f"'{old}' has a gradient, and nothing takes its place")
        xs = list(dict.fromkeys(item.x for item in backward.wanted))
        ys = [(new[old], gradient) for old, gradient in backward.given]
        prefix = f"{backward.name}/tfmem"
        made, found = self.gradients(self.graph, ahead.nodes, ys, xs, prefix)
        gradient_of = dict(zip(xs, found, strict=True))
        nodes, rewired = list(made), {}
        for number, item in enumerate(backward.wanted):
            gradient = gradient_of[item.x]
            if gradient is None and item.zero is not None:
                gradient = item.zero
            elif gradient is None:
                zeros = self.zeros(f"{prefix}/zeros_{number}", item.x)
                nodes.append(zeros)
                gradient = TensorId(zeros.name)
            if item.listed:
                listed = self.graph[item.listed]
                name = self.fresh(f"{prefix}/list_{number}")
                nodes.append(NewNode(name, listed.op, (gradient, listed.inputs[1]), dict(listed.attrs)))
                gradient = TensorId(name)
            rewired[item.old] = gradient
        return nodes, rewired

    def zeros(self, name: str, x: TensorId) -> NewNode:
        spec = self.graph.specs[x]
        return NewNode(self.fresh(name), "ZerosLike", (x,), {"T": DataType(spec.dtype)})

    def fresh(self, wanted: str) -> str:
        name, suffix = wanted, 1
        while name in self.graph.nodes:
            name, suffix = f"{wanted}_{suffix}", suffix + 1
        return name

    def is_read(self, tensor: TensorId) -> bool:
        """Whether somebody needs this tensor."""
        return tensor.node in self.fetched or any(self.needed(use.node) for use in self.graph.uses(tensor))

    def needed(self, name: str) -> bool:
        """Whether a node does anything but serve what will be removed."""
        if name not in self.known:
            node = self.graph[name]
            read = name in self.fetched or node.stateful
            self.known[name] = name not in self.removed and (
                read or any(self.is_read(tensor) for tensor in self.graph.tensors(node))
            )
        return self.known[name]

    def dead_readers(self, removed: Collection[str], kept: Collection[TensorId]) -> set[str]:
        """The nodes that read what is removed and serve nobody, and what reads those."""
        found = set(removed)
        waiting = list(removed)
        while waiting:
            for tensor in self.graph.tensors(self.graph[waiting.pop()]):
                for use in self.graph.uses(tensor):
                    if tensor not in kept and use.node not in found and not self.needed(use.node):
                        found.add(use.node)
                        waiting.append(use.node)
        return found

    def with_dead(self, removed: set[str], new: dict[TensorId, TensorId]) -> set[str]:
        """What is removed, with what then serves nobody.

        Raises:
            Unreadable: somebody reads an output that nothing takes the place of.
        """
        found = self.dead_readers(removed, new)
        for name in sorted(removed):
            for tensor in self.graph.tensors(self.graph[name]):
                reader = next((use.node for use in self.graph.uses(tensor) if use.node not in found), None)
                if tensor not in new and reader is not None:
                    raise Unreadable(f"'{reader}' reads '{tensor}', which nothing takes the place of")
        return found


def differentiable(match: Match) -> Match:
    """The same match with launches that keep what their gradients need."""
    moved: dict[TensorId, TensorId] = {}
    nodes: list[NewNode | Launch] = []
    for node in match.nodes:
        if isinstance(node, Launch):
            forward = _forward(node.cell)
            new = replace(node, cell=forward, base=node.cell)
            for direction in range(len(node.directions)):
                for index in range(len(node.cell.outputs)):
                    moved[node.output(index, direction)] = new.output(index, direction)
                for index in range(len(node.cell.states)):
                    moved[node.final(index, direction)] = new.final(index, direction)
            nodes.append(new)
        else:
            nodes.append(replace(node, inputs=tuple(moved.get(tensor, tensor) for tensor in node.inputs)))
    rewired = tuple((old, moved.get(new, new)) for old, new in match.rewired)
    return replace(match, nodes=tuple(nodes), rewired=rewired)


def _forward(cell: Cell) -> Cell:
    return differentiate(cell).forward


def _read(match: Match) -> Iterable[TensorId]:
    for node in match.nodes:
        yield from (node.node() if isinstance(node, Launch) else node).inputs
