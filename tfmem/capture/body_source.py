"""Functions that a captured graph calls, as graphs that passes plan on and edit: bodies of `If` and `While` above all.

    FunctionDef --_captured--> Captured, its arguments as feeds --passes--> Captured --_definition--> FunctionDef

Relies on how a FunctionDef writes tensors: an argument by its name, an op's output as "split:output:1".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.framework.op_def_pb2 import OpDef
from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
from tensorflow.core.framework.types_pb2 import DT_RESOURCE
from tensorflow.python.ops import handle_data_util

from graph_passes.errors import GraphError
from graph_passes.graph.ops import LOOPS
from graph_passes.graph.serde import flat_names, output_names
from tfmem.capture.build import shaped_graph
from tfmem.capture.captured import BODIES, Captured, functions_in, is_compiled, op_name

_PARTS = {"then_branch": "then", "else_branch": "else", "branches": "branch", "f": ""}  # in a name, of an attribute


@dataclass(frozen=True)
class _Argument:
    """What all callers say of an argument."""

    dtype: int
    shape: tf.TensorShape
    behind: tuple[tuple[int, TensorShapeProto], ...] = ()  # dtypes and shapes of what a handle refers to

    @classmethod
    def of(cls, given: tf.Tensor, returned: tf.Tensor | None) -> _Argument:
        """`returned`: what a loop makes of it, which may have another shape after each turn."""
        shape = given.shape if returned is None else given.shape.most_specific_compatible_shape(returned.shape)
        data = handle_data_util.get_handle_data(given) if given.dtype in (tf.resource, tf.variant) else None
        known = data.shape_and_type if data is not None and data.is_set else ()
        return cls(given.dtype.base_dtype.as_datatype_enum, shape, tuple((each.dtype, each.shape) for each in known))

    def merged(self, other: _Argument) -> _Argument:
        shape = self.shape.most_specific_compatible_shape(other.shape)
        return replace(self, shape=shape, behind=self.behind if self.behind == other.behind else ())


@dataclass(frozen=True)
class Body:
    """A function that is called.

    Attributes:
        name: of the function.
        caller: the path of its call: "decoder/while/body".
        captured: the function as a graph.
        shaped: the same with shapes.
    """

    name: str
    caller: str
    captured: Captured
    shaped: tf.Graph


def bodies(captured: Captured, graph: tf.Graph) -> list[Body]:
    """The functions that a graph calls, and those that these call, with shapes that hold for all callers. Those that
    XLA compiles, and what these call, are left out.

    Args:
        captured: the graph, its library included.
        graph: the same with shapes.
    """
    library = {function.signature.name: function for function in captured.graph_def.library.function}
    found: dict[str, Body] = {}
    known: dict[str, tuple[_Argument, ...]] = {}
    pending = [("", captured, graph)]
    while pending:
        within, outer, shaped = pending.pop()
        for name, caller, given in _calls(outer, shaped):
            definition, before = library.get(name), known.get(name)
            if definition is None or len(definition.signature.input_arg) != len(given):
                continue
            arguments = given if before is None else tuple(map(_Argument.merged, before, given))
            if arguments == before:
                continue
            known[name] = arguments
            first = found.pop(name).caller if name in found else within + caller
            inner = _captured(definition, arguments, library, captured)
            try:
                inside = shaped_graph(inner) if inner is not None else None
            except GraphError:  # its callers may know more when it runs
                inside = None
            if inner is not None and inside is not None:
                found[name] = Body(name, first, inner, inside)
                pending.append((f"{first}/", inner, inside))
    return list(found.values())


def _calls(captured: Captured, graph: tf.Graph) -> Iterator[tuple[str, str, tuple[_Argument, ...]]]:
    """For each call of a function its name, that of the caller, and what it is given."""
    for node in captured.graph_def.node:
        if node.op not in BODIES or is_compiled(node):
            continue
        op = graph.get_operation_by_name(node.name)
        given = op.inputs[1:] if node.op.endswith(("If", "Case")) else op.inputs
        returned: Sequence[tf.Tensor | None] = op.outputs if node.op in LOOPS else [None] * len(given)
        if len(returned) != len(given):
            continue
        arguments = tuple(map(_Argument.of, given, returned))
        for attribute in BODIES[node.op]:
            called = functions_in(node.attr[attribute])
            for place, function in enumerate(called):
                part = _PARTS.get(attribute, attribute) + (str(place) if len(called) > 1 else "")
                yield function.name, f"{node.name}/{part}".rstrip("/"), arguments


def _captured(
    definition: FunctionDef, arguments: Sequence[_Argument], library: Mapping[str, FunctionDef], outer: Captured
) -> Captured | None:
    """A function as a graph whose feeds are its arguments; None if it cannot be written as one."""
    flat = flat_names(definition, library)
    if flat is None or is_compiled(definition):
        return None
    graph_def = GraphDef(versions=outer.graph_def.versions)
    for argument, known in zip(definition.signature.input_arg, arguments, strict=True):
        graph_def.node.append(_placeholder(argument, known))
    names = {argument.name for argument in definition.signature.input_arg}
    try:
        for source in definition.node_def:
            node = graph_def.node.add()
            node.CopyFrom(source)
            node.input[:] = [text if text.startswith("^") else flat[text] for text in source.input]
        results = [flat[definition.ret[result.name]] for result in definition.signature.output_arg]
    except KeyError:  # it reads, or returns, what it does not make
        return None
    graph_def.library.function.extend(_reached(definition, library))
    return Captured(
        graph_def=graph_def,
        feeds=tuple(f"{argument.name}:0" for argument in definition.signature.input_arg),
        fetches=tuple(text if ":" in text else f"{text}:0" for text in results),
        control_fetches=tuple(dict.fromkeys(node for node in definition.control_ret.values() if node not in names)),
        creation_order=tuple(node.name for node in graph_def.node),
        traced={"": outer.traced[name]} if (name := definition.signature.name) in outer.traced else {},
    )


def _placeholder(argument: OpDef.ArgDef, known: _Argument) -> NodeDef:
    node = NodeDef(name=argument.name, op="Placeholder")
    node.attr["dtype"].type = argument.type
    node.attr["shape"].shape.CopyFrom(known.shape.as_proto() if argument.type != DT_RESOURCE else TensorShapeProto())
    if known.behind:
        node.attr["_handle_dtypes"].list.type.extend(dtype for dtype, _ in known.behind)
        node.attr["_handle_shapes"].list.shape.extend(shape for _, shape in known.behind)
    return node


def _reached(definition: FunctionDef, library: Mapping[str, FunctionDef]) -> list[FunctionDef]:
    """The functions that a function calls, and those that these call."""
    found: dict[str, FunctionDef] = {}
    pending = [definition]
    while pending:
        for node in pending.pop().node_def:
            named = [called.name for value in node.attr.values() for called in functions_in(value)]
            for name in (node.op, *named):
                if name in library and name not in found:
                    found[name] = library[name]
                    pending.append(library[name])
    return list(found.values())


def with_function(captured: Captured, name: str, body: Captured) -> Captured:
    """`captured`, whose function `name` is another one.

    Args:
        captured: not changed.
        name: of a function of its library.
        body: the function as `bodies` gave it, edited.

    Raises:
        GraphError: it cannot be written as a function.
    """
    graph_def = GraphDef()
    graph_def.CopyFrom(captured.graph_def)
    library = {function.signature.name: function for function in graph_def.library.function}
    definition = library[name]
    definition.CopyFrom(_definition(definition, body, library))
    present = set(library)
    graph_def.library.function.extend(
        function for function in body.graph_def.library.function if function.signature.name not in present
    )
    return replace(captured, graph_def=graph_def)


def _definition(before: FunctionDef, body: Captured, library: Mapping[str, FunctionDef]) -> FunctionDef:
    """`before`, of the ops of `body`."""
    arguments = {argument.name for argument in before.signature.input_arg}
    nodes = [node for node in body.graph_def.node if node.name not in arguments]
    written = {f"{name}:0": name for name in arguments}
    for node in nodes:
        outputs = output_names(node, library)
        if outputs is None:
            raise GraphError(
                f"TensorFlow does not know the outputs of '{node.name}' ({node.op}), so no function holds it"
            )
        written |= {f"{node.name}:{index}": f"{node.name}:{output}" for index, output in enumerate(outputs)}

    def tensor(text: str) -> str:
        return written[text if ":" in text else f"{text}:0"]

    result = FunctionDef()
    result.CopyFrom(before)
    for field in ("node_def", "ret", "control_ret"):
        result.ClearField(field)
    for node in nodes:
        inside = result.node_def.add()
        inside.CopyFrom(node)
        waits = [text for text in node.input if text.startswith("^") and op_name(text) not in arguments]
        inside.input[:] = [*(tensor(text) for text in node.input if not text.startswith("^")), *waits]
    if len(body.fetches) != len(before.signature.output_arg):
        raise GraphError(f"internal error in tfmem: '{before.signature.name}' lost a result; please report this")
    for output, fetch in zip(before.signature.output_arg, body.fetches, strict=True):
        result.ret[output.name] = tensor(fetch)
    del result.signature.control_output[:]
    for name in body.control_fetches:
        result.control_ret[name] = name
        result.signature.control_output.append(name)
    return result
