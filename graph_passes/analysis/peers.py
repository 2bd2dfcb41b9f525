"""Collectives that meet at run time, and the cycles that they close. Pure.

    lane of GPU:0    a0 -> c0 -> b0      Neither c0 nor c1 ends before both have begun: an op that c1 waits for must
    lane of GPU:1    a1 -> c1 -> b1      not wait for b0. So the two count as one node, and the graph has no cycle.

A lane is a device. TensorFlow orders the collectives of a lane by a token, a resource that each of them takes, so the
k-th of a group in one lane meets the k-th of that group in every other.

    lane of GPU:0    a0 -> if0 -> b0     Both branches of if0 run two collectives, which meet those in if1: so
    lane of GPU:1    a1 -> if1 -> b1     tf.distribute gathers the slices of an embedding's gradient. if0 and if1
                                         count as one collective each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from custom_ops.ordering import topological_order
from graph_passes.errors import GraphError
from graph_passes.graph import ops
from graph_passes.graph.ir import Graph, Node
from graph_passes.graph.order import topological
from graph_passes.lower.known_numbers import integers

GROUP_SIZE, GROUP_KEY = 1, 2  # the inputs of a collective of the second version that say which group it is of
_CONDITIONS = frozenset({"If", "StatelessIf"})
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


@dataclass(frozen=True)
class BranchCollectives:
    """The collectives in each branch of a condition.

    Attributes:
        group: the key of their group of devices.
        size: how many devices the group has.
        count: how many collectives a branch runs.
    """

    group: int
    size: int
    count: int


def lanes(graph: Graph) -> tuple[str, ...]:
    """The devices that ops of the graph are placed on, by the first op of each."""
    return tuple(dict.fromkeys(node.device for node in graph if node.device))


def default_lane(graph: Graph) -> str:
    """The device of ops that name none: TensorFlow places them on the first GPU, if it has one; "" without lanes."""
    found = lanes(graph)
    gpus = sorted(device for device in found if "GPU:" in device)
    return next(iter((*gpus, *found)), "")


def every_device(graph: Graph) -> tuple[str, ...]:
    """`lanes` of the graph and of all functions that it calls."""
    inner = (device for function in graph.functions.values() for device in every_device(function.graph))
    return tuple(dict.fromkeys((*lanes(graph), *inner)))


def collective_inside(graph: Graph) -> str:
    """The first collective of a branch, a loop or another function that meets one outside, in words; "" if none does.

    A node whose function holds all that meet waits for nothing but what it reads, like any other. One whose function
    holds all of this process waits for other processes, as a collective does. One of `conditions_that_meet` is a
    collective.
    """
    return _inside(graph, _meeting_lanes(graph), "", frozenset(conditions_that_meet(graph)))


def conditions_that_meet(graph: Graph) -> dict[str, BranchCollectives]:
    """Conditions that count as one collective each, by name: both branches run equally many collectives of one group,
    all in the condition's lane, and these meet collectives of other lanes of this process."""
    here, found = _meeting_lanes(graph), dict[str, BranchCollectives]()
    bodies: dict[str, list[Graph]] = {}
    for (caller, _), function in graph.functions.items():
        if graph[caller].op in _CONDITIONS:
            bodies.setdefault(caller, []).append(function.graph)
    for caller, branches in bodies.items():
        lane = graph[caller].device
        if all(_unmet(body, here, lane) is None for body in branches):
            continue
        held = {_held_by_one(body, lane) for body in branches}
        one = held.pop()
        if not held and one is not None:
            found[caller] = one
    return found


def meeting_nodes(graph: Graph) -> frozenset[str]:
    """Names of the collectives of a graph, and of `conditions_that_meet`."""
    return frozenset(node.name for node in graph if is_collective(node)).union(conditions_that_meet(graph))


def _held_by_one(body: Graph, lane: str) -> BranchCollectives | None:
    """The collectives of a branch, if all are of one lane and one group, and none is deeper."""
    deeper = frozenset[str]().union(*(_meeting_lanes(function.graph, lane) for function in body.functions.values()))
    groups = list(_groups_in(body, lane))
    if deeper or len(groups) != 1:
        return None
    ((node, size, lanes_held),) = groups
    key = constant_input(body, node, GROUP_KEY)
    return (
        BranchCollectives(key, size, lanes_held[lane])
        if key is not None and lanes_held and set(lanes_held) == {lane}
        else None
    )


def _inside(graph: Graph, here: frozenset[str], lane: str, without: frozenset[str] = frozenset()) -> str:
    for (caller, _), function in graph.functions.items():
        inner = graph[caller].device or lane
        held = None if caller in without else _unmet(function.graph, here, inner)
        if held is not None:
            return (
                f"collective '{held.name}' ({held.op}) is inside of a function that '{caller}' calls, and what it "
                "meets is not"
            )
        deeper = _inside(function.graph, here, inner)
        if deeper:
            return deeper
    return ""


def _unmet(body: Graph, here: frozenset[str], lane: str) -> Node | None:
    """A collective that waits for one outside of a function's body, or perhaps does; None if there is none.

    Args:
        body: the function's.
        here: the devices of this process that take part in collectives. What waits for other processes waits for
            nothing outside of the body here, if all of them meet in it.
        lane: the device of ops that name none: that of the node which calls the function.
    """
    for node, size, lanes_held in _groups_in(body, lane):
        if lanes_held is None or len(set(lanes_held.values())) > 1:
            return node
        if len(lanes_held) != size and frozenset(lanes_held) != here:
            return node
    return None


