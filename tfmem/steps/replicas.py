"""A step of several replicas under a budget: a plan for each device of this process.

Dry runs are for steps of one device: replicas would have to agree on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median_low

import tensorflow as tf

from graph_passes import pipeline
from graph_passes.analysis.cost.model import CostModel
from graph_passes.analysis.memory.observe import Sample, observe
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.analysis.peers import (
    GROUP_SIZE,
    awaited_elsewhere,
    collective_inside,
    constant_input,
    default_lane,
    every_device,
    is_collective,
    lanes,
    meetings,
)
from graph_passes.decision import Missed
from graph_passes.device_report import DeviceReport
from graph_passes.errors import GraphError, InfeasibleBudgetError, ReplicasError
from graph_passes.graph.ir import Graph, Node, integer
from graph_passes.passes.offload.lanes import LanePlan, Pool, plan_lanes, pools_of, tighter_margins
from graph_passes.passes.offload.options import Effort
from graph_passes.passes.offload.plan import Probing
from graph_passes.report import Report, measured
from graph_passes.splitting import CLEARLY, SplitStep, with_split
from graph_passes.step_report import describe
from tfmem.device_names import allocator_of
from tfmem.devices import find_target, links_together, memory
from tfmem.runtime.engine import Engine
from tfmem.runtime.estimate import Estimate
from tfmem.runtime.faults import is_fault

_LANE = 40  # bits of the number of a table that are those of the step


def budgets_on_devices(step: pipeline.Step, engine: Engine) -> dict[str, int | None]:
    """The user's budget for each allocator of a step, or the default of its device; None for no limit.

    Raises:
        InvalidBudgetError: a budget is none for its device, or for a device that the step does not use.
    """
    names = tuple(pools_of(step.graph, pool_name))
    engine.settings.require_used(names)
    return {name: engine.settings.budget_on(find_target(name, engine.library)) for name in names}


def undivided(graph: Graph, kind: str) -> str:
    """Why the devices of a step cannot be planned one by one; "" if they can.

    Args:
        graph: the step's.
        kind: of its devices, "GPU" or "CPU"; a loop of a step on GPUs may have ops on the CPU.
    """
    inside = set(every_device(graph)).difference(lanes(graph))
    hidden = sorted(device for device in inside if pool_name(device).startswith(kind))
    return collective_inside(graph) or (
        f"all that runs on {hidden[0]} is inside of functions that the step calls" if hidden else ""
    )


def budget_together(step: pipeline.Step, engine: Engine) -> int | None:
    """The budgets of all devices of a step, and of the functions that it calls, together; None for no limit.

    Raises:
        InvalidBudgetError: see `budgets_on_devices`.
    """
    names = tuple(dict.fromkeys(pool_name(device) for device in every_device(step.graph)))
    engine.settings.require_used(names)
    budgets = [engine.settings.budget_on(find_target(name, engine.library)) for name in names]
    return sum(filter(None, budgets)) or None


def require_fitting(timeline: Timeline, budget: int, why: str) -> None:
    """Refuse a step that needs more than its devices have, and that cannot be planned by device.

    Raises:
        ReplicasError: so it is.
    """
    if timeline.peak > budget:
        raise ReplicasError(
            f"the step needs {timeline.peak:,} bytes, more than the {budget:,} that its devices may use together, and "
            f"its tensors cannot be moved: {why}; optimise the function of one step, and call it in a loop of Python, "
            "or train with a smaller batch"
        )


def plan_replicas(
    step: pipeline.Step,
    engine: Engine,
    budgets: Mapping[str, int | None],
    margins: Mapping[str, int] | None = None,
    costs: CostModel | None = None,
    effort: Effort = Effort.SEARCHED,
    in_use: Mapping[str, int] | None = None,
) -> tuple[LanePlan, ...]:
    """A plan for each device.

    Args:
        step: of all replicas of this process.
        engine: options, op library and the first device.
        budgets: bytes by allocator, None for no limit; see `budgets_on_devices`.
        margins: bytes of the budgets that plans leave free; see `Pool`.
        costs: what ops take; None for the estimate.
        effort: how long each plan is looked for.
        in_use: bytes by allocator that are taken while no step runs; by default what is in use now.

    Raises:
        InfeasibleBudgetError: no plan for one of the devices keeps within the budget.
        ReplicasError: tensors would have to move, and replicas of other processes take part that cannot agree (see
            `tfmem.steps.agreement`), or the collectives are in no known order.
        HostMemoryError, SpillDirectoryError: the host cannot take what all devices together would move.
    """
    # What cuDNN takes is an upper estimate. Without a budget of the user's it must not make tensors move.
    timeline = step.timeline(costs or estimated(engine))
    pools = pools_under(step.graph, engine, budgets, margins or {}, in_use or in_use_on_devices(step.graph, engine))
    default = default_lane(step.graph)
    options = engine.settings.options.offload
    elsewhere = "" if engine.workers.board() is not None else waits_for_others(step.graph)
    try:
        plans = plan_lanes(step.graph, timeline, pools, default, options, relax=not step.merging, effort=effort)
    except InfeasibleBudgetError as error:
        if elsewhere:
            raise _refused(elsewhere, budgets) from error
        raise
    if not any(each.plan.moves for each in plans):
        return plans
    if elsewhere:
        raise _refused(elsewhere, budgets)
    try:
        meetings(step.graph)
    except GraphError as error:
        raise ReplicasError(
            f"the step needs more than {_in_words(budgets)}, and its tensors cannot be moved: {error}; train "
            "with a smaller batch"
        ) from error
    moved = sum(each.timeline.buffers[move.buffer].nbytes for each in plans for move in each.plan.moves)
    engine.memory.require_host_bytes(moved)
    return plans


def estimated(engine: Engine) -> Estimate:
    """What ops of a step of replicas take, before they ran; what cuDNN takes counts where the user gave a budget."""
    return engine.estimate(workspace=engine.settings.target.is_gpu and engine.settings.must_fit)


def probes_of(plans: Sequence[LanePlan], run: int) -> tuple[Probing, ...]:
    """A table for each lane: times of two GPUs have no common beginning."""
    names = [f"/device:{tf.DeviceSpec.from_string(each.device).device_type}" for each in plans]
    indices = [tf.DeviceSpec.from_string(each.device).device_index for each in plans]
    return tuple(
        Probing(run + (lane + 1 << _LANE), f"{name}:{index}", holds=False)
        for lane, (name, index) in enumerate(zip(names, indices, strict=True))
    )


def timed_lanes(plans: Sequence[LanePlan], samples: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Seconds of the ops of all lanes, by name, as a call in which all lanes ran shows them.

    Args:
        plans: what ran in each lane.
        samples: what the probes of each lane read.
    """
    found: dict[str, float] = {}
    for each, read in zip(plans, samples, strict=True):
        if each.plan.ordered:
            seen = observe(each.timeline, each.plan.moves, read, each.plan.paddings)
            names = [each.timeline.steps[position].node for position in each.plan.ordered]
            found.update({name: seen.seconds[name] for name in names})
    return found


