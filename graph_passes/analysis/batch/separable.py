"""Which ops of a step can work on a piece of the batch, and regions of them that can run piece by piece.

sources          inputs, and what iterators give, with the batch as first dimension start the labels
separable        in the schedule's order, the rule of each op whose input depends on the batch
convex           of a stretch of the schedule, the separable ops from which no path leads out and back in:
batch norm's statistics, or a mean of the batch that other ops read, are such a path
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from graph_passes.analysis.batch.batch_rules import separation
from graph_passes.analysis.batch.labels import Asked, Label, MixesError, Rows, Separation
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import PRODUCTS
from graph_passes.refusals import Refusal

_FEEDS = frozenset({"Placeholder", "PlaceholderV2", "PlaceholderWithDefault", "_Arg", "_DeviceArg"})
_READ = frozenset({"IteratorGetNext", "IteratorGetNextSync", "OptionalGetValue", "QueueDequeueManyV2"})  # by the step
_SOURCES = _FEEDS | _READ


@dataclass(frozen=True, eq=False)
class Separable:
    """The ops of a step that can work on a piece of the batch.

    Attributes:
        graph: the graph.
        order: its schedule.
        batch: how many examples there are.
        rules: by name of an op, how it does.
        labels: of each tensor that depends on the batch.
        refused: by name of an op that reads such a tensor, why it does not.
    """

    graph: Graph
    order: tuple[str, ...]
    batch: int
    rules: Mapping[str, Separation]
    labels: Mapping[TensorId, Label]
    refused: Mapping[str, Refusal]

    def inside(self, reader: str, index: int, members: Collection[str]) -> bool:
        """Whether a data input is handed over within a piece, where both ops are members."""
        source = self.graph[reader].inputs[index]
        rows = self.rules[reader].inputs[index]
        return source.node in members and rows is not None and self.labels.get(source) == rows

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes that these ops make."""
        return sum(_bytes(self.graph, name) for name in names)


def batches(graph: Graph) -> list[int]:
    """Sizes that the first dimension of sources has, those of the largest sources first."""
    found: Counter[int] = Counter()
    for tensor in (tensor for node in graph if node.op in _SOURCES for tensor in graph.tensors(node)):
        sizes = graph.sizes(tensor)
        if sizes and sizes[0] > 1 and graph.specs[tensor].dtype != "resource":
            found[sizes[0]] += graph.nbytes(tensor)
    return [size for size, _ in found.most_common()]


def fed(graph: Graph) -> int:
    """Bytes of what a caller gives. TensorFlow shares the memory of a NumPy array that happens to be aligned, so its
    allocator counts all of them, some or none."""
    return sum(graph.nbytes(TensorId(node.name)) for node in graph if node.op in _FEEDS)


def separable(
    graph: Graph,
    order: Sequence[str],
    batch: int,
    fetched: Collection[str] = (),
    device: str = "",
    default: str = "",
) -> Separable:
    """Ask the rule of each op that reads what depends on the batch.

    Args:
        graph: the graph, shapes inferred.
        order: its schedule.
        batch: how many examples there are.
        fetched: nodes that are fetched by name: of these only such with one output are separable.
        device: ops elsewhere, and ops that wait for ops elsewhere, are not separable; "": they may be.
        default: the device of ops that name none, such as transposes that Grappler made.
    """
    labels: dict[TensorId, Label] = {}
    rules: dict[str, Separation] = {}
    refused: dict[str, Refusal] = {}
    for name in order:
        node = graph[name]
        if node.op in _SOURCES:
            sized = ((tensor, graph.sizes(tensor)) for tensor in graph.tensors(node))
            labels.update({tensor: Rows(0) for tensor, sizes in sized if sizes and sizes[0] == batch})
            continue
        given = [label if isinstance(label := labels.get(tensor), Rows) else None for tensor in node.inputs]
        if not any(given) or (device and not _is_local(graph, node, device, default)):
            continue
        try:
            found = _asked(graph, node, batch, given)
        except MixesError as error:
            refused[name] = error.refusal
            labels.update(_kept(graph, node, given))
            continue
        if node.stateful or not node.outputs or (name in fetched and node.outputs > 1):
            continue
        rules[name] = found
        labels.update(zip(graph.tensors(node), found.outputs, strict=True))
    return Separable(graph, tuple(order), batch, rules, labels, refused)


def _is_local(graph: Graph, node: Node, device: str, default: str) -> bool:
    """Whether an op runs on the device, and each of its pieces would wait for that device alone. Where a source is
    does not matter."""
    before = (graph[name] for name in graph.predecessors(node))
    here = (node.device or default) == device
    return here and all(each.op in _SOURCES or each.device in (device, "") for each in before)


