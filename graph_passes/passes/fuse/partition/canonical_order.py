"""An order of a region's members that is the same for equal regions, whatever their nodes are called. Pure.

    GPU:0    split:0 -> mul -> update w, split:1 -> mul_1 -> update v
    GPU:1    split:1 -> mul_8 -> update v, split:0 -> mul_9 -> update w      the text of a region depends on the order

Of the members that can come next, one comes by what it computes: its op and attributes, and those of all it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from custom_ops.ordering import topological_order
from graph_passes.analysis.dependences import Dependences
from graph_passes.analysis.peers import Meeting
from graph_passes.graph.ir import Graph


class CanonicalOrder:
    """Orders regions of a graph."""

    def __init__(self, graph: Graph, order: Sequence[str], net: Dependences, met: Sequence[Meeting]) -> None:
        self._order = order
        self._net = net
        self._place = {name: number for number, name in enumerate(order)}
        turns = {name: f"{meeting.group} {meeting.turn}" for meeting in met for name in meeting.members}
        self._marks: dict[str, str] = {}
        for name in order:
            node = graph[name]
            read = [(self._marks[tensor.node], tensor.index) for tensor in node.inputs]
            attrs = sorted((key, repr(value)) for key, value in node.attrs.items() if not key.startswith("_"))
            value = graph.constants[name].tolist() if name in graph.constants else None
            computed = turns.get(name) or (node.op, attrs, value, read)
            self._marks[name] = sha256(repr(computed).encode()).hexdigest()

    def __call__(self, members: Sequence[str]) -> list[str]:
        """The members, given in a topological order, in the order for equal regions."""
        within = set(members)
        before = {name: [self._order[p] for p in self._net.before[self._place[name]]] for name in members}
        after: dict[str, list[str]] = {name: [] for name in members}
        waiting = dict.fromkeys(members, 0)
        for name, earlier in before.items():
            for each in within.intersection(earlier):
                after[each].append(name)
                waiting[name] += 1
        rank = {name: (self._marks[name], number) for number, name in enumerate(members)}
        return topological_order(waiting, after.__getitem__, rank.__getitem__)