def in_use_on_devices(graph: Graph, engine: Engine) -> dict[str, int]:
    """Bytes that are taken now of each allocator of a step."""
    library = engine.library
    names = pools_of(graph, pool_name)
    return {name: max(0, memory(library, find_target(name, library).name).bytes_in_use) for name in names}


def pools_under(
    graph: Graph,
    engine: Engine,
    budgets: Mapping[str, int | None],
    margins: Mapping[str, int],
    in_use: Mapping[str, int],
) -> list[Pool]:
    """The memory of all lanes."""
    library, found = engine.library, pools_of(graph, pool_name)
    targets = [find_target(name, library) for name in found]
    links = links_together(targets, library, engine.settings.options.offload.spill_directory)
    return [
        Pool(name, devices, budgets[name], in_use[name], link, margins.get(name, 0))
        for (name, devices), link in zip(found.items(), links, strict=True)
    ]


def waits_for_others(graph: Graph) -> str:
    """A node that waits for devices of other processes, or for an unknown number of them; "" if none does."""
    collectives = [node for node in graph if is_collective(node)]
    here = len({node.device for node in collectives})
    for node in collectives:
        size = _group_size(graph, node)
        if size is None or size > here:
            return f"'{node.name}' ({node.op})"
    caller = next(iter(awaited_elsewhere(graph)), None)
    return "" if caller is None else f"'{caller}' ({graph[caller].op})"


