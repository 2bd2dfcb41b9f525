"""Plans for a step that runs on several devices: one for each lane, within the budget of its pool of memory. Pure.

    budgets of pools -> lanes -> shares of the budgets -> one OffloadPlan each

Lanes of one allocator (CPU:0 and CPU:1 of a process) are a pool. Their tensors may be alive at once in any combination,
so their shares of the budget add up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from graph_passes.analysis.memory import roles
from graph_passes.analysis.memory.lanes import held_by, lane_of
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.analysis.peers import lanes
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import Graph
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import OffloadPlan, plan_offload


@dataclass(frozen=True, eq=False)
class LanePlan:
    """What moves on one device.

    Attributes:
        device: as the graph's nodes name it.
        timeline: of the lane.
        plan: for the lane's share of its pool's budget.
    """

    device: str
    timeline: Timeline
    plan: OffloadPlan


@dataclass(frozen=True)
class Pool:
    """Devices of one allocator.

    Attributes:
        devices: as the graph's nodes name them.
        budget: bytes for all of them together.
        in_use: bytes that the allocator holds before the step.
    """

    devices: tuple[str, ...]
    budget: int
    in_use: int = 0


def pools_of(graph: Graph, pool: Callable[[str], str]) -> dict[str, tuple[str, ...]]:
    """The lanes of a graph by the allocator that each takes its memory from; `pool` names it for a device."""
    found: dict[str, list[str]] = {}
    for device in lanes(graph):
        found.setdefault(pool(device), []).append(device)
    return {name: tuple(devices) for name, devices in found.items()}


def plan_lanes(
    graph: Graph,
    timeline: Timeline,
    pools: Sequence[Pool],
    default: str,
    link: Link,
    options: OffloadOptions,
    *,
    relax: bool = True,
) -> tuple[LanePlan, ...]:
    """A plan for each lane of a step.

    Args:
        graph: the step's graph.
        timeline: the whole step's, all lanes in one order.
        pools: the memory of all lanes.
        default: the device of ops that name none.
        link: bandwidths of each device's link to the host.
        options: the policy and its thresholds.
        relax: see `plan_offload`.

    Raises:
        InfeasibleBudgetError: no plan of a lane keeps its share of the budget.
    """
    found = []
    for pool in pools:
        parts = {device: lane_of(graph, timeline, device, default) for device in pool.devices}
        own = {device: held_by(graph, device, default) for device in pool.devices}
        own[pool.devices[0]] += max(0, pool.in_use - sum(own.values()))  # what else the process holds
        parts = {device: replace(part, base=own[device]) for device, part in parts.items()}
        share = _shares({device: part.peak for device, part in parts.items()}, own, pool.budget)
        for device, part in parts.items():
            try:
                plan = plan_offload(
                    part,
                    link,
                    share[device],
                    options,
                    layers=[at for at in roles.layers(graph, part) if graph[part.steps[at].node].device == device],
                    convolution_inputs=roles.convolution_inputs(graph, part),
                    relax=relax,
                )
            except InfeasibleBudgetError as error:
                raise _of_pool(error, device, pool, share[device]) from error
            found.append(LanePlan(device, part, plan))
    return tuple(found)


def _of_pool(error: InfeasibleBudgetError, device: str, pool: Pool, share: int) -> InfeasibleBudgetError:
    """What a user can do about a lane without a plan: the budget is that of the whole pool."""
    if len(pool.devices) == 1:
        return InfeasibleBudgetError(f"on {device}: {error}", error.smallest_budget, error.op, error.least)
    scale = pool.budget / max(1, share)
    smallest, least = round(scale * error.smallest_budget), round(scale * error.least)
    return InfeasibleBudgetError(
        f"memory_budget is {pool.budget:,} bytes for the {len(pool.devices)} devices of one allocator, so {device} may "
        f"use {share:,}; with every candidate tensor moved out it still needs between {error.least:,} and "
        f"{error.smallest_budget:,} bytes at op '{error.op}'; give a budget of at least {smallest:,} bytes, or a "
        "smaller batch",
        smallest,
        error.op,
        least,
    )


def _shares(peaks: Mapping[str, int], base: Mapping[str, int], budget: int) -> dict[str, int]:
    """Bytes for each lane: what it holds anyway, and of the rest as much as it would take of it without a plan."""
    wanted = {device: peak - base[device] for device, peak in peaks.items()}
    rest, total = budget - sum(base.values()), max(1, sum(wanted.values()))
    return {device: base[device] + rest * wanted[device] // total for device in peaks}
