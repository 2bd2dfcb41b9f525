"""Checks that an edited graph is still one: acyclic, every input there, every consumer of the right type."""

from __future__ import annotations

from custom_ops.ordering import topological_order
from graph_passes.errors import GraphError
from graph_passes.graph.ir import DataType, Graph, TensorId
from graph_passes.graph.merged import merged_pairs
from graph_passes.graph.order import topological


def verify_graph(graph: Graph) -> None:
    """Raise if `graph` is not well formed.

    Raises:
        GraphError: a cycle, an input that no node makes, or a MemOp that reads a tensor of another type.
    """
    for node in graph:
        for tensor in node.inputs:
            producer = graph[tensor.node]
            if tensor.index >= producer.outputs:
                raise GraphError(
                    f"'{node.name}' reads '{tensor}', but '{producer.name}' ({producer.op}) has "
                    f"{producer.outputs} outputs"
                )
        wanted = node.attrs.get("T")
        if node.op.startswith("MemOp") and isinstance(wanted, DataType) and node.inputs:
            spec = graph.specs.get(TensorId(*node.inputs[0]))
            if spec is not None and spec.dtype not in ("variant", wanted.name):
                raise GraphError(f"'{node.name}' moves {wanted.name}, but reads '{node.inputs[0]}' of {spec.dtype}")
    topological(graph)


def verify_merged(before: Graph, edited: Graph) -> None:
    """Raise if `edited` is no graph once oneDNN has merged pairs of its ops, and `before` was one.

    TensorFlow itself says so at the first call of the step: after every pass, and without a name.

    Raises:
        GraphError: an op has to wait for one half of a pair, and the other half for that op.
    """
    if (stuck := _stuck(edited)) is not None and _stuck(before) is None:
        raise GraphError(f"oneDNN runs '{stuck[0]}' and '{stuck[1]}' as one op, and what it reads would wait for it")


def _stuck(graph: Graph) -> tuple[str, str] | None:
    """The first pair that can never run as one op, or behind which one cannot."""
    pairs = {goes: stays for stays, goes in merged_pairs(graph)}
    after: dict[str, set[str]] = {pairs.get(node.name, node.name): set() for node in graph}
    waiting = dict.fromkeys(after, 0)
    for node in graph:
        name = pairs.get(node.name, node.name)
        for source in {pairs.get(each, each) for each in graph.predecessors(node)} - {name}:
            if name not in after[source]:
                after[source].add(name)
                waiting[name] += 1
    done = set(topological_order(waiting, after.__getitem__))
    return next(((stays, goes) for goes, stays in pairs.items() if stays not in done), None)
