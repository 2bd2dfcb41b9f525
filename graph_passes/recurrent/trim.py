"""What of a match is needed at all, and what of the graph is dead once it is done."""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.ir import Graph, TensorId
from graph_passes.ops import EXTERNAL
from graph_passes.recurrent.hoist import READS
from graph_passes.recurrent.lists import ARRAYS
from graph_passes.recurrent.loops import Loop
from graph_passes.recurrent.match import Launch, Match, NewNode, reads


def trimmed(
    graph: Graph,
    loop: Loop,
    nodes: list[NewNode | Launch],
    rewired: list[tuple[TensorId, TensorId]],
    keep: Collection[str],
) -> Match:
    """The match, without rewirings and new nodes that nobody needs, and with all old nodes that are then dead."""
    dead = _dead(graph, loop, nodes, rewired, keep)
    taken = [(old, new) for old, new in rewired if old.node in loop.nodes and old.node in keep]
    alive = [(old, new) for old, new in rewired if any(use.node not in dead for use in graph.uses(old))] + [
        pair for pair in taken if not graph.uses(pair[0])
    ]
    needed = {new.node for _, new in alive} | {node.name for node in nodes if isinstance(node, Launch)}
    kept: list[NewNode | Launch] = []
    for node in reversed(nodes):
        if node.name in needed:
            kept.append(node)
            needed.update(tensor.node for tensor in reads(node))
    kept.reverse()
    return Match(
        name=loop.name,
        carrier=loop.carrier,
        nodes=tuple(kept),
        rewired=tuple(alive),
        removed=tuple(sorted(_dead(graph, loop, kept, alive, keep))),
        renamed=tuple((old.node, new) for old, new in taken),
    )


def _dead(
    graph: Graph,
    loop: Loop,
    nodes: list[NewNode | Launch],
    rewired: list[tuple[TensorId, TensorId]],
    keep: Collection[str],
) -> set[str]:
    unread = {old for old, _ in rewired}
    needed = {tensor.node for node in nodes for tensor in reads(node)} | {new.node for _, new in rewired} | set(keep)
    dead = set(loop.nodes)
    waiting = [tensor.node for name in loop.nodes for tensor in graph[name].inputs] + [old.node for old, _ in rewired]
    while waiting:
        node = graph[waiting.pop()]
        if node.name in dead or node.name in needed or (node.op in EXTERNAL and node.op not in ("Const", *READS)):
            continue
        if node.stateful and node.op not in READS | ARRAYS:
            continue
        read = [use.node for tensor in graph.tensors(node) if tensor not in unread for use in graph.uses(tensor)]
        if all(reader in dead for reader in (*read, *graph.waiting(node))):
            dead.add(node.name)
            waiting += [tensor.node for tensor in node.inputs]
    return dead
