"""Sizes that a graph computes from shapes which are known before it runs, as constants.

    x [64, 8] -> Shape -> StridedSlice -> Pack -> Reshape        becomes        Const [64, 8] -> Reshape

Grappler folds these in a function. The graph of a session is planned before Grappler sees it. What Grappler would fold
TensorFlow computes here: the ops that read nothing but shapes, constants, and one another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

import numpy as np
import tensorflow as tf

from graph_passes.graph.ir import DataType, Graph, Literal, Node, TensorId, TensorSpec
from graph_passes.graph.ops import LOOPS, SHAPE_READERS
from graph_passes.graph.rewrite import Names, NewNode, Rewrite, apply_rewrites
from graph_passes.graph.serde import encode

MOST = 64  # numbers of a tensor that is a size
_CALLS = LOOPS | {"If", "StatelessIf", "Case", "StatelessCase", "PartitionedCall", "Merge", "Switch"}
_DTYPES = frozenset({"int32", "int64"})


def with_static_sizes(graph: Graph, order: Sequence[str], fetched: Collection[str] = ()) -> tuple[Graph, list[Rewrite]]:
    """A copy of `graph` whose readers of known sizes read constants, and the rewrites that make it so.

    Args:
        graph: with the shapes that hold whatever is fed.
        order: of one step, names of its nodes, each behind those that it reads. Ops elsewhere that read shapes are
            looked at as well: they would else keep a tensor of which they need no number.
        fetched: nodes that stay.
    """
    elsewhere = [node.name for node in graph if node.op in SHAPE_READERS]
    order = [name for name in dict.fromkeys((*order, *elsewhere)) if name not in fetched]
    known = _known(graph, order)
    values = _computed(graph, [name for name in order if name in known])
    read = {
        tensor: np.asarray(value)
        for tensor, value in values.items()
        if any(use.node not in known for use in graph.uses(tensor))
    }
    if not read:
        return graph, []
    names, edited = Names(graph), graph.copy()
    nodes, rewired = [], []
    for tensor, value in read.items():
        spec = TensorSpec(value.dtype.name, value.dtype.itemsize, value.shape)
        literal = Literal(spec.dtype, value.shape, tuple(value.reshape(-1).tolist()))
        attrs = {"dtype": DataType(spec.dtype), "value": literal}
        made = NewNode(names.fresh(f"tfmem/sizes/{tensor.node}"), "Const", (), attrs, graph[tensor.node].device)
        nodes.append(made)
        rewired.append((tensor, TensorId(made.name)))
        edited.specs[TensorId(made.name)] = spec
        edited.constants[made.name] = value
    gone = tuple(name for name in known if graph[name].op != "Const")
    rewrite = Rewrite("sizes", tuple(nodes), rewired=tuple(rewired), replaced=gone, successor=nodes[-1].name)
    apply_rewrites([rewrite], edited)
    return edited, [rewrite]


def _known(graph: Graph, order: Sequence[str]) -> frozenset[str]:
    """The ops whose results follow from shapes and constants."""
    found: set[str] = set()
    for name in order:
        node = graph[name]
        if node.op == "Const":
            if name in graph.constants and graph.constants[name].size <= MOST:
                found.add(name)
        elif node.op in SHAPE_READERS:
            if all(_sizes(graph, tensor) is not None for tensor in node.inputs):
                found.add(name)
        elif _computes_sizes(graph, node) and all(tensor.node in found for tensor in node.inputs):
            found.add(name)
    return frozenset(found)


def _computes_sizes(graph: Graph, node: Node) -> bool:
    """Whether an op makes few integers from what it reads, and nothing else."""
    if not node.inputs or node.stateful or node.op in _CALLS:
        return False
    specs = [graph.specs.get(tensor) for tensor in graph.tensors(node)]
    return bool(specs) and all(
        spec is not None and spec.dtype in _DTYPES and (spec.sizes is None or prod(spec.sizes) <= MOST)
        for spec in specs
    )


def _sizes(graph: Graph, tensor: TensorId) -> tuple[int, ...] | None:
    spec = graph.specs.get(tensor)
    return None if spec is None else spec.sizes


def _computed(graph: Graph, known: Sequence[str]) -> Mapping[TensorId, np.ndarray]:
    """What these ops make, but for constants."""
    tensors: dict[TensorId, tf.Tensor] = {}
    with tf.Graph().as_default() as computing, tf.device("CPU"):
        for name in known:
            node, outputs = graph[name], list(graph.tensors(graph[name]))
            if node.op == "Const":
                made = [tf.constant(graph.constants[name])]
            elif node.op in SHAPE_READERS:
                read = [_sizes(graph, tensor) or () for tensor in node.inputs]
                made = [
                    tf.constant(_number(node.op, sizes), graph.specs[output].dtype)
                    for sizes, output in zip(read, outputs, strict=True)
                ]
            else:
                attrs = {key: encode(value) for key, value in node.attrs.items() if not key.startswith("_")}
                made = computing.create_op(node.op, [tensors[each] for each in node.inputs], attrs=attrs).outputs
            tensors.update(zip(outputs, made, strict=True))
        wanted = {tensor: made for tensor, made in tensors.items() if graph[tensor.node].op != "Const"}
        with tf.compat.v1.Session(graph=computing) as session:
            return session.run(wanted)


def _number(op: str, sizes: tuple[int, ...]) -> int | list[int]:
    """What a reader of shapes says of one."""
    return prod(sizes) if op == "Size" else len(sizes) if op == "Rank" else list(sizes)
