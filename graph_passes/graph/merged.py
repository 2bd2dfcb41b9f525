"""Pairs of ops that a kernel library will run as one, decided after every graph pass has run."""

from __future__ import annotations

from graph_passes.graph.ir import Graph, TensorId


def merged_pairs(graph: Graph) -> list[tuple[str, str]]:
    """Pairs (op that stays, op that goes) that oneDNN's layout pass merges (mkl_layout_pass.cc, `minfo_`).

    It merges no pair of which one op has a control input.
    """
    pairs = []
    for node in graph:
        if node.op == "Conv2DBackpropFilter" and len(node.inputs) == 3:
            gradient = node.inputs[2]
            pairs += [(node.name, use.node) for use in graph.uses(gradient) if graph[use.node].op == "BiasAddGrad"]
        elif node.op in ("Conv2D", "_FusedConv2D") and node.inputs:
            source = graph[node.inputs[0].node]
            if source.op == "Pad" and len(graph.uses(node.inputs[0])) == 1:
                pairs.append((node.name, source.name))
            readers = graph.uses(TensorId(node.name))
            if node.op == "Conv2D" and len(readers) == 1 and graph[readers[0].node].op == "BiasAdd":
                pairs.append((node.name, readers[0].node))
    return [pair for pair in pairs if not any(graph[name].control for name in pair)]


# gradient -> (the op that it belongs to, which of the gradient's inputs is that op's result)
_PAIRED = {"MaxPoolGrad": ("MaxPool", 1), "MaxPool3DGrad": ("MaxPool3D", 1), "LRNGrad": ("LRN", 2)}


def is_paired(graph: Graph, tensor: TensorId) -> bool:
    """Whether oneDNN's gradient reads `tensor` straight from the op that made it, or is not used at all.

    The two share a workspace that no edge of the given graph shows: which of equal numbers the pooling took, say. With
    another op in between, TensorFlow's own gradient runs, which may choose otherwise (mkl_layout_pass.cc, `wsinfo_`).
    """
    made = graph[tensor.node].op
    return tensor.index == 0 and any(_PAIRED.get(graph[use.node].op) == (made, use.index) for use in graph.uses(tensor))
