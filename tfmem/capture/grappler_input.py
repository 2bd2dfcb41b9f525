"""Nodes and attributes that tfmem adds to a graph while Grappler runs, and removes afterwards.

It is what Grappler knows in the runtime's own path: that feeds are arguments, their shapes, and where ops run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
from tensorflow.python.framework import kernels

from tfmem.capture.argument_shapes import HANDLE_ATTRIBUTES, HANDLES, remove_shapes, say_shapes, shape_op
from tfmem.capture.captured import BODIES, free_name, functions_in, op_name

# While and If carry this mark; Grappler would turn marked ones into frames of Switch and Merge,
# which are cycles.
_LOWER = "_lower_using_switch_merge"

# What a feed may be in a graph; see `_make_arguments`.
_FED = ("Placeholder", "Const")

# In graphs of earlier versions a placeholder without dimensions may have any shape.
_SCALARS = 24


@dataclass(frozen=True)
class Added:
    """What `prepare` wrote.

    Attributes:
        lowered: the mark of While and If ops, which they lost, by the function that they are in, "" for the graph
            itself, and their names.
        placed: ops that got a device, each with the function it is in; "" for the graph itself.
        device_name: the device.
    """

    lowered: Mapping[tuple[str, str], bool]
    placed: frozenset[tuple[str, str]]
    device_name: str


def prepare(graph_def: GraphDef, feeds: tuple[str, ...], device: str, nested: bool = False) -> tuple[GraphDef, Added]:
    """A copy of the graph for Grappler.

    Args:
        graph_def: the graph.
        feeds: names of its feeds ("x:0").
        device: "CPU" or "GPU": where ops without a device are assumed to run.
        nested: keep While and If whole in bodies, too.
    """
    device_name = f"/job:localhost/replica:0/task:0/device:{device}:0"
    prepared = GraphDef()
    prepared.CopyFrom(graph_def)
    _make_arguments(prepared, feeds)
    called = _bodies(prepared)
    say_shapes(prepared, [function for function in prepared.library.function if function.signature.name in called])
    lowered = _hide_lowering(prepared, nested)
    placed = _place(prepared, device, device_name)
    return prepared, Added(lowered, frozenset(placed), device_name)


def restore(result: GraphDef, source: GraphDef, feeds: tuple[str, ...], added: Added) -> None:
    """Remove what was only for Grappler, and restore the feeds, read or not.

    A feed waits for no op, whatever the trace says: that op may be one that Grappler removed.
    """
    remove_shapes(result, source)
    _take_back(result, source, added)
    fed = {op_name(name) for name in feeds}
    kept = [node for node in result.node if node.name not in fed]
    given = GraphDef(node=(node for node in source.node if node.name in fed)).node
    for node in given:
        del node.input[:]
    _set_nodes(result, [*given, *kept])


def _set_nodes(graph_def: GraphDef, nodes: Iterable[NodeDef]) -> None:
    copies = GraphDef(node=nodes).node  # before the nodes, which may be among them, are deleted
    del graph_def.node[:]
    graph_def.node.extend(copies)


def _make_arguments(graph_def: GraphDef, feeds: tuple[str, ...]) -> None:
    """Turn the feeds into function arguments, as in the graphs that the runtime gives to Grappler.

    For a placeholder it would allocate a tensor of its shape; and an argument knows the shapes of a captured variable.
    A tensor that was made outside of a function, and captured, is a Const in its graph but an argument to the runtime,
    which folds nothing that depends on it.
    """
    index = {op_name(name): place for place, name in enumerate(feeds)}
    taken = {node.name for node in graph_def.node}
    shaped: dict[str, str] = {}
    nodes = []
    for node in graph_def.node:
        nodes.append(node)
        if node.name not in index or node.op not in _FED:
            continue
        dtype = node.attr["dtype"].type
        kept = {key: node.attr[key] for key in HANDLE_ATTRIBUTES if key in node.attr}
        argument = NodeDef(name=node.name, op="_Arg", device=node.device, input=node.input)
        argument.attr["T"].type = dtype
        argument.attr["index"].i = index[node.name]
        for key, value in kept.items():
            argument.attr[key].CopyFrom(value)
        shape = _known_shape(node, graph_def.versions.producer)
        if dtype not in HANDLES and shape is not None:
            known = shape_op(free_name(f"{node.name}/shape", taken), node.name, dtype, shape)
            known.device = node.device
            nodes.append(known)
            shaped[node.name] = known.name
        node.CopyFrom(argument)
    added = set(shaped.values())
    for node in nodes:
        if node.name not in added:
            node.input[:] = [shaped.get(name.removesuffix(":0"), name) for name in node.input]
    _set_nodes(graph_def, nodes)


def _known_shape(node: NodeDef, producer: int) -> TensorShapeProto | None:
    if node.op == "Const":
        shape: TensorShapeProto = node.attr["value"].tensor.tensor_shape
        return shape
    if "shape" not in node.attr:
        return None
    shape = node.attr["shape"].shape
    return shape if not shape.unknown_rank and (len(shape.dim) > 0 or producer >= _SCALARS) else None


def _hide_lowering(graph_def: GraphDef, nested: bool) -> dict[tuple[str, str], bool]:
    marks = {}
    for function, nodes in _bodies(graph_def).items() if nested else [("", graph_def.node)]:
        for node in nodes:
            if _LOWER in node.attr:
                marks[function, node.name] = node.attr[_LOWER].b
                del node.attr[_LOWER]
    return marks


def _place(graph_def: GraphDef, device: str, device_name: str) -> set[tuple[str, str]]:
    """Write a device on ops that have none: the optimizers skip such ops. Returns the ops it was
    written on, each with the function it is in; "" for the graph itself.

    TensorFlow lowers control flow first, so that its Grappler sees the ops of bodies placed, too.
    """
    known: dict[str, str] = {}
    placed = set()
    for function, nodes in _bodies(graph_def).items():
        for node in nodes:
            if node.device:
                continue
            if node.op not in known:
                supported = device == "CPU" or _has_kernel(node.op, device)
                known[node.op] = device_name if supported else device_name.replace(device, "CPU")
            node.device = known[node.op]
            placed.add((function, node.name))
    return placed


def _has_kernel(op: str, device: str) -> bool:
    """Whether an op runs on a device's type; so does one without kernels, such as a call."""
    types = {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op).kernel}
    return not types or bool(types & {device, "DEFAULT"})


def _bodies(graph_def: GraphDef) -> dict[str, Iterable[NodeDef]]:
    """The graph itself, under the name "", and the functions that run where it runs: not, for example, those that a
    tf.data pipeline calls.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    found: dict[str, Iterable[NodeDef]] = {"": graph_def.node}
    waiting = [graph_def.node]
    while waiting:
        for node in waiting.pop():
            for attribute in BODIES.get(node.op, ()):
                for called in functions_in(node.attr[attribute]):
                    if called.name in library and called.name not in found:
                        found[called.name] = library[called.name].node_def
                        waiting.append(library[called.name].node_def)
    return found


def _take_back(result: GraphDef, source: GraphDef, added: Added) -> None:
    names = {(function, node.name) for function, nodes in _bodies(source).items() for node in nodes}
    for function, nodes in _bodies(result).items():
        for node in nodes:
            place = (function, node.name)
            if place in added.placed or (place not in names and node.device == added.device_name):
                node.device = ""
            if place in added.lowered:
                node.attr[_LOWER].b = added.lowered[place]
