"""A step that leaves every variable as it is: run to see what it needs, and run again if it needed too much."""

from __future__ import annotations

from tensorflow.core.framework.graph_pb2 import GraphDef

from graph_passes.graph.ir import Graph
from graph_passes.graph.ops import FUSION_OP, is_update
from tfmem.capture.captured import HARMLESS


def can_dry_run(graph: Graph) -> bool:
    """Whether nothing but variables would remember that the step ran."""
    return all(not node.stateful or node.op in HARMLESS or node.op == FUSION_OP or is_update(node.op) for node in graph)


def without_updates(graph_def: GraphDef) -> GraphDef:
    """`graph_def` with every op that writes a variable replaced by one that waits for the same; a region computes what
    it would assign, and drops it."""
    result = GraphDef()
    result.CopyFrom(graph_def)
    for node in result.node:
        if node.op == FUSION_OP:
            node.attr["dry_run"].b = True
        elif is_update(node.op):
            waits_for = dict.fromkeys("^" + name.lstrip("^").partition(":")[0] for name in node.input)
            node.op = "NoOp"
            node.ClearField("attr")
            del node.input[:]
            node.input.extend(waits_for)
    return result
