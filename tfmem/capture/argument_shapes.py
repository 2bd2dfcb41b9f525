"""What Grappler knows of the shapes of arguments: an `EnsureShape` behind each says it while Grappler runs.

The runtime's arguments, those of the graph and of the functions that it calls, know their shape by `_output_shapes`,
but `OptimizeGraph` erases that attribute. Without shapes Grappler leaves products of constants, and sums of several
tensors, as they are; it rewrites them in the runtime's path, and the results differ in the last bits.

An attribute marks these ops, since Grappler gives ops of an inlined body other names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto

from tfmem.capture.captured import BODIES, free_name, functions_in, op_name

# What stands behind these is said by attributes of the argument.
HANDLES = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)

HANDLE_ATTRIBUTES = ("_handle_shapes", "_handle_dtypes")

_MARK = "_tfmem_argument_shape"

Handles = dict[str, dict[str, AttrValue]]  # by the argument
RepeatedNodes = Any  # a repeated field of nodes, for which protobuf has no public type


def shape_op(name: str, argument: str, dtype: int, shape: TensorShapeProto) -> NodeDef:
    """An op that says the shape of an argument."""
    node = NodeDef(name=name, op="EnsureShape", input=[argument])
    node.attr["T"].type = dtype
    node.attr["shape"].shape.CopyFrom(shape)
    node.attr[_MARK].b = True
    return node


def say_shapes(graph_def: GraphDef, functions: Iterable[FunctionDef]) -> None:
    """Insert an op behind each argument whose shape the trace says; a body returns its arguments themselves.

    Of a variable, an attribute of the argument says the shape, as it does in the runtime's graphs.
    """
    _say_handles(graph_def)
    for function in functions:
        arguments = function.signature.input_arg
        taken = {node.name for node in function.node_def} | {argument.name for argument in arguments}
        added: dict[str, NodeDef] = {}
        for place, argument in enumerate(arguments):
            shape = _traced_shape(function, place)
            if shape is not None and argument.type not in HANDLES:
                name = free_name(f"{argument.name}/shape", taken)
                added[argument.name] = shape_op(name, argument.name, argument.type, shape)
        for node in function.node_def:
            node.input[:] = [f"{added[text].name}:output:0" if text in added else text for text in node.input]
        function.node_def.extend(added.values())


def _traced_shape(function: FunctionDef, place: int) -> TensorShapeProto | None:
    """None for an argument of unknown rank, and for one that stands for several tensors."""
    argument = function.signature.input_arg[place]
    if place not in function.arg_attr or argument.number_attr or argument.type_list_attr or argument.type_attr:
        return None
    shapes: Sequence[TensorShapeProto] = function.arg_attr[place].attr["_output_shapes"].list.shape
    return shapes[0] if len(shapes) == 1 and not shapes[0].unknown_rank else None


def _say_handles(graph_def: GraphDef) -> None:
    """Write what stands behind the handles that a graph passes to the functions that it calls, at any depth."""
    library = {function.signature.name: function for function in graph_def.library.function}
    feeds = {node.name: _handle(node.attr) for node in graph_def.node if node.op == "_Arg"}
    behind: dict[str, Handles] = {}
    waiting = [(graph_def.node, {name: handle for name, handle in feeds.items() if handle})]
    while waiting:
        nodes, known = waiting.pop()
        for node in nodes:
            passed = [known.get(op_name(text)) for text in node.input if not text.startswith("^")]
            for function in _called(node, library):
                name, arguments = function.signature.name, [each.name for each in function.signature.input_arg]
                given = dict(zip(reversed(arguments), reversed(passed), strict=False))
                # of two callers, what both say
                before = behind.get(name, {key: handle for key, handle in given.items() if handle})
                agreed = {key: handle for key, handle in before.items() if given.get(key) == handle}
                if behind.get(name) != agreed:
                    behind[name] = agreed
                    waiting.append((function.node_def, agreed))
    for name, handles in behind.items():
        for place, argument in enumerate(library[name].signature.input_arg):
            for key, value in handles.get(argument.name, {}).items():
                library[name].arg_attr[place].attr[key].CopyFrom(value)


def _handle(attributes: Mapping[str, AttrValue]) -> dict[str, AttrValue]:
    """What attributes say of the variable behind a handle."""
    return {key: attributes[key] for key in HANDLE_ATTRIBUTES if key in attributes}


def _called(node: NodeDef, library: Mapping[str, FunctionDef]) -> list[FunctionDef]:
    """The functions of an op, which all take the last of its inputs."""
    names = [each.name for key in BODIES.get(node.op, ()) for each in functions_in(node.attr[key])]
    return [library[name] for name in names if name in library]


def remove_shapes(graph_def: GraphDef, source: GraphDef) -> None:
    """Let the readers of the ops that said shapes read the arguments again, in the graph and in all functions.

    Args:
        graph_def: what Grappler made of the graph.
        source: the graph without these ops.
    """
    given = {function.signature.name: function.arg_attr for function in source.library.function}
    _read_arguments(graph_def.node)
    for function in graph_def.library.function:
        known = given.get(function.signature.name, {})
        for place, attributes in function.arg_attr.items():
            for key in HANDLE_ATTRIBUTES:
                if place not in known or key not in known[place].attr:
                    attributes.attr.pop(key, None)
        said = _read_arguments(function.node_def)
        for name, text in list(function.ret.items()):
            function.ret[name] = _source(text, said)


def _read_arguments(nodes: RepeatedNodes) -> Mapping[str, str]:
    """Remove the ops that said shapes; what each of them read."""
    said = {node.name: node.input[0] for node in nodes if _MARK in node.attr}
    if not said:
        return said
    copies = [NodeDef.FromString(node.SerializeToString()) for node in nodes if node.name not in said]
    for node in copies:
        if any(op_name(name) in said for name in node.input):
            inputs = [_source(name, said) for name in node.input]
            waits = dict.fromkeys(name for name in inputs if name.startswith("^"))
            node.input[:] = [*(name for name in inputs if not name.startswith("^")), *waits]
    del nodes[:]
    nodes.extend(copies)
    return said


def _source(name: str, said: Mapping[str, str]) -> str:
    """What `name` stands for without the ops that said shapes; a body in another leaves two in a row."""
    while op_name(name) in said:
        source = said[op_name(name)]
        name = f"^{op_name(source)}" if name.startswith("^") else source
    return name
