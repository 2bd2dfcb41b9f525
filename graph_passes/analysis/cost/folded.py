"""What TensorFlow computes once and keeps: ops of constants alone, when it makes a graph ready to run
(common_runtime/constant_folding.cc). Grappler leaves those whose result is large.

    loss = mean(h * h)      its gradient is 1/N everywhere, as large as h, and in memory as long as the graph is
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from graph_passes.graph import ops
from graph_passes.graph.ir import Graph, Node, TensorId

LARGEST = 10 << 20  # bytes of a result that TensorFlow keeps
_STATEFUL = frozenset({"Empty"})  # which a split adds: a node of a new graph does not say so
_CONTROL_FLOW = frozenset({"Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond", *ops.LOOPS})


def folded(graph: Graph) -> int:
    """Bytes of the results that are kept: those that other ops read."""
    constant = _of_constants(graph)
    kept = (tensor for name in constant for tensor in graph.tensors(graph[name]) if _is_read(graph, tensor, constant))
    return sum(nbytes for nbytes in map(graph.nbytes, kept) if nbytes <= LARGEST)


def not_run(graph: Graph) -> frozenset[str]:
    """The ops that do not run in the step, for their results are kept."""
    constant = _of_constants(graph)
    runs = {
        name
        for name in constant
        for tensor in graph.tensors(graph[name])
        if graph.nbytes(tensor) > LARGEST and _is_read(graph, tensor, constant)
    }
    runs = graph.reached(runs, lambda node: (tensor.node for tensor in node.inputs))
    return frozenset(constant - runs)


def _of_constants(graph: Graph) -> set[str]:
    """The ops that compute with nothing but constants."""
    constant = {node.name for node in graph if node.op == "Const"}
    waiting, known = list(constant), Counter[str]()
    while waiting:
        for tensor in graph.tensors(graph[waiting.pop()]):
            for use in graph.uses(tensor):
                known[use.node] += 1
                reader = graph[use.node]
                if known[use.node] == len(reader.inputs) and _can_be(graph, reader):
                    constant.add(reader.name)
                    waiting.append(reader.name)
    return {name for name in constant if graph[name].op != "Const"}


def _is_read(graph: Graph, tensor: TensorId, constant: Collection[str]) -> bool:
    return any(use.node not in constant for use in graph.uses(tensor))


def _can_be(graph: Graph, node: Node) -> bool:
    called = any((node.name, part) in graph.functions for part in ("cond", "body", "f", "then_branch", "else_branch"))
    return not (node.stateful or called or node.op in _STATEFUL | _CONTROL_FLOW | ops.EXTERNAL | ops.COLLECTIVES)
