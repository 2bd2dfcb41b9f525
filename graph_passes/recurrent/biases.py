"""Products with a bias behind them become one op on a GPU, as Grappler makes of them on a CPU alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from graph_passes.ir import DataType, TensorId, boolean
from graph_passes.recurrent.match import Launch, Match, NewNode
from graph_passes.recurrent.needs import inputs_of

FUSED = "_FusedMatMul"  # TensorFlow's own; it has no gradient
_DTYPE = "float32"  # on a GPU and a CPU alike; not so of shorter types


def with_fused_biases(match: Match) -> Match:
    """`match`, in which no `BiasAdd` reads and writes again what a `MatMul` of the match made for it alone."""
    read = Counter(tensor for node in match.nodes for tensor in inputs_of(node))
    read.update(new for _, new in (*match.rewired, *match.renamed))
    products = {
        TensorId(node.name): node
        for node in match.nodes
        if isinstance(node, NewNode) and node.op == "MatMul" and not node.control and read[TensorId(node.name)] == 1
    }
    nodes: list[NewNode | Launch] = []
    for node in match.nodes:
        product = products.get(node.inputs[0]) if isinstance(node, NewNode) and node.op == "BiasAdd" else None
        dtype = product and product.attrs["T"]
        if isinstance(node, NewNode) and product and isinstance(dtype, DataType) and dtype.name == _DTYPE:
            nodes.remove(product)
            nodes.append(_fused(product, node))
        else:
            nodes.append(node)
    return replace(match, nodes=tuple(nodes))


def _fused(product: NewNode, bias: NewNode) -> NewNode:
    attrs = {
        "T": product.attrs["T"],
        "transpose_a": boolean(product.attrs.get("transpose_a", False)),
        "transpose_b": boolean(product.attrs.get("transpose_b", False)),
        "num_args": 1,
        "fused_ops": ("BiasAdd",),
        "epsilon": 0.0,
    }
    return replace(bias, op=FUSED, inputs=(*product.inputs, bias.inputs[1]), attrs=attrs)
