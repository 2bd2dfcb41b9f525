"""What waits for what, by number: the form in which fusion asks which nodes may run together.

Nodes are numbered in a topological order. Sets of nodes that shall run as one are *acyclic together* if no path leaves
one of them and comes back: then the graph in which each is one node has an order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from graph_passes.analysis.op_pattern import IN_KERNELS, NodePattern, OpPattern
from graph_passes.graph.ir import Graph, Node, TensorId


class Role(Enum):
    """What a node is to runs of work (see `runs`)."""

    WORK = "work"
    LAST = "last"  # work that nothing of its run may read
    FIRST = "first"  # work that reads nothing of its run
    FREE = "free"  # takes no time: belongs to the run of what it reads, or to none
    BORDER = "border"  # in no run


@dataclass(frozen=True)
class Dependences:
    """Nodes by number.

    Attributes:
        before: for each node those that it waits for, each once, in increasing order; all are smaller than it.
    """

    before: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.before)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each node those that wait for it, each once, in increasing order."""
        found: list[list[int]] = [[] for _ in self.before]
        for number, earlier in enumerate(self.before):
            for place in earlier:
                found[place].append(number)
        return tuple(map(tuple, found))

    def behind(self, members: Collection[int], end: int) -> set[int]:
        """What waits for one of `members` without being one, up to the number `end`."""
        found: set[int] = set()
        for number in range(min(members, default=end), end):
            if number not in members and any(other in members or other in found for other in self.before[number]):
                found.add(number)
        return found

    def is_convex(self, members: Collection[int]) -> bool:
        """Whether no path leaves `members` and comes back."""
        members = set(members)
        behind = self.behind(members, max(members, default=0) + 1)
        return not any(other in behind for number in members for other in self.before[number])

    def among(self, members: Sequence[int]) -> Dependences:
        """The dependences among `members` alone, given in increasing order, renumbered from 0."""
        place = {number: index for index, number in enumerate(members)}
        return Dependences(tuple(tuple(place[p] for p in self.before[number] if p in place) for number in members))


def read_by(op_patterns: Mapping[str, NodePattern], node: Node) -> list[TensorId]:
    """The tensors whose numbers reach `node` in a region, handles of variables among them.

    What only says axes or a shape does not, nor does a constant, which a kernel holds itself.
    """
    op_pattern = op_patterns[node.name]
    read = [node.inputs[index] for index in op_pattern.operands + op_pattern.reads + op_pattern.writes]
    if op_pattern.pattern not in IN_KERNELS or op_pattern.pattern is OpPattern.VIEW or node.op == "AssignVariableOp":
        return read
    return [tensor for tensor in read if op_patterns[tensor.node].pattern is not OpPattern.CONSTANT]


def waited(graph: Graph, node: Node) -> list[str]:
    """Names of the nodes that `node` waits for though it reads nothing of them; in place of a `NoOp`, which does
    nothing, those that this waits for. So what ends a function, and waits for all of its reads, divides nothing."""
    found: dict[str, None] = {}
    seen: set[str] = set()
    pending = list(reversed(node.control))
    while pending:
        name = pending.pop()
        if graph[name].op != "NoOp":
            found[name] = None
        elif name not in seen:
            seen.add(name)
            pending += reversed(graph[name].control)
    return list(found)


def dependences(
    graph: Graph,
    op_patterns: Mapping[str, NodePattern],
    order: Sequence[str],
    whole: Collection[str] = (),
    together: Collection[Sequence[str]] = (),
) -> Dependences:
    """The dependences of a graph, numbered by `order`; see `waited` for a `NoOp`, of which nothing waits here.

    Args:
        graph: the graph.
        op_patterns: of all nodes.
        order: a topological order of them.
        whole: names of nodes of which every input counts, since no region will hold them; of others, see `read_by`.
        together: sets of nodes of which each waits for all that any of its set waits for, as collectives that meet do;
            `order` has to fit that.
    """
    place = {name: number for number, name in enumerate(order)}
    before: list[tuple[int, ...]] = []
    for name in order:
        node = graph[name]
        read = node.inputs if name in whole else read_by(op_patterns, node)
        found = {place[tensor.node] for tensor in read} | {place[control] for control in waited(graph, node)}
        before.append(tuple(sorted(found)) if node.op != "NoOp" else ())
    for names in together:
        needed = tuple(sorted({earlier for name in names for earlier in before[place[name]]}))
        for name in names:
            before[place[name]] = needed
    return Dependences(tuple(before))


