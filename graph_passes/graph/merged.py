"""Pairs of ops that a kernel library will run as one, decided after every graph pass has run."""

from __future__ import annotations

from graph_passes.graph.ir import Graph, TensorId


def merged_pairs(graph: Graph) -> list[tuple[str, str]]:
    """Pairs (op that stays, op that goes) that oneDNN's layout pass merges (mkl_layout_pass.cc, `minfo_`)."""
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
    return pairs
