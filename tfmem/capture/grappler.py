"""Runs TensorFlow's own graph optimizer (Grappler) once, inside the pipeline, and keeps it off the
result.

The only file that touches Grappler. It relies on `tensorflow.python.grappler` (the bindings of
`OptimizeGraph` and of virtual clusters), on the eager context's `FunctionCallOptions` (as
`tf.experimental.function_executor_type` does) and on two function attributes that Grappler and the
inliner of the runtime look at (see `NO_GRAPPLER`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.protobuf import device_properties_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.python.eager import context
from tensorflow.python.framework import kernels
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import tf_optimizer

from tfmem.capture.captured import Captured, op_definition, op_name, unique
from tfmem.capture.inline import inline_calls

# Attributes of a function that keep its body as it is. `_noinline`: a caller's Grappler, and the
# lowering of calls when a function is instantiated, leave the call alone. `_tf_data_function`: a
# session's Grappler, which otherwise optimises the whole library, skips the body
# (meta_optimizer.cc, "Skip tf.data functions").
NO_GRAPPLER = {"_noinline": True, "_tf_data_function": True}

# While and If carry this mark; Grappler would turn marked ones into frames of Switch and Merge,
# which are cycles.
_LOWER = "_lower_using_switch_merge"

# The runtime lowers these after Grappler. To wait for a lowered one means to wait for its side
# effects, not for the loops its inputs come from; the dependency optimizer, which drops implied
# control edges, does not know that.
_STATEFUL_CONTROL_FLOW = frozenset({"While", "If", "Case"})


def run_grappler(captured: Captured, *, device: str | None = None) -> Captured:
    """Inline calls and run Grappler's default optimizers, as the user's context configures them,
    memory's turned off.

    Args:
        captured: what capture gave.
        device: "CPU" or "GPU": where ops without a device are assumed to run, which decides on
            layouts and fused ops. None: the GPU if the process sees one.

    Returns:
        The optimised graph. Feeds, fetches and control fetches keep their names; `creation_order`
        is that of the inlined graph before Grappler, so ops that Grappler made are not in it. If
        Grappler fails, the inlined graph (as TensorFlow's runtime does, with a warning).
    """
    fetched = {op_name(name) for name in captured.fetches}
    graph_def = inline_calls(captured.graph_def, fetched)
    order = tuple(node.name for node in graph_def.node)
    keep = unique([*(op_name(name) for name in captured.fetches), *captured.control_fetches])
    optimized = _optimize(graph_def, captured, keep, device or _default_device())
    return Captured(optimized, captured.feeds, captured.fetches, captured.control_fetches, order)


def session_config(base: ConfigProto | None = None) -> ConfigProto:
    """A config for sessions that run a rewritten `tf.Graph`: `base` with the rewrites off that undo
    or misread it.

    A session's Grappler cannot be run before the edit, as it is for functions, so it stays on where
    it does no harm. Off are: memory optimization (it would move and recompute on its own), layout
    (it wraps unknown ops in transposes) and dependency, loop and scoped-allocator optimization
    (they drop or reroute the control edges that hold the order).
    """
    config = ConfigProto()
    if base is not None:
        config.CopyFrom(base)
    rewrite = config.graph_options.rewrite_options
    off = rewriter_config_pb2.RewriterConfig.OFF
    rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    rewrite.layout_optimizer = off
    rewrite.dependency_optimization = off
    rewrite.loop_optimization = off
    rewrite.scoped_allocator_optimization = off
    return config


@contextmanager
def without_grappler() -> Iterator[None]:
    """Functions called in this context, on this thread, are run (or put into a graph) with Grappler
    off.
    """
    eager = context.context()
    options = eager.function_call_options
    eager.function_call_options = options_without_grappler(options)
    try:
        yield
    finally:
        eager.function_call_options = options


def options_without_grappler(options: context.FunctionCallOptions) -> context.FunctionCallOptions:
    """The same options of a call, with Grappler off."""
    return _disabled(options.executor_type, bytes(options.config_proto_serialized or b""))


@functools.lru_cache(maxsize=16)
def _disabled(executor: str | None, serialized: bytes) -> context.FunctionCallOptions:
    """Kept, because every call of a restored function needs them."""
    config = ConfigProto.FromString(serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return context.FunctionCallOptions(executor, config)


def _default_device() -> str:
    return "GPU" if tf.config.list_logical_devices("GPU") else "CPU"


def _optimize(graph_def: GraphDef, captured: Captured, keep: tuple[str, ...], device: str) -> GraphDef:
    config = ConfigProto()
    config.CopyFrom(context.context().config)
    rewrite = config.graph_options.rewrite_options
    if rewrite.disable_meta_optimizer:
        return graph_def
    rewrite.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    rewrite.min_graph_nodes = -1
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    if any(node.op in _STATEFUL_CONTROL_FLOW for nodes in bodies for node in nodes):
        rewrite.dependency_optimization = rewriter_config_pb2.RewriterConfig.OFF

    result = _rewrite(config, graph_def, captured, keep, device)
    if not all(map(_is_valid, result.node)):
        # The remapper fuses bfloat16 convolutions into an op that TensorFlow's runtime knows only
        # after oneDNN has renamed it; no graph with it can be imported.
        rewrite.remapping = rewriter_config_pb2.RewriterConfig.OFF
        result = _rewrite(config, graph_def, captured, keep, device)
    return result


def _is_valid(node: NodeDef) -> bool:
    """Whether the type attribute `T` of a fused op is among those that the op is registered for."""
    definition = op_definition(node.op) if node.op.startswith("_Fused") else None
    if definition is None:
        return True
    allowed = [list(a.allowed_values.list.type) for a in definition.attr if a.name == "T"]
    return not allowed or not allowed[0] or node.attr["T"].type in allowed[0]


def _rewrite(
    config: ConfigProto,
    graph_def: GraphDef,
    captured: Captured,
    keep: tuple[str, ...],
    device: str,
) -> GraphDef:
    prepared = GraphDef()
    prepared.CopyFrom(graph_def)
    _make_arguments(prepared, captured.feeds)
    lowered = _hide_lowering(prepared)
    device_name = f"/job:localhost/replica:0/task:0/device:{device}:0"
    placed = _place(prepared, device, device_name)

    cluster = grappler_cluster.Cluster(devices=[_properties(device, device_name)])
    try:
        result = tf_optimizer.OptimizeGraph(
            config, _meta_graph(prepared, keep), verbose=False, graph_id=b"tfmem", cluster=cluster
        )
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        logging.getLogger(__name__).warning("Grappler failed; the graph is used as it was: %s", error)
        return graph_def
    finally:
        cluster.Shutdown()
    _restore(result, graph_def, captured.feeds, lowered, placed, device_name)
    return result


def _meta_graph(graph_def: GraphDef, keep: tuple[str, ...]) -> meta_graph_pb2.MetaGraphDef:
    """Grappler takes what has to survive from the collection `train_op`."""
    meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(keep)
    return meta_graph


def _make_arguments(graph_def: GraphDef, feeds: tuple[str, ...]) -> None:
    """Turn the feeds into function arguments, as in the graphs that the runtime gives to Grappler.

    For a placeholder it would allocate a tensor of its shape; and an argument knows the shapes of a
    captured variable.
    """
    index = {op_name(name): place for place, name in enumerate(feeds)}
    for node in graph_def.node:
        if node.name not in index or node.op != "Placeholder":
            continue
        shape = node.attr["shape"].shape
        dtype = node.attr["dtype"].type
        kept = {key: node.attr[key] for key in ("_handle_dtypes", "_handle_shapes") if key in node.attr}
        argument = NodeDef(name=node.name, op="_Arg", device=node.device, input=node.input)
        argument.attr["T"].type = dtype
        argument.attr["index"].i = index[node.name]
        for key, value in kept.items():
            argument.attr[key].CopyFrom(value)
        if dtype != tf.resource.as_datatype_enum:
            argument.attr["_output_shapes"].list.shape.append(shape)
        node.CopyFrom(argument)


def _hide_lowering(graph_def: GraphDef) -> dict[str, bool]:
    marks = {}
    for node in graph_def.node:
        if _LOWER in node.attr:
            marks[node.name] = node.attr[_LOWER].b
            del node.attr[_LOWER]
    return marks


def _place(graph_def: GraphDef, device: str, device_name: str) -> set[str]:
    """Write a device on ops that have none: the optimizers skip such ops. Returns the ops it was
    written on.
    """
    known: dict[str, str] = {}
    placed = set()
    for node in graph_def.node:
        if node.device:
            continue
        if node.op not in known:
            types = {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(node.op).kernel}
            supported = device == "CPU" or not types or bool(types & {device, "DEFAULT"})
            known[node.op] = device_name if supported else device_name.replace(device, "CPU")
        node.device = known[node.op]
        placed.add(node.name)
    return placed


def _restore(
    result: GraphDef,
    source: GraphDef,
    feeds: tuple[str, ...],
    lowered: dict[str, bool],
    placed: set[str],
    device_name: str,
) -> None:
    """Take back what was only for Grappler, and put back the feeds as they were, read or not."""
    names = {node.name for node in source.node}
    for node in result.node:
        if node.name in placed or (node.name not in names and node.device == device_name):
            node.device = ""
        if node.name in lowered:
            node.attr[_LOWER].b = lowered[node.name]
    fed = {op_name(name) for name in feeds}
    kept = [node for node in result.node if node.name not in fed]
    placeholders = [node for node in source.node if node.name in fed]
    del result.node[:]
    result.node.extend([*placeholders, *kept])


def _properties(device: str, device_name: str) -> device_properties_pb2.NamedDevice:
    """A description of the device as the runtime would give it; a virtual cluster starts no session
    and no device.
    """
    named = device_properties_pb2.NamedDevice(name=device_name)
    named.properties.type = device
    named.properties.num_cores = 1
    named.properties.frequency = 1000
    physical = tf.config.list_physical_devices("GPU") if device == "GPU" else []
    if physical:
        capability = tf.config.experimental.get_device_details(physical[0]).get("compute_capability", (7, 0))
        named.properties.environment["architecture"] = ".".join(map(str, capability))
    return named
