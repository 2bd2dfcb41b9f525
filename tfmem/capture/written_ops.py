"""Ops that TensorFlow makes of tensors of a graph, as nodes for that graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.core.framework.node_def_pb2 import NodeDef

from tfmem.capture.captured import free_name

Known = tuple[tf.DType, tf.TensorShape | Sequence[int | None]]


def written_ops(
    function: Callable[..., list[tf.Tensor]],
    given: Sequence[tuple[str, Known]],
    scope: str,
    device: str,
    taken: set[str],
) -> tuple[list[NodeDef], list[str]]:
    """Nodes that compute a function of tensors, and the names of its results.

    Args:
        function: takes a tensor for each of `given`, in their order; its results are outputs of nodes that it makes.
        given: tensors of the graph: name, and dtype and shape.
        scope: the nodes' names begin with it.
        device: where they run.
        taken: names that the graph has; those of the nodes are added.
    """
    with tf.Graph().as_default() as scratch:
        tensors = [tf.compat.v1.placeholder(*known) for _, known in given]
        results = function(*tensors)
    names = {each.op.name: name for each, (name, _) in zip(tensors, given, strict=True)}
    made = []
    for node in scratch.as_graph_def().node:
        if node.op != "Placeholder":
            new = NodeDef()
            new.CopyFrom(node)
            new.name = free_name(f"{scope}/{node.name}", taken)
            new.device = device
            new.input[:] = [names.get(name, name) for name in node.input]
            names[node.name] = new.name
            made.append(new)
    return made, [names[each.op.name] for each in results]
