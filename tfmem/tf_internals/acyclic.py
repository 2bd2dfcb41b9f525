"""A topological order kept under edge insertion (Pearce and Kelly, 2006): it finds a cycle before
it is made.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from graph_passes.errors import GraphError


class AcyclicOrder:
    """Positions such that every edge leads to a later one. An edge that agrees with them costs
    nothing.
    """

    def __init__(self, edges: Iterable[tuple[Hashable, Iterable[Hashable]]]) -> None:
        """`edges`: every node, once, with the nodes that come right before it.

        Raises:
            GraphError: there is a cycle already.
        """
        self._before: dict[Hashable, list[Hashable]] = {node: list(before) for node, before in edges}
        self._after: dict[Hashable, list[Hashable]] = {node: [] for node in self._before}
        waiting = {node: len(before) for node, before in self._before.items()}
        for node, before in self._before.items():
            for source in before:
                self._after[source].append(node)
        ready = [node for node, count in waiting.items() if count == 0]
        # A tuple leaves room behind every position: (5,) < (5, 1) < (5, 1, 2) < (5, 3) < (6,).
        self._position: dict[Hashable, tuple[int, ...]] = {}
        while ready:
            node = ready.pop()
            self._position[node] = (len(self._position),)
            for after in self._after[node]:
                waiting[after] -= 1
                if waiting[after] == 0:
                    ready.append(after)
        if len(self._position) != len(self._before):
            stuck = next(node for node, count in waiting.items() if count)
            raise GraphError(f"the graph has a cycle through '{stuck}'")

    def add_node(self, node: Hashable, before: Iterable[Hashable]) -> None:
        """Add a node right after the nodes `before`."""
        self._before[node] = list(before)
        self._after[node] = []
        last = max((self._position[source] for source in self._before[node]), default=(-1,))
        self._position[node] = (*last, len(self._position))
        for source in self._before[node]:
            self._after[source].append(node)

    def add_edge(self, source: Hashable, target: Hashable) -> None:
        """Let `source` come before `target`.

        Raises:
            GraphError: `target` comes before `source` already; nothing is changed.
        """
        lowest, highest = self._position[target], self._position[source]
        if lowest <= highest:
            later = self._reach(target, self._after, lambda position: position <= highest)
            if source in later:
                raise GraphError(f"'{target}' cannot wait for '{source}', which waits for '{target}' itself")
            earlier = self._reach(source, self._before, lambda position: position >= lowest)
            moved = sorted(earlier, key=self._position.__getitem__) + sorted(later, key=self._position.__getitem__)
            places = sorted(self._position[node] for node in moved)
            self._position.update(zip(moved, places, strict=True))
        self._before[target].append(source)
        self._after[source].append(target)

    def remove_edge(self, source: Hashable, target: Hashable) -> None:
        """Take back one edge; the order stays valid."""
        self._before[target].remove(source)
        self._after[source].remove(target)

    def _reach(self, start, edges, within) -> set[Hashable]:  # type: ignore[no-untyped-def]
        found, open_nodes = {start}, [start]
        while open_nodes:
            for node in edges[open_nodes.pop()]:
                if node not in found and within(self._position[node]):
                    found.add(node)
                    open_nodes.append(node)
        return found
