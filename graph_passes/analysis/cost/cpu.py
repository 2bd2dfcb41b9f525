"""Workspace that TensorFlow's CPU kernels are known to take: read in their source, and seen in observed steps."""

from __future__ import annotations

from math import prod

from graph_passes.graph.ir import Graph, Node, TensorId

# Convolutions, products and reductions were seen to take less than 1% of their operands.


def workspace(graph: Graph, node: Node) -> int:
    """Bytes that the CPU kernel of `node` allocates while it runs, beyond its outputs."""
    if node.op == "MaxPoolGrad":
        # An index of 8 bytes for each pooled number, and the pooled tensor again. The kernel writes that in place where
        # no other op still needs it (maxpooling_op.cc, `MaxPoolingGradOp`).
        pooled = node.inputs[1]
        return 8 * prod(graph.sizes(pooled) or (0,)) + graph.nbytes(pooled)
    if node.op == "MaxPool":
        return graph.nbytes(TensorId(node.name)) // 4  # which input each output is
    if node.op == "Einsum":
        return sum(graph.nbytes(tensor) for tensor in node.inputs)  # transposed, for a product of matrices
    return 0
