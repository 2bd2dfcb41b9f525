"""A loop and its gradient whose steps have small inner loops, with the steps of these written out in both.

The gradient of an inner loop runs as often as the inner loop ran, a number that travels through a list:

    step of the loop        inner loop --number of steps--> TensorListPushBack
    step of its gradient    TensorListPopBack --> the inner loop's gradient
"""

from __future__ import annotations

from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import passed
from graph_passes.passes.recurrent.find.plain_steps import inner_counts, without_inner_loops
from graph_passes.passes.recurrent.train.loop_pairs import Pair


def with_inner_steps(graph: Graph, pair: Pair) -> Graph:
    """`graph`, or a copy in which inner loops of `pair` of a known, small number of steps are written out."""
    step, walk = (graph.functions[name, "body"] for name in (pair.forward, pair.backward))
    counts = inner_counts(step)
    if not counts:
        return graph
    popped = _popped(graph, pair, counts)
    copy = graph.working_copy()
    copy.functions[pair.forward, "body"] = without_inner_loops(step, counts)
    copy.functions[pair.backward, "body"] = without_inner_loops(walk, inner_counts(walk, popped))
    return copy


def _popped(graph: Graph, pair: Pair, counts: dict[str, int]) -> dict[TensorId, int]:
    """What the gradient's step pops from lists to which the step pushes how often an inner loop ran."""
    step, walk = (graph.functions[name, "body"] for name in (pair.forward, pair.backward))
    lists = {
        name: passed(graph, tensor) for name, tensor in zip(walk.arguments, graph[pair.backward].inputs, strict=True)
    }
    found: dict[TensorId, int] = {}
    for node in walk.graph:
        source = lists.get(passed(walk.graph, node.inputs[0]).node) if node.op == "TensorListPopBack" else None
        if source is None or source.node != pair.forward or source.index not in pair.lists:
            continue
        pushed = step.graph[passed(step.graph, step.results[source.index]).node]
        value = passed(step.graph, pushed.inputs[1])
        if value.node in counts and value.index == 0:  # TensorFlow's own count of a loop's steps is its first variable
            found[TensorId(node.name, 1)] = counts[value.node]
    return found
