r"""The regions of a graph, each as what one op runs; where anything fails over a region, its ops stay single ops.

The hard case: a path that leaves a set of ops and comes back, so that the set can be no one op.

    a --> exp ---------------> add --> out        {exp, add} would wait for the sort, which waits for exp:
           \--> sort (no rule) --/                two regions, {a, exp} and {add, out}, on the two sides of the sort

Growing sets edge by edge meets such cycles one at a time. Instead each op gets a level from the ops that stay outside
(`analysis/dependences.py`), and what shares a level is acyclic by construction. The steps of `plan_fusion`:

    patterns_of, within, on_a_cpu   what each op is like, and what the device cannot do
    _running_together               sets of nodes of which all run whenever one does
    partition_graph                 candidates, and the steps of each: kernels, calls, views (`partition/partition.py`)
    _planned                        each candidate lowered to a `Region`, with its kernels: a `RegionPlan`
    _alike                          of replicas whose variables have to stay equal, equal regions (`equal_kernels.py`)
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

from custom_ops.errors import KernelError
from custom_ops.fusion.codegen.plan.contraction import refused_product
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.programs import FusionProgram
from custom_ops.fusion.region import Region
from custom_ops.fusion.text import to_text
from graph_passes import refusals
from graph_passes.analysis.cost.kernel_costs import Beside, KernelDevice
from graph_passes.analysis.device_support import Capabilities, on_a_cpu, within, without_forward
from graph_passes.analysis.op_pattern import NodePattern, OpPattern, patterns_of
from graph_passes.graph.graph_source import Readable
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.lower.lower_nodes import Lowering
from graph_passes.lower.program_writer import LoweringError
from graph_passes.lower.shapes import TRANSPOSES, Shapes
from graph_passes.passes.fuse.at_once import AtOnce
from graph_passes.passes.fuse.equal_kernels import behind_sums, unequal
from graph_passes.passes.fuse.lower_region import Encode, Lowered, lower_region
from graph_passes.passes.fuse.partition.partition import ON_CPU, Partition, RegionSchedule, StepKind, partition_graph
from graph_passes.passes.fuse.partition.score import Measure, Refuse
from graph_passes.refusals import Reason, Refusal
from graph_passes.report import RegionRecord, StepRecord


@dataclass(frozen=True)
class Needs:
    """What planning takes.

    Attributes:
        device: that runs the graph.
        home: its name, as TensorFlow writes it in full: where nodes run of which nothing says where.
        encode: writes the attributes of a call.
        kinds: of nodes that a region may hold there.
        fed: names of nodes whose outputs a caller may give.
        roots: names of nodes of which a caller may run some without the others; None: all of the graph runs.
        capabilities: what the device can do; None: it is a CPU.
        programs: makes the kernels of a region that runs on a device ("" is `home`), or raises KernelError; None: the
            device needs none.
        measure: times patterns of a graph, of which the last names are fetched (see `Measure`); None: all is by model.
        timed: whether products may be timed where they run, to choose among their algorithms.
        beside: times the library's products (see `Beside`); None: none may be timed.
        mirrored: whether variables of several devices have to stay equal, so that equal kernels must update them.
        at_once: regions whose kernels are made at a time: others compile while this process lowers the next one.
        segments: a memory budget follows: no region may hold nodes of two segments (see `schedule_segments.py`), nor
            reads of variables, nor memory while it does not run. None: there is no budget.
    """

    device: KernelDevice
    home: str
    encode: Encode
    kinds: Collection[OpPattern] = ON_CPU
    fed: Collection[str] = ()
    roots: Collection[str] | None = None
    capabilities: Capabilities | None = None
    programs: Callable[[Region, str], Sequence[FusionProgram]] | None = None
    measure: Callable[[Graph, Shapes, Collection[str]], Measure] | None = None
    timed: bool = False
    beside: Beside | None = None
    mirrored: bool = False
    at_once: int = 1
    segments: Mapping[str, int] | None = None


@dataclass(frozen=True)
class RegionPlan:
    """One region that runs as one op.

    Attributes:
        name: of the op.
        schedule: its steps.
        lowered: what the op runs, on what.
        text: of what it runs, as the op's attribute has it.
        record: for the report.
        renamed: members that are fetched by name.
        programs: of its kernels, where the device needs them.
        timed: whether its products may be timed.
        keeps_memory: whether it may hold memory from one run to the next.
    """

    name: str
    schedule: RegionSchedule
    lowered: Lowered
    text: str
    record: RegionRecord
    renamed: tuple[str, ...] = ()
    programs: tuple[FusionProgram, ...] = ()
    timed: bool = False
    keeps_memory: bool = True


@dataclass(frozen=True)
class Unfused:
    """A region that stays unchanged.

    Attributes:
        name: that its op would have had.
        members: names of its nodes.
        reason: why.
        traceback: of a fault inside tfmem; else empty.
        warned: whether a warning is given at once: a fault, or there is no kernel for it.
    """

    name: str
    members: tuple[str, ...]
    reason: Refusal
    traceback: str = ""
    warned: bool = False


@dataclass(frozen=True)
class FusionPlan:
    """What becomes of a graph.

    Attributes:
        regions: in an order in which they can run.
        kept: regions that stay.
        reasons: why a node is in no region, for each that is in none.
    """

    regions: tuple[RegionPlan, ...] = ()
    kept: tuple[Unfused, ...] = ()
    reasons: Mapping[str, Refusal] = field(default_factory=dict)

    @property
    def unfused(self) -> set[str]:
        """Names of the nodes of regions that stay."""
        return {name for each in self.kept for name in each.members}

    def without(self, errors: Mapping[str, Exception]) -> FusionPlan:
        """This, less the regions named in `errors`, whose rewrite could not be carried out."""
        lost = [each for each in self.regions if each.name in errors]
        failed = [fault(each.name, each.schedule.members, errors[each.name]) for each in lost]
        left = tuple(each for each in self.regions if each.name not in errors)
        return replace(self, regions=left, kept=(*self.kept, *failed))

    def joined(self, other: FusionPlan) -> FusionPlan:
        """This, and what becomes of another graph."""
        return FusionPlan((*self.regions, *other.regions), (*self.kept, *other.kept), {**self.reasons, **other.reasons})

    def named(self, names: Mapping[str, str]) -> FusionPlan:
        """This as the report has it, which is about a graph of the same ops, called otherwise: by the names here."""

        def record(region: RegionRecord) -> RegionRecord:
            steps = (
                replace(step, ops=tuple((names.get(name, name), op) for name, op in step.ops)) for step in region.steps
            )
            return replace(region, steps=tuple(steps))

        regions = tuple(replace(each, record=record(each.record)) for each in self.regions)
        kept = tuple(
            replace(
                each, members=tuple(names.get(name, name) for name in each.members), reason=each.reason.renamed(names)
            )
            for each in self.kept
        )
        return FusionPlan(
            regions, kept, {names.get(name, name): why.renamed(names) for name, why in self.reasons.items()}
        )

    def within(self, caller: str) -> FusionPlan:
        """This as the report has it, which is about a function that `caller` calls: "while/body"."""
        regions = tuple(replace(each, record=each.record.within(caller)) for each in self.regions)
        kept = tuple(
            replace(each, name=f"{caller}/{each.name}", members=tuple(f"{caller}/{name}" for name in each.members))
            for each in self.kept
        )
        return FusionPlan(regions, kept, {f"{caller}/{name}": why for name, why in self.reasons.items()})


def plan_fusion(source: Readable, needs: Needs) -> tuple[FusionPlan, Graph]:
    """The regions of a graph after Grappler, and the graph."""
    graph = source.read(functions=False)
    keep = source.keep(graph)
    known = _without_names(graph, patterns_of(graph), {*keep, *(needs.roots or ())})
    known = within(needs.capabilities, graph, known, keep) if needs.capabilities else on_a_cpu(graph, known)
    lowering = Lowering(graph, Shapes(graph))
    plan = _plan_of(graph, known, needs, keep, lowering)
    while needs.capabilities and (lost := without_forward(graph, known, plan.reasons.keys() | plan.unfused)):
        known |= lost
        plan = _plan_of(graph, known, needs, keep, lowering)
    return plan, graph


def _plan_of(
    graph: Graph, known: Mapping[str, NodePattern], needs: Needs, keep: Collection[str], lowering: Lowering
) -> FusionPlan:
    fetched = [tensor for name in keep for tensor in graph.tensors(graph[name])]
    apart = behind_sums(graph, known) if needs.mirrored else set()
    regions: list[RegionSchedule] = []
    reasons: dict[str, Refusal] = {}
    for names in _running_together(graph, needs.roots):
        plan = partition_graph(
            graph,
            known if len(names) == len(graph) else _only(names, known),
            needs.device,
            kinds=needs.kinds,
            default=needs.home,
            apart=apart,
            segments=needs.segments or {},
            fed=needs.fed,
            fetched=fetched,
            refuse=refusal(graph, keep, lowering),
            measure=needs.measure(graph, lowering.shapes, keep) if needs.measure else None,
        )
        regions += plan.regions
        reasons |= {name: why for name, why in plan.reasons.items() if name in names}
    plan = Partition(tuple(regions), reasons)
    found = _planned(graph, plan, needs, keep, fetched, lowering)
    return _alike(graph, found, apart) if needs.mirrored else found


def _alike(graph: Graph, plan: FusionPlan, behind: AbstractSet[str]) -> FusionPlan:
    """`plan` without the regions because of which replicas would differ."""
    found = {each.name: (each.schedule.members, each.lowered.region) for each in plan.regions}
    lost = unequal(graph, {name: each for name, each in found.items() if not behind.isdisjoint(each[0])})
    kept = (
        Unfused(each.name, each.schedule.members, Reason.OTHER_REPLICA()) for each in plan.regions if each.name in lost
    )
    left = tuple(each for each in plan.regions if each.name not in lost)
    return replace(plan, regions=left, kept=(*plan.kept, *kept))


def refusal(graph: Graph, keep: Collection[str], lowering: Lowering) -> Refuse:
    """Says of nodes of a graph why they cannot be one kernel; of `keep` the names are fetched."""

    def refuse(members: Sequence[str]) -> Refusal | None:
        made = leaving(graph, members, keep)
        try:
            if any(graph[name].op in TRANSPOSES for name in members):
                kernel = lowering.kernel(members, made)
                detail = refused_product(Pattern.of(kernel.program, kernel.input_shapes))
                return Reason.PRODUCT_TILES(detail=detail) if detail else None
            lowering.require(members, made)
        except LoweringError as error:
            return error.refusal
        return None

    return refuse


def leaving(graph: Graph, members: Sequence[str], keep: Collection[str]) -> list[TensorId]:
    """What other nodes read of what members make, and what is fetched: `keep` has the names."""
    inside = set(members)
    made = ((name, tensor) for name in members for tensor in graph.tensors(graph[name]))
    return [t for name, t in made if name in keep or any(use.node not in inside for use in graph.uses(t))]


def _running_together(graph: Graph, roots: Collection[str] | None) -> list[set[str]]:
    """The nodes in sets, each of which runs whenever one of it does. No path leaves a set and comes back to it: what
    reads a node is needed for no other root than the node is."""
    if roots is None:
        return [set(graph.nodes)]
    needed: dict[str, list[int]] = {name: [] for name in graph.nodes}
    for number, root in enumerate(each for each in roots if each in graph.nodes):
        for name in graph.reached([root], graph.predecessors):
            needed[name].append(number)
    found: dict[tuple[int, ...], set[str]] = {}
    for name, numbers in needed.items():
        if numbers:
            found.setdefault(tuple(numbers), set()).add(name)
    return [names for names in found.values() if len(names) > 1]


def _only(names: Collection[str], known: Mapping[str, NodePattern]) -> dict[str, NodePattern]:
    apart = NodePattern(OpPattern.OPAQUE, Reason.RUN_ALONE())
    return {
        name: each if name in names or each.pattern is OpPattern.CONSTANT else apart for name, each in known.items()
    }


def _planned(
    graph: Graph,
    plan: Partition,
    needs: Needs,
    keep: Collection[str],
    fetched: Sequence[TensorId],
    lowering: Lowering,
) -> FusionPlan:
    regions: list[RegionPlan] = []
    kept: list[Unfused] = []
    names = _names(graph, len(plan.regions))
    with AtOnce(needs.at_once) as pool:
        begun = [_begun(graph, region, needs, fetched, lowering, pool) for region in plan.regions]
        for name, region, made in zip(names, plan.regions, begun, strict=True):
            try:
                lowered, programs = made()
                text = to_text(lowered.region)
            except LoweringError as error:
                kept.append(Unfused(name, region.members, error.refusal))
            except KernelError as error:
                kept.append(Unfused(name, region.members, Reason.NO_KERNEL(detail=str(error)), warned=True))
            except Exception as error:  # whatever it is, the step runs without this region
                kept.append(fault(name, region.members, error))
            else:
                record = _record(name, region, graph)
                renamed = tuple(member for member in region.members if member in keep)
                keeps = needs.segments is None
                regions.append(RegionPlan(name, region, lowered, text, record, renamed, programs, needs.timed, keeps))
    return FusionPlan(tuple(regions), tuple(kept), plan.reasons)


def _begun(
    graph: Graph, region: RegionSchedule, needs: Needs, fetched: Sequence[TensorId], lowering: Lowering, pool: AtOnce
) -> Callable[[], tuple[Lowered, tuple[FusionProgram, ...]]]:
    """What waits for a region's kernels, and gives what the op runs with them; it raises what is wrong with either."""
    try:
        steps = [step.members for step in region.steps]
        called = {name for step in region.steps if step.kind is StepKind.CALL for name in step.members}
        kernels = {name for step in region.kernels for name in step.members}
        evenly = needs.capabilities.of_images if needs.capabilities else ()
        lowered = lower_region(graph, steps, needs.encode, fetched, lowering, called, kernels, evenly)
    except Exception as error:
        return partial(_raise, error)
    if not needs.programs:
        return lambda: (lowered, ())
    place = place_of(graph, region.members) or needs.home
    made = pool.begin(partial(needs.programs, lowered.region, place))
    return lambda: (lowered, tuple(made()))


