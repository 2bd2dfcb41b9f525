"""Which ops are layers: the forward ops that multiply with a weight. Read from the dataflow, never from names."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes import ops
from graph_passes.analysis.merged import merged_pairs
from graph_passes.analysis.timeline import Timeline
from graph_passes.ir import Graph, TensorId

_SAME_DATA = ops.VIEWS | {"Cast", "Transpose", "ConjugateTranspose"}


def layers(graph: Graph, timeline: Timeline) -> list[int]:
    """Positions of the forward convolutions and matrix products that read a variable, ascending."""
    found = []
    for position, step in enumerate(timeline.steps[: timeline.turn + 1]):
        node = graph[step.node]
        if node.op in ops.CONVOLUTIONS or node.op in ops.MATRIX_PRODUCTS:
            if any(reads_variable(graph, tensor) for tensor in node.inputs):
                found.append(position)
    return found


def reads_variable(graph: Graph, tensor: TensorId) -> bool:
    """Whether `tensor` is a variable's value, perhaps cast, transposed or reshaped."""
    node = graph[tensor.node]
    while node.op in _SAME_DATA and node.inputs:
        node = graph[node.inputs[0].node]
    return node.op in ("ReadVariableOp", "VariableV2", "Variable") or (
        node.op in ("Placeholder", "_Arg") and any("Resource" in graph[s].op for s in graph.successors(node))
    )


def convolution_inputs(graph: Graph, timeline: Timeline) -> frozenset[int]:
    """Indices of the buffers that a forward convolution reads."""
    convolutions = {
        position
        for position, step in enumerate(timeline.steps[: timeline.turn + 1])
        if graph[step.node].op in ops.CONVOLUTIONS
    }
    return frozenset(
        index for index, buffer in enumerate(timeline.buffers) if not convolutions.isdisjoint(buffer.uses)
    )


def unordered(graph: Graph, order: Sequence[str], merging: bool) -> frozenset[int]:
    """Positions of the ops whose order is the runtime's own: collectives, and what a kernel library merges away.

    Args:
        merging: whether the runtime merges pairs of ops after Grappler, as TensorFlow's oneDNN pass does on CPUs. An
            order between the two would make the merged op wait for itself.
    """
    merged = {second for _, second in merged_pairs(graph)} if merging else frozenset[str]()
    return frozenset(
        position for position, name in enumerate(order) if graph[name].op in ops.COLLECTIVES or name in merged
    )