def _group_size(graph: Graph, node: Node) -> int | None:
    """How many devices the group of a collective has; None if that is not known."""
    if "group_size" in node.attrs:  # of the first version
        return integer(node.attrs["group_size"])
    return constant_input(graph, node, GROUP_SIZE)


def pool_name(device: str) -> str:
    """The allocator that a device takes its memory from: all CPUs of a process have one."""
    spec = tf.DeviceSpec.from_string(device)
    return allocator_of(f"{spec.device_type}:{spec.device_index}")


def describe_replicas(
    step: pipeline.Step,
    plans: Sequence[LanePlan],
    engine: Engine,
    name: str,
    timed: bool = False,
    split: SplitStep | None = None,
) -> Report:
    """One report: peaks of the allocator that needs the most, moves of all devices, and figures of each allocator."""
    policy = engine.settings.options.offload.policy
    reports = [describe(step, each.timeline, each.plan, policy, graph=name, device=each.pool.name) for each in plans]
    if split is not None:
        before = (replace(split, peak_before=split.peaks_before[each.device]) for each in plans)
        moves = any(report.transfers for report in reports)
        reports = [with_split(report, one, moves) for report, one in zip(reports, before, strict=True)]
    pools = dict.fromkeys(each.pool for each in plans)
    devices = [
        _on_device(pool, [report for each, report in zip(plans, reports, strict=True) if each.pool is pool])
        for pool in pools
    ]
    fullest = _fullest(devices)
    first = next(report for report in reports if report.device == fullest.device)
    stays = dict.fromkeys(note for report in reports for note in report.notes)
    about_split = _not_split(step, engine, reports) if split is None else [split.note] if split.note else []
    return replace(
        first,
        device=f"{len(plans)} x {engine.settings.target.description}",
        decision=next((report.decision for report in reports if report.transfers), first.decision),
        budget=fullest.budget,
        peak_before=fullest.peak_before,
        peak_predicted=fullest.peak_predicted,
        peak_uncounted=fullest.peak_uncounted,
        bytes_out_predicted=sum(found.bytes_out for found in devices),
        bytes_in_predicted=sum(found.bytes_in for found in devices),
        transfers=tuple(record for report in reports for record in report.transfers),
        devices=tuple(devices),
        not_moved=tuple(each for report in reports for each in report.not_moved),
        notes=(_costs(engine, timed), *about_split, *stays),
    )


def _costs(engine: Engine, timed: bool) -> str:
    if not timed:
        return "op times and workspace are estimates"
    if engine.settings.target.is_gpu:
        return "op times and workspace were measured on each device"
    return "op times were measured on each device; workspace is an estimate"


def _not_split(step: pipeline.Step, engine: Engine, reports: Sequence[Report]) -> list[str]:
    """A note where a step of one process would be divided to see whether that is faster. Workers would have to try it
    together, and to agree on what they measured."""
    if not engine.settings.splits_by_time or not waits_for_others(step.graph):
        return []
    rates = [report.verdict.rate for report in reports if report.transfers and report.verdict is not None]
    if min(rates, default=1.0) > CLEARLY:
        return []
    return ["not split along the batch: workers run pieces only where no moves meet a budget, and not to be faster"]


def replanned(
    step: pipeline.Step,
    engine: Engine,
    plans: Sequence[LanePlan],
    report: Report,
    costs: CostModel | None = None,
) -> tuple[LanePlan, ...] | None:
    """Plans that take less than `plans`, where the measured peaks of `report` exceed budgets; None if there are none.

    Replicas of one process are one graph, so that no other process has to agree.
    """
    over = {found.device: found.over for found in report.devices}
    budgets = {found.device: found.budget for found in report.devices}
    try:
        found = plan_replicas(step, engine, budgets, tighter_margins(plans, over), costs)
    except Exception as error:
        if is_fault(error):
            raise
        return None
    return None if [each.plan.actions for each in found] == [each.plan.actions for each in plans] else found


