"""A candidate for a region as planning its kernels sees it: ops by number, the memory that they use and define."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from custom_ops.background import go_on
from custom_ops.ordering import topological_order
from graph_passes.analysis.dependences import Dependences, read_by, waited
from graph_passes.analysis.op_pattern import REDUCTIONS, NodePattern, OpPattern
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.graph.ops import passed
from graph_passes.lower.rules import RULES

UNKNOWN = 64  # stands for a size that is known only when the region runs

_NO_WORK = frozenset({OpPattern.VIEW, OpPattern.CONSTANT})
_NOTHING_NEW = frozenset({OpPattern.VIEW, OpPattern.READ})  # the memory of what they read, under another name


WHOLE = REDUCTIONS - {OpPattern.ROW_REDUCTION}  # whose result depends on all of a tensor, not on one row


@dataclass(frozen=True)
class RegionCandidate:
    """Nodes that may become a region. They and their pieces of memory are numbered. A variable is one piece of memory,
    and so are a tensor and its views.

    Attributes:
        names: of the nodes, in topological order.
        kinds: of the nodes.
        fusible: which memory-intensive nodes can be in a kernel.
        net: what waits for what; an update of a variable waits for the readers of its old value, where it can.
        incompatible: pairs that cannot be in one kernel: the earlier node writes a variable that the later one uses,
            or makes a seed that the later one draws with.
        uses: for each node the memory that it reads.
        defs: for each node the memory that it writes.
        nbytes: of each piece of memory.
        live_outs: memory that is read outside of the region: results, and variables that are assigned.
        generated: products that can be in a kernel.
    """

    names: tuple[str, ...]
    kinds: tuple[OpPattern, ...]
    fusible: tuple[bool, ...]
    net: Dependences
    incompatible: frozenset[tuple[int, int]]
    uses: tuple[tuple[int, ...], ...]
    defs: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
    live_outs: frozenset[int]
    generated: frozenset[int] = frozenset()

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each piece of memory the nodes that read it."""
        found: list[list[int]] = [[] for _ in self.nbytes]
        for number, read in enumerate(self.uses):
            for memory in read:
                found[memory].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def makers(self) -> Mapping[int, int]:
        """The first node that defines a piece of memory, for all that are defined here."""
        return {memory: number for number in reversed(range(len(self.names))) for memory in self.defs[number]}

    @cached_property
    def partners(self) -> Mapping[int, frozenset[int]]:
        """For each node of `incompatible` those that it cannot be in one kernel with."""
        found: dict[int, set[int]] = {}
        for one, other in self.incompatible:
            found.setdefault(one, set()).add(other)
            found.setdefault(other, set()).add(one)
        return {number: frozenset(others) for number, others in found.items()}

    @cached_property
    def whole(self) -> tuple[bool, ...]:
        """Which nodes reduce to what depends on all of a tensor."""
        return tuple(kind in WHOLE for kind in self.kinds)

    @cached_property
    def _working(self) -> tuple[bool, ...]:
        pairs = enumerate(zip(self.fusible, self.kinds, strict=True))
        return tuple(number in self.generated or (can and kind not in _NO_WORK) for number, (can, kind) in pairs)

    def works(self, number: int) -> bool:
        """Whether a node would be a separate kernel, if it is in no other."""
        return self._working[number]


def candidate_of(
    graph: Graph,
    op_patterns: Mapping[str, NodePattern],
    members: Sequence[str],
    outputs: Collection[TensorId],
    fusible: Callable[[str], bool],
    generated: Callable[[str], bool] = lambda name: False,
) -> RegionCandidate:
    """The candidate of these members.

    Args:
        graph: the graph.
        op_patterns: of its nodes.
        members: of the region, in topological order.
        outputs: tensors of members that are read outside of the region.
        fusible: whether a memory-intensive node can be in a kernel.
        generated: whether a product can.
    """
    go_on()
    incompatible = _incompatible(graph, op_patterns, members)
    order, net = _ordered(_edges(graph, op_patterns, members, incompatible))
    names, place = tuple(members[old] for old in order), {old: new for new, old in enumerate(order)}
    memory: dict[tuple[TensorId, bool], int] = {}  # a tensor, or what a variable holds: its handle
    nbytes: list[int] = []

    def number(tensor: TensorId, variable: bool = False) -> int:
        key = (passed(graph, tensor) if variable else tensor, variable)
        if key not in memory:
            memory[key] = len(nbytes)
            nbytes.append(_bytes(graph, tensor, variable))
        return memory[key]

    uses: list[tuple[int, ...]] = []
    defs: list[tuple[int, ...]] = []
    live_outs: set[int] = set()
    for name in names:
        node, op_pattern = graph[name], op_patterns[name]
        if op_pattern.pattern is OpPattern.READ:  # what it makes is the memory of the variable itself
            memory[TensorId(name), False] = number(node.inputs[op_pattern.reads[0]], True)
        elif op_pattern.pattern is OpPattern.VIEW:
            memory[TensorId(name), False] = number(node.inputs[op_pattern.operands[0]])
        variables = {node.inputs[place] for place in (*op_pattern.reads, *op_pattern.writes)}
        read = [tensor for tensor in read_by(op_patterns, node) if tensor not in variables]
        held = [number(node.inputs[place], True) for place in op_pattern.reads]
        given = [number(node.inputs[place], True) for place in op_pattern.writes]
        uses.append(tuple(dict.fromkeys([*map(number, read), *held])))
        new = () if op_pattern.pattern in _NOTHING_NEW else map(number, graph.tensors(node))
        defs.append(tuple(dict.fromkeys([*new, *given])))
        live_outs |= {number(tensor) for tensor in graph.tensors(node) if tensor in outputs} | set(given)
    kinds = tuple(op_patterns[name].pattern for name in names)
    incompatible = frozenset((place[earlier], place[later]) for earlier, later in incompatible)
    can = tuple(map(fusible, names))
    products = frozenset(number for number, name in enumerate(names) if generated(name))
    made = tuple(uses), tuple(defs)
    return RegionCandidate(names, kinds, can, net, incompatible, *made, tuple(nbytes), frozenset(live_outs), products)


