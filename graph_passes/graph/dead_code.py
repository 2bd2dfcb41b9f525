"""Dead-code elimination: what of a graph nothing needs once a rewrite is done, and what of the rewrite itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.ops import ARRAYS, EXTERNAL, READS
from graph_passes.graph.rewrite import Inserted

New = TypeVar("New", bound=Inserted)


def dead_code(
    graph: Graph,
    start: Collection[str],
    nodes: Sequence[Inserted],
    rewired: Mapping[TensorId, TensorId],
    keep: Collection[str],
) -> set[str]:
    """The nodes of `graph` that nothing needs once it is rewritten.

    These are the nodes of `start`, their readers that nothing needs, and their inputs that no other node reads. What a
    new node reads stays, and so does what that reads.

    Args:
        graph: as it is before.
        start: the nodes that the rewrite takes the place of.
        nodes: what is inserted.
        rewired: old tensors, and what their readers will read.
        keep: names of nodes that are fetched.
    """
    dead = _dead_readers(graph, start, rewired, keep)
    read = {tensor.node for node in nodes for tensor in node.inputs} | {new.node for new in rewired.values()}
    waiting = [tensor.node for name in sorted(dead) for tensor in graph[name].inputs] + [old.node for old in rewired]
    while waiting:
        node = graph[waiting.pop()]
        if node.name in dead or node.name in read or node.name in keep or not _may_go(node):
            continue
        readers = (use.node for tensor in graph.tensors(node) if tensor not in rewired for use in graph.uses(tensor))
        if all(reader in dead for reader in (*readers, *graph.waiting(node))):
            dead.add(node.name)
            waiting += [tensor.node for tensor in node.inputs]
    return dead - graph.reached(dead & read, lambda node: dead.intersection(graph.predecessors(node)))


def without_dead(nodes: Sequence[New], needed: Collection[str]) -> list[New]:
    """The new `nodes` that the nodes named in `needed` are, or read; `nodes` are in topological order."""
    found, kept = set(needed), list[New]()
    for node in reversed(nodes):
        if node.name in found:
            kept.append(node)
            found.update(tensor.node for tensor in node.inputs)
    return kept[::-1]


def is_needed(
    graph: Graph, name: str, removed: Collection[str], keep: Collection[str], rewired: Collection[TensorId] = ()
) -> bool:
    """Whether a node does anything but serve what will be removed, or make what will be read elsewhere."""
    waiting, seen = [name], {name}
    while waiting:
        node = graph[waiting.pop()]
        if node.name in removed:
            continue
        if node.name in keep or node.stateful:
            return True
        made = [tensor for tensor in graph.tensors(node) if tensor not in rewired]
        readers = {use.node for tensor in made for use in graph.uses(tensor)} - seen
        seen |= readers
        waiting += readers
    return False


def is_read(graph: Graph, tensor: TensorId, removed: Collection[str], keep: Collection[str]) -> bool:
    """Whether a node that stays needs this tensor."""
    return tensor.node in keep or any(is_needed(graph, use.node, removed, keep) for use in graph.uses(tensor))


def _may_go(node: Node) -> bool:
    if node.op in EXTERNAL:
        return node.op in ("Const", *READS)
    return not node.stateful or node.op in READS | ARRAYS


def _dead_readers(
    graph: Graph, removed: Collection[str], rewired: Collection[TensorId], keep: Collection[str]
) -> set[str]:
    """`removed`, their readers that nothing needs, and the readers of those."""

    def dead(node: Node) -> Iterable[str]:
        tensors = [tensor for tensor in graph.tensors(node) if tensor not in rewired]
        readers = {use.node for tensor in tensors for use in graph.uses(tensor)}
        return [name for name in readers if not is_needed(graph, name, removed, keep, rewired)]

    return graph.reached(removed, dead)