def _raise(error: Exception) -> NoReturn:
    raise error


def place_of(graph: Graph, members: Sequence[str]) -> str:
    """The device that a region's nodes ask for; "" if none does."""
    return next((graph[name].device for name in members if graph[name].device), "")


def _names(graph: Graph, count: int) -> list[str]:
    prefix, suffix = "fusion", 0
    while any(f"{prefix}_{place}" in graph.nodes for place in range(count)):
        prefix, suffix = f"fusion{suffix}", suffix + 1
    return [f"{prefix}_{place}" for place in range(count)]


def _without_names(graph: Graph, known: Mapping[str, NodePattern], named: Collection[str]) -> dict[str, NodePattern]:
    """Nodes that callers name stay, unless they have one output: that one can be given the name."""
    alone = NodePattern(OpPattern.OPAQUE, Reason.NOT_ALONE())
    return {name: alone if name in named and graph[name].outputs != 1 else each for name, each in known.items()}


def _record(name: str, region: RegionSchedule, graph: Graph) -> RegionRecord:
    place = {member: number for number, step in enumerate(region.steps) for member in step.members}
    steps = []
    for number, step in enumerate(region.steps):
        read = {place.get(tensor.node, number) for member in step.members for tensor in graph[member].inputs}
        ops = tuple((member, graph[member].op) for member in step.members)
        steps.append(StepRecord(step.kind.value, ops, tuple(sorted(read - {number}))))
    return RegionRecord(name, tuple(steps))


def fault(name: str, members: tuple[str, ...], error: Exception) -> Unfused:
    """What the report says of a region that stays because tfmem failed."""
    reason = refusals.fault(error)
    return Unfused(name, members, reason, "".join(traceback.format_exception(error)), warned=True)
