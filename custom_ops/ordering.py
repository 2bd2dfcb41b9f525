"""Orders of nodes that wait for others, and sets that are joined: of whatever nodes are."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Item = TypeVar("Item")


def topological_order(
    waiting: Mapping[Item, int],
    after: Callable[[Item], Iterable[Item]],
    rank: Callable[[Item], Any] | None = None,
) -> list[Item]:
    """Order nodes so that each stands behind all that it waits for.

    Args:
        waiting: for how many others each node waits.
        after: the nodes that wait for a node, each once.
        rank: of the nodes that can come next the one of the least rank does; by default the one that can since last.

    Returns:
        All nodes, or fewer: those on a cycle, and those behind one, are left out.
    """
    left = dict(waiting)
    ready = [item for item, count in left.items() if not count]
    order: list[Item] = []
    if rank is None:
        while ready:
            item = ready.pop()
            order.append(item)
            for other in after(item):
                left[other] -= 1
                if not left[other]:
                    ready.append(other)
        return order
    ranked = [(rank(item), item) for item in ready]
    heapq.heapify(ranked)
    while ranked:
        _, item = heapq.heappop(ranked)
        order.append(item)
        for other in after(item):
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ranked, (rank(other), other))
    return order


class DisjointSets:
    """Sets of the numbers from 0 to `count` - 1, at first one for each number."""

    def __init__(self, count: int) -> None:
        self._owner = list(range(count))

    def root(self, number: int) -> int:
        """Return the number that stands for the set of `number`."""
        owner = self._owner
        while owner[number] != number:
            owner[number] = owner[owner[number]]
            number = owner[number]
        return number

    def join(self, one: int, other: int) -> None:
        """Make one set of the sets of two numbers."""
        self._owner[self.root(one)] = self.root(other)
