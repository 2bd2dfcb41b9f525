"""The last changes of a match: initial zeros that no op has to fill, biases that products add."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from graph_passes.graph.ir import DataType, Graph, Literal, TensorId, boolean
from graph_passes.graph.rewrite import Names, NewNode
from graph_passes.passes.recurrent.find.provenance import is_zero
from graph_passes.passes.recurrent.match import Match, RecurrentNode

FUSED = "_FusedMatMul"  # TensorFlow's own; it has no gradient
_DTYPE = "float32"  # on a GPU and a CPU alike; not so of shorter types


def without_zeros(graph: Graph, match: Match, names: Names) -> Match:
    """`match`, whose launches start from no tensor of `graph` that is known to be zeros.

    The op takes a tensor without rows for these.
    """
    nodes: list[NewNode | RecurrentNode] = []
    for node in match.nodes:
        nodes += _starting_from_none(graph, node, names) if isinstance(node, RecurrentNode) else [node]
    return replace(match, nodes=tuple(nodes))


def _starting_from_none(graph: Graph, launch: RecurrentNode, names: Names) -> list[NewNode | RecurrentNode]:
    states = {state for direction in launch.directions for state in direction.states}
    zeros = {state for state in states if state.node in graph.nodes and is_zero(graph, state)}
    if not zeros:
        return [launch]
    attrs = {"dtype": DataType(launch.dtype), "value": Literal(launch.dtype, (0, launch.units), ())}
    none = NewNode(names.fresh(f"{launch.name}/zeros"), "Const", (), attrs, launch.device)
    instead = dict.fromkeys(zeros, TensorId(none.name))
    directions = [
        replace(direction, states=tuple(instead.get(state, state) for state in direction.states))
        for direction in launch.directions
    ]
    return [none, replace(launch, directions=tuple(directions))]


def with_fused_biases(match: Match) -> Match:
    """`match`, in which no `BiasAdd` reads and writes again what a `MatMul` of the match made for it alone.

    Both become one op on a GPU, as Grappler makes of them on a CPU alone.
    """
    read = Counter(tensor for node in match.nodes for tensor in node.inputs)
    read.update(new for _, new in (*match.rewired, *match.renamed))
    products = {
        TensorId(node.name): node
        for node in match.nodes
        if isinstance(node, NewNode) and node.op == "MatMul" and not node.control and read[TensorId(node.name)] == 1
    }
    nodes: list[NewNode | RecurrentNode] = []
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
