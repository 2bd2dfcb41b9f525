"""Batch norms that Grappler joined with a ReLU for a CPU, taken apart again where no graph could hold them.

TensorFlow infers the shapes of such an op by a rule for GPUs, which wants a multiple of 4 channels. So no graph with
the op and another number of channels can be imported, although oneDNN's kernel takes any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef

from tfmem.capture.captured import every_node, op_name

JOINED, NORM = "_FusedBatchNormEx", "FusedBatchNormV3"
SCALE = 1  # the input with a number for each channel
INPUTS = 5  # of a batch norm; behind them what is added, if anything
_OUTPUTS = {NORM: "y", "AddV2": "z", "Relu": "activations"}  # names of first outputs, by which bodies of functions read


def apart(graph_def: GraphDef) -> GraphDef:
    """`graph_def` with batch norm, addition and ReLU as single ops, unless the channels are known to be a multiple of
    4; itself where there is nothing to take apart."""
    if not any(node.op == JOINED for node in every_node(graph_def)):
        return graph_def
    result = GraphDef()
    result.CopyFrom(graph_def)
    _take_apart(result.node, in_a_body=False)
    for function in result.library.function:
        read = _take_apart(function.node_def, in_a_body=True)
        for name, tensor in function.ret.items():
            function.ret[name] = read.get(tensor, tensor)
    return result


def _take_apart(nodes: Any, in_a_body: bool) -> dict[str, str]:
    """Take the ops of one graph apart; returns what is read in place of which tensor."""

    def output(name: str, op: str) -> str:
        return f"{name}:{_OUTPUTS[op]}:0" if in_a_body else name

    read: dict[str, str] = {}
    makers = {node.name: node for node in nodes}
    for node in [node for node in nodes if node.op == JOINED and not _is_taken(node, makers)]:
        relu, side = node.attr["activation_mode"].s == b"Relu", node.attr["num_side_inputs"].i > 0
        then = [("AddV2", [node.input.pop(INPUTS)])] if side else []
        then += [("Relu", [])] if relu else []
        del node.attr["activation_mode"], node.attr["num_side_inputs"]
        node.op, last = NORM, output(node.name, NORM)
        tensors = [last] if in_a_body else [last, f"{last}:0"]
        for op, more in then:
            made = nodes.add(name=f"{node.name}/tfmem_{op.lower()}", op=op, device=node.device, input=[last, *more])
            made.attr["T"].CopyFrom(node.attr["T"])
            last = output(made.name, op)
        if then:
            first = f"{node.name}/tfmem_{then[0][0].lower()}"
            read |= dict.fromkeys(tensors, last)
            _rewire(nodes, dict.fromkeys(tensors, last), first)
    return read


def _is_taken(node: NodeDef, makers: Mapping[str, NodeDef]) -> bool:
    """Whether TensorFlow can import a joined op: the scale is a variable with a number for each channel."""
    maker = makers.get(op_name(node.input[SCALE]))
    handle = makers.get(op_name(maker.input[0])) if maker is not None and maker.op == "ReadVariableOp" else None
    if handle is None:
        return False
    sizes = [dim.size for shape in handle.attr["_handle_shapes"].list.shape for dim in shape.dim]
    return len(sizes) == 1 and sizes[0] > 0 and sizes[0] % 4 == 0


def _rewire(nodes: Any, read: dict[str, str], but: str) -> None:
    """Let all nodes but one read other tensors."""
    for node in nodes:
        if node.name != but:
            node.input[:] = [read.get(name, name) for name in node.input]
