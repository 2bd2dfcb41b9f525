"""Gradients of what a pass inserts, by TensorFlow's own machinery.

A match of the recurrent pass computes new tensors from tensors of the graph through a few plain ops and
`TfmemRecurrent`, all of which have a registered gradient. So they are put into a scratch `tf.Graph`, differentiated
there, and the new ops are read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.eager.graph_only_ops import graph_placeholder

from custom_ops.recurrent.cell import from_text
from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph, TensorId, TensorSpec
from graph_passes.graph.rewrite import Names, NewNode
from graph_passes.graph.serde import encode
from graph_passes.passes.recurrent.match import RECURRENT_OP, Direction, RecurrentNode
from tfmem.capture.build import set_behind


def gradients(
    graph: Graph,
    nodes: Sequence[NewNode | RecurrentNode],
    ys: Sequence[tuple[TensorId, TensorId]],
    xs: Sequence[TensorId],
    outside: Mapping[TensorId, TensorId],
    names: Names,
    prefix: str,
) -> tuple[tuple[NewNode | RecurrentNode, ...], tuple[TensorId | None, ...]]:
    """Differentiate new nodes.

    Args:
        graph: the graph that the nodes will be inserted into; not changed.
        nodes: new nodes in topological order.
        ys: results of them, each with its gradient, a tensor of the graph.
        xs: what they read; of a resource, the gradient is that of the variable behind it.
        outside: the tensors of the graph that names in `nodes` and `xs` stand for; others are tensors of the graph.
        names: gives names to the gradient's ops.
        prefix: of these names.

    Returns:
        The gradient's nodes in topological order, and for each of `xs` its gradient; None if no result depends on it.

    Raises:
        GraphError: an op has no gradient, or TensorFlow refuses one.
    """
    scratch = tf.Graph()
    mine = {node.name for node in nodes}
    read = dict.fromkeys(tensor for node in nodes for tensor in node.inputs if tensor.node not in mine)
    read.update(dict.fromkeys([*(gradient for _, gradient in ys), *xs]))
    try:
        with scratch.as_default():
            inner = {tensor: _stand_in(graph, outside.get(tensor, tensor), place) for place, tensor in enumerate(read)}
            for place, node in enumerate(nodes):
                _insert(scratch, f"node_{place}", node, inner)
            before = len(scratch.get_operations())
            results = [inner[y] for y, _ in ys]
            with scratch.name_scope("gradients"):
                found = tf.gradients(results, [inner[x] for x in xs], [inner[gradient] for _, gradient in ys])
                found = [tf.convert_to_tensor(tensor) if tensor is not None else None for tensor in found]
    except (ValueError, TypeError, LookupError, tf.errors.OpError) as error:
        raise GraphError(f"what would take the place of a loop has no gradient: {error}") from error
    outer = {inner[tensor].name: outside.get(tensor, tensor) for tensor in inner}
    device = next((node.device for node in nodes if isinstance(node, RecurrentNode)), "")
    return _read_back(scratch, before, outer, found, names, prefix, device)


def _stand_in(graph: Graph, tensor: TensorId, place: int) -> Any:
    """What a tensor of the graph is in the scratch graph: a constant stays one, for shapes and axes are read."""
    spec = graph.specs.get(tensor, TensorSpec("float32", 4, None))
    name = f"outside_{place}"
    if tensor.node in graph.constants:
        return tf.constant(graph.constants[tensor.node], spec.dtype, name=name)
    placeholder = graph_placeholder(tf.as_dtype(spec.dtype), spec.shape, name=name)
    if spec.behind is not None:
        dtype, shape = tf.as_dtype(spec.behind.dtype), tf.TensorShape(spec.behind.shape)
        set_behind(placeholder, [(dtype.as_datatype_enum, shape.as_proto())])
    return placeholder


def _insert(scratch: tf.Graph, name: str, node: NewNode | RecurrentNode, inner: dict[TensorId, Any]) -> None:
    """Insert `node` under a name that no other uses: beside a node "a/b", TensorFlow does not give the name "a"."""
    new = node.node() if isinstance(node, RecurrentNode) else node
    node_def = node_def_pb2.NodeDef(name=name, op=new.op)
    input_map = {}
    for tensor in new.inputs:
        source = inner[tensor].name
        node_def.input.append(source)
        input_map[source] = inner[tensor]
    for key, value in new.attrs.items():
        node_def.attr[key].CopyFrom(encode(value))
    graph_def = graph_pb2.GraphDef(versions=scratch.graph_def_versions, node=[node_def])
    tf.graph_util.import_graph_def(graph_def, input_map=input_map, name="")
    for index, output in enumerate(scratch.get_operation_by_name(name).outputs):
        inner[TensorId(new.name, index)] = output


def _read_back(
    scratch: tf.Graph,
    before: int,
    outer: Mapping[str, TensorId],
    found: Sequence[Any],
    fresh: Names,
    prefix: str,
    device: str,
) -> tuple[tuple[NewNode | RecurrentNode, ...], tuple[TensorId | None, ...]]:
    names: dict[str, str] = {}
    nodes: list[NewNode | RecurrentNode] = []

    def place(tensor: Any) -> TensorId:
        known = outer.get(tensor.name)
        return known if known is not None else TensorId(names[tensor.op.name], tensor.value_index)

    needed = _ancestors(found)
    for op in scratch.get_operations()[before:]:
        if op.name not in needed:
            continue
        names[op.name] = fresh.fresh(f"{prefix}/{op.name}")
        attrs = {key: value for key, value in op.node_def.attr.items() if key != "_class"}
        control = tuple(names[waits.name] for waits in op.control_inputs if waits.name in names)
        inputs = tuple(map(place, op.inputs))
        if op.type == RECURRENT_OP:
            nodes.append(_launch(op, names[op.name], inputs, control, device))
        else:
            nodes.append(NewNode(names[op.name], op.type, inputs, attrs, "", control, len(op.outputs)))
    return tuple(nodes), tuple(None if tensor is None else place(tensor) for tensor in found)


def _launch(op: Any, name: str, inputs: tuple[TensorId, ...], control: tuple[str, ...], device: str) -> RecurrentNode:
    """A recurrent op of the scratch graph as data, so that GPU programs can be made for it."""
    cell, base = (
        from_text(text) if text else None for text in (op.get_attr(a).decode() for a in ("cell", "base_cell"))
    )
    assert cell is not None
    count = op.get_attr("directions")
    reverse = op.get_attr("reverse") or [False] * count
    sizes = [len(part) for part in (cell.sequences, cell.invariants, cell.vectors, cell.matrices, cell.states)]
    ends = [count * sum(sizes[:kind]) for kind in range(len(sizes) + 1)]
    kinds = [inputs[start:end] for start, end in pairwise(ends)]

    def direction(place: int) -> Direction:
        parts = (kind[place * size : (place + 1) * size] for kind, size in zip(kinds, sizes, strict=True))
        sequences, invariants, vectors, matrices, states = parts
        return Direction(sequences, invariants, vectors, matrices, states, reverse[place])

    directions = tuple(map(direction, range(count)))
    dtype = op.get_attr("T").name
    batch_major = op.get_attr("batch_major")
    batch = op.inputs[0].shape[0 if batch_major else 1] if op.inputs[0].shape.rank else None
    return RecurrentNode(name, cell, op.get_attr("units"), dtype, directions, device, control, base, batch, batch_major)


def _ancestors(tensors: Sequence[Any]) -> set[str]:
    waiting = [tensor.op for tensor in tensors if tensor is not None]
    found: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found.add(op.name)
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return found