def _asked(graph: Graph, node: Node, batch: int, labels: Sequence[Rows | None]) -> Separation:
    """The rule's answer. A source may have the batch's size by chance: without its label the op may have a rule."""
    try:
        return separation(Asked(graph, node, batch, tuple(labels)))
    except MixesError:
        fed = [graph[tensor.node].op in _SOURCES for tensor in node.inputs]
        without = tuple(None if is_fed else label for is_fed, label in zip(fed, labels, strict=True))
        if not any(without) or list(without) == list(labels):
            raise
        return separation(Asked(graph, node, batch, without))


def _kept(graph: Graph, node: Node, given: Sequence[Rows | None]) -> dict[TensorId, Label]:
    """Labels of what an op makes that needs all of the batch. Its readers may slice that; whether they may is asked."""
    found: dict[TensorId, Label] = {}
    for label in (label for label in given if label is not None and label.axis == 0):
        size = next(
            sizes[0]
            for tensor, each in zip(node.inputs, given, strict=True)
            if each == label and (sizes := graph.sizes(tensor))
        )
        for tensor in graph.tensors(node):
            sizes = graph.sizes(tensor)
            if sizes and sizes[0] == size:
                found.setdefault(tensor, label)
    return found


def convex(found: Separable, among: Collection[str]) -> frozenset[str]:
    """The part of `among`, separable ops, that can run piece by piece.

    Ops lie before or behind the ops that need all of the batch; the part that makes more bytes is returned.
    """
    members = frozenset(among)
    after = _crossed(found, members, forwards=True)
    before = _crossed(found, members, forwards=False)
    if not after:
        return members
    size_before, size_after = found.nbytes(before), found.nbytes(after)
    return members - (before if size_before <= size_after else after)


def _crossed(found: Separable, members: frozenset[str], forwards: bool) -> frozenset[str]:
    """Members behind a path that leaves the members and comes back, or those before it."""
    graph = found.graph
    crossing: set[str] = set()  # ops behind an edge out of the members, whichever way the path goes
    met: set[str] = set()
    for name in found.order if forwards else reversed(found.order):
        node = graph[name]
        edges = _before(graph, node) if forwards else _behind(graph, node)
        for other, reader, index in edges:
            leaves = name in members and other in members
            handed = leaves and (index < 0 or found.inside(reader, index, members))
            if other in crossing or (other in members and not handed):
                crossing.add(name)
                break
        if name in members and name in crossing:
            met.add(name)
    return frozenset(met)


def _before(graph: Graph, node: Node) -> list[tuple[str, str, int]]:
    """(op that `node` waits for, op that reads it, data input of that one, or -1). A constant waits for nothing, though
    Grappler gives one that it folded control edges."""
    if node.op == "Const":
        return []
    data = [(tensor.node, node.name, index) for index, tensor in enumerate(node.inputs)]
    return [*data, *((name, node.name, -1) for name in node.control)]


def _behind(graph: Graph, node: Node) -> list[tuple[str, str, int]]:
    data = [(use.node, use.node, use.index) for tensor in graph.tensors(node) for use in graph.uses(tensor)]
    return [*data, *((name, name, -1) for name in graph.waiting(node) if graph[name].op != "Const")]


def _bytes(graph: Graph, name: str) -> int:
    return sum(map(graph.nbytes, graph.tensors(graph[name])))


def levels(found: Separable) -> list[frozenset[str]]:
    """The separable ops between the ops that need all of the batch: each set can run piece by piece."""
    graph = found.graph
    level: dict[str, int] = {}
    for name in found.order:
        node, mine = graph[name], name in found.rules
        level[name] = 0
        for other, reader, index in _before(graph, node):
            known = other in found.rules
            handed = mine and known and (index < 0 or found.inside(reader, index, found.rules))
            level[name] = max(level[name], level[other] + (known and not handed))
    sets: dict[int, set[str]] = {}
    for name in found.rules:
        sets.setdefault(level[name], set()).add(name)
    return [frozenset(sets[each]) for each in sorted(sets)]


def again(found: Separable, members: Collection[str], products: bool = True) -> frozenset[str]:
    """The separable ops outside of `members` that make, from what is kept, the rows that the members read.

    Args:
        found: the step.
        members: of a region.
        products: whether convolutions and matrix products are among them; else their results are kept.
    """
    reached: set[str] = set()
    pending = list(members)
    while pending:
        name = pending.pop()
        for index, tensor in enumerate(found.graph[name].inputs):
            source = tensor.node
            if source in members or source in reached or source not in found.rules:
                continue
            if found.inside(name, index, found.rules) and (products or found.graph[source].op not in PRODUCTS):
                reached.add(source)
                pending.append(source)
    return frozenset(reached)
