"""Bodies that differ in the names of their nodes alone, as in unrolled steps. tfmem plans one of them, and edits the
others in the same way."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace

from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from graph_passes.errors import GraphError
from tfmem.capture.captured import Captured, called_by, functions_in, op_name

_COLOCATED = b"loc:@"
_NAMES = frozenset(
    {"_original_func_name", "forward_function_name", "backward_function_name"}
)  # attributes of a function


def structure_of(body: Captured) -> Hashable:
    """All of a body, and of what it calls, but the names of nodes and of functions; in equal bodies nodes have to be in
    one order."""
    place = _places(node.name for node in body.graph_def.node)
    library = {function.signature.name: function for function in body.graph_def.library.function}
    called = called_by(body.graph_def.node)
    nodes = tuple(
        _renamed(node, place, _places(called)).SerializeToString(deterministic=True) for node in body.graph_def.node
    )
    functions = tuple(_function(library[name], library) if name in library else name for name in called)
    fetches, control = ([_name(text, place) for text in names] for names in (body.fetches, body.control_fetches))
    return nodes, functions, len(body.feeds), tuple(fetches), tuple(control)


def names_by_place(first: Captured, second: Captured) -> dict[str, str]:
    """The names of nodes of `second` by those of `first`, which has the same structure."""
    return {a.name: b.name for a, b in zip(first.graph_def.node, second.graph_def.node, strict=True)}


def followed(given: Captured, other: Captured, edited: Captured) -> Captured:
    """`given`, with the edit that another body of equal structure got.

    Args:
        given: not changed.
        other: the other body before its edit.
        edited: the other body after its edit.

    Raises:
        GraphError: nodes that are new in `edited` are called as others here.
    """
    names = names_by_place(other, given)
    functions = dict(zip(called_by(other.graph_def.node), called_by(given.graph_def.node), strict=True))
    taken = set(names.values())
    for node in edited.graph_def.node:
        if node.name not in names and node.name in taken:
            raise GraphError(f"internal error in tfmem: the name '{node.name}' is taken; please report this")
    graph_def = GraphDef(versions=given.graph_def.versions)
    graph_def.library.CopyFrom(given.graph_def.library)
    known = {function.signature.name for function in [*graph_def.library.function, *other.graph_def.library.function]}
    new = (function for function in edited.graph_def.library.function if function.signature.name not in known)
    graph_def.library.function.extend(new)  # code of kernels, which all have in common
    graph_def.node.extend(_renamed(node, names, functions) for node in edited.graph_def.node)
    return replace(
        given,
        graph_def=graph_def,
        fetches=tuple(_name(text, names) for text in edited.fetches),
        control_fetches=tuple(_name(text, names) for text in edited.control_fetches),
        creation_order=tuple(node.name for node in graph_def.node),
    )


def _places(names: Iterable[str]) -> dict[str, str]:
    return {name: str(number) for number, name in enumerate(names)}


def _function(definition: FunctionDef, library: Mapping[str, FunctionDef]) -> Hashable:
    """See `structure_of`."""
    signature, called = definition.signature, called_by(definition.node_def)
    place = _places([*(each.name for each in signature.input_arg), *(node.name for node in definition.node_def)])
    return (
        tuple(each.type for each in (*signature.input_arg, *signature.output_arg)),
        tuple(_name(definition.ret[each.name], place) for each in signature.output_arg),
        tuple(sorted(_name(text, place) for text in definition.control_ret.values())),
        tuple((name, str(value)) for name, value in sorted(definition.attr.items()) if name not in _NAMES),
        tuple(
            _renamed(node, place, _places(called)).SerializeToString(deterministic=True) for node in definition.node_def
        ),
        tuple(_function(library[name], library) if name in library else name for name in called),
    )


def _renamed(node: NodeDef, names: Mapping[str, str], functions: Mapping[str, str]) -> NodeDef:
    result = NodeDef()
    result.CopyFrom(node)
    result.name = names.get(node.name, node.name)
    result.input[:] = [_name(text, names) for text in node.input]
    result.ClearField("experimental_debug_info")
    for value in result.attr.values():
        for function in functions_in(value):
            function.name = functions.get(function.name, function.name)
    if "_class" in node.attr:
        kept = _colocated(node.attr["_class"], names)
        if kept.list.s:
            result.attr["_class"].CopyFrom(kept)
        else:
            del result.attr["_class"]
    return result


def _colocated(value: AttrValue, names: Mapping[str, str]) -> AttrValue:
    """The colocation groups without nodes of other graphs, which mean nothing here."""
    result = AttrValue()
    names_of = (text.removeprefix(_COLOCATED).decode() for text in value.list.s)
    result.list.s.extend(_COLOCATED + names[name].encode() for name in names_of if name in names)
    return result


def _name(text: str, names: Mapping[str, str]) -> str:
    """A node's name, a tensor's or a control input, as the node is called."""
    name = op_name(text)
    return text.replace(name, names.get(name, name), 1)