def usual_replicas(report: Report, peaks: Sequence[Sequence[int]]) -> Report:
    """`report` with the usual peaks of later calls. A single call may have met what another version of the step left.

    Args:
        report: of `measured_replicas`.
        peaks: of each later call, the bytes of each device.
    """
    usual = [
        max(median_low(taken), (found.peak_measured or 0) - found.peak_uncounted)
        for found, taken in zip(report.devices, zip(*peaks, strict=True), strict=True)
    ]
    report = replace(report, notes=tuple(note for note in report.notes if not isinstance(note, Missed)))
    most = _missed(measured_replicas(report, peaks, last=True))
    report = measured_replicas(report, [usual], last=True)
    if most is None or _missed(report) is not None:
        return report
    return replace(report, notes=(*report.notes, most.once))


def _missed(report: Report) -> Missed | None:
    return next((note for note in report.notes if isinstance(note, Missed)), None)


def measured_replicas(report: Report, peaks: Sequence[Sequence[int]], last: bool) -> Report:
    """`report` with the most that calls of the step took of each device.

    Args:
        report: of `describe_replicas`.
        peaks: of each call, the bytes of each device.
        last: whether no other call is measured: then a missed budget is a note.
    """
    devices = tuple(
        replace(found, peak_measured=max(taken) + found.peak_uncounted)
        for found, taken in zip(report.devices, zip(*peaks, strict=True), strict=True)
    )
    report = replace(report, devices=devices)
    missed = [(found, found.over) for found in devices if found.over]
    if missed and last:
        how = " and ".join(f"by {over:,} bytes on {found.device}" for found, over in missed)
        report = replace(report, notes=(Missed.of(f" {how}"), *report.notes))
    fullest = max(missed, key=lambda pair: pair[1])[0] if missed else _fullest(devices)
    report = replace(
        report,
        budget=fullest.budget,
        peak_before=fullest.peak_before,
        peak_predicted=fullest.peak_predicted,
        peak_uncounted=fullest.peak_uncounted,
    )
    return measured(report, fullest.peak_measured or 0)


def _fullest(devices: Sequence[DeviceReport]) -> DeviceReport:
    """The device that a report is about first: of those with a budget, the one with the highest peak."""
    return max(devices, key=lambda found: (found.budget is not None, found.peak_before))


def _on_device(pool: Pool, reports: Sequence[Report]) -> DeviceReport:
    """The figures of an allocator, whose peaks are the sums of those of its lanes."""
    return DeviceReport(
        device=pool.name,
        lanes=len(reports),
        budget=pool.budget,
        peak_before=sum(report.peak_before for report in reports),
        peak_predicted=sum(report.peak_predicted for report in reports),
        peak_uncounted=sum(report.peak_uncounted for report in reports),
        bytes_out=sum(report.bytes_out_predicted for report in reports),
        bytes_in=sum(report.bytes_in_predicted for report in reports),
        transfers=sum(len(report.transfers) for report in reports),
    )


def _in_words(budgets: Mapping[str, int | None]) -> str:
    """The budget in a sentence, or that of each device where they differ."""
    given = {name: budget for name, budget in budgets.items() if budget is not None}
    if len(set(given.values())) == 1:
        return f"the budget of {next(iter(given.values())):,} bytes"
    return f"the budgets of {', '.join(f'{budget:,} bytes on {name}' for name, budget in given.items())}"


def _refused(collective: str, budgets: Mapping[str, int | None]) -> ReplicasError:
    return ReplicasError(
        f"the step needs more than {_in_words(budgets)}, and no tensor of a step that runs in several "
        f"workers can be moved without TensorFlow's coordination service: {collective} waits for devices of other "
        "processes; train with MultiWorkerMirroredStrategy, with MirroredStrategy, or with a smaller batch"
    )
