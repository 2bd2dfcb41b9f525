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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.protobuf import device_properties_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.core.protobuf.config_pb2 import ConfigProto
from tensorflow.python.eager import context
from tensorflow.python.grappler import cluster as grappler_cluster
from tensorflow.python.grappler import tf_optimizer

from custom_ops.background import go_on
from tfmem.capture import batch_norms
from tfmem.capture.captured import Captured, every_node, op_definition, op_name, unique
from tfmem.capture.grappler_input import prepare, restore
from tfmem.capture.inline import inline_captured
from tfmem.capture.kept_graphs import KeptGraphs
from tfmem.capture.unread_results import without_unread

# Attributes of a function that keep its body as it is. `_noinline`: a caller's Grappler, and the
# lowering of calls when a function is instantiated, leave the call alone. `_tf_data_function`: a
# session's Grappler, which otherwise optimises the whole library, skips the body
# (meta_optimizer.cc, "Skip tf.data functions").
NO_GRAPPLER = {"_noinline": True, "_tf_data_function": True}

# The runtime lowers these after Grappler. To wait for a lowered one means to wait for its side
# effects, not for the loops its inputs come from; the dependency optimizer, which drops implied
# control edges, does not know that.
_STATEFUL_CONTROL_FLOW = frozenset({"While", "If", "Case"})
NOTHING_KEPT = KeptGraphs("", {})


def run_grappler(
    captured: Captured,
    *,
    device: str | None = None,
    nested: bool = False,
    keep_layout: bool = False,
    portable: bool = False,
    kept: KeptGraphs = NOTHING_KEPT,
) -> Captured:
    """Inline calls and run Grappler's default optimizers, as the user's context configures them,
    memory's turned off.

    Args:
        captured: what capture gave.
        device: "CPU" or "GPU": where ops without a device are assumed to run, which decides on
            layouts and fused ops. None: the GPU if the process sees one.
        nested: keep loops and conditions within bodies as single ops, too, for passes that edit bodies.
        keep_layout: leave convolutions in the layout that the program gave them.
        portable: make no op and no layout that another kind of device lacks.
        kept: what earlier processes made of the same graph.

    Returns:
        The optimised graph. Feeds, fetches and control fetches keep their names; `creation_order`
        is that of the inlined graph before Grappler, so ops that Grappler made are not in it. If
        Grappler fails, the inlined graph (as TensorFlow's runtime does, with a warning).
    """
    go_on()
    inlined = inline_captured(captured)
    order = tuple(node.name for node in inlined.graph_def.node)
    keep = unique([*(op_name(name) for name in captured.fetches), *captured.control_fetches])
    device = device or ("GPU" if tf.config.list_logical_devices("GPU") else "CPU")
    config = ConfigProto()
    config.CopyFrom(context.context().config)
    go_on()
    if keep and not config.graph_options.rewrite_options.disable_meta_optimizer:  # it refuses a graph without fetches
        inlined = without_unread(inlined)
        if portable:
            config.graph_options.rewrite_options.remapping = rewriter_config_pb2.RewriterConfig.OFF
        if keep_layout or portable:
            config.graph_options.rewrite_options.layout_optimizer = rewriter_config_pb2.RewriterConfig.OFF
        rewrite = functools.partial(_rewrite, config, inlined.graph_def, captured, keep, device, nested, kept)
        optimized = _optimize(config, inlined.graph_def, rewrite)
        if device == "CPU":
            optimized = batch_norms.apart(optimized)
        inlined = replace(inlined, graph_def=optimized)
    return replace(inlined, creation_order=order)


def session_config(base: ConfigProto | None = None) -> ConfigProto:
    """A config for sessions that run a `tf.Graph` that tfmem has edited.

    TensorFlow's graph optimizer (Grappler) runs in the session, after the edit, so the config turns off what would undo
    the edit: memory optimization, which would move and recompute tensors itself; layout optimization, which wraps
    unknown ops in transposes; and dependency, loop and scoped-allocator optimization, which drop or reroute the control
    edges that hold the order.

    Args:
        base: a config to start from; None for TensorFlow's defaults. It is not changed.
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
    """`options` of a call, with Grappler off."""
    return _disabled(options.executor_type, bytes(options.config_proto_serialized or b""))


@functools.lru_cache(maxsize=16)
def _disabled(executor: str | None, serialized: bytes) -> context.FunctionCallOptions:
    """Kept, because every call of a restored function needs them."""
    config = ConfigProto.FromString(serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return context.FunctionCallOptions(executor, config)


def _optimize(config: ConfigProto, graph_def: GraphDef, rewrite: Callable[[], GraphDef]) -> GraphDef:
    """What `rewrite` makes of a graph by `config`, which is changed here."""
    options = config.graph_options.rewrite_options
    options.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    options.min_graph_nodes = -1
    if any(node.op in _STATEFUL_CONTROL_FLOW for node in every_node(graph_def)):
        options.dependency_optimization = rewriter_config_pb2.RewriterConfig.OFF

    result = rewrite()
    if not all(map(_is_valid, result.node)):
        # The remapper fuses bfloat16 convolutions into an op that TensorFlow's runtime knows only
        # after oneDNN has renamed it; no graph with it can be imported.
        options.remapping = rewriter_config_pb2.RewriterConfig.OFF
        result = rewrite()
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
    nested: bool,
    kept: KeptGraphs,
) -> GraphDef:
    prepared, added = prepare(graph_def, captured.feeds, device, nested)
    properties = _properties(device, added.device_name)
    meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=prepared)
    # What has to survive, where Grappler looks for it, in one order for all processes.
    meta_graph.collection_def["train_op"].node_list.value.extend(sorted(keep))
    try:
        inputs = (config, meta_graph, properties)
        result = kept.get(len(graph_def.node), inputs, lambda: _run(config, meta_graph, properties))
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        logging.getLogger(__name__).warning("Grappler failed; tfmem uses the graph unchanged: %s", error)
        return graph_def
    restore(result, graph_def, captured.feeds, added)
    return result


def _run(
    config: ConfigProto, meta_graph: meta_graph_pb2.MetaGraphDef, properties: device_properties_pb2.NamedDevice
) -> GraphDef:
    cluster = grappler_cluster.Cluster(devices=[properties])
    try:
        return tf_optimizer.OptimizeGraph(config, meta_graph, verbose=False, graph_id=b"tfmem", cluster=cluster)
    finally:
        cluster.Shutdown()


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
