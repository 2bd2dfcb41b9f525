"""Collectives that meet at run time, and the cycles that they close. Pure.

    lane of GPU:0    a0 -> c0 -> b0      Neither c0 nor c1 ends before both have begun: an op that c1 waits for must
    lane of GPU:1    a1 -> c1 -> b1      not wait for b0. So the two count as one node, and the graph has no cycle.

A lane is a device. TensorFlow orders the collectives of a lane by a token, a resource that each of them takes, so the
k-th of a group in one lane meets the k-th of that group in every other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from custom_ops.ordering import topological_order
from graph_passes.errors import GraphError
from graph_passes.graph import ops
from graph_passes.graph.ir import Graph, Node
from graph_passes.graph.order import topological
from graph_passes.lower.values import integers

GROUP_KEY = 2  # the input of a collective of the second version that names its group
_TOKENS = 4  # before the tokens: data, size and key of the group, key of the instance


@dataclass(frozen=True)
class Meeting:
    """Collectives of which none ends before all have begun.

    Attributes:
        group: the key of their group of devices.
        turn: how many meetings of the group come before.
        members: names of the nodes, one in each lane of this process; other processes may have more.
    """

    group: int
    turn: int
    members: tuple[str, ...]


def lanes(graph: Graph) -> tuple[str, ...]:
    """The devices that ops of the graph are placed on, by the first op of each."""
    return tuple(dict.fromkeys(node.device for node in graph if node.device))


def is_collective(node: Node) -> bool:
    """Whether the node waits for nodes of other devices or processes."""
    return node.op in ops.COLLECTIVES


def meetings(graph: Graph) -> tuple[Meeting, ...]:
    """The collectives of a step, put together as they meet.

    Raises:
        GraphError: two collectives of a lane have no order, a group's key is not known, or a function holds one.
    """
    _refuse_inside(graph)
    in_lane: dict[str, int] = {}  # how many collectives a lane has so far
    latest: dict[str, dict[str, int]] = {}  # node -> lane -> the last collective of the lane that it waits for
    turns: dict[tuple[str, int], int] = {}
    found: dict[tuple[int, int], list[str]] = {}
    for name in topological(graph):
        node = graph[name]
        waited = _merged(latest[before] for before in dict.fromkeys(graph.predecessors(node)))
        if is_collective(node):
            place = in_lane.get(node.device, 0)
            if waited.get(node.device, 0) != place:
                raise GraphError(
                    f"collective '{name}' ({node.op}) has no order among those of {node.device or 'its device'}; "
                    "expected an ordering token, as tf.distribute gives it in TensorFlow 2"
                )
            in_lane[node.device] = place + 1
            waited = {**waited, node.device: place + 1}
            group = _group(graph, node)
            turn = turns.get((node.device, group), 0)
            turns[node.device, group] = turn + 1
            found.setdefault((group, turn), []).append(name)
        latest[name] = waited
    return tuple(Meeting(group, turn, tuple(members)) for (group, turn), members in found.items())


def united_order(graph: Graph, met: Sequence[Meeting]) -> list[str]:
    """A topological order in which each collective stands behind all that any collective of its meeting waits for.

    Raises:
        GraphError: the graph has none: it waits for itself.
    """
    if not met:
        return topological(graph)
    before = {node.name: set(graph.predecessors(node)) for node in graph}
    after: dict[str, list[str]] = {name: [] for name in before}
    for meeting in met:
        needed = set().union(*(before[name] for name in meeting.members))
        before.update(dict.fromkeys(meeting.members, needed))
    for name, needed in before.items():
        for each in needed:
            after[each].append(name)
    order = topological_order({name: len(needed) for name, needed in before.items()}, after.__getitem__)
    if len(order) < len(graph):
        stuck = next(name for name in before if name not in set(order))
        raise GraphError(f"the step waits for itself through or before '{stuck}' ({graph[stuck].op})")
    return order


def waits_for_itself(graph: Graph) -> tuple[str, ...]:
    """The nodes of one cycle that the graph has once collectives that meet are one node; () if it has none.

    Time and memory are linear in nodes and edges.

    Raises:
        GraphError: as `meetings`.
    """
    united = {name: meeting.members[0] for meeting in meetings(graph) for name in meeting.members}
    members: dict[str, list[str]] = {}
    for name, first in united.items():
        members.setdefault(first, []).append(name)

    def successors(name: str) -> Iterator[str]:
        for member in members.get(name, (name,)):
            for reader in graph.successors(graph[member]):
                yield united.get(reader, reader)

    waiting: dict[str, int] = {}
    nodes = [node.name for node in graph if united.get(node.name, node.name) == node.name]
    for name in nodes:
        for reader in set(successors(name)):
            waiting[reader] = waiting.get(reader, 0) + 1
    ready = [name for name in nodes if name not in waiting]
    while ready:
        for reader in set(successors(ready.pop())):
            waiting[reader] -= 1
            if not waiting[reader]:
                del waiting[reader]
                ready.append(reader)
    return _cycle(graph, waiting, united, members) if waiting else ()


def _cycle(
    graph: Graph, stuck: dict[str, int], united: dict[str, str], members: dict[str, list[str]]
) -> tuple[str, ...]:
    """A cycle among nodes of which each waits for another one of them."""
    path: list[str] = []
    name = next(iter(stuck))
    while name not in path:
        path.append(name)
        before = (
            united.get(source, source)
            for member in members.get(name, (name,))
            for source in graph.predecessors(graph[member])
        )
        name = next(source for source in before if source in stuck)
    return tuple(reversed(path[path.index(name) :]))


def _merged(parts: Iterator[dict[str, int]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for part in parts:
        if not merged:
            merged = part  # shared until it differs: most nodes wait for one lane alone
            continue
        if any(merged.get(lane, 0) < place for lane, place in part.items()):
            merged = {**merged, **{lane: max(place, merged.get(lane, 0)) for lane, place in part.items()}}
    return merged


def _group(graph: Graph, node: Node) -> int:
    key = integers(graph, node.inputs[GROUP_KEY]) if len(node.inputs) > _TOKENS else None
    if not key:
        raise GraphError(
            f"collective '{node.name}' ({node.op}) has no constant group key and ordering token; expected those that "
            "tf.distribute gives in TensorFlow 2"
        )
    return key[0]


def _refuse_inside(graph: Graph) -> None:
    for (caller, _), function in graph.functions.items():
        for node in function.graph:
            if is_collective(node):
                raise GraphError(
                    f"collective '{node.name}' ({node.op}) is inside of a function that '{caller}' calls; tfmem edits "
                    "steps whose collectives run once in each step"
                )
        _refuse_inside(function.graph)
