"""GraphDef <-> Graph: the one module of this package that uses protocol buffers and TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, versions_pb2
from tensorflow.python.eager.graph_only_ops import graph_placeholder
from tensorflow.python.framework import op_def_registry, versions
from tensorflow.python.ops import handle_data_util

from custom_ops import image_functions
from graph_passes.errors import AlreadyOptimizedError, GraphError
from graph_passes.graph.frames import frames, subgraph
from graph_passes.graph.ir import (
    MEMORY_OPS,
    AttrValue,
    Code,
    DataType,
    Function,
    Graph,
    Literal,
    Node,
    Shape,
    TensorId,
    TensorSpec,
    parse_input,
)
from graph_passes.graph.ops import copied

BODIES = {
    "While": ("cond", "body"),
    "StatelessWhile": ("cond", "body"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}
# of TensorFlow's importer
IMPORT_ERRORS = (ValueError, TypeError, KeyError, OverflowError, MemoryError, tf.errors.OpError)
MOST_OUTPUTS = 1 << 16  # of one op, in the body of a function, where TensorFlow has not looked at its attributes yet
SMALL_CONSTANT = 64  # elements: axes, permutations, shapes and scalars, which passes read


def from_graph_def(
    graph_def: Any,
    inferred: Any = None,
    functions: bool = False,
) -> Graph:
    """Read a GraphDef; shapes and dtypes by TensorFlow's own inference.

    Args:
        graph_def: a `tf.compat.v1.GraphDef`, function library included.
        inferred: a `tf.Graph` that holds the same nodes with their shapes; imported here if it is not given. A GraphDef
            does not say what shape a captured variable has, so the graph of a function has to be given.
        functions: whether to read the functions that nodes call, and the bodies of lowered loops, too.

    Returns:
        The graph, its nodes in the order of `graph_def`.

    Raises:
        AlreadyOptimizedError: the graph holds tfmem's ops.
        GraphError: TensorFlow cannot import the graph.
    """
    refuse_optimized((node_def.name, node_def.op) for node_def in graph_def.node)
    if inferred is None:
        inferred = imported(graph_def)
    return _read(graph_def, inferred, functions)


def refuse_optimized(names_and_types: Iterable[tuple[str, str]]) -> None:
    """Raise AlreadyOptimizedError if one of the ops is tfmem's."""
    for name, op in names_and_types:
        if op in MEMORY_OPS:
            raise AlreadyOptimizedError(
                f"the graph holds tfmem's op '{name}' ({op}): it was optimised before; give the original graph"
            )


def from_tf_graph(graph: Any, functions: bool = False) -> Graph:
    """Read a live `tf.Graph` (or the FuncGraph being built); it is not changed. `functions`: see `from_graph_def`.

    Raises:
        AlreadyOptimizedError: the graph holds tfmem's ops.
    """
    refuse_optimized((op.name, op.type) for op in graph.get_operations())
    return _read(graph.as_graph_def(), graph, functions)


def imported(graph_def: Any) -> tf.Graph:
    """A graph that TensorFlow makes of a GraphDef, with the shapes that TensorFlow infers.

    Raises:
        GraphError: TensorFlow cannot import it.
    """
    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
    except IMPORT_ERRORS as error:
        raise GraphError(
            f"TensorFlow cannot import the graph; make tf.graph_util.import_graph_def take it: {error}"
        ) from error
    return graph


def _read(graph_def: Any, graph: Any, functions: bool) -> Graph:
    library = {function.signature.name: function for function in graph_def.library.function} if functions else {}
    read = Graph(*_read_parts(graph_def, graph), _read_functions(graph_def, graph, library))
    if functions:
        _read_frames(read, graph_def, graph)
    return read


def _read_parts(
    graph_def: Any, graph: Any
) -> tuple[list[Node], dict[TensorId, TensorSpec], dict[str, npt.NDArray[Any]]]:
    nodes, specs, constants = [], {}, {}
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
        if node_def.op == "Const" and _is_small(specs[TensorId(node_def.name)]):
            value = _value(node_def.attr["value"].tensor)
            if value is not None:
                constants[node_def.name] = value
    return nodes, specs, constants


def _value(tensor: Any) -> npt.NDArray[Any] | None:
    """A constant's value; None for a proto that only TensorFlow's C++ reads (more values than its shape has, say)."""
    try:
        return tf.make_ndarray(tensor)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError):
        return None


def _read_functions(graph_def: Any, graph: Any, library: Mapping[str, Any]) -> dict[tuple[str, str], Function]:
    """The bodies that the nodes of `graph_def` call, with the shapes of their callers; calls in them included."""
    found = {}
    for node_def in graph_def.node:
        for attribute in BODIES.get(node_def.op, ()):
            definition = library.get(node_def.attr[attribute].func.name)
            inputs = graph.get_operation_by_name(node_def.name).inputs
            if attribute in BODIES["If"]:
                inputs = inputs[1:]  # what decides is no argument
            if definition is not None and len(inputs) == len(definition.signature.input_arg):
                rest = {name: other for name, other in library.items() if name != definition.signature.name}
                function = _read_function(definition, inputs, rest)
                if function is not None:
                    found[node_def.name, attribute] = function
    return found