def runs(
    net: Dependences,
    roles: Sequence[Role],
    places: Sequence[int] = (),
    apart: Collection[tuple[int, int]] = (),
) -> list[int]:
    """Which nodes of work can run together: the fewest sets that are acyclic together, with borders between.

    Work that lies before a border on some path and work behind it belong to different sets. So a path on which work
    and borders alternate needs as many sets as it has stretches of work, and no more than the longest such path are
    needed: each node gets the number of stretches that can lie before it.

    Args:
        net: what waits for what.
        roles: of the nodes.
        places: nodes of different places never belong to one set; empty: all are in one.
        apart: edges whose ends never belong to one set.

    Returns:
        The *rank* of each node. Nodes of one odd rank and one place are a set; nodes of an even rank are in none. Along
        an edge a rank never falls, and it rises wherever an edge leaves a set: so no path comes back to one.
    """
    ranks: list[int] = []
    inside: list[int] = []  # stretches before the node, on paths whose last stretch it is in or may join; -1: none
    outside: list[int] = []  # the same on paths whose last stretch has ended
    for number, earlier in enumerate(net.before):
        within, without = -1, 0
        for p in earlier:
            if (places and places[p] != places[number]) or (apart and (p, number) in apart):
                without = max(without, outside[p], inside[p] + 1)
            else:
                within, without = max(within, inside[p]), max(without, outside[p])
        role = roles[number]
        level = max(within + 1 if role is Role.FIRST else within, without)
        if role is Role.WORK or role is Role.FIRST or role is Role.LAST:
            ranks.append(2 * level + 1)
            within, without = (-1, level + 1) if role is Role.LAST else (level, -1)
        elif role is Role.BORDER:
            within, without = -1, max(within + 1, without)
            ranks.append(2 * without)
        else:
            ranks.append(2 * within + 1 if within >= without else 2 * without)
        inside.append(within)
        outside.append(without)
    return ranks


def settled(
    net: Dependences,
    ranks: Sequence[int],
    roles: Sequence[Role],
    waits: Callable[[int, int, Sequence[int]], bool],
    places: Sequence[int] = (),
    apart: Collection[tuple[int, int]] = (),
) -> list[int]:
    """The ranks of `runs`, with nodes moved to a later set: that of the first node that reads them.

    Args:
        net, ranks, roles, places, apart: as `runs` was given them, and what it gave.
        waits: asked of a node of work that could move, with the rank that it would have and those of the others; free
            nodes that are in no set always join one.
    """
    found = list(ranks)
    for number in reversed(range(len(net))):
        if roles[number] is Role.BORDER or not net.after[number]:
            continue
        latest, joins = 2 * len(net), False
        for other in net.after[number]:
            rank = found[other]
            if rank % 2 == 0:
                last, same = rank - 1, False
            elif (
                (places and places[other] != places[number])
                or roles[number] is Role.LAST
                or roles[other] is Role.FIRST
                or (number, other) in apart
            ):
                last, same = rank - 2, False
            else:
                last, same = rank, True
            latest, joins = min(latest, last), same if last < latest else joins or (same and last == latest)
        if joins and latest > found[number]:
            free = roles[number] is Role.FREE and found[number] % 2 == 0
            if free or (roles[number] is not Role.FREE and waits(number, latest, found)):
                found[number] = latest
    return found


def connected(net: Dependences, members: Sequence[int]) -> list[list[int]]:
    """`members` in sets between which there is no edge, each in increasing order, ordered by their first."""
    within = set(members)
    found: list[list[int]] = []
    seen: set[int] = set()
    for first in members:
        if first in seen:
            continue
        seen.add(first)
        part, pending = [], [first]
        while pending:
            number = pending.pop()
            part.append(number)
            for other in (*net.before[number], *net.after[number]):
                if other in within and other not in seen:
                    seen.add(other)
                    pending.append(other)
        found.append(sorted(part))
    return found
