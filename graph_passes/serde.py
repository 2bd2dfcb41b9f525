"""GraphDef <-> Graph: the one place of this package that speaks protocol buffers and TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2

from graph_passes.errors import AlreadyOptimizedError, GraphError
from graph_passes.ir import (
    MEMORY_OPS,
    AttrValue,
    DataType,
    Graph,
    Node,
    Shape,
    TensorId,
    TensorSpec,
    parse_input,
)


def from_graph_def(
    graph_def: Any, feed_shapes: Mapping[str, Sequence[int | None]] | None = None, inferred: Any = None
) -> Graph:
    """Read a GraphDef; shapes and dtypes by TensorFlow's own inference.

    Args:
        graph_def: a `tf.compat.v1.GraphDef`, function library included.
        feed_shapes: static shapes of placeholders, by node name, where they are better known than in the graph.
        inferred: a `tf.Graph` that holds the same nodes with their shapes; imported here if it is not given. A GraphDef
            does not say what shape a captured variable has, so the graph of a function has to be given.

    Returns:
        The graph, its nodes in the order of `graph_def`.

    Raises:
        AlreadyOptimizedError: the graph holds tfmem's ops.
        GraphError: TensorFlow cannot import the graph.
    """
    refuse_optimized((node_def.name, node_def.op) for node_def in graph_def.node)
    if inferred is None:
        inferred = tf.Graph()
        try:
            with inferred.as_default():
                tf.graph_util.import_graph_def(_with_shapes(graph_def, feed_shapes or {}), name="")
        except (ValueError, tf.errors.OpError) as error:
            raise GraphError(f"TensorFlow cannot import the graph: {error}") from error
    return _read(graph_def, inferred)


def refuse_optimized(names_and_types: Iterable[tuple[str, str]]) -> None:
    """Raise AlreadyOptimizedError if one of the ops is tfmem's."""
    for name, op in names_and_types:
        if op in MEMORY_OPS:
            raise AlreadyOptimizedError(
                f"the graph holds tfmem's op '{name}' ({op}): it was optimised before; give the graph as it was before"
            )


def from_tf_graph(graph: Any) -> Graph:
    """Read a live `tf.Graph` (or the FuncGraph being built); it is not changed.

    Raises:
        AlreadyOptimizedError: the graph holds tfmem's ops.
    """
    refuse_optimized((op.name, op.type) for op in graph.get_operations())
    return _read(graph.as_graph_def(), graph)


def _with_shapes(graph_def: Any, feed_shapes: Mapping[str, Sequence[int | None]]) -> Any:
    if not feed_shapes:
        return graph_def
    shaped = graph_pb2.GraphDef()
    shaped.CopyFrom(graph_def)
    for node_def in shaped.node:
        if node_def.name in feed_shapes:
            dims = feed_shapes[node_def.name]
            node_def.attr["shape"].shape.CopyFrom(tf.TensorShape(dims).as_proto())
            node_def.attr.pop("_output_shapes", None)
            node_def.attr.pop("_user_specified_name", None)
    return shaped


def _read(graph_def: Any, graph: Any) -> Graph:
    nodes, specs = [], {}
    for node_def in graph_def.node:
        op = graph.get_operation_by_name(node_def.name)
        inputs = [parse_input(text) for text in node_def.input]
        nodes.append(
            Node(
                name=node_def.name,
                op=node_def.op,
                inputs=[tensor for tensor, is_control in inputs if not is_control],
                control=[tensor.node for tensor, is_control in inputs if is_control],
                device=node_def.device,
                attrs=dict(node_def.attr),
                outputs=len(op.outputs),
                stateful=op.op_def.is_stateful if op.op_def is not None else True,
            )
        )
        for index, tensor in enumerate(op.outputs):
            specs[TensorId(node_def.name, index)] = _spec(tensor)
    return Graph(nodes, specs)


def _spec(tensor: Any) -> TensorSpec:
    shape = tuple(tensor.shape.as_list()) if tensor.shape.rank is not None else None
    dtype = tensor.dtype.base_dtype
    fixed = dtype not in (tf.string, tf.resource, tf.variant)
    return TensorSpec(dtype.name, dtype.size if fixed else 0, shape)


def to_graph_def(graph: Graph, base: Any) -> Any:
    """Write `graph` as a GraphDef with the library and versions of `base`, the GraphDef it was read from."""
    result = graph_pb2.GraphDef()
    result.library.CopyFrom(base.library)
    result.versions.CopyFrom(base.versions)
    for node in graph:
        node_def = result.node.add(name=node.name, op=node.op, device=node.device)
        for tensor in node.inputs:
            node_def.input.append(tensor.node if tensor.index == 0 else str(tensor))
        for before in node.control:
            node_def.input.append("^" + before)
        for key, value in node.attrs.items():
            node_def.attr[key].CopyFrom(encode(value))
    return result


def encode(value: AttrValue | Any) -> Any:
    """A pass's attribute value as an AttrValue proto; values read from a GraphDef pass through."""
    if isinstance(value, attr_value_pb2.AttrValue):
        return value
    if isinstance(value, bool):
        return attr_value_pb2.AttrValue(b=value)
    if isinstance(value, int):
        return attr_value_pb2.AttrValue(i=value)
    if isinstance(value, float):
        return attr_value_pb2.AttrValue(f=value)
    if isinstance(value, str):
        return attr_value_pb2.AttrValue(s=value.encode())
    if isinstance(value, DataType):
        return attr_value_pb2.AttrValue(type=tf.as_dtype(value.name).as_datatype_enum)
    if isinstance(value, Shape):
        return attr_value_pb2.AttrValue(shape=tf.TensorShape(value.dims).as_proto())
    raise GraphError(f"no attribute value can hold {value!r} of type {type(value).__name__}")