def _read_function(definition: Any, inputs: Sequence[Any], library: Mapping[str, Any]) -> Function | None:
    """None where TensorFlow cannot import the body; passes then say that they could not read it."""
    names = [argument.name for argument in definition.signature.input_arg]
    graph_def = graph_pb2.GraphDef(versions=versions_pb2.VersionDef(producer=versions.GRAPH_DEF_VERSION))
    called = [node for node in definition.node_def if node.op in library]
    if called:
        graph_def.library.function.extend(library.values())
    graph_def.node.extend(definition.node_def)
    flat = flat_names(definition, library)
    if flat is None:
        return None
    try:
        for node in graph_def.node:
            node.input[:] = [name if name.startswith("^") else flat[name] for name in node.input]
            node.attr.pop("_class", None)
        results = [parse_input(flat[definition.ret[result.name]])[0] for result in definition.signature.output_arg]
    except KeyError:  # it reads, or returns, what it does not make
        return None
    return _infer(graph_def, names, inputs, results, library, dict(definition.attr))


def _infer(
    graph_def: Any,
    names: Sequence[str],
    inputs: Sequence[Any],
    results: Sequence[TensorId],
    library: Mapping[str, Any],
    attrs: Mapping[str, Any],
) -> Function | None:
    """A function of the nodes of `graph_def`, with the arguments `names` of the shapes of `inputs`."""
    graph = tf.Graph()
    try:
        with graph.as_default():
            arguments = [_argument(name, tensor) for name, tensor in zip(names, inputs, strict=True)]
            input_map = {f"{name}:0": argument for name, argument in zip(names, arguments, strict=True)}
            read = {name for node in graph_def.node for name in node.input}
            used = {key: value for key, value in input_map.items() if key.removesuffix(":0") in read}
            tf.graph_util.import_graph_def(graph_def, input_map=used, name="")
    except IMPORT_ERRORS:
        return None
    whole = graph.as_graph_def()
    body = Graph(*_read_parts(whole, graph), _read_functions(whole, graph, library))
    return Function(body, tuple(names), tuple(results), attrs)


def _read_frames(read: Graph, graph_def: Any, graph: Any) -> None:
    """Give the bodies and conditions of lowered loops to `read.functions`, under the name of their LoopCond."""
    definitions = {node_def.name: node_def for node_def in graph_def.node}
    for frame in frames(read):
        entries = [variable.enter for variable in frame.variables] + list(frame.constants)
        inputs = [graph.get_operation_by_name(name).inputs[0] for name in entries]
        nexts = [read[variable.next_iteration].inputs[0] for variable in frame.variables]
        kept = {name: _argument_name(name) for name in frame.constants}
        before = {f"{v.switch}:1": _argument_name(v.switch) for v in frame.variables} | kept
        asked = {v.merge: _argument_name(v.merge) for v in frame.variables} | kept
        for attribute, renamed, ends in (
            ("body", before, nexts + [TensorId(name) for name in kept]),
            ("cond", asked, [read[frame.condition].inputs[0]]),
        ):
            edges = frozenset(parse_input(text)[0].node for text in renamed)
            part = graph_pb2.GraphDef(versions=graph_def.versions)
            for name in subgraph(read, ends, edges):
                node = part.node.add()
                node.CopyFrom(definitions[name])
                node.input[:] = [renamed.get(text, text) for text in node.input if not text.startswith("^")]
                node.attr.pop("_class", None)
            results = [parse_input(renamed.get(_text_of(end), _text_of(end)))[0] for end in ends]
            function = _infer(part, list(renamed.values()), inputs, results, {}, {})
            if function is not None:
                read.functions[frame.condition, attribute] = function


def _argument_name(name: str) -> str:
    """A name without "/": an op "a" cannot be imported where "a/b" is there already."""
    return "argument." + name.replace("/", ".")


def _text_of(tensor: TensorId) -> str:
    return tensor.node if tensor.index == 0 else str(tensor)


def _argument(name: str, outer: Any) -> Any:
    argument = graph_placeholder(outer.dtype.base_dtype, outer.shape, name=name)
    if outer.dtype in (tf.resource, tf.variant):
        data = handle_data_util.get_handle_data(outer)
        if data is not None and data.is_set:
            handle_data_util.set_handle_data(argument, data)
    return argument


def flat_names(definition: Any, library: Mapping[str, Any]) -> dict[str, str] | None:
    """How a graph writes what a function's body reads: the tensor "split:output:1" is "split:1" there; None where that
    is unknown."""
    flat = {argument.name: argument.name for argument in definition.signature.input_arg}
    for node_def in definition.node_def:
        outputs = output_names(node_def, library)
        if outputs is None:
            return None
        for index, output in enumerate(outputs):
            flat[f"{node_def.name}:{output}"] = f"{node_def.name}:{index}" if index else node_def.name
    return flat


