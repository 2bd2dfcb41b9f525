"""What one training step of a session's graph runs: such a graph holds initializers, restores and evaluation too.

A control edge makes an op run whenever its successor does, so MemOps are chained inside one step and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.analysis.memory.roles import is_layer, source
from graph_passes.errors import GraphError
from graph_passes.graph import ops
from graph_passes.graph.ir import Graph, TensorId


def step_region(graph: Graph, fetches: Sequence[str] = ()) -> Graph:
    """The part of `graph` that one step runs; `graph` itself is left as it is.

    Args:
        graph: a whole session graph.
        fetches: names of the ops that a step runs; by default those that train.

    Raises:
        GraphError: a fetch is not in the graph, or there are several training steps to choose from.
    """
    kept = graph.reached(fetches or find_fetches(graph), graph.predecessors)
    nodes = (node.copy() for node in graph if node.name in kept)
    specs = {tensor: spec for tensor, spec in graph.specs.items() if tensor.node in kept}
    constants = {name: value for name, value in graph.constants.items() if name in kept}
    functions = {place: function for place, function in graph.functions.items() if place[0] in kept}
    return Graph(nodes, specs, constants, functions)


def reads_before_updates(graph: Graph) -> list[tuple[str, str]]:
    """Pairs (update, op that reads the same variable) that need a control edge.

    A reference variable of TensorFlow 1 is read where it lies, so an update that comes early would change what a later
    op reads. A resource variable's reader keeps the value that it read.
    """
    pairs = []
    for update in [node for node in graph if ops.is_update(node.op) and node.inputs]:
        variable = source(graph, update.inputs[0])
        if graph[variable.node].op not in ("VariableV2", "Variable"):
            continue
        later = graph.reached([update.name], graph.successors)
        pairs += [(update.name, reader) for reader in _readers(graph, variable) if reader not in later]
    return pairs


def waits_in_place(graph: Graph) -> list[tuple[str, str]]:
    """Pairs (update, op that reads the value before it) for edges that keep variables where they lie, as far as these
    edges close no cycle.

    TensorFlow updates a variable where it lies if no op holds its old value. Otherwise it writes a copy: the variable
    has moved, into the middle of what a large tensor needs in the next step.
    """
    copy, pairs = graph.working_copy(), list[tuple[str, str]]()
    reads: dict[TensorId, list[str]] = {}
    for node in copy:
        if node.op == "ReadVariableOp":
            reads.setdefault(source(copy, node.inputs[0]), []).append(node.name)
    for update in [node for node in copy if ops.writes(node) and node.op != "AssignVariableOp"]:
        for variable in update.inputs:
            for read in reads.get(source(copy, variable), ()):
                for reader in _readers(copy, TensorId(read)):
                    later = reader in copy.reached([update.name], copy.successors)
                    if not later and reader not in copy.predecessors(update):
                        copy.add_control(update.name, reader)
                        pairs.append((update.name, reader))
    return pairs


def with_waits(graph: Graph, pairs: Sequence[tuple[str, str]]) -> Graph:
    """A copy of `graph` in which the first op of each pair waits for the second."""
    found = graph.copy()
    for update, reader in pairs:
        found.add_control(update, reader)
    return found


def _readers(graph: Graph, variable: TensorId) -> list[str]:
    """The ops that read a variable, each once; not those that update it."""
    readers, views = [], [variable]
    while views:
        for use in graph.uses(views.pop()):
            node = graph[use.node]
            if node.op in ops.VIEWS:
                views.append(TensorId(node.name))
            elif not ops.writes(node):
                readers.append(node.name)
    return list(dict.fromkeys(readers))


def find_fetches(graph: Graph) -> list[str]:
    """The ops that train: each writes a weight, that is, a variable which a layer reads, with what comes from a layer.

    Initializers, restores and moving averages do not. Without any, the results that come from layers.

    Raises:
        GraphError: several groups of updates can be run on their own.
    """
    layers = [node for node in graph if is_layer(graph, node)]
    weights = {source(graph, tensor) for node in layers for tensor in node.inputs}
    behind = graph.reached([node.name for node in layers], graph.readers)
    updates = [
        node.name
        for node in graph
        if ops.is_update(node.op) and node.name in behind and source(graph, node.inputs[0]) in weights
    ]
    if not updates:
        last = [node.name for node in graph if next(graph.successors(node), None) is None]
        return [name for name in last if name in behind and not ops.is_update(graph[name].op)] or last
    groups = _groups(graph, updates)
    if len(groups) > 1 and any(mask.bit_count() > 1 for mask in groups):
        names = ", ".join(f"'{name}'" for name in groups.values())
        raise GraphError(
            f"the graph has several training steps, {names}; name the one to optimise: "
            f"optimize(graph, fetches=[{next(iter(groups.values()))!r}])"
        )
    return updates


def _groups(graph: Graph, updates: Sequence[str]) -> dict[int, str]:
    """The sets of updates that one op waits for, as bits, with the first such op; no set that is part of another."""
    masks = {name: 1 << place for place, name in enumerate(updates)}
    pending = list(updates)
    while pending:
        name = pending.pop()
        for successor in graph.successors(graph[name]):
            mask = masks.get(successor, 0) | masks[name]
            if mask != masks.get(successor):
                masks[successor] = mask
                pending.append(successor)
    first: dict[int, str] = {}
    for node in graph:
        if node.name in masks:
            first.setdefault(masks[node.name], node.name)
    return {
        mask: name for mask, name in first.items() if not any(mask != other and mask & other == mask for other in first)
    }
