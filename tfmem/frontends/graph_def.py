"""Captures and restores a GraphDef or MetaGraphDef: nothing runs, and variables are nodes of the graph itself."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.variable_pb2 import VariableDef
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef

from graph_passes.errors import GraphError
from graph_passes.graph.ir import MEMORY_OPS
from graph_passes.graph.ops import FUSION_OP
from graph_passes.graph.serde import imported
from graph_passes.passes.recurrent.match import RECURRENT_OP
from graph_passes.report import Report
from tfmem.capture.captured import READERS, Captured, is_stateful, op_name, unique

REPORT_ATTR = "_tfmem_report"


def capture_graph_def(
    graph_def: GraphDef, feeds: Sequence[str] | None = None, fetches: Sequence[str] | None = None
) -> Captured:
    """Take a serialised graph.

    Args:
        graph_def: the graph; it is copied.
        feeds: names of what is fed, "x" or "x:0"; default: every placeholder.
        fetches: names of what is asked for; an op without outputs is one that has to run. Default:
            every op that nothing reads.

    Raises:
        GraphError: a feed or fetch is not in the graph, or TensorFlow cannot import it.
    """
    if feeds is None:
        placeholders = ("Placeholder", "PlaceholderV2")
        feeds = [node.name for node in graph_def.node if node.op in placeholders]
    if fetches is None:
        fetches = unread(graph_def)
    graph = imported(graph_def)
    outputs = {op.name: len(op.outputs) for op in graph.get_operations()}
    for name in (*feeds, *fetches):
        if op_name(name) not in outputs:
            raise GraphError(
                f"the graph has no op '{op_name(name)}', which is to be fed or fetched; "
                "name ops or tensors of the graph"
            )
        index = name.partition(":")[2]
        if index and int(index) >= outputs[op_name(name)]:
            raise GraphError(
                f"the graph has no tensor '{name}', which is to be fed or fetched: the op has "
                f"{outputs[op_name(name)]} outputs, numbered from 0; name one of these"
            )
    copy = GraphDef()
    copy.CopyFrom(graph_def)
    for node in copy.node:
        if "_class" in node.attr:  # importing gives an op the device of what it is placed with
            node.device = graph.get_operation_by_name(node.name).device
    run = [op_name(name) for name in fetches if not outputs[op_name(name)]]
    run += [n.name for n in graph_def.node if is_stateful(n.op) and n.op not in READERS]
    return Captured(
        graph_def=copy,
        feeds=tuple(map(_tensor_name, feeds)),
        fetches=tuple(_tensor_name(name) for name in fetches if outputs[op_name(name)]),
        control_fetches=unique(run),
        creation_order=tuple(node.name for node in graph_def.node),
        traced={"": graph},  # some graphs say their shapes (`_output_shapes`)
    )


def unread(graph_def: GraphDef) -> list[str]:
    """The ops that nothing reads or waits for: train ops, initializers, summaries, savers."""
    read = {op_name(name) for node in graph_def.node for name in node.input}
    return [node.name for node in graph_def.node if node.name not in read]


def named(meta_graph: MetaGraphDef) -> list[str]:
    """The ops and tensors that a MetaGraphDef names, and those that nothing reads: all that its
    users may ask for.
    """
    names = list(unread(meta_graph.graph_def))
    for collection in meta_graph.collection_def.values():
        names += collection.node_list.value
        for text in collection.bytes_list.value:
            variable = VariableDef()
            try:
                variable.ParseFromString(text)
            except DecodeError:
                continue  # no variable: such collections hold protos of any type
            fields = ("variable_name", "initializer_name", "initial_value_name", "snapshot_name")
            names += [getattr(variable, field) for field in fields]
    saver = meta_graph.saver_def
    names += [saver.filename_tensor_name, saver.save_tensor_name, saver.restore_op_name]
    names += [*_signature_names(meta_graph, "inputs"), *_signature_names(meta_graph, "outputs")]
    present = {node.name for node in meta_graph.graph_def.node}
    return list(unique([name for name in names if op_name(name) in present]))


def restore_graph_def(captured: Captured) -> GraphDef:
    """The rewritten graph, once it is sure that all that was asked for is in it.

    Raises:
        GraphError: a fetch is missing.
    """
    present = {node.name for node in captured.graph_def.node}
    for name in (*captured.fetches, *captured.control_fetches):
        if op_name(name) not in present:
            raise GraphError(f"the rewritten graph lacks op '{op_name(name)}', which is fetched")
    return captured.graph_def


def put_report(graph_def: GraphDef, report: Report) -> None:
    """Let a node carry a report: the first of tfmem's; where there is none, the first of all, if the report says why.

    TensorFlow does not look at attributes that begin with "_".
    """
    ours = [node for node in graph_def.node if node.op in MEMORY_OPS or node.op in (RECURRENT_OP, FUSION_OP)]
    for node in graph_def.node:
        node.attr.pop(REPORT_ATTR, None)  # an earlier optimisation may have left one
    said = report.notes or report.not_replaced or report.fusion
    for node in ours[:1] or (graph_def.node[:1] if said else []):
        node.attr[REPORT_ATTR].s = report.to_json().encode()


def report_in(graph_def: GraphDef) -> str:
    """The report that `put_report` stored.

    Raises:
        GraphError: the graph holds no report.
    """
    for node in graph_def.node:
        if REPORT_ATTR in node.attr:
            return str(node.attr[REPORT_ATTR].s.decode(errors="replace"))
    raise GraphError(
        "no report in the graph: tfmem left the graph unchanged, or this is the original; pass what optimize returned"
    )


def capture_meta_graph(
    meta_graph: MetaGraphDef,
    feeds: Sequence[str] | None = None,
    fetches: Sequence[str] | None = None,
) -> Captured:
    """Take the graph of a MetaGraphDef; see `capture_graph_def`.

    Args:
        meta_graph: the graph with its collections and signatures.
        feeds: default: the inputs of all signatures.
        fetches: default: the collection `train_op`, else the outputs of all signatures.
    """
    if feeds is None:
        feeds = _signature_names(meta_graph, "inputs") or None
    if fetches is None and "train_op" in meta_graph.collection_def:
        fetches = list(meta_graph.collection_def["train_op"].node_list.value) or None
    if fetches is None:
        fetches = _signature_names(meta_graph, "outputs") or None
    return capture_graph_def(meta_graph.graph_def, feeds, fetches)


def restore_meta_graph(meta_graph: MetaGraphDef, graph_def: GraphDef) -> MetaGraphDef:
    """`meta_graph` around another graph; collections and signatures are kept."""
    restored = MetaGraphDef()
    restored.CopyFrom(meta_graph)
    restored.graph_def.CopyFrom(graph_def)
    restored.meta_info_def.ClearField("stripped_op_list")  # lists the ops of the old graph
    return restored


def _signature_names(meta_graph: MetaGraphDef, side: str) -> list[str]:
    signatures = meta_graph.signature_def.values()
    infos = [info for signature in signatures for info in getattr(signature, side).values()]
    return list(unique([info.name for info in infos if info.WhichOneof("encoding") == "name"]))


def _tensor_name(name: str) -> str:
    return name if ":" in name else f"{name}:0"
