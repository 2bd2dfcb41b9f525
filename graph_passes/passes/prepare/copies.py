"""Cheap values that are computed again where they are read much later, instead of being stored until then.

    conv -> BiasAdd -> mean, variance, normalization      ->  conv -> BiasAdd -> mean, variance, normalization
                    -> (behind other layers) gradient         conv -> BiasAdd again -> gradient

No kernel can hold both kinds of readers, so that the kernel with the first BiasAdd would store its result for the
second. What it is made of is stored in any case, for it comes from an op that is no part of a kernel. The numbers are
the same: it is the same op.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from graph_passes.analysis.op_pattern import NodePattern, OpPattern
from graph_passes.graph.ir import Graph, Node, TensorId, Use
from graph_passes.graph.ops import viewed
from graph_passes.graph.order import topological

CHEAP = frozenset({"BiasAdd", "Add", "AddV2", "Sub", "Mul"})
LEAST = 1 << 20  # bytes of what is worth it
SMALL = 16  # times smaller is an operand that costs nothing
_APART = frozenset({OpPattern.PRODUCT, OpPattern.BATCHED_PRODUCT, OpPattern.CALL, OpPattern.OPAQUE})  # in no kernel


@dataclass(frozen=True)
class Recomputed:
    """A node that is computed again.

    Attributes:
        name: of the node.
        late: what reads it late, and will read the second.
        after: the name of a node that the second one waits for, so that it is not computed with the first.
    """

    name: str
    late: tuple[Use, ...]
    after: str


def recomputed(graph: Graph, known: Mapping[str, NodePattern], keep: Collection[str]) -> tuple[Recomputed, ...]:
    """What is computed again; the names of `keep` are fetched."""
    wanted = [node for node in graph if node.name not in keep and _is_cheap(graph, known, node)]
    if not wanted:
        return ()
    stages = _Stages(graph, known)
    found = []
    for node in wanted:
        uses = list(graph.uses(TensorId(node.name)))
        first = min(stages.needed[use.node] for use in uses)
        late = tuple(use for use in uses if stages.needed[use.node] > first)
        if late:
            earliest = min((use.node for use in late), key=lambda name: stages.needed[name])
            found.append(Recomputed(node.name, late, stages.begins(earliest)))
    return tuple(found)


def _is_cheap(graph: Graph, known: Mapping[str, NodePattern], node: Node) -> bool:
    """Whether all that a node reads is one stored tensor of the node's size, and small ones."""
    if node.op not in CHEAP or node.control or known[node.name].pattern is not OpPattern.ELEMENTWISE:
        return False
    size = graph.nbytes(TensorId(node.name))
    large = [tensor for tensor in node.inputs if graph.nbytes(tensor) * SMALL > size]
    known_sizes = all(graph.sizes(tensor) is not None for tensor in node.inputs)
    if size < LEAST or not known_sizes or len(large) != 1 or graph.nbytes(large[0]) != size:
        return False
    return known[viewed(graph, large[0], lambda name: known[name].pattern is OpPattern.VIEW).node].pattern in _APART


class _Stages:
    """How many ops that are no part of a kernel lie before each node, one behind the other.

    Attributes:
        needed: for each node the stage of the first that needs it, and cannot run earlier.
    """

    def __init__(self, graph: Graph, known: Mapping[str, NodePattern]) -> None:
        self._graph = graph
        self._apart = {name: each.pattern in _APART for name, each in known.items()}
        self._first: dict[str, int] = {}
        order = topological(graph)
        for name in order:
            self._first[name] = max(map(self._behind, graph.predecessors(graph[name])), default=0)
        self.needed = dict(self._first)
        for name in reversed(order):
            if not self._apart[name]:
                later = (self.needed[each] for each in graph.successors(graph[name]))
                self.needed[name] = max(self._first[name], min(later, default=0))

    def begins(self, name: str) -> str:
        """An op that is no part of a kernel, behind which the stage begins in which a node is needed. It depends on no
        node that is needed in this stage or later: such a one would be needed before the op."""
        graph, stage = self._graph, self.needed[name]
        while self._first[name] < stage:
            name = next(each for each in graph.successors(graph[name]) if self.needed[each] == stage)
        while not self._apart[name] or self._first[name] == stage:
            name = next(each for each in graph.predecessors(graph[name]) if self._behind(each) == stage)
        return name

    def _behind(self, name: str) -> int:
        """The stage of what reads a node at once."""
        return self._first[name] + self._apart[name]
