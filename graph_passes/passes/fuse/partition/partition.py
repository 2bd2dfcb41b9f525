"""Decides which ops run as one, and as which kernels. Pure: a graph in, a `Partition` out.

graph --find_regions--> regions --candidate_of--> ops and bytes --substitution, exploration--> patterns with scores
  --mixed patterns--> products with what is around them
  --choose--> patterns that are disjoint and acyclic --> steps in an order
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod

from custom_ops.background import go_on
from graph_passes.analysis.cost.kernel_costs import KernelDevice
from graph_passes.analysis.op_pattern import IN_KERNELS, NodePattern, OpPattern
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.lower.rules import RULES
from graph_passes.passes.fuse.partition.candidate import RegionCandidate, candidate_of
from graph_passes.passes.fuse.partition.explore import Exploration, exploratory
from graph_passes.passes.fuse.partition.ilp import Limits, PatternChoice, choose_patterns
from graph_passes.passes.fuse.partition.mixed import mixed_patterns
from graph_passes.passes.fuse.partition.patterns import substitution
from graph_passes.passes.fuse.partition.quotient_graph import QuotientGraph
from graph_passes.passes.fuse.partition.regions import NO_SEGMENTS, find_regions
from graph_passes.passes.fuse.partition.score import Candidate, Measure, Refuse, Scorer
from graph_passes.passes.fuse.partition.signature import Signature, Signatures, once
from graph_passes.refusals import Refusal

# What may be in a region; which calls on a GPU, `Capabilities` says.
ON_GPU = frozenset(OpPattern) - {OpPattern.OPAQUE}
ON_CPU = frozenset(OpPattern) - {OpPattern.OPAQUE}
PRODUCTS = frozenset({OpPattern.PRODUCT, OpPattern.BATCHED_PRODUCT})


class StepKind(Enum):
    """What a region does in a step."""

    KERNEL = "kernel"
    CALL = "call"
    VIEW = "view"
    READ = "read"


_STEPS = {
    OpPattern.PRODUCT: StepKind.CALL,
    OpPattern.BATCHED_PRODUCT: StepKind.CALL,
    OpPattern.CALL: StepKind.CALL,
    OpPattern.VIEW: StepKind.VIEW,
    OpPattern.READ: StepKind.READ,
}


@dataclass(frozen=True)
class RegionStep:
    """One step of a region.

    Attributes:
        kind: of the step.
        members: names of the nodes that it stands for, in topological order; one, unless it is a kernel.
        saves: seconds that the pattern saves.
        seconds: that it takes, by the model or measured.
        explored: whether exploratory fusion found it, not substitution.
    """

    kind: StepKind
    members: tuple[str, ...]
    saves: float = 0.0
    seconds: float = 0.0
    explored: bool = False


@dataclass(frozen=True)
class RegionSchedule:
    """What one op shall run.

    Attributes:
        steps: one after the other.
        choice: how its patterns were chosen.
    """

    steps: tuple[RegionStep, ...]
    choice: PatternChoice

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all its nodes, in topological order."""
        return tuple(name for step in self.steps for name in step.members)

    def named(self, names: Mapping[str, str]) -> RegionSchedule:
        """This of an equal region, whose nodes are called otherwise: by the names here."""
        steps = (replace(step, members=tuple(names[name] for name in step.members)) for step in self.steps)
        return replace(self, steps=tuple(steps))

    @property
    def kernels(self) -> tuple[RegionStep, ...]:
        """The steps that are kernels."""
        return tuple(step for step in self.steps if step.kind is StepKind.KERNEL)


@dataclass(frozen=True)
class Partition:
    """What to stitch in a graph.

    Attributes:
        regions: in an order in which they can run; acyclic together with the rest of the graph.
        reasons: why a node is in none, for each that is in none.
    """

    regions: tuple[RegionSchedule, ...]
    reasons: Mapping[str, Refusal] = field(default_factory=dict)


def partition_graph(
    graph: Graph,
    op_patterns: Mapping[str, NodePattern],
    device: KernelDevice,
    *,
    kinds: Collection[OpPattern] = ON_CPU,
    generated: Callable[[str], bool] | None = None,
    default: str = "",
    apart: AbstractSet[str] = frozenset(),
    segments: Mapping[str, int] = NO_SEGMENTS,
    fed: Collection[str] = (),
    fetched: Collection[TensorId] = (),
    refuse: Refuse | None = None,
    measure: Measure | None = None,
    limits: Limits | None = None,
    exploration: Exploration | None = None,
) -> Partition:
    """Plan a graph, or the body of a function of one.

    Args:
        graph: with the shapes that are known.
        op_patterns: of all its nodes.
        device: what it runs on.
        kinds: of nodes that may be in a region.
        generated: whether a product can; None: those that are small on the device.
        default: the device of nodes that ask for none, "/job:localhost/replica:0/task:0/device:CPU:0".
        apart: names of nodes that are in no region with others; see `find_regions`.
        segments: of nodes, by name; no region holds nodes of two of them; see `find_regions`.
        fed: names of nodes whose outputs the caller may give.
        fetched: tensors that are read outside of the graph; of a function, its results.
        refuse: see `Refuse`; None: anything can be a kernel.
        measure: see `Measure`; None: plan by model alone.
        limits: of the search, for each region.
        exploration: how far patterns are explored.

    Raises:
        GraphError: the graph has a cycle.
    """

    def by_kind(name: str) -> bool:
        return op_patterns[name].pattern in IN_KERNELS

    signatures = Signatures(graph, fetched)
    refuse = once(refuse, signatures) if refuse else None
    measure = _measured_once(measure, signatures) if measure else None
    generated = generated or small_products(graph, op_patterns, device)
    outside: dict[str, Refusal] = {}
    while True:
        go_on()
        gain = _gain(op_patterns, device)
        regions, reasons = find_regions(graph, op_patterns, gain, kinds, fed, outside, default, apart, segments)
        candidates = [
            candidate_of(graph, op_patterns, members, _outputs(graph, members, fetched), by_kind, generated)
            for members in regions
        ]
        scorers = (Scorer(each, device, refuse, measure) for each in candidates)
        planned = _scheduled(scorers, signatures, limits or Limits(), exploration)
        alone = [step.members for region in planned for step in region.kernels if len(step.members) == 1]
        refused = {members[0]: why for members in alone if refuse and (why := refuse(members))}
        if not refused:
            return Partition(planned, reasons)
        outside |= refused  # not even by themselves


