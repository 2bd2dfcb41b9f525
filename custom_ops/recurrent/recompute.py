"""The values of a forward step that are kept for the backward step; the others are recomputed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import pairwise
from typing import TypeAlias

from custom_ops.expr.nodes import Elementwise
from custom_ops.recurrent.cell import Cell, CellConstant, Invariant, Vector, arguments_of

# A node is two points, so that passing it costs; "source" and "sink" are points too.
Point: TypeAlias = tuple[int, str] | str

# What moving a column costs, and a scalar: next to nothing.
COLUMN, SCALAR = 1000, 1


def cheapest(cell: Cell, needed: Collection[int], stored: Collection[int]) -> set[int]:
    """The nodes to read so that all `needed` can be computed from them elementwise, moving the fewest columns.

    What is `stored` anyway has to be read only; another node has to be stored and read. A sequence costs as much as
    that: it is there, but to read it keeps it in memory. Parameters, constants and invariants cost nothing.

    This is a minimum cut, and of equal ones that nearest to what is needed, which recomputes least: an LSTM keeps
    its four activated gates rather than products and inputs, from which they follow.
    """
    network = _Network()
    waiting, seen = list(needed), set(needed)
    for place in needed:
        network.connect((place, "out"), "sink")
    while waiting:
        place = waiting.pop()
        match cell.nodes[place]:
            case CellConstant() | Vector() | Invariant():
                continue
            case Elementwise() as node:
                for argument in arguments_of(node):
                    network.connect((argument, "out"), (place, "in"))
                    if argument not in seen:
                        seen.add(argument)
                        waiting.append(argument)
            case _:
                network.connect("source", (place, "in"))
        cost = (SCALAR if cell.scalar[place] else COLUMN) * (1 if place in stored else 2)
        network.connect((place, "in"), (place, "out"), cost)
    within = network.side_of_sink()
    entries = {place for place in seen if (place, "in") in network and (place, "out") in within}
    return {place for place in entries if (place, "in") not in within}


class _Network:
    """Maximum flow along shortest paths (Edmonds and Karp): a cell has tens of nodes."""

    def __init__(self) -> None:
        self.capacity: dict[Point, dict[Point, float]] = {"source": {}, "sink": {}}

    def __contains__(self, point: Point) -> bool:
        return point in self.capacity

    def connect(self, a: Point, b: Point, capacity: float = float("inf")) -> None:
        self.capacity.setdefault(a, {})[b] = capacity
        self.capacity.setdefault(b, {}).setdefault(a, 0)

    def side_of_sink(self) -> set[Point]:
        """The points from which more could still flow to the sink, when no more can from the source."""
        while True:
            following = self._towards_sink()
            if "source" not in following:
                return set(following)
            path: list[Point] = ["source"]
            while path[-1] != "sink":
                path.append(following[path[-1]])
            edges = list(pairwise(path))
            flow = min(self.capacity[a][b] for a, b in edges)
            for a, b in edges:
                self.capacity[a][b] -= flow
                self.capacity[b][a] += flow

    def _towards_sink(self) -> dict[Point, Point]:
        """The next point on the way to the sink, for each point with such a way."""
        following: dict[Point, Point] = {"sink": "sink"}
        waiting: deque[Point] = deque(["sink"])
        while waiting:
            point = waiting.popleft()
            for other in self.capacity[point]:
                if other not in following and self.capacity[other][point] > 0:
                    following[other] = point
                    waiting.append(other)
        return following
