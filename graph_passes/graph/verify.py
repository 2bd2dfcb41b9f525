"""Checks that an edited graph is still one: acyclic, every input there, every consumer of the right type."""

from __future__ import annotations

from graph_passes.errors import GraphError
from graph_passes.graph.ir import DataType, Graph, TensorId
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
