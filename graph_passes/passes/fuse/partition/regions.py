"""Which nodes of a graph run together as one op: a *region*. Pure: a graph and the pattern of its nodes in.

Regions are as few and as large as they can be: dispatching an op costs more than most of them compute. Along a path,
what lies before an op that no region can hold and what lies behind it belong to different regions; nothing else
divides them (see `runs`), but for devices. A body of an `If` or a `While` is a separate graph.

Collectives that meet count as one op: a path may leave a device through one of them and come back through another.

    GPU:0    a0 -> c0    b0 -> ...       {a0, b0} would be one region by the edges of the graph alone. But c1 waits for
    GPU:1          c1 -> b1 -> b0        c0 to begin, and so for the region, which waits for b1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from graph_passes.analysis.dependences import Role, dependences, runs, settled
from graph_passes.analysis.op_pattern import NodePattern, OpPattern
from graph_passes.analysis.peers import is_collective, meetings, united_order
from graph_passes.errors import GraphError
from graph_passes.graph.ir import Graph, TensorId, texts
from graph_passes.graph.ops import EXTERNAL, passed
from graph_passes.graph.order import is_acyclic
from graph_passes.passes.fuse.partition.canonical_order import CanonicalOrder
from graph_passes.refusals import Reason, Refusal

CALLS = frozenset(
    {OpPattern.PRODUCT, OpPattern.BATCHED_PRODUCT, OpPattern.CALL}
)  # what a region runs by a library's kernel
# What a region may hold, but never for its own sake.
_ROLES = dict.fromkeys((OpPattern.VIEW, OpPattern.READ, OpPattern.CONSTANT), Role.FREE)
# Behind these an op may be dead: it runs only if a condition holds that is not among its inputs.
_BRANCHES = frozenset({"Switch", "RefSwitch", "Merge", "RefMerge", "Enter", "RefEnter"})

NO_SEGMENTS: Mapping[str, int] = MappingProxyType({})

# What running some nodes as one op saves, in seconds.
Gain = Callable[[Sequence[str]], float]


def find_regions(
    graph: Graph,
    op_patterns: Mapping[str, NodePattern],
    gain: Gain,
    kinds: Collection[OpPattern],
    fed: Collection[str] = (),
    outside: Mapping[str, Refusal] | None = None,
    default: str = "",
    apart: AbstractSet[str] = frozenset(),
    segments: Mapping[str, int] = NO_SEGMENTS,
) -> tuple[list[tuple[str, ...]], Mapping[str, Refusal]]:
    """The members of each region of a graph, and why a node is in none, for all that are in none. Members are in
    topological order, and regions in an order in which they can run.

    Args:
        graph: the graph, or the body of a function.
        op_patterns: of all its nodes.
        gain: regions that gain nothing by it stay as they are.
        kinds: of nodes that may be in a region.
        fed: names of nodes whose outputs the caller may give.
        outside: names of further nodes that can be in no region, and why.
        default: the device of nodes that ask for none, "/job:localhost/replica:0/task:0/device:CPU:0".
        apart: names of nodes that are in no region with others; equal regions of them have equal orders.
        segments: of nodes, by name: no region holds nodes of two segments. A node that is not among them is of the last
            segment that it reads of.

    Raises:
        GraphError: the graph has a cycle.
    """
    try:
        met = meetings(graph)
        order = united_order(graph, met)
    except GraphError as error:
        if is_acyclic(graph):  # else there is no order of any kind
            return [], dict.fromkeys(graph.nodes, Reason.COLLECTIVES(detail=str(error)))
        raise
    together = [meeting.members for meeting in met]
    borders = _borders(graph, op_patterns, order, kinds, fed) | dict(outside or {})
    places = _numbered(
        [
            (place, segment, name in apart)
            for place, segment, name in zip(
                _places(graph, order, default), _segments(graph, order, segments), order, strict=True
            )
        ]
    )

    def saves_memory(number: int, _later: int, _ranks: Sequence[int]) -> bool:
        return _held_longer(graph, op_patterns, order[number]) < 0

    whole = {name for name in order if name in borders or op_patterns[name].pattern is OpPattern.CONSTANT}
    while True:
        roles = [Role.BORDER if name in borders else _ROLES.get(op_patterns[name].pattern, Role.WORK) for name in order]
        net = dependences(graph, op_patterns, order, whole, together)
        ranks = settled(net, runs(net, roles, places), roles, saves_memory, places)
        sets: dict[tuple[int, int], list[str]] = {}
        for number, name in enumerate(order):
            if ranks[number] % 2:
                sets.setdefault((ranks[number], places[number]), []).append(name)
        found = {key: members for key, members in sets.items() if gain(members) > 0.0}
        inside = {name for members in found.values() for name in members}
        more: dict[str, Refusal] = {}
        for key, members in sets.items():
            if key in found:
                more |= _conflicts(graph, op_patterns, members)
            else:
                why = Reason.NO_GAIN(ops=_ops(len(members)))
                more |= {name: why for name in members if op_patterns[name].pattern not in _ROLES}
        # What stays outside reads all of its inputs, axes and shapes as well, so that there may be more paths.
        left = {name for name in order if name not in inside and name not in whole}
        if not left and not more:
            regions = [tuple(found[key]) for key in sorted(found)]
            if apart:
                like = CanonicalOrder(graph, order, net, met)
                regions = [members if apart.isdisjoint(members) else tuple(like(members)) for members in regions]
            return regions, _reasons(order, inside, borders)
        whole |= left | more.keys()
        borders |= more


def _borders(
    graph: Graph,
    op_patterns: Mapping[str, NodePattern],
    order: Sequence[str],
    kinds: Collection[OpPattern],
    fed: Collection[str],
) -> dict[str, Refusal]:
    """Nodes that no region can hold, and why."""
    branches = (node.name for node in graph if node.op in _BRANCHES)
    dead = graph.reached(branches, graph.successors)
    found: dict[str, Refusal] = {}
    for name in order:
        node, op_pattern = graph[name], op_patterns[name]
        if op_pattern.pattern not in kinds:
            found[name] = op_pattern.reason or Reason.NO_SUCH_PATTERN(pattern=op_pattern.pattern.value)
        elif is_collective(node):
            found[name] = Reason.ASYNCHRONOUS(op=node.op)
        elif name in fed:
            found[name] = Reason.FED()
        elif name in dead:
            found[name] = Reason.BEHIND_SWITCH()
        elif not node.inputs:
            found[name] = Reason.HELD_CONSTANT()
    return found


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _segments(graph: Graph, order: Sequence[str], known: Mapping[str, int]) -> list[int]:
    """The segment of each node."""
    found: dict[str, int] = {}
    for name in order:
        before = (found.get(other, 0) for other in graph.predecessors(graph[name]))
        found[name] = known[name] if name in known else max(before, default=0)
    return [found[name] for name in order]


def _places(graph: Graph, order: Sequence[str], default: str) -> list[int]:
    """A number for each node, equal for those that run at one place: job, replica, task and device.

    A node without a device runs where the node is with which it is colocated, or where the resource lies that it takes;
    what none of them says is the default's.
    """
    known: dict[str, int] = {}
    numbers: dict[tuple[str, ...], int] = {}
    places: list[int] = []
    for name in order:
        node = graph[name]
        asked = node.device
        for label in () if asked else texts(node.attrs.get("_class")):
            other = graph.nodes.get(label.removeprefix("loc:@"))
            asked = asked or (other.device if other is not None else "")
        asked = asked or next((graph[tensor.node].device for tensor in node.inputs if _is_resource(graph, tensor)), "")
        if asked not in known:
            own, others = _parts(asked), _parts(default)
            place = tuple(own.get(key) or others.get(key, "") for key in ("job", "replica", "task", "device"))
            known[asked] = numbers.setdefault(place, len(numbers))
        places.append(known[asked])
    return places


def _is_resource(graph: Graph, tensor: TensorId) -> bool:
    spec = graph.specs.get(tensor)
    return spec is not None and spec.dtype == "resource"


def _parts(device: str) -> dict[str, str]:
    """`/job:localhost/replica:0/task:0/device:GPU:0` by keys; `/gpu:0` is how TensorFlow 1 wrote a device."""
    found: dict[str, str] = {}
    for part in device.lower().split("/"):
        key, _, value = part.partition(":")
        if key in ("cpu", "gpu"):
            key, value = "device", part
        found[key] = value
    return found


def _held_longer(graph: Graph, op_patterns: Mapping[str, NodePattern], name: str) -> int:
    """Bytes that are in memory while a node waits, less those that are not: what it reads, unless it is there anyhow,
    less what it makes."""
    node = graph[name]
    read = {node.inputs[index] for index in op_patterns[name].operands}
    held = sum(graph.nbytes(tensor) for tensor in read if graph[passed(graph, tensor).node].op not in EXTERNAL)
    return held - sum(map(graph.nbytes, graph.tensors(node)))


def _conflicts(graph: Graph, op_patterns: Mapping[str, NodePattern], members: Sequence[str]) -> dict[str, Refusal]:
    """Calls of ops that take a variable which their region assigns."""
    assigned = {graph[name].inputs[place] for name in members for place in op_patterns[name].writes}
    found: dict[str, Refusal] = {}
    for name in members:
        op_pattern = op_patterns[name]
        taken = [graph[name].inputs[place] for place in (*op_pattern.reads, *op_pattern.writes)]
        both = [tensor for tensor in taken if tensor in assigned]
        if both and op_pattern.pattern in CALLS:
            found[name] = Reason.VARIABLE_ASSIGNED(tensor=both[0])
    return found


def _reasons(
    order: Sequence[str],
    inside: Collection[str],
    borders: Mapping[str, Refusal],
) -> dict[str, Refusal]:
    beside = Reason.NO_TIME()
    return {name: borders.get(name, beside) for name in order if name not in inside}


def _ops(count: int) -> str:
    return "one op" if count == 1 else f"{count} ops"
