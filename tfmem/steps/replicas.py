"""A step of several replicas under a budget: a plan for each device of this process, made before anything runs.

Observed steps, trials and dry runs are for steps of one device: replicas would have to agree on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tensorflow as tf

from graph_passes import pipeline
from graph_passes.analysis.peers import is_collective, lanes, meetings
from graph_passes.errors import GraphError, InfeasibleBudgetError, ReplicasError
from graph_passes.graph.ir import Graph
from graph_passes.lower.values import integers
from graph_passes.passes.offload.lanes import LanePlan, Pool, plan_lanes, pools_of
from graph_passes.report import Report
from tfmem.devices import memory
from tfmem.runtime.engine import Engine

_GROUP_SIZE = 1  # the input of a collective that tells how many devices its group has


def plan_replicas(step: pipeline.Step, engine: Engine, budget: int) -> tuple[LanePlan, ...]:
    """A plan for each device.

    Args:
        step: of all replicas of this process.
        engine: options, op library and the first device.
        budget: bytes for each device.

    Raises:
        InfeasibleBudgetError: no plan for one of the devices keeps within the budget.
        ReplicasError: tensors would have to move, and replicas of other processes take part that cannot agree (see
            `tfmem.steps.agreement`), or the collectives are in no known order.
        HostMemoryError, SpillDirectoryError: the host cannot take what all devices together would move.
    """
    # What cuDNN takes is an upper estimate. Without a budget of the user's it must not make tensors move.
    timeline = step.timeline(engine.estimate(workspace=engine.target.is_gpu and engine.must_fit))
    pools = [
        Pool(devices, budget, max(0, memory(engine.library, f"/device:{name}").bytes_in_use))
        for name, devices in pools_of(step.graph, pool_name).items()
    ]
    default = next(iter(lanes(step.graph)), "")
    options = engine.options.offload
    elsewhere = "" if engine.workers.board() is not None else waits_for_others(step.graph)
    try:
        plans = plan_lanes(step.graph, timeline, pools, default, engine.link, options, relax=not step.merging)
    except InfeasibleBudgetError as error:
        if elsewhere:
            raise _refused(elsewhere, budget) from error
        raise
    if not any(each.plan.moves for each in plans):
        return plans
    if elsewhere:
        raise _refused(elsewhere, budget)
    try:
        meetings(step.graph)
    except GraphError as error:
        raise ReplicasError(
            f"the step needs more than the budget of {budget:,} bytes, and its tensors cannot be moved: {error}; train "
            "with a smaller batch"
        ) from error
    moved = sum(each.timeline.buffers[move.buffer].nbytes for each in plans for move in each.plan.moves)
    engine.memory.require_host_bytes(moved)
    return plans


def waits_for_others(graph: Graph) -> str:
    """A collective that waits for devices of other processes, or for an unknown number of them; "" if none does."""
    collectives = [node for node in graph if is_collective(node)]
    here = len({node.device for node in collectives})
    for node in collectives:
        size = integers(graph, node.inputs[_GROUP_SIZE]) if len(node.inputs) > _GROUP_SIZE else None
        if size is None or size[0] > here:
            return f"'{node.name}' ({node.op})"
    return ""


def pool_name(device: str) -> str:
    """The allocator that a device takes its memory from: all CPUs of a process have one."""
    spec = tf.DeviceSpec.from_string(device)
    return "CPU:0" if spec.device_type == "CPU" else f"{spec.device_type}:{spec.device_index}"


def describe_replicas(step: pipeline.Step, plans: Sequence[LanePlan], engine: Engine, name: str) -> Report:
    """One report: peaks of the allocator that needs the most, moves of all devices."""
    policy = engine.options.offload.policy
    reports = [
        pipeline.describe(step, each.timeline, each.plan, policy, graph=name, device=pool_name(each.device), notes=())
        for each in plans
    ]
    fullest = max(_pooled(reports), key=lambda report: report.peak_before)
    devices = [
        f"{report.device}: planned peak {report.peak_predicted:,} of {report.peak_before:,} bytes, "
        f"{len(report.transfers)} tensors offloaded"
        for report in reports
    ]
    return replace(
        fullest,
        device=f"{len(plans)} x {engine.target.description}",
        decision=next((report.decision for report in reports if report.transfers), fullest.decision),
        budget=engine.budget,
        bytes_out_predicted=sum(report.bytes_out_predicted for report in reports),
        bytes_in_predicted=sum(report.bytes_in_predicted for report in reports),
        transfers=tuple(record for report in reports for record in report.transfers),
        notes=("op times and memory are estimates: steps of several replicas are not observed", *devices),
    )


def _pooled(reports: Sequence[Report]) -> list[Report]:
    """A report for each allocator, whose peaks are the sums of those of its devices."""
    pools: dict[str, list[Report]] = {}
    for report in reports:
        pools.setdefault(report.device, []).append(report)
    return [
        replace(
            each[0],
            peak_before=sum(report.peak_before for report in each),
            peak_predicted=sum(report.peak_predicted for report in each),
            peak_uncounted=sum(report.peak_uncounted for report in each),
        )
        for each in pools.values()
    ]


def _refused(collective: str, budget: int) -> ReplicasError:
    return ReplicasError(
        f"the step needs more than the budget of {budget:,} bytes, and no tensor of a step that runs in several "
        f"workers can be moved without TensorFlow's coordination service: {collective} waits for devices of other "
        "processes; train with MultiWorkerMirroredStrategy, with MirroredStrategy, or with a smaller batch"
    )
