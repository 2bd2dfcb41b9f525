"""Who needs what, when some nodes are about to be removed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from graph_passes.ir import Graph, TensorId
from graph_passes.recurrent.match import Launch, NewNode


def inputs_of(node: NewNode | Launch) -> Iterator[TensorId]:
    """What a new node reads."""
    yield from node.inputs if isinstance(node, NewNode) else (t for d in node.directions for t in d.tensors())


def is_needed(
    graph: Graph, name: str, removed: Collection[str], keep: Collection[str], replaced: Collection[TensorId] = ()
) -> bool:
    """Whether a node does anything but serve what will be removed, or make what will be replaced."""
    waiting, seen = [name], {name}
    while waiting:
        node = graph[waiting.pop()]
        if node.name in removed:
            continue
        if node.name in keep or node.stateful:
            return True
        made = [tensor for tensor in graph.tensors(node) if tensor not in replaced]
        readers = {use.node for tensor in made for use in graph.uses(tensor)} - seen
        seen |= readers
        waiting += readers
    return False


def is_read(graph: Graph, tensor: TensorId, removed: Collection[str], keep: Collection[str]) -> bool:
    """Whether somebody needs this tensor."""
    return tensor.node in keep or any(is_needed(graph, use.node, removed, keep) for use in graph.uses(tensor))


def dead_readers(
    graph: Graph, removed: Collection[str], keep: Collection[str], replaced: Collection[TensorId]
) -> set[str]:
    """The nodes that read what is removed and not replaced, and serve nobody; and what reads those."""
    found, waiting = set(removed), list(removed)
    while waiting:
        for tensor in graph.tensors(graph[waiting.pop()]):
            for use in graph.uses(tensor):
                if (
                    tensor not in replaced
                    and use.node not in found
                    and not is_needed(graph, use.node, removed, keep, replaced)
                ):
                    found.add(use.node)
                    waiting.append(use.node)
    return found