def _scheduled(
    scorers: Iterable[Scorer], signatures: Signatures, limits: Limits, exploration: Exploration | None
) -> tuple[RegionSchedule, ...]:
    """The steps of regions, which are planned once for equal ones: a net's layers, and the lanes of replicas."""
    known: dict[Hashable, tuple[RegionCandidate, RegionSchedule]] = {}
    found = []
    for scorer in scorers:
        region = scorer.region
        key = signatures(region.names), replace(region, names=())
        if key not in known:
            known[key] = region, schedule_region(scorer, limits, exploration)
        other, schedule = known[key]
        found.append(schedule.named(dict(zip(other.names, region.names, strict=True))))
    return tuple(found)


def _measured_once(measure: Measure, signatures: Signatures) -> Measure:
    """A `Measure` that asks `measure` once about equal patterns."""
    call = once(lambda members: measure.call(members[0]), signatures)
    prepared: set[Signature] = set()

    def prepare(patterns: Sequence[Sequence[str]]) -> None:
        new = {signatures(members): members for members in patterns}
        measure.prepare([members for signature, members in new.items() if signature not in prepared])
        prepared.update(new)

    return Measure(once(measure.kernel, signatures), lambda name: call([name]), prepare)


def small_products(graph: Graph, op_patterns: Mapping[str, NodePattern], device: KernelDevice) -> Callable[[str], bool]:
    """Whether a node is a product that can be in a kernel: of sizes that are known, and small (`KernelDevice.most`)."""

    def small(name: str) -> bool:
        node, most = graph[name], device.most
        if most is None or op_patterns[name].pattern not in PRODUCTS or node.op not in RULES:
            return False
        left, right, result = (graph.specs[tensor] for tensor in (*node.inputs[:2], TensorId(name)))
        if left.sizes is None or right.sizes is None or result.sizes is None or RULES[node.op].refusal(graph, node):
            return False
        batch = prod(result.sizes[:-2])
        rows, columns = result.sizes[-2:]
        depth = prod(left.sizes[-2:]) // rows
        nbytes = result.itemsize * sum(prod(each.sizes) for each in (left, right, result) if each.sizes is not None)
        return 2 * batch * rows * columns * depth <= most.operations and nbytes <= most.nbytes

    return small


def _gain(op_patterns: Mapping[str, NodePattern], device: KernelDevice) -> Callable[[Sequence[str]], float]:
    def gain(members: Sequence[str]) -> float:
        dispatched = sum(op_patterns[name].pattern is not OpPattern.CONSTANT for name in members)
        working = any(
            op_patterns[name].pattern not in (OpPattern.CONSTANT, OpPattern.VIEW, OpPattern.READ) for name in members
        )
        return dispatched * device.dispatch - device.region if working else 0.0

    return gain


def _outputs(graph: Graph, members: Sequence[str], fetched: Collection[TensorId]) -> set[TensorId]:
    """What members make, and other nodes or the caller read."""
    within = set(members)
    made = (tensor for name in members for tensor in graph.tensors(graph[name]))
    return {tensor for tensor in made if tensor in fetched or any(use.node not in within for use in graph.uses(tensor))}


def schedule_region(scorer: Scorer, limits: Limits, exploration: Exploration | None = None) -> RegionSchedule:
    """The steps of one region."""
    net = scorer.region.net
    _measure_at_once(scorer)
    candidates = substitution(scorer)
    candidates += mixed_patterns(scorer, candidates) if scorer.region.generated else []
    substituted = len(candidates)
    candidates += exploratory(scorer, candidates, exploration)
    choice = choose_patterns(candidates, net, limits)
    contraction = QuotientGraph(net, [candidates[place].members for place in choice.chosen])
    order = contraction.order()
    if order is None:
        raise AssertionError("a choice without cycles has an order")
    patterns = dict(enumerate(candidates[place] for place in choice.chosen))
    explored = {group for group, place in enumerate(choice.chosen) if place >= substituted}
    steps = tuple(_step(scorer, contraction.groups[group], patterns.get(group), group in explored) for group in order)
    return RegionSchedule(steps, choice)


def _measure_at_once(scorer: Scorer) -> None:
    """What substitution fusion will ask to be measured, as a dry run by model has it: its kernels are compiled side by
    side, where one after the other would take many times as long."""
    if scorer.measure:
        by_model, noted = scorer.dry_run()
        substitution(by_model)
        scorer.measure.prepare(noted)


def _step(scorer: Scorer, members: Sequence[int], pattern: Candidate | None, explored: bool) -> RegionStep:
    region = scorer.region
    names = tuple(region.names[number] for number in members)
    if pattern:
        return RegionStep(StepKind.KERNEL, names, pattern.score, pattern.seconds, explored)
    kind = _STEPS.get(region.kinds[members[0]], StepKind.KERNEL)
    return RegionStep(kind, names, 0.0, scorer.seconds(members) if region.works(members[0]) else 0.0)
