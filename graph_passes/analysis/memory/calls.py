"""What the functions that a graph calls need while they run: a loop's step, a branch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.lists import PARTS, steps_of
from graph_passes.analysis.memory.liveness import build_timeline
from graph_passes.graph import ops
from graph_passes.graph.ir import Function, Graph, Node
from graph_passes.graph.order import is_acyclic, schedule

_ALIASES = frozenset({"Switch", "RefSwitch", "OptionalGetValue"})


@dataclass(frozen=True)
class WithCalls:
    """Estimates of a graph with the functions that it calls; a `CostModel`."""

    estimate: Roofline

    def seconds(self, graph: Graph, node: Node) -> float:
        """See `CostModel`. A loop takes its steps' time, one step's where their number is not known."""
        own = self.estimate.seconds(graph, node)
        if (node.name, "cond") in graph.functions:
            steps = steps_of(graph, node)
            parts = [graph.functions.get((node.name, part)) for part in ("cond", "body")]
            return own + (1 if steps is None else steps) * sum(_seconds(each, self.estimate) for each in parts if each)
        parts = [graph.functions.get((node.name, part)) for part in PARTS]
        return own + max((_seconds(each, self.estimate) for each in parts if each), default=0.0)

    def workspace(self, graph: Graph, node: Node) -> int:
        """See `CostModel`. A call takes the most that one run of its function needs at once, where sizes are known."""
        parts = (graph.functions.get((node.name, part)) for part in PARTS)
        inside = max((_peak(function, self.estimate) for function in parts if function is not None), default=0)
        if node.op not in ops.LOOPS:  # a loop's results come from the step before, those of a branch from its own run
            inside = max(0, inside - sum(graph.nbytes(tensor) for tensor in graph.tensors(node)))
        return self.estimate.workspace(graph, node) + inside

    def base(self, graph: Graph) -> int:
        """See `CostModel`."""
        return self.estimate.base(graph)


@lru_cache(maxsize=32)
def _seconds(function: Function, estimate: Roofline) -> float:
    """The time that a function takes to run once."""
    costs = WithCalls(estimate)
    return sum(costs.seconds(function.graph, node) for node in function.graph)


@lru_cache(maxsize=32)
def _peak(function: Function, estimate: Roofline) -> int:
    """Bytes that a function needs beyond its arguments, while it runs once."""
    graph = function.graph
    if not is_acyclic(graph):
        return 0
    timeline = build_timeline(graph, schedule(graph), WithCalls(estimate), function.results, aliases=_ALIASES)
    return timeline.peak - timeline.base
