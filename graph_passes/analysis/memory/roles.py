"""Which ops are layers: the forward ops that multiply with a weight. Read from the dataflow, never from names."""

from __future__ import annotations

from collections.abc import Sequence

from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.graph import ops
from graph_passes.graph.ir import Graph, Node, TensorId
from graph_passes.graph.merged import merged_pairs

_FEW = 1 << 10  # bytes that matter to no budget


def layers(graph: Graph, timeline: Timeline) -> list[int]:
    """Positions of the forward convolutions and matrix products that read a variable, ascending."""
    forward = enumerate(timeline.steps[: timeline.turn + 1])
    return [position for position, step in forward if is_layer(graph, graph[step.node])]


def is_layer(graph: Graph, node: Node) -> bool:
    """Whether `node` is a convolution or matrix product with a variable's value."""
    return node.op in ops.PRODUCTS and any(reads_variable(graph, tensor) for tensor in node.inputs)


def has_gradient(graph: Graph) -> bool:
    """Whether the graph differentiates: see `gradient_ops`; or because a function that it calls does, or takes from a
    list what another loop put in. A region may hold it."""
    if any(node.op in ("TensorListPopBack", ops.FUSION_OP) for node in graph) or gradient_ops(graph):
        return True
    return any(has_gradient(function.graph) for function in graph.functions.values())


def gradient_ops(graph: Graph) -> list[str]:
    """Ops that make gradients, by their types, or because they multiply what a layer reads once more. Ops without
    either mark lie before these and behind them."""
    read: set[TensorId] = set()
    multiplied: dict[str, set[TensorId]] = {}
    found = []
    for node in graph:
        if "Grad" in node.op or "Backprop" in node.op:
            found.append(node.name)
        elif node.op in ops.PRODUCTS:
            activations = {source(graph, tensor) for tensor in node.inputs if not reads_variable(graph, tensor)}
            if is_layer(graph, node):
                read |= activations
            else:
                multiplied[node.name] = activations
    return found + [name for name, activations in multiplied.items() if not read.isdisjoint(activations)]


def reads_variable(graph: Graph, tensor: TensorId) -> bool:
    """Whether `tensor` is a variable's value, perhaps cast, transposed or reshaped."""
    node = graph[ops.passed(graph, tensor, ops.SAME_NUMBERS).node]
    return node.op in ("ReadVariableOp", "VariableV2", "Variable") or (
        node.op in ("Placeholder", "_Arg") and any("Resource" in graph[s].op for s in graph.successors(node))
    )


def first_update(graph: Graph, order: Sequence[str]) -> int:
    """The position of the first op that writes a weight, a variable that a layer reads; `len(order)` if none does."""
    weights = set()
    for node in graph:
        if node.op in ops.PRODUCTS:
            weights |= {source(graph, tensor) for tensor in node.inputs}
    for position, name in enumerate(order):
        node = graph[name]
        written = node.inputs[:1] if ops.is_update(node.op) else node.inputs if ops.writes(node) else ()
        if any(source(graph, tensor) in weights for tensor in written):
            return position
    return len(order)


def source(graph: Graph, tensor: TensorId) -> TensorId:
    """The variable (its handle) that `tensor` is the value of, or `tensor` itself."""
    return ops.passed(graph, tensor, ops.SAME_NUMBERS | {"ReadVariableOp"})


def convolution_inputs(graph: Graph, timeline: Timeline) -> frozenset[int]:
    """Indices of the buffers that a forward convolution reads."""
    convolutions = {
        position
        for position, step in enumerate(timeline.steps[: timeline.turn + 1])
        if graph[step.node].op in ops.CONVOLUTIONS
    }
    return frozenset(index for index, buffer in enumerate(timeline.buffers) if not convolutions.isdisjoint(buffer.uses))


def unordered(graph: Graph, order: Sequence[str], merging: bool, hosted: bool = False) -> frozenset[int]:
    """Positions of the ops that no control edge may go to.

    These are collectives, whose order is the runtime's own; what lives outside the step (a function's arguments take no
    control inputs); what a kernel library merges into another op; and what touches a device's memory little.

    Args:
        merging: whether the runtime merges pairs of ops after Grappler, as TensorFlow's oneDNN pass does on CPUs. An
            order between the two would make the merged op wait for itself.
        hosted: whether int32 tensors lie in the host's memory, as in a GPU's step. An edge from a GPU's op would make
            the host wait until the GPU has caught up. What is small may be a seed or a condition, which the host reads:
            that copy would wait behind all copies of moves, and the next op for it.
    """
    merged = {second for _, second in merged_pairs(graph)} if merging else frozenset[str]()
    return frozenset(
        position
        for position, name in enumerate(order)
        if name in merged
        or graph[name].op in ops.COLLECTIVES
        or graph[name].op in ops.EXTERNAL
        or (hosted and _is_free(graph, graph[name]))
    )


def _is_free(graph: Graph, node: Node) -> bool:
    """Whether all that an op reads and makes is small, or int32."""
    specs = [graph.specs.get(tensor) for tensor in (*node.inputs, *graph.tensors(node))]
    return bool(specs) and all(
        spec is not None and spec.nbytes is not None and (spec.dtype == "int32" or spec.nbytes <= _FEW)
        for spec in specs
    )