def _groups_in(body: Graph, lane: str) -> Iterator[tuple[Node, int, Counter[str] | None]]:
    """For each group of devices that meet in a body: a collective, how many devices the group has, and how many
    collectives each lane has; None where the group is not known. Ops that name no device are in `lane`."""
    in_lanes: dict[int, Counter[str]] = {}
    latest: dict[int, tuple[Node, int]] = {}
    for node in filter(is_collective, body):
        key, size = constant_input(body, node, GROUP_KEY), constant_input(body, node, GROUP_SIZE)
        if key is None or size is None:
            yield node, 0, None
            continue
        in_lanes.setdefault(key, Counter())[node.device or lane] += 1
        latest[key] = node, size
    for key, (node, size) in latest.items():
        yield node, size, in_lanes[key]


def _meeting_lanes(graph: Graph, lane: str = "") -> frozenset[str]:
    """The devices of this process that take part in collectives, in the graph or in functions that it calls."""
    own = {node.device or lane for node in graph if is_collective(node)}
    inner = (
        _meeting_lanes(function.graph, graph[caller].device or lane)
        for (caller, _), function in graph.functions.items()
    )
    return frozenset(own.union(*inner))


def awaited_elsewhere(graph: Graph, lane: str = "") -> dict[str, frozenset[str]]:
    """The nodes whose functions wait for other processes, by name, and the devices that meet those there.

    Args:
        graph: the step's, or a function's.
        lane: the device of ops that name none.
    """
    found: dict[str, frozenset[str]] = {}
    met_here = conditions_that_meet(graph)
    for (caller, _), function in graph.functions.items():
        if caller in met_here:
            continue
        inner = graph[caller].device or lane
        groups = [(size, held) for _, size, held in _groups_in(function.graph, inner) if held is not None]
        devices = frozenset[str]().union(
            *(held for size, held in groups if size > len(held)), *awaited_elsewhere(function.graph, inner).values()
        )
        if devices:
            found[caller] = found.get(caller, frozenset()) | devices
    return found


def constant_input(graph: Graph, node: Node, position: int) -> int | None:
    """A constant integer that a collective of the second version takes; None if it is not known."""
    known = integers(graph, node.inputs[position]) if len(node.inputs) > position else None
    return known[0] if known else None


def is_collective(node: Node) -> bool:
    """Whether the node waits for nodes of other devices or processes."""
    return node.op in ops.COLLECTIVES


def meetings(graph: Graph) -> tuple[Meeting, ...]:
    """The collectives of a step, put together as they meet.

    A node whose function meets other processes is no meeting here, since it is one node. It has an order among the
    collectives of its lanes: without it, another process could run the two the other way round.

    Raises:
        GraphError: two collectives of a lane have no order, a group's key is not known, a function holds one that
            meets another outside, or a condition meets what is none.
    """
    inside = collective_inside(graph)
    if inside:
        raise GraphError(f"{inside}; expected all that meet in one function")
    elsewhere, conditions = awaited_elsewhere(graph), conditions_that_meet(graph)
    in_lane: dict[str, int] = {}  # how many collectives a lane has so far
    latest: dict[str, dict[str, int]] = {}  # node -> lane -> the last collective of the lane that it waits for
    turns: dict[tuple[str, int], int] = {}
    found: dict[tuple[int, int], list[str]] = {}
    for name in topological(graph):
        node = graph[name]
        waited = _merged(latest[before] for before in dict.fromkeys(graph.predecessors(node)))
        meets = is_collective(node) or name in conditions
        for lane in sorted(elsewhere.get(name, frozenset({node.device} if meets else ()))):
            place = in_lane.get(lane, 0)
            if waited.get(lane, 0) != place:
                raise GraphError(
                    f"collective '{name}' ({node.op}) has no order among those of {lane or 'its device'}; "
                    "expected an ordering token, as tf.distribute gives it in TensorFlow 2"
                )
            in_lane[lane] = place + 1
            waited = {**waited, lane: place + 1}
        if meets:
            group = conditions[name].group if name in conditions else _group(graph, node)
            turn = turns.get((node.device, group), 0)
            turns[node.device, group] = turn + 1
            found.setdefault((group, turn), []).append(name)
        latest[name] = waited
    for members in found.values():
        if len({conditions.get(name) for name in members}) > 1:
            raise GraphError(f"'{members[0]}' ({graph[members[0]].op}) does not meet as many collectives as it runs")
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

    nodes = (node.name for node in graph if united.get(node.name, node.name) == node.name)
    after = {name: set(successors(name)) for name in nodes}
    waiting = dict.fromkeys(after, 0)
    for reader in chain.from_iterable(after.values()):
        waiting[reader] += 1
    done = set(topological_order(waiting, after.__getitem__))
    stuck = [name for name in after if name not in done]
    return _cycle(graph, stuck, united, members) if stuck else ()


def _cycle(
    graph: Graph, stuck: Sequence[str], united: dict[str, str], members: dict[str, list[str]]
) -> tuple[str, ...]:
    """A cycle among nodes of which each waits for another one of them."""
    path, among = list[str](), frozenset(stuck)
    name = stuck[0]
    while name not in path:
        path.append(name)
        before = (
            united.get(source, source)
            for member in members.get(name, (name,))
            for source in graph.predecessors(graph[member])
        )
        name = next(source for source in before if source in among)
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
    key = constant_input(graph, node, GROUP_KEY) if len(node.inputs) > _TOKENS else None
    if key is None:
        raise GraphError(
            f"collective '{node.name}' ({node.op}) has no constant group key and ordering token; expected those that "
            "tf.distribute gives in TensorFlow 2"
        )
    return key
