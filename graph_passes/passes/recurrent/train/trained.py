"""One recurrence and its gradients, as found: the match of the forward op, and of each gradient op which gradients it
takes and which it gives.

`plan.py` puts the new gradient ops together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graph_passes.graph.dead_code import is_needed, is_read
from graph_passes.graph.ir import Graph, Node, TensorId, WorkingCopy
from graph_passes.graph.ops import passed
from graph_passes.graph.rewrite import Names
from graph_passes.passes.recurrent.find.counting import linear
from graph_passes.passes.recurrent.find.loops import Unreadable, functional_loops
from graph_passes.passes.recurrent.find.provenance import is_zero, spread, trace
from graph_passes.passes.recurrent.find.step_gradients import RolledGradient
from graph_passes.passes.recurrent.lower.cudnn import CUDNN, MOVES, joinable_cudnn, match_cudnn, turns, undoes
from graph_passes.passes.recurrent.lower.read_loop import read_loop
from graph_passes.passes.recurrent.match import Joinable, Match, Unmatched
from graph_passes.passes.recurrent.train.loop_pairs import Pair, invariants, read_pair, without_lists
from graph_passes.refusals import Reason

BACKPROP = frozenset({"CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"})


@dataclass(frozen=True)
class WantedGradient:
    """A tensor that an old gradient op made.

    Attributes:
        old: the tensor.
        x: what it is the gradient of.
        zero: what it is where nothing depends on `x`; None: zeros like `x`.
        listed: the `TensorListFromTensor` that made a list of `x`, if `old` is a list.
        moves: nodes that only reorder what they read, first to last: `old` is the gradient of what they make of `x`,
            which is what they make of the gradient of `x`.
    """

    old: TensorId
    x: TensorId
    zero: TensorId | None = None
    listed: str = ""
    moves: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backward:
    """An old gradient op.

    Attributes:
        name: its node.
        given: results of the forward op, old ones, each with its gradient.
        wanted: what has to be made.
    """

    name: str
    given: tuple[tuple[TensorId, TensorId], ...]
    wanted: tuple[WantedGradient, ...]


@dataclass(frozen=True)
class Trained:
    """A forward op, and its gradient ops; usually one.

    Attributes:
        forward: its node.
        backwards: its gradients.
        unchanged: outputs of the forward node that are its inputs: (output, input).
        joinable: what takes its place in inference, and whether another direction may share its launch.
    """

    forward: str
    backwards: tuple[Backward, ...]
    unchanged: tuple[tuple[TensorId, TensorId], ...]
    joinable: Joinable

    @property
    def nodes(self) -> tuple[str, ...]:
        """The old nodes."""
        return (self.forward, *(backward.name for backward in self.backwards))

    @property
    def new_nodes(self) -> frozenset[str]:
        """The new ones in the forward op."""
        return frozenset(node.name for node in self.joinable.match.nodes)

    @property
    def reverse(self) -> bool:
        """Whether its launch walks backwards."""
        return self.joinable.match.launches[0].directions[0].reverse


def trained_loop(graph: Graph, forward: str, backwards: Sequence[str], names: Names, keep: Collection[str]) -> Trained:
    """Read a loop and the loops that are its gradients.

    Raises:
        Unreadable: why they stay.
    """
    pairs = [read_pair(graph, forward, backward) for backward in backwards]
    finder = _Loops(graph, forward, backwards, keep)
    given = [finder.given(pair) for pair in pairs]
    copy, readers = finder.as_inference(pairs[0], dict.fromkeys(old for group in given for old, _ in group))
    joinable = read_loop(copy, without_lists(copy, pairs[0]), names, {*keep, *readers}, trains=True)
    gradients = [
        Backward(pair.backward, tuple(group), tuple(finder.wanted(pair, joinable.match)))
        for pair, group in zip(pairs, given, strict=True)
    ]
    return Trained(forward, tuple(gradients), tuple(invariants(graph, forward)), joinable)


def trained_steps(graph: Graph, rolled: RolledGradient, names: Names, keep: Collection[str]) -> Trained:
    """Read a loop that stands for unrolled steps, and its gradient.

    Raises:
        Unreadable: why they stay.
    """
    copy = graph.working_copy()
    # Where no loss reads its own value, a stack serves the gradient alone.
    readers = [copy.insert(f"{old.node}/reader", "Identity", [old], {}) for old in rolled.results]
    loop = next(loop for loop in functional_loops(copy) if loop.name == rolled.forward)
    joinable = read_loop(copy, loop, names, {*keep, *readers}, trains=True)
    wanted = list[WantedGradient]()
    for old, x in rolled.wanted(graph):
        if is_read(graph, old, {rolled.forward, rolled.backward}, keep):
            entry, moves = read_as(graph, joinable.match, x)
            wanted += moved_back(graph, frozenset(keep), old, entry, moves)
    backward = Backward(rolled.backward, rolled.given(graph), tuple(wanted))
    return Trained(rolled.forward, (backward,), (), joinable)


def cudnn_pairs(graph: Graph) -> Iterator[tuple[str, str]]:
    """Every `CudnnRNN` with its gradient: (forward, backward)."""
    for node in graph:
        if node.op in BACKPROP:
            output = node.inputs[5 if node.op == "CudnnRNNBackpropV3" else 4]
            forward = graph[passed(graph, output).node]
            if forward.op in CUDNN:
                yield forward.name, node.name


def trained_cudnn(graph: Graph, forward: str, backwards: Sequence[str], names: Names, keep: Collection[str]) -> Trained:
    """Read a `CudnnRNN` and its gradients.

    Raises:
        Unreadable: why they stay.
    """
    weights = _weight_gradients(graph, forward, backwards, keep)
    match = match_cudnn(graph, forward, names, keep, backwards, opaque=weights is None)
    if isinstance(match, Match) and weights is not None:
        read = {tensor for node in match.nodes for tensor in node.inputs}
        if not all(item.x in read for items in weights for item in items):
            weights = None
            match = match_cudnn(graph, forward, names, keep, backwards, opaque=True)
    if isinstance(match, Unmatched):
        raise Unreadable(match.reason)
    gradients = []
    for place, name in enumerate(backwards):
        node = graph[name]
        first = 8 if node.op == "CudnnRNNBackpropV3" else 7
        start = passed(graph, node.inputs[first])
        given = [] if is_zero(graph, start) else [_turned_back(graph, forward, match, start)]
        for index in (1, 2):
            start = passed(graph, node.inputs[first + index])
            old = TensorId(forward, index)
            if old in dict(match.rewired) and not is_zero(graph, start):
                given.append((old, start))
        wanted = list(weights[place]) if weights is not None else []
        for index, x in enumerate(graph[forward].inputs[: 3 if weights is not None else 4]):
            if is_read(graph, TensorId(name, index), {forward, *backwards}, keep):
                _require_single(graph, forward, x, index)
                entry, moves = read_as(graph, match, x)
                wanted += moved_back(graph, keep, TensorId(name, index), entry, moves)
        gradients.append(Backward(name, tuple(given), tuple(wanted)))
    return Trained(forward, tuple(gradients), (), joinable_cudnn(graph, match))


def _turned_back(graph: Graph, forward: str, match: Match, start: TensorId) -> tuple[TensorId, TensorId]:
    """The output of a `CudnnRNN` and its gradient; of one that was turned around, as it is behind that."""
    node = graph[start.node]
    turned = [old for old, _ in match.rewired if old.node != forward]
    if turned and turns(graph, node.name, graph[forward]):
        gradient = node.inputs[0]
        while (before := graph[gradient.node]).inputs and undoes(graph, before.name, before.inputs[0].node):
            gradient = graph[before.inputs[0].node].inputs[0]
        return turned[0], gradient
    return TensorId(forward), start


def _weight_gradients(
    graph: Graph, forward: str, backwards: Sequence[str], keep: Collection[str]
) -> list[list[WantedGradient]] | None:
    """For each gradient op, what its vector of weight gradients is taken apart into; None where that is not clear.

    Each part has to be arranged as one of the tensors that the vector of weights was packed of.
    """
    packed = trace(graph, graph[forward].inputs[3])
    if packed is None:
        return None
    sources = list(zip(packed.sources, packed.arrangements(), strict=True))
    found = []
    for name in backwards:
        parts = spread(graph, TensorId(name, 3), keep)
        if parts is None:
            return None
        wanted = []
        for part, places in parts.items():
            if is_read(graph, part, {forward, *backwards}, keep):
                x = next((source for source, there in sources if np.array_equal(there, places)), None)
                if x is None:
                    return None
                wanted.append(WantedGradient(part, x))
        found.append(wanted)
    return found


class _Loops:
    def __init__(self, graph: Graph, forward: str, backwards: Sequence[str], keep: Collection[str]) -> None:
        self.graph = graph
        self.ahead = graph[forward]
        self.removed = {forward, *backwards}
        self.keep = frozenset(keep)
        self.still = dict(invariants(graph, forward))

    def as_inference(self, pair: Pair, given: Collection[TensorId]) -> tuple[WorkingCopy, list[str]]:
        """A graph in which no gradient reads the forward loop, only to be read; `given` have one reader more each."""
        copy, name = self.graph.working_copy(), self.ahead.name
        inputs = copy[name].inputs
        replaced = {TensorId(name, place): inputs[place] for place in pair.lists} | self.still
        for old, new in replaced.items():
            for use in list(copy.uses(old)):
                copy.rewire(use.node, use.index, new)
        for backward in sorted(self.removed - {name}):
            for index, tensor in enumerate(copy[backward].inputs):
                if tensor.node == name:
                    copy.rewire(backward, index, inputs[tensor.index])
        # Before it is asked what is idle: where no loss reads its own value, a stack serves the gradient alone.
        readers = [copy.insert(f"{old.node}/reader", "Identity", [old], {}) for old in given]
        idle = {
            use.node
            for tensor in copy.tensors(copy[name])
            for use in copy.uses(tensor)
            if not is_needed(copy, use.node, (), {*self.keep, *readers})
        }
        copy.remove(copy.reached(idle, copy.readers))
        return copy, readers

    def given(self, pair: Pair) -> list[tuple[TensorId, TensorId]]:
        """The results of the forward loop that have a gradient, and that."""
        found: list[tuple[TensorId, TensorId]] = []
        for place, variable in pair.variables.items():
            start = passed(self.graph, self.graph[pair.backward].inputs[place])
            old = TensorId(pair.forward, variable)
            if is_zero(self.graph, start):
                continue
            if old in self.still:
                raise Unreadable(Reason.GRADIENT_OF_INVARIANT(tensor=start))
            found += self.of_list(old, start) if self.is_list(variable) else [(old, start)]
        return found

    def of_list(self, old: TensorId, start: TensorId) -> Iterator[tuple[TensorId, TensorId]]:
        graph, node = self.graph, self.graph[start.node]
        if is_zero(graph, start):
            return
        if node.op == "AddN":
            for part in node.inputs:
                yield from self.of_list(old, passed(graph, part))
            return
        if node.op in ("TensorListReserve", "EmptyTensorList"):
            return
        if node.op == "TensorListSetItem":  # of one item that is read behind the loop
            yield from self.of_item(old, node)
            return
        if node.op != "TensorListFromTensor":
            raise Unreadable(Reason.GRADIENT_OF_LIST.of(node))
        stacks = [
            reader for reader in self.graph if reader.op == "TensorListStack" and passed(graph, reader.inputs[0]) == old
        ]
        if not stacks:
            raise Unreadable(Reason.GRADIENT_UNSTACKED.of(node))
        yield TensorId(stacks[0].name), node.inputs[0]

    def of_item(self, old: TensorId, node: Node) -> Iterator[tuple[TensorId, TensorId]]:
        """The reader of an item of a list, and the gradient that the TensorListSetItem `node` puts in a list."""
        graph = self.graph
        yield from self.of_list(old, passed(graph, node.inputs[0]))
        if is_zero(graph, passed(graph, node.inputs[2])):
            return
        index = linear(graph, node.inputs[1])
        readers = [
            reader
            for reader in graph
            if reader.op == "TensorListGetItem"
            and passed(graph, reader.inputs[0]) == old
            and linear(graph, reader.inputs[1]) == index
        ]
        if not readers:
            raise Unreadable(Reason.GRADIENT_UNSTACKED.of(node))
        yield TensorId(readers[0].name), node.inputs[2]

    def is_list(self, variable: int) -> bool:
        spec = self.graph.specs.get(self.ahead.inputs[variable])
        return spec is not None and spec.dtype == "variant"

    def wanted(self, pair: Pair, match: Match) -> Iterator[WantedGradient]:
        """The tensors that the backward loop made and that are read elsewhere."""
        graph = self.graph
        for place, variable in pair.variables.items():
            old, x = TensorId(pair.backward, place), self.ahead.inputs[variable]
            if not is_read(graph, old, self.removed, self.keep):
                continue
            made = graph[passed(graph, x).node]
            if self.is_list(variable) and made.op == "TensorListSetItem":
                yield from self.items(old, made, match)
                continue
            if self.is_list(variable) and made.op != "TensorListFromTensor":
                raise Unreadable(Reason.GRADIENT_OF_MADE_LIST.of(made, tensor=old))
            _require_single(graph, pair.forward, x, variable)
            if self.is_list(variable):
                entry, moves = read_as(graph, match, made.inputs[0])
                yield from self.lists(old, entry, made.name, moves)
            else:
                entry, moves = read_as(graph, match, x)
                yield WantedGradient(old, entry, zero=graph[pair.backward].inputs[place], moves=moves)

    def items(self, old: TensorId, made: Node, match: Match) -> Iterator[WantedGradient]:
        """Readers of a list of gradients, of a list with one item: the gradient of that."""
        graph = self.graph
        for use in graph.uses(old):
            reader = graph[use.node]
            if reader.op == "Identity" and reader.name not in self.keep:
                yield from self.items(TensorId(reader.name), made, match)
            elif reader.op == "TensorListGetItem" and linear(graph, reader.inputs[1]) == linear(graph, made.inputs[1]):
                _require_single(graph, self.ahead.name, made.inputs[2], -1)
                entry, moves = read_as(graph, match, made.inputs[2])
                yield WantedGradient(TensorId(reader.name), entry, moves=moves)
            elif is_needed(graph, reader.name, self.removed, self.keep):
                raise Unreadable(Reason.GRADIENT_OF_MADE_LIST.of(made, tensor=old))

    def lists(self, old: TensorId, x: TensorId, made: str, moves: tuple[str, ...]) -> Iterator[WantedGradient]:
        """Readers of a list of gradients: where it is stacked at once, no list is needed."""
        graph = self.graph
        for use in graph.uses(old):
            reader = graph[use.node]
            if reader.op == "Identity" and reader.name not in self.keep:
                yield from self.lists(TensorId(reader.name), x, made, moves)
            elif reader.op == "TensorListStack" and reader.name not in self.keep:
                yield from moved_back(graph, self.keep, TensorId(reader.name), x, moves)
            elif is_needed(graph, reader.name, self.removed, self.keep):
                yield WantedGradient(old, x, listed=made, moves=moves)


def moved_back(
    graph: Graph, keep: Collection[str], old: TensorId, x: TensorId, moves: tuple[str, ...]
) -> Iterator[WantedGradient]:
    """Readers of a gradient that undo the last move read the gradient of what was before it."""
    readers = [use.node for use in graph.uses(old) if moves and use.node not in keep]
    undo = [name for name in readers if undoes(graph, name, moves[-1])]
    for name in undo:
        yield from moved_back(graph, keep, TensorId(name), x, moves[:-1])
    if len(undo) < len(graph.uses(old)) or old.node in keep:
        yield WantedGradient(old, x, moves=moves)


def read_as(graph: Graph, match: Match, x: TensorId) -> tuple[TensorId, tuple[str, ...]]:
    """The tensor that the match reads for `x`, and the nodes that only reorder it to make `x`."""
    read = {tensor for node in match.nodes for tensor in node.inputs}
    found, moves = x, list[str]()
    while found not in read and graph[found.node].op in ("Identity", *MOVES):
        if graph[found.node].op != "Identity":
            moves.append(found.node)
        found = graph[found.node].inputs[0]
    if found not in read:
        raise Unreadable(Reason.GRADIENT_UNREAD(tensor=x))
    return found, tuple(reversed(moves))


def _require_single(graph: Graph, forward: str, x: TensorId, place: int) -> None:
    """Raises Unreadable if the gradients of two inputs of the forward op would be one."""
    source = passed(graph, x)
    for other, tensor in enumerate(graph[forward].inputs):
        entered = passed(graph, tensor)
        made = graph[entered.node]
        if made.op == "TensorListFromTensor":
            entered = passed(graph, made.inputs[0])
        if other != place and entered == source:
            raise Unreadable(Reason.GRADIENT_TWICE(tensor=x))
