"""Shapes that a program set itself (`set_shape`), which a GraphDef does not hold.

Relies on `_output_shapes`, which TensorFlow's importer takes as a node's shapes and infers the others from; on the
graph that a function of a `FuncGraph` was made of (`_functions`, `_cached_graph`); and on names that Grappler's layout
optimizer gives (`-LayoutOptimizer`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef

from graph_passes.errors import GraphError
from tfmem.capture.captured import Captured

Shapes = Mapping[str, list[tf.TensorShape]]  # of all outputs of an op

_WITHOUT = (tf.resource, tf.variant)  # what they refer to counts, not they
_GRAPPLERS_LAYOUT = "-LayoutOptimizer"  # how the names end of ops that Grappler inserts to change a layout


def traced_graphs(graph: tf.Graph) -> dict[str, tf.Graph]:
    """The graphs of a traced function and of those that it calls, for `Captured.traced`."""
    called = {name: getattr(function, "_cached_graph", None) for name, function in graph._functions.items()}
    return {"": graph} | {name: inner for name, inner in called.items() if inner is not None}


def refined(build: Callable[[Shapes], tf.Graph], captured: Captured) -> tf.Graph:
    """The graph that `build` makes, with the shapes that the program knew.

    The first ops whose shapes were lost are told, as the others mostly follow from them; then the others.

    Args:
        build: makes the graph with shapes given.
        captured: knows what was traced.
    """
    told: dict[str, list[tf.TensorShape]] = {}
    graph = build(told)
    for only_first in (True, False):
        lost = _lost(graph, captured) if captured.traced else {}
        if not lost:
            break
        told |= _first(lost, graph) if only_first else lost
        try:
            graph = build(told)
        except GraphError:  # Grappler kept a name and changed the layout: the op's shape is another now
            break
    return graph


def program_shapes(captured: Captured) -> Iterator[str]:
    """What the program knew of the shapes of the ops that are still there, as text, in the graph's order: all that
    `refined` may tell."""
    for node in captured.graph_def.node:
        traced = _made(node.name, captured)
        if traced is not None and traced.type == node.op:
            yield f"{node.name} {' '.join(str(output.shape) for output in traced.outputs)}"


def with_shapes(graph_def: GraphDef, shapes: Shapes) -> GraphDef:
    """A copy whose nodes of these names say their shapes; the graph itself if there are none."""
    if not shapes:
        return graph_def
    result = GraphDef()
    result.CopyFrom(graph_def)
    for node in result.node:
        if node.name in shapes:
            node.attr["_output_shapes"].list.shape.extend(shape.as_proto() for shape in shapes[node.name])
    return result


def _lost(graph: tf.Graph, captured: Captured) -> dict[str, list[tf.TensorShape]]:
    """The ops of which the program knew more, with what it knew."""
    lost = {}
    behind = _behind_layouts(graph, captured)
    for op in graph.get_operations():
        if op.name in behind:
            continue
        if all(output.shape.is_fully_defined() or output.dtype in _WITHOUT for output in op.outputs):
            continue
        traced = _traced(op, captured)
        if traced is None:
            continue
        pairs = [(output.shape, known.shape) for output, known in zip(op.outputs, traced.outputs, strict=True)]
        if all(found.is_compatible_with(known) for found, known in pairs):
            merged = [found.merge_with(known) for found, known in pairs]
            if any(_says_more(known, found) for (found, _), known in zip(pairs, merged, strict=True)):
                lost[op.name] = merged
    return lost


def _behind_layouts(graph: tf.Graph, captured: Captured) -> set[str]:
    """Names of the ops behind those by which Grappler changes layouts: what the program knew may be of other axes.

    Grappler transposes the inputs of a convolution, and the results back. An op in between that has no `data_format`
    changes in its shape alone:

        x [n, h, w, c] -> Transpose -> Conv2D [n, c, h, w] -> Relu [n, c, h, w] -> Transpose -> y [n, h, w, c]

    Ops behind the last transposition count, too: it is missing where the layout makes no difference, as behind a mean
    over h and w, so counting transpositions does not find the ops in between.
    """
    pending = [
        op for op in graph.get_operations() if op.name.endswith(_GRAPPLERS_LAYOUT) and _traced(op, captured) is None
    ]
    behind = {op.name for op in pending}
    while pending:
        readers = {op.name: op for output in pending.pop().outputs for op in output.consumers()}
        pending += [op for name, op in readers.items() if name not in behind]
        behind.update(readers)
    return behind


def _traced(op: tf.Operation, captured: Captured) -> tf.Operation | None:
    """The op that the program made, if `op` is still what it was."""
    traced = _made(op.name, captured)
    if traced is None or traced.type != op.type or len(traced.outputs) != len(op.outputs):
        return None
    return traced


def _made(name: str, captured: Captured) -> tf.Operation | None:
    """The op that the program gave this name, or that an inlined function had."""
    function, own = captured.origins.get(name, ("", name))
    graph = captured.traced.get(function)
    try:
        return graph.get_operation_by_name(own) if graph is not None else None
    except KeyError:
        return None


def _says_more(known: tf.TensorShape, found: tf.TensorShape) -> bool:
    if found.rank is None:
        return known.rank is not None
    return any(
        theirs is None and ours is not None for ours, theirs in zip(known.as_list(), found.as_list(), strict=True)
    )


def _first(lost: Shapes, graph: tf.Graph) -> dict[str, list[tf.TensorShape]]:
    """The lost shapes that do not depend on other lost shapes."""
    behind: set[str] = set()
    for op in graph.get_operations():
        if any(tensor.op.name in lost or tensor.op.name in behind for tensor in op.inputs):
            behind.add(op.name)
    return {name: shapes for name, shapes in lost.items() if name not in behind}
