"""A graph in which sets of nodes are one node each: its order, or the cycles that prevent one (Figure 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from custom_ops.ordering import topological_order
from graph_passes.analysis.dependences import Dependences


class Passage(NamedTuple):
    """How a cycle passes through a given group: in by one of its nodes, and out by one, which may be the same."""

    group: int
    enters: int
    leaves: int


class QuotientGraph:
    """`net` with each of some disjoint sets as one group; every other node is a group by itself.

    Attributes:
        groups: the nodes of each group, in increasing order; those that were given come first, as they were given.
    """

    def __init__(self, net: Dependences, sets: Sequence[Sequence[int]]) -> None:
        self._net = net
        self._owner = owner = [-1] * len(net)
        for group, members in enumerate(sets):
            for number in members:
                owner[number] = group
        self.groups = [sorted(members) for members in sets]
        for number, group in enumerate(owner):
            if group < 0:
                owner[number] = len(self.groups)
                self.groups.append([number])
        self._given = len(sets)
        self._after: list[list[int]] = []
        self._waiting = [0] * len(self.groups)
        for group, members in enumerate(self.groups):
            later = {owner[other] for number in members for other in net.after[number]}
            later.discard(group)
            self._after.append(sorted(later))
            for other in later:
                self._waiting[other] += 1

    def order(self) -> list[int] | None:
        """The groups in an order that fits the dependences, or None if there is none.

        Of those that can come next, the one whose last node has the smallest number does.
        """
        waiting = dict(enumerate(self._waiting))
        found = topological_order(waiting, self._after.__getitem__, lambda group: self.groups[group][-1])
        return found if len(found) == len(self.groups) else None

    def cycles(self) -> list[list[Passage]]:
        """For each given group on a cycle, one of the shortest through it: how it passes through the given groups, in
        increasing order of these. Of cycles through the same groups there is one."""
        found: dict[tuple[int, ...], list[Passage]] = {}
        for component in self._components():
            within = set(component)
            for start in component:
                if start < self._given:
                    cycle = self._passages(self._shortest(start, within))
                    found.setdefault(tuple(passage.group for passage in cycle), cycle)
        return list(found.values())

    def _passages(self, cycle: Sequence[int]) -> list[Passage]:
        """How a cycle passes through its given groups; each of its groups waits for the next one."""
        edges = [self._edge(earlier, later) for later, earlier in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
        entries = [into for _, into in edges]
        exits = [out for out, _ in (edges[-1], *edges[:-1])]
        return sorted(Passage(*each) for each in zip(cycle, entries, exits, strict=True) if each[0] < self._given)

    def _edge(self, earlier: int, later: int) -> tuple[int, int]:
        """Its ends: the first node of a group that a node of the other waits for, and the first of these."""
        ends = ((number, other) for number in self.groups[earlier] for other in self._net.after[number])
        return next((number, other) for number, other in ends if self._owner[other] == later)

    def _shortest(self, start: int, within: set[int]) -> list[int]:
        came: dict[int, int] = {}
        pending = deque([start])
        while pending:
            group = pending.popleft()
            for other in self._after[group]:
                if other == start:
                    cycle = [group]
                    while cycle[-1] != start:
                        cycle.append(came[cycle[-1]])
                    return cycle
                if other in within and other not in came:
                    came[other] = group
                    pending.append(other)
        raise AssertionError("a strongly connected group has a cycle")

    def _components(self) -> list[list[int]]:
        """The strongly connected components of two groups or more (Tarjan), each in increasing order."""
        index: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        on_stack: set[int] = set()
        found: list[list[int]] = []
        for root in range(self._given):
            if root in index:
                continue
            path = [(root, iter(self._after[root]))]
            index[root] = low[root] = len(index)
            stack.append(root)
            on_stack.add(root)
            while path:
                group, later = path[-1]
                for other in later:
                    if other not in index:
                        index[other] = low[other] = len(index)
                        stack.append(other)
                        on_stack.add(other)
                        path.append((other, iter(self._after[other])))
                        break
                    if other in on_stack:
                        low[group] = min(low[group], index[other])
                else:
                    path.pop()
                    if path:
                        low[path[-1][0]] = min(low[path[-1][0]], low[group])
                    if low[group] == index[group]:
                        component: list[int] = []
                        while not component or component[-1] != group:
                            component.append(stack.pop())
                        on_stack.difference_update(component)
                        if len(component) > 1:
                            found.append(sorted(component))
        return sorted(found)