def output_names(node_def: Any, library: Mapping[str, Any]) -> list[str] | None:
    """How a function's body writes the outputs of an op, in order: "product:0"; None where that is unknown."""
    called = library.get(node_def.op)
    definition = called.signature if called is not None else op_def_registry.get(node_def.op)
    if definition is None:
        return None
    result = []
    for output in definition.output_arg:
        if output.number_attr:
            count = node_def.attr[output.number_attr].i
        elif output.type_list_attr:
            count = len(node_def.attr[output.type_list_attr].list.type)
        else:
            count = 1
        if not 0 <= count <= MOST_OUTPUTS:
            return None
        result += [f"{output.name}:{place}" for place in range(count)]
    return result


def _is_small(spec: TensorSpec) -> bool:
    return bool(spec.itemsize) and spec.nbytes is not None and spec.nbytes <= SMALL_CONSTANT * spec.itemsize


def _spec(tensor: Any) -> TensorSpec:
    behind = None
    if tensor.dtype == tf.resource:
        data = handle_data_util.get_handle_data(tensor)
        if data is not None and data.is_set and len(data.shape_and_type) == 1:
            held = data.shape_and_type[0]
            behind = _tensor_spec(tf.as_dtype(held.dtype), tf.TensorShape(held.shape))
    return _tensor_spec(tensor.dtype.base_dtype, tensor.shape, behind)


def _tensor_spec(dtype: Any, dims: Any, behind: TensorSpec | None = None) -> TensorSpec:
    shape = tuple(dims.as_list()) if dims.rank is not None else None
    fixed = dtype not in (tf.string, tf.resource, tf.variant)
    return TensorSpec(dtype.name, dtype.size if fixed else 0, shape, behind)


def to_graph_def(graph: Graph, base: Any) -> Any:
    """Write `graph` as a GraphDef with the library and versions of `base`, the GraphDef it was read from; the code that
    its nodes name goes into the library."""
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
        if "_class" in node_def.attr:
            _drop_lost_colocations(node_def, graph)
    present = {function.signature.name for function in result.library.function}
    named = {image_functions.name_of(code): code for node in graph for code in codes_of(node.attrs)}
    result.library.function.extend(
        image_functions.definition(code) for name, code in named.items() if name not in present
    )
    return result


def codes_of(attrs: Mapping[str, AttrValue | Any]) -> list[bytes]:
    """The code of GPU kernels that a node's attributes name."""
    lists = [value for value in attrs.values() if isinstance(value, tuple)]
    return [item.data for items in lists for item in items if isinstance(item, Code)]


def _drop_lost_colocations(node_def: Any, graph: Graph) -> None:
    """Nothing can be placed with a node that a pass has removed."""
    groups = node_def.attr["_class"].list.s
    kept = [group for group in groups if group.decode(errors="backslashreplace").removeprefix("loc:@") in graph.nodes]
    if len(kept) == len(groups):
        return
    del node_def.attr["_class"]
    if kept:
        node_def.attr["_class"].list.s.extend(kept)


def attributes(node: Node) -> bytes:
    """The type and the attributes of a node as a serialised NodeDef without name and inputs, the same in every process;
    those that only made sense where the node was are left out."""
    node_def = node_def_pb2.NodeDef(op=node.op)
    for key, value in copied(node).items():
        node_def.attr[key].CopyFrom(encode(value))
    return bytes(node_def.SerializeToString(deterministic=True))


def encode(value: AttrValue | Any) -> Any:
    """A pass's attribute value as an AttrValue proto; values read from a GraphDef pass through."""
    if isinstance(value, attr_value_pb2.AttrValue):
        return value
    if isinstance(value, str):
        value = value.encode()
    for kind, name in ((bool, "b"), (int, "i"), (float, "f"), (bytes, "s")):  # a bool is an int, too
        if isinstance(value, kind):
            return attr_value_pb2.AttrValue(**{name: value})
    if isinstance(value, Code):
        name = image_functions.name_of(value.data)
        return attr_value_pb2.AttrValue(func=attr_value_pb2.NameAttrList(name=name))
    if isinstance(value, DataType):
        return attr_value_pb2.AttrValue(type=tf.as_dtype(value.name).as_datatype_enum)
    if isinstance(value, Literal):
        array = np.array(value.values, tf.as_dtype(value.dtype).as_numpy_dtype).reshape(value.shape)
        return attr_value_pb2.AttrValue(tensor=tf.make_tensor_proto(array))
    if isinstance(value, tuple):
        return _encode_list(value)
    if isinstance(value, Shape):
        return attr_value_pb2.AttrValue(shape=tf.TensorShape(value.dims).as_proto())
    raise GraphError(f"no attribute value can hold {value!r} of type {type(value).__name__}")


def _encode_list(values: tuple[Any, ...]) -> Any:
    result = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue())
    for value in values:
        item = encode(value)
        kind = item.WhichOneof("value")
        getattr(result.list, kind).append(getattr(item, kind))
    return result
