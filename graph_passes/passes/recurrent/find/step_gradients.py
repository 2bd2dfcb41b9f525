"""The gradient of unrolled steps in a graph: where it begins, what it makes, and what is between.

TensorFlow writes an op or two for each op of each step, and sums of what the steps give for one weight: an AddN with an
operand for each step, or for each place that reads the weight. What is found here is a `Proposal`, which has the form
of the gradient. Whether it is the gradient, and which of its tensors is that of which weight, is for numbers to say
(`Exits`), which takes TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, permutations, product

from graph_passes.graph.ir import Function, Graph, Node, TensorId, integer
from graph_passes.graph.ops import FLOATS, READS
from graph_passes.graph.order import topological
from graph_passes.passes.recurrent.find.provenance import is_zero
from graph_passes.passes.recurrent.find.unrolled import Unrolled, same

STEP_GRADIENT = "GradientOfSteps"  # a node that stands for a gradient, in a graph that is only read
_TRIES = 24  # ways to say which gradient belongs to which result
_DEPTH = 3  # of ops between an item of what is unpacked and the gradient of a step
_OWN = frozenset({"PreventGradient"})


@dataclass(frozen=True, eq=False)
class Proposal:
    """What may be the gradient of unrolled steps.

    Attributes:
        entries: what the steps read: each weight, initial state and unpacked tensor once.
        starts: a result (a Pack, or a tensor of the last step), and its gradient.
        steps: entries -> the results in `starts`, then `between`.
        between: tensors of the steps that `walk` reads.
        others: what else `walk` reads.
        walk: the gradients in `starts`, `between`, `entries`, `others` -> the tensors in `candidates`.
        candidates: an entry, and a tensor that may be its gradient; the likeliest first.
    """

    entries: tuple[TensorId, ...]
    starts: tuple[tuple[TensorId, TensorId], ...]
    steps: Function
    between: tuple[TensorId, ...]
    others: tuple[TensorId, ...]
    walk: Function
    candidates: tuple[tuple[TensorId, TensorId], ...]


# For each entry that `walk` makes the gradient of, that gradient; empty if `walk` is no gradient of the steps, or that
# is unknown (`tfmem/capture/numeric_step_gradients.py`).
Exits = Callable[[Graph, Proposal], Mapping[TensorId, TensorId]]


@dataclass(frozen=True)
class StepGradient:
    """The gradient of unrolled steps.

    Attributes:
        starts: a result, and its gradient.
        exits: what a step reads, and its gradient.
    """

    starts: tuple[tuple[TensorId, TensorId], ...]
    exits: Mapping[TensorId, TensorId]


@dataclass(frozen=True)
class RolledGradient:
    """The gradient of a loop that steps with their gradient became.

    Attributes:
        forward, backward: the nodes; the second, `STEP_GRADIENT`, stands for the gradient.
        results: of the loop, stacked where they are of all steps; `backward` reads their gradients, in this order.
        places: for each output of `backward`, the input of the loop that it is the gradient of; of a list, that of the
            tensor of which it was made.
    """

    forward: str
    backward: str
    results: tuple[TensorId, ...]
    places: tuple[int, ...]

    def given(self, graph: Graph) -> tuple[tuple[TensorId, TensorId], ...]:
        """Results and their gradients."""
        return tuple(zip(self.results, graph[self.backward].inputs, strict=True))

    def wanted(self, graph: Graph) -> Iterator[tuple[TensorId, TensorId]]:
        """What `backward` makes, and what it is the gradient of."""
        for number, place in enumerate(self.places):
            x = graph[self.forward].inputs[place]
            maker = graph[x.node]
            yield TensorId(self.backward, number), maker.inputs[0] if maker.op == "TensorListFromTensor" else x


def entries_of(graph: Graph, found: Unrolled) -> dict[TensorId, TensorId]:
    """All that steps read from outside, and which tensor stands for it: that which the second step reads first.

    Of an unpacked tensor it is the tensor, of a state what it begins with.
    """
    inside = {name for chain in found.chains for name in chain}
    entries: dict[TensorId, TensorId] = {}
    read: dict[TensorId, TensorId] = {}
    for steps in found.chains:
        for place, second in enumerate(graph[steps[1]].inputs):
            if second.node in found.sequences:
                source = graph[second.node].inputs[0]
                entries[source] = source
            elif second in found.masks:
                entries |= {tensor: tensor for tensor in found.masks[second]}
            elif second.node not in inside:
                if second not in read:
                    read[second] = next((other for other in read if same(graph, other, second)), second)
                entries |= {graph[name].inputs[place]: read[second] for name in steps}
    return entries | {initial: initial for initial in found.states.values()}


def step_gradient(
    graph: Graph, found: Unrolled, needed: Collection[str], keep: Collection[str], exits: Exits
) -> StepGradient | None:
    """The gradient of `found`, if the graph has it in a form that is recognised.

    Args:
        graph: the graph, without cycles.
        found: steps.
        needed: names of nodes that a result or an effect depends on.
        keep: names of nodes that are fetched.
        exits: see `Exits`.
    """
    names = [name for chain in found.chains for name in chain]
    if any(graph[name].op in _OWN or "_gradient_op_type" in graph[name].attrs for name in names):
        return None
    search = _Search(graph, found, frozenset(needed) - frozenset(keep))
    for proposal in islice(search.proposals(), _TRIES):
        known = exits(graph, proposal)
        if known:
            return StepGradient(proposal.starts, known)
    return None


class _Search:
    def __init__(self, graph: Graph, found: Unrolled, needed: Collection[str]) -> None:
        self.graph, self.found, self.needed = graph, found, needed
        self.inside = {name for steps in found.chains for name in steps}
        self.steps = len(found.chains[0])
        self.entries = entries_of(graph, found)
        self.place = {name: number for number, name in enumerate(topological(graph))}
        self.sums: dict[TensorId, list[TensorId]] = {}
        self.nodes: set[str] = set()

    def proposals(self) -> Iterator[Proposal]:
        """Every way to say which gradient belongs to which result."""
        behind = self.graph.reached(self.found.gradient, self._pure_readers) & set(self.needed)
        behind -= {name for name in behind if self._is_end(self.graph[name])}
        self.sums = self._sums(behind)
        anchors = {tensor.node for tensors in self.sums.values() for tensor in tensors}
        if not anchors:
            return
        self.nodes = behind & self.graph.reached(
            anchors, lambda node: (tensor.node for tensor in node.inputs if tensor.node in behind)
        )
        unpacked = self._absorb_unpacked()
        self._absorb_sizes()
        self._close()
        self._absorb_sizes()
        read = dict.fromkeys(tensor for name in self._ordered() for tensor in self.graph[name].inputs)
        outer = [tensor for tensor in read if self._is_outer(tensor)]
        yield from self._assigned(outer, unpacked)

    def _pure_readers(self, node: Node) -> Iterable[str]:
        return () if self._is_end(node) else (name for name in self.graph.readers(node) if name not in self.inside)

    def _is_end(self, node: Node) -> bool:
        return node.stateful or node.op == STEP_GRADIENT

    def _sums(self, behind: Collection[str]) -> dict[TensorId, list[TensorId]]:
        """For each entry the tensors that have the form of its gradient."""
        read: dict[TensorId, int] = {}
        for name in self.inside:
            for tensor in self.graph[name].inputs:
                if tensor in self.entries:
                    read[self.entries[tensor]] = read.get(self.entries[tensor], 0) + 1
        packed = {self.graph[name].inputs[0] for name in self.found.sequences}
        found: dict[TensorId, list[TensorId]] = {}
        for name in sorted(behind, key=self.place.__getitem__):
            node, made = self.graph[name], TensorId(name)
            if any(tensor.node not in behind for tensor in node.inputs):
                continue  # a sum that also has terms from elsewhere
            for entry in dict.fromkeys(self.entries.values()):
                if not self._alike(made, entry):
                    continue
                reads = self.steps if entry in packed else read.get(entry, 0)  # of items, each may be padded
                counted = node.op == "AddN" and reads >= len(node.inputs) >= self.steps
                if counted or (entry in packed and node.op == "Pack" and len(node.inputs) == self.steps):
                    found.setdefault(entry, []).append(made)
        return found

    def _alike(self, one: TensorId, other: TensorId) -> bool:
        left, right = self.graph.specs.get(one), self.graph.specs.get(other)
        if left is None or right is None or left.dtype != right.dtype or left.dtype not in FLOATS:
            return False
        return left.shape is not None and left.shape == right.shape

    def _absorb_unpacked(self) -> dict[TensorId, int]:
        """Take in the Unpack of the gradient of a Pack, and what leads from its items to the gradient alone: sums,
        masks. These depend on no step, and so are not behind one.

        Returns:
            What is unpacked, and along which axis.
        """
        found: dict[TensorId, int] = {}
        waiting = self._ordered()
        while waiting:
            node = self.graph[waiting.pop()]
            for tensor in node.inputs:
                maker = self.graph[tensor.node]
                if not self._is_outer(tensor) or maker.stateful or not self._serves_alone(maker):
                    continue
                if self._is_item(tensor):
                    self.nodes.add(maker.name)
                    found[maker.inputs[0]] = integer(maker.attrs.get("axis", 0))
                elif self._from_items(maker, _DEPTH):
                    self.nodes.add(maker.name)
                    waiting.append(maker.name)
        return found

    def _serves_alone(self, node: Node) -> bool:
        return all(reader in self.nodes for reader in self.graph.readers(node) if reader in self.needed)

    def _from_items(self, node: Node, depth: int) -> bool:
        """Whether a node makes something of items, and of others only if it is a sum."""
        found = [
            self._is_item(tensor) or (depth > 0 and self._from_items(self.graph[tensor.node], depth - 1))
            for tensor in node.inputs
            if self._is_outer(tensor)
        ]
        return any(found) and (all(found) or node.op == "AddN")

    def _is_item(self, tensor: TensorId) -> bool:
        maker = self.graph[tensor.node]
        return maker.op == "Unpack" and maker.outputs == self.steps and maker.name not in self.found.sequences

    def _absorb_sizes(self) -> None:
        """Take in what computes whole numbers: shapes and offsets, which random numbers could not stand for."""
        waiting = [tensor for name in self._ordered() for tensor in self.graph[name].inputs]
        while waiting:
            tensor = waiting.pop()
            node, spec = self.graph[tensor.node], self.graph.specs.get(tensor)
            whole = spec is not None and spec.dtype in ("int32", "int64")
            pure = node.inputs and not node.stateful and node.name in self.needed
            if whole and pure and self._is_outer(tensor):
                self.nodes.add(node.name)
                waiting += node.inputs

    def _close(self) -> None:
        """Take in what depends on nothing but what is known by now: the gradient of an initial state, say."""
        waiting = sorted(self.nodes, key=self.place.__getitem__)
        while waiting:
            node = self.graph[waiting.pop()]
            for name in self.graph.readers(node):
                reader = self.graph[name]
                if name in self.nodes or name in self.inside or name not in self.needed or self._is_end(reader):
                    continue
                if all(tensor.node in self.nodes or not self._is_outer(tensor) for tensor in reader.inputs):
                    self.nodes.add(name)
                    waiting.append(name)

    def _is_outer(self, tensor: TensorId) -> bool:
        """Whether a tensor is none of the steps', the gradient's, or those that the steps read, and no constant."""
        name = tensor.node
        if name in self.nodes or name in self.inside or tensor in self.entries:
            return False
        return name not in self.found.sequences and self.graph[name].op != "Const"

    def _ordered(self) -> list[str]:
        return sorted(self.nodes, key=self.place.__getitem__)

    def _assigned(self, outer: list[TensorId], unpacked: Mapping[TensorId, int]) -> Iterator[Proposal]:
        graph = self.graph
        packs = [TensorId(name) for name in self.found.stacked]
        ends = {tensor: self._last(tensor) for tensor in self.found.last}
        singles = [tensor for tensor in outer if tensor not in unpacked and not is_zero(graph, tensor)]
        singles = [tensor for tensor in singles if any(self._alike(tensor, end) for end in ends.values())]
        if len(unpacked) > len(packs) or len(singles) > len(ends) or not (unpacked or singles):
            return
        for first, second in product(
            permutations(packs, len(unpacked)), permutations(list(ends.values()), len(singles))
        ):
            starts = [*zip(first, unpacked, strict=True), *zip(second, singles, strict=True)]
            along = all(
                integer(graph[pack.node].attrs.get("axis", 0)) == axis
                for pack, axis in zip(first, unpacked.values(), strict=True)
            )
            if along and all(self._alike(*pair) for pair in starts):
                given = {gradient for _, gradient in starts}
                yield self._proposal(tuple(starts), tuple(tensor for tensor in outer if tensor not in given))

    def _last(self, tensor: TensorId) -> TensorId:
        """The tensor of the last step in place of one of the first."""
        steps = next(steps for steps in self.found.chains if steps[0] == tensor.node)
        return TensorId(steps[-1], tensor.index)

    def _proposal(self, starts: tuple[tuple[TensorId, TensorId], ...], others: tuple[TensorId, ...]) -> Proposal:
        graph = self.graph
        entries = tuple(dict.fromkeys(self.entries.values()))
        names = self._ordered()
        read = dict.fromkeys(tensor for name in names for tensor in graph[name].inputs)
        within = self.inside | set(self.found.sequences)
        between = tuple(tensor for tensor in read if tensor.node in within)
        results = tuple(result for result, _ in starts)
        packs = [result.node for result in results if result.node not in self.inside]
        steps = self._function([*within, *packs], entries, (*results, *between), self.entries)
        candidates = tuple(chain.from_iterable(self._candidates(entry, names) for entry in entries))
        arguments = (*(gradient for _, gradient in starts), *between, *entries, *others)
        walk = self._function(names, arguments, tuple(tensor for _, tensor in candidates), self.entries)
        return Proposal(entries, starts, steps, between, others, walk, candidates)

    def _candidates(self, entry: TensorId, names: Iterable[str]) -> Iterator[tuple[TensorId, TensorId]]:
        """Sums over the steps; of a state, whatever has its shape and is read elsewhere."""
        sums = self.sums.get(entry, [])
        if not sums and entry in self.found.states.values() and not is_zero(self.graph, entry):
            made = (tensor for name in names for tensor in self.graph.tensors(self.graph[name]))
            sums = [tensor for tensor in made if self._alike(tensor, entry) and self._is_read(tensor)]
        return ((entry, tensor) for tensor in sums)

    def _is_read(self, tensor: TensorId) -> bool:
        readers = {use.node for use in self.graph.uses(tensor)}
        return any(name not in self.nodes and name in self.needed for name in readers)

    def _function(
        self,
        names: Iterable[str],
        arguments: tuple[TensorId, ...],
        results: tuple[TensorId, ...],
        instead: Mapping[TensorId, TensorId],
    ) -> Function:
        """These nodes, and the constants that they read, as a function; each of `instead` is another tensor there."""
        graph = self.graph
        given = {tensor: f"argument:{place}" for place, tensor in enumerate(arguments)}  # no node's name has a colon

        def inner(tensor: TensorId) -> TensorId:
            known = given.get(tensor) or given.get(instead.get(tensor, tensor))
            return tensor if known is None else TensorId(known)

        own = [Node(name, "Placeholder", outputs=1) for name in given.values()]
        order = sorted(set(names), key=self.place.__getitem__)
        made = set(order)
        constants = dict.fromkeys(
            tensor.node
            for name in order
            for tensor in map(inner, graph[name].inputs)
            if tensor.node not in made and tensor.node in graph.nodes
        )
        for name in (*constants, *order):
            copy = graph[name].copy()
            copy.inputs, copy.control = [inner(tensor) for tensor in copy.inputs], []
            own.append(copy)
        specs = {tensor: graph.specs[tensor] for name in (*constants, *order) for tensor in graph.tensors(graph[name])
                 if tensor in graph.specs}  # fmt: skip
        values = {name: graph.constants[name] for name in constants if name in graph.constants}
        return Function(Graph(own, specs, values), tuple(given.values()), tuple(map(inner, results)))


def ends(graph: Graph, keep: Collection[str]) -> set[str]:
    """The nodes that are needed for themselves: those with effects, and those that are fetched."""
    return {node.name for node in graph if node.name in keep or (node.stateful and node.op not in READS)}
