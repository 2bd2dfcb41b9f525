"""Sequences that were reversed before a loop, and outputs that are reversed behind it: the launch walks backwards
instead, and nothing is moved.
"""

from __future__ import annotations

from graph_passes.graph.ir import DataType, Graph, Node, TensorId
from graph_passes.graph.ops import passed
from graph_passes.graph.writer import Writer


def is_reversed(graph: Graph, source: TensorId) -> bool:
    """Whether `source` was reversed along time."""
    return _reversal(graph, source) is not None


def unreversed(graph: Graph, write: Writer, source: TensorId) -> TensorId:
    """The sequence of which `source` is the reversal."""
    found = _reversal(graph, source)
    if found is None:
        return source
    before, transpose = found
    if transpose is None:
        return before
    attrs = {"T": DataType(graph.specs[before].dtype), "Tperm": DataType(graph.specs[transpose.inputs[1]].dtype)}
    return write.once("Transpose", [before, transpose.inputs[1]], attrs)


def _reversal(graph: Graph, source: TensorId) -> tuple[TensorId, Node | None] | None:
    """What was reversed along time, and the Transpose behind the reversal, if there is one."""
    node = graph[passed(graph, source).node]
    if node.op == "ReverseV2":
        return (node.inputs[0], None) if axes(graph, node) == [0] else None
    order = transposition(graph, node)
    if order is None:
        return None
    inner = graph[passed(graph, node.inputs[0]).node]
    if inner.op == "ReverseV2" and axes(graph, inner) == [order[0]]:
        return inner.inputs[0], node
    return None


def transposition(graph: Graph, node: Node) -> list[int] | None:
    """The order of axes that a Transpose makes."""
    order = graph.constants.get(passed(graph, node.inputs[1]).node) if node.op == "Transpose" else None
    return None if order is None else [int(axis) for axis in order]


def axes(graph: Graph, node: Node) -> list[int] | None:
    """The axes that a ReverseV2 reverses."""
    spec = graph.specs.get(node.inputs[0])
    found = graph.constants.get(passed(graph, node.inputs[1]).node)
    if found is None or spec is None or spec.shape is None:
        return None
    return [int(axis) % len(spec.shape) for axis in found.reshape(-1)]


def fold_outputs(
    graph: Graph, write: Writer, stacked: TensorId, output: TensorId, dtype: str
) -> list[tuple[TensorId, TensorId]]:
    """Rewirings for the output of a launch that walked backwards: readers that reverse it once more read it as it is.

    Args:
        graph: the graph.
        write: takes new nodes.
        stacked: the loop's output, in the loop's order.
        output: the launch's, in the order of its inputs.
        dtype: dtype of both.
    """
    rewired = [(stacked, write.reversed(output, dtype))]
    for use in graph.uses(stacked):
        reader = graph[use.node]
        if reader.op == "ReverseV2" and axes(graph, reader) == [0]:
            rewired.append((TensorId(reader.name), output))
        order = transposition(graph, reader)
        if order is None or use.index != 0:
            continue
        for behind in graph.uses(TensorId(reader.name)):
            end = graph[behind.node]
            if end.op == "ReverseV2" and behind.index == 0 and axes(graph, end) == [order.index(0)]:
                rewired.append((TensorId(end.name), write.transposed(output, dtype, order)))
    return rewired