def _edges(
    graph: Graph,
    op_patterns: Mapping[str, NodePattern],
    members: Sequence[str],
    incompatible: Collection[tuple[int, int]],
) -> list[set[int]]:
    """For each member those that it waits for."""
    place = {name: number for number, name in enumerate(members)}
    before: list[set[int]] = []
    after: list[list[int]] = [[] for _ in members]
    for number, name in enumerate(members):
        node = graph[name]
        used = node.inputs if op_patterns[name].pattern is OpPattern.CONSTANT else read_by(op_patterns, node)
        found = {place.get(tensor.node, -1) for tensor in used}
        found |= {place.get(control, -1) for control in waited(graph, node)}
        before.append(found - {-1})
        for earlier in before[-1]:
            after[earlier].append(number)
    for earlier, later in sorted(incompatible):
        if earlier not in before[later]:
            before[later].add(earlier)
            after[earlier].append(later)
    # An update waits for the readers of the old value, unless it comes before them: else it would have to be copied.
    for update, name in enumerate(members):
        for index in op_patterns[name].writes:
            handle = passed(graph, graph[name].inputs[index])
            for reader in _old_value_readers(graph, op_patterns, members, place, handle, update):
                if reader != update and reader not in before[update] and not _reaches(after, update, reader):
                    before[update].add(reader)
                    after[reader].append(update)
    return before


def _old_value_readers(
    graph: Graph,
    op_patterns: Mapping[str, NodePattern],
    members: Sequence[str],
    place: Mapping[str, int],
    handle: TensorId,
    update: int,
) -> list[int]:
    """Members that use what a variable holds before it is updated, by way of a read and of views of what was read."""
    found: list[int] = []
    pending: list[int] = []
    for name in dict.fromkeys(use.node for use in graph.uses(handle)):
        if name in place and place[name] < update:
            (pending if op_patterns[name].pattern is OpPattern.READ else found).append(place[name])
    while pending:
        for name in graph.readers(graph[members[pending.pop()]]):
            if name in place and op_patterns[name].pattern is OpPattern.VIEW:
                pending.append(place[name])
            elif name in place:
                found.append(place[name])
    return sorted(set(found))


def _reaches(after: Sequence[Sequence[int]], first: int, last: int) -> bool:
    seen = {first}
    pending = [first]
    while pending:
        for other in after[pending.pop()]:
            if other == last:
                return True
            if other not in seen:
                seen.add(other)
                pending.append(other)
    return False


def _incompatible(
    graph: Graph, op_patterns: Mapping[str, NodePattern], names: Sequence[str]
) -> frozenset[tuple[int, int]]:
    """From each op that writes a variable to those that use it next, up to the next one that writes it; and from what
    makes a seed to random ops that draw with it."""
    writer: dict[TensorId, int] = {}
    found: set[tuple[int, int]] = set()
    place = {name: number for number, name in enumerate(names)}
    for number, name in enumerate(names):
        op_pattern, node = op_patterns[name], graph[name]
        if node.op in RULES and RULES[node.op].states:
            seeds = (node.inputs[index].node for index in op_pattern.operands)
            found |= {(place[seed], number) for seed in seeds if place.get(seed, number) < number}
        if not op_pattern.reads and not op_pattern.writes:
            continue
        handles = [passed(graph, node.inputs[index]) for index in (*op_pattern.reads, *op_pattern.writes)]
        found |= {(writer[handle], number) for handle in handles if handle in writer}
        writer |= {passed(graph, node.inputs[index]): number for index in op_pattern.writes}
    return frozenset(found)


def _ordered(before: Sequence[Collection[int]]) -> tuple[list[int], Dependences]:
    """An order in which all that a node waits for come before it, and the dependences numbered so."""
    after: list[list[int]] = [[] for _ in before]
    for number, earlier in enumerate(before):
        for place in earlier:
            after[place].append(number)
    order = topological_order(dict(enumerate(map(len, before))), after.__getitem__, lambda number: number)
    place_of = {number: index for index, number in enumerate(order)}
    net = Dependences(tuple(tuple(sorted(place_of[p] for p in before[number])) for number in order))
    return order, net


def _bytes(graph: Graph, tensor: TensorId, variable: bool) -> int:
    spec = graph.specs.get(tensor)
    if variable and spec is not None:
        spec = spec.behind
    if spec is None:
        return 0
    count = spec.itemsize
    for size in spec.shape or ():
        count *= UNKNOWN if size is None else size
    return count
