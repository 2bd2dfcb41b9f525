"""Segments of a schedule: under a memory budget no region holds nodes of two of them. Pure.

    schedule    a b c | d e f | g h       each segment makes at most so many bytes
    regions     (a c)  (d e f)  (h)       while a region runs, all that it reads and gives is in memory at once

A region is one op. What it reads stays until it ends, and what it gives is there from its begin. So a region that ran
from the first layer to the last would hold all of the step at once, and no move could begin or end within it. Within a
segment a region holds at most the segment's bytes longer than its ops would. Moves are planned afterwards, on the
schedule in which each region is one op, so that none can lie inside a region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graph_passes.graph.ir import Graph
from graph_passes.graph.ops import EXTERNAL, VIEWS


@dataclass(frozen=True)
class RegionBounds:
    """How regions are bounded.

    Attributes:
        share: the part of the budget that a segment may make: 4 is a quarter. None: there is one segment.
        calls: whether regions hold products, and other calls of kernels that are not generated.
    """

    share: int | None
    calls: bool


# In the order in which they are tried. Regions of generated kernels alone end at each product, and what they make can
# be computed again instead of copied.
SEGMENTATIONS = (
    RegionBounds(None, calls=True),
    RegionBounds(None, calls=False),
    RegionBounds(16, calls=False),
    RegionBounds(4, calls=True),
    RegionBounds(16, calls=True),
    RegionBounds(64, calls=True),
)


def segments(graph: Graph, order: Sequence[str], most: int | None, lanes: bool = False) -> dict[str, int]:
    """The segment of each node of a schedule.

    Args:
        graph: the graph.
        order: its schedule.
        most: bytes that the ops of a segment make together, unless a single op makes more; None: no limit.
        lanes: whether each device has separate segments, so that equal lanes have equal ones.
    """
    found: dict[str, int] = {}
    default = next((node.device for node in graph if node.device), "") if lanes else ""
    last: dict[str, tuple[int, int]] = {}  # of each lane, the number of its segment, and what that makes
    for name in order:
        node = graph[name]
        held = node.op in EXTERNAL or node.op in VIEWS
        nbytes = 0 if held else sum(graph.nbytes(tensor) for tensor in graph.tensors(node))
        lane = (node.device or default) if lanes else ""
        number, made = last.get(lane, (0, 0))
        if most is not None and made and made + nbytes > most:
            number, made = number + 1, 0
        last[lane] = number, made + nbytes
        found[name] = number
    return found


def with_regions(order: Sequence[str], regions: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """A schedule's names with each region in the place of its last member, where all that it reads is there.

    Args:
        order: names of the ops before there were regions.
        regions: the members of each, by its name.
    """
    place = {name: number for number, name in enumerate(order)}
    last: dict[int, list[str]] = {}
    for region, members in regions.items():
        last.setdefault(max((place[name] for name in members if name in place), default=len(order)), []).append(region)
    inside = {name for members in regions.values() for name in members}
    found: list[str] = []
    for number, name in enumerate(order):
        found += [*(() if name in inside else (name,)), *last.get(number, ())]
    return (*found, *last.get(len(order), ()))
