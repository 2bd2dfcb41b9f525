"""Builds a `tf.Graph` from a captured GraphDef so that static shapes are known, those of captured
variables too.

Relies on TensorFlow's handle data (the shape and dtype behind a resource tensor, lost in a
GraphDef) and on `AtomicFunction`, the owner of a registered function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
from tensorflow.core.function.polymorphism import function_type as function_types
from tensorflow.python.eager import context
from tensorflow.python.eager.graph_only_ops import graph_placeholder
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import cpp_shape_inference_pb2, importer, ops
from tensorflow.python.ops import handle_data_util

from custom_ops import image_functions
from custom_ops.background import go_on
from graph_passes.analysis.memory.liveness import open_inputs
from graph_passes.errors import GraphError, ShapesError
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import EXTERNAL
from graph_passes.graph.serde import IMPORT_ERRORS
from tfmem.capture.captured import Captured, called_by, every_node, free_name, functions_in, op_name
from tfmem.capture.set_shapes import Shapes, refined, with_shapes

_EXAMPLE = 240  # a size that many others divide, and larger than most windows

FeedShapes = Mapping[str, Sequence[int | None]]
_HandleData = cpp_shape_inference_pb2.CppShapeInferenceResult.HandleData
_HandleShapeAndType = cpp_shape_inference_pb2.CppShapeInferenceResult.HandleShapeAndType


def shaped_graph(captured: Captured, feed_shapes: FeedShapes | None = None) -> tf.Graph:
    """The captured graph to read shapes from, with every feed's shape and handle known, and the shapes that the program
    set (`set_shape`) where ops kept their names.

    Args:
        captured: the graph, as captured or as rewritten.
        feed_shapes: shapes of feeds, by tensor name ("x:0"), where better known than in the graph.

    Raises:
        GraphError: a shape contradicts the graph's, or TensorFlow cannot import the graph.
        ShapesError: with `feed_shapes` alone it cannot.
    """
    body, library = own_library(captured.graph_def)

    def build(feed_shapes: FeedShapes, shapes: Shapes) -> tf.Graph:
        go_on()
        graph = tf.Graph()
        build_graph(graph, captured.feeds, with_shapes(body, shapes), library, feed_shapes)
        return graph

    try:
        return refined(partial(build, feed_shapes or {}), captured)
    except GraphError as error:
        if not feed_shapes:
            raise
        refined(partial(build, {}), captured)
        raise ShapesError(f"shapes of inputs contradict the step; give inputs of other shapes: {error}") from error


def sized_by_data(captured: Captured, graph: Graph, feed_shapes: FeedShapes) -> frozenset[TensorId]:
    """The tensors of `graph` whose size depends on data: it is not known even where all dimensions of inputs are.

    Args:
        captured: what `graph` was read from.
        graph: the graph.
        feed_shapes: as for `shaped_graph`.
    """
    given = open_inputs(graph)
    if not given:
        return frozenset()
    filled = {f"{name}:0": [_EXAMPLE if dim is None else dim for dim in shape] for name, shape in given.items()}
    try:
        shapes = shaped_graph(captured, {**feed_shapes, **filled})
    except GraphError:  # not of this size; then all counts as left open
        return frozenset()
    tensors = {
        TensorId(op.name, place): tensor for op in shapes.get_operations() for place, tensor in enumerate(op.outputs)
    }
    unknown = {name for name, tensor in tensors.items() if not tensor.shape.is_fully_defined()}
    # The sizes of a GraphDef's variables may be unknown: then what is unknown need not depend on data.
    lacking = any(tensor in unknown for node in graph if node.op in EXTERNAL for tensor in graph.tensors(node))
    return frozenset() if lacking else frozenset(unknown)


def annotate_handles(graph_def: GraphDef, inputs: Iterable[tf.Tensor], rename: bool = True) -> dict[str, str]:
    """Write onto the placeholders of captured resources what they stand for, and give them names
    without "/".

    The attribute names are those that TensorFlow gives to a function's arguments. A name such as
    "a/Read/resource" could not be made before the op "a/Read" is imported: TensorFlow then takes
    "a/Read" for a scope.

    Returns:
        The new names of the renamed placeholders.
    """
    nodes = {node.name: node for node in graph_def.node}
    taken, renamed = set(nodes), {}
    for tensor in inputs:
        data = handle_data_util.get_handle_data(tensor) if tensor.dtype in (tf.resource, tf.variant) else None
        if data is None or not data.is_set:
            continue
        node = nodes[tensor.op.name]
        node.attr["_handle_dtypes"].list.type.extend(item.dtype for item in data.shape_and_type)
        node.attr["_handle_shapes"].list.shape.extend(item.shape for item in data.shape_and_type)
        if rename and "/" in node.name:
            renamed[node.name] = free_name(node.name.replace("/", "."), taken)
    if renamed:
        _rename(graph_def, renamed)
    return renamed


def _rename(graph_def: GraphDef, renamed: Mapping[str, str]) -> None:
    for node in graph_def.node:
        node.name = renamed.get(node.name, node.name)
        for place, name in enumerate(node.input):
            if op_name(name) in renamed:
                node.input[place] = ("^" if name.startswith("^") else "") + renamed[op_name(name)]
        if "_class" in node.attr:
            groups = (
                group.decode(errors="backslashreplace").removeprefix("loc:@") for group in node.attr["_class"].list.s
            )
            node.attr["_class"].list.s[:] = [f"loc:@{renamed.get(group, group)}".encode() for group in groups]


def build_graph(
    graph: tf.Graph,
    feeds: Sequence[str],
    graph_def: GraphDef,
    library: Iterable[atomic_function.AtomicFunction],
    feed_shapes: FeedShapes,
) -> list[tf.Tensor]:
    """Import `graph_def` into the empty `graph`, with inference starting from the shapes of feeds
    and their handles.

    Returns:
        The placeholders of `feeds`, in order.

    Raises:
        GraphError: a shape contradicts the graph's, or TensorFlow cannot import the graph.
    """
    body = GraphDef()
    body.CopyFrom(graph_def)
    nodes = {node.name: node for node in body.node}
    for name in feeds:
        if op_name(name) not in nodes:
            raise GraphError(
                f"the graph has no op '{op_name(name)}', which is to be fed; pass names of this graph's inputs"
            )
        if name in feed_shapes:
            _tighten(nodes[op_name(name)], feed_shapes[name])
    with graph.as_default(), ops.control_dependencies(None):
        try:
            for function in library:
                graph._add_function(function)
            handles = {name: _make_handle(nodes[name]) for name in map(op_name, feeds) if _is_handle(nodes[name])}
            _import_body(graph, body, handles)
        except IMPORT_ERRORS as error:
            raise GraphError(
                f"TensorFlow cannot import the graph; make tf.graph_util.import_graph_def take it: {error}"
            ) from error
    return [graph.get_tensor_by_name(name) for name in feeds]


def _tighten(node: NodeDef, wanted: Sequence[int | None]) -> None:
    shape = tf.TensorShape(node.attr["shape"].shape)
    if not shape.is_compatible_with(tf.TensorShape(wanted)):
        raise GraphError(
            f"input '{node.name}' has shape {shape} in the graph, not {tuple(wanted)}; "
            "give a shape that agrees in rank and in every known dimension"
        )
    node.attr["shape"].shape.CopyFrom(shape.merge_with(tf.TensorShape(wanted)).as_proto())
    node.attr.pop("_output_shapes", None)


def _is_handle(node: NodeDef) -> bool:
    return node.op == "Placeholder" and "_handle_dtypes" in node.attr


def _make_handle(node: NodeDef) -> tf.Tensor:
    placeholder = graph_placeholder(tf.as_dtype(node.attr["dtype"].type), [], name=node.name)
    for key, value in node.attr.items():
        if key.startswith("_") and key != "_output_shapes":
            placeholder.op._set_attr(key, value)
    types, shapes = node.attr["_handle_dtypes"].list.type, node.attr["_handle_shapes"].list.shape
    set_behind(placeholder, zip(types, shapes, strict=True))
    return placeholder


def set_behind(handle: tf.Tensor, behind: Iterable[tuple[int, TensorShapeProto]]) -> None:
    """Let a tensor that is a handle know the dtypes and shapes of what it refers to."""
    items = [_HandleShapeAndType(dtype=dtype, shape=shape) for dtype, shape in behind]
    handle_data_util.set_handle_data(handle, _HandleData(is_set=True, shape_and_type=items))


def _import_body(graph: tf.Graph, body: GraphDef, handles: Mapping[str, tf.Tensor]) -> None:
    """Import all but the handles. To wait for a handle means nothing; Grappler removes partners of
    colocations.
    """
    kept = [node for node in body.node if node.name not in handles]
    present = {node.name for node in kept}
    read: set[str] = set()
    partners: set[str] = set()
    for node in kept:
        inputs = [name for name in node.input if not (name.startswith("^") and name[1:] in handles)]
        if len(inputs) != len(node.input):
            node.input[:] = inputs
        read.update(map(op_name, inputs))
        if "_class" in node.attr:
            groups = [(group, group.decode(errors="backslashreplace")) for group in node.attr["_class"].list.s]
            node.attr["_class"].list.s[:] = [group for group, name in groups if name.removeprefix("loc:@") in present]
            partners.update((node.name, *(name.removeprefix("loc:@") for _, name in groups)))
    devices = _taken_off(kept, partners) if not graph._device_functions_outer_to_inner else {}
    input_map = {f"{name}:0": tensor for name, tensor in handles.items() if name in read}
    importer.import_graph_def(GraphDef(versions=body.versions, node=kept), input_map=input_map, name="")
    for device, names in devices.items():
        spec = tf.DeviceSpec.from_string(device)
        for name in names:
            graph.get_operation_by_name(name)._set_device(spec)


def _taken_off(nodes: Iterable[NodeDef], partners: Collection[str]) -> dict[str, list[str]]:
    """Take the devices off `nodes`, but for `partners` of colocations; the nodes' names by their devices.

    For each node that names a device the import enters `tf.device`, which takes longer than all else that it does.
    """
    devices: dict[str, list[str]] = {}
    for node in nodes:
        if node.device and node.name not in partners:
            devices.setdefault(node.device, []).append(node.name)
            node.device = ""
    return devices


def own_library(graph_def: GraphDef) -> tuple[GraphDef, list[atomic_function.AtomicFunction]]:
    """Give every library function a new name, and register it.

    Grappler changes bodies and keeps names, so a name may mean something else already; and
    TensorFlow drops a function with the object that made it. The returned objects own the new
    functions, so the caller keeps them. Functions that hold the code of GPU kernels are called by their digest,
    so that a process has each once.

    Returns:
        The graph without library, and the functions.
    """
    if not graph_def.library.function:
        return graph_def, []
    result = GraphDef()
    result.CopyFrom(graph_def)
    functions, owners, renamed = [], {}, {}
    for function in result.library.function:
        name = function.signature.name
        code = image_functions.code_in(function)
        if code is None:
            functions.append(function)
            renamed[name] = f"{name}_tfmem_{ops.uid()}"
        else:
            renamed[name] = image_functions.name_of(code)
            owners[renamed[name]] = image_functions.registered(code)
    for node in every_node(result):
        node.op = renamed.get(node.op, node.op)
        for value in node.attr.values():
            for called in functions_in(value):
                called.name = renamed.get(called.name, called.name)
    eager = context.context()
    for function in functions:
        function.signature.name = renamed[function.signature.name]
        for link in ("forward_function_name", "backward_function_name"):
            function.attr.pop(link, None)
        eager.add_function_def(function)
        name = function.signature.name
        owners[name] = atomic_function.AtomicFunction(name, eager, _flat_type(function))
    for function in functions:  # TensorFlow makes a graph of a function, to save it, from what owns it alone
        called = [*called_by(function.node_def), *dict.fromkeys(node.op for node in function.node_def)]
        owners[function.signature.name].children.extend(owners[name] for name in called if name in owners)
    result.ClearField("library")
    return result, list(owners.values())


def _flat_type(function) -> function_types.FunctionType:  # type: ignore[no-untyped-def]
    inputs = tuple(tf.TensorSpec(None, tf.as_dtype(argument.type)) for argument in function.signature.input_arg)
    outputs = tuple(tf.TensorSpec(None, tf.as_dtype(result.type)) for result in function.signature.output_arg)
    return function_types.from_structured_signature((inputs, {}), outputs)
