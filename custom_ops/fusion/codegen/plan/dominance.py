"""Dominance in data flow graphs (Cooper, Harvey and Kennedy, "A simple, fast dominance algorithm")."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

V = TypeVar("V", bound=Hashable)


class DominanceTree(Generic[V]):
    """The vertices on every path from a root, as a tree.

    Args:
        root: where paths begin.
        successors: of a vertex. Of a data flow graph the readers of a value give dominance, what it is computed from
            gives post-dominance, which begins at the exit.
    """

    def __init__(self, root: V, successors: Callable[[V], Iterable[V]]) -> None:
        order = _reverse_postorder(root, successors)
        self._number = {vertex: number for number, vertex in enumerate(order)}
        before: dict[V, list[V]] = {vertex: [] for vertex in order}
        for vertex in order:
            for successor in successors(vertex):
                before[successor].append(vertex)
        self._parent: dict[V, V] = {root: root}
        changed = True
        while changed:  # once for a graph without cycles
            changed = False
            for vertex in order[1:]:
                known = [other for other in before[vertex] if other in self._parent]
                parent = known[0]
                for other in known[1:]:
                    parent = self._common(parent, other)
                if self._parent.get(vertex) != parent:
                    self._parent[vertex], changed = parent, True

    def dominates(self, over: V, vertex: V) -> bool:
        """Whether every path from the root to `vertex` meets `over`; a vertex dominates itself. None dominates what no
        path reaches."""
        if vertex not in self._number or over not in self._number:
            return False
        while self._number[vertex] > self._number[over]:
            vertex = self._parent[vertex]
        return vertex == over

    def _common(self, a: V, b: V) -> V:
        while a != b:
            while self._number[a] > self._number[b]:
                a = self._parent[a]
            while self._number[b] > self._number[a]:
                b = self._parent[b]
        return a


def _reverse_postorder(root: V, successors: Callable[[V], Iterable[V]]) -> list[V]:
    found: list[V] = []
    seen, stack = {root}, [(root, iter(list(successors(root))))]
    while stack:
        vertex, rest = stack[-1]
        following = next((other for other in rest if other not in seen), None)
        if following is None:
            found.append(vertex)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(list(successors(following)))))
    return found[::-1]
