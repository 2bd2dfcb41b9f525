"""Plans for a step that runs on several devices: one for each lane, within the budget of its pool of memory. Pure.

    budgets of pools -> lanes -> shares of the budgets -> one OffloadPlan each

Lanes of one allocator (CPU:0 and CPU:1 of a process) are a pool. Their tensors may be alive at once in any combination,
so their shares of the budget add up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from graph_passes.analysis.memory import roles
from graph_passes.analysis.memory.lane_timeline import held_by, lane_of
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.analysis.peers import lanes
from graph_passes.checks import LARGEST
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import Graph
from graph_passes.passes.offload.options import Effort, OffloadOptions
from graph_passes.passes.offload.plan import How, OffloadPlan, plan_offload

_UNIT = Link(1.0, 1.0)
_LITTLE = 64  # part of its pool's memory up to which a lane gets all that it would take


@dataclass(frozen=True, eq=False)
class Pool:
    """Devices of one allocator.

    Attributes:
        name: of the allocator.
        devices: as the graph's nodes name them.
        budget: bytes for all of them together; None for no limit.
        in_use: bytes that the allocator holds before the step.
        link: bandwidths of the devices' link to the host.
        margin: bytes of the budget that plans leave free: what steps took beyond earlier plans.
    """

    name: str = ""
    devices: tuple[str, ...] = ()
    budget: int | None = None
    in_use: int = 0
    link: Link = _UNIT
    margin: int = 0

    @property
    def planned_budget(self) -> int:
        """Bytes that plans may use."""
        return LARGEST if self.budget is None else self.budget - self.margin


@dataclass(frozen=True, eq=False)
class LanePlan:
    """What moves on one device.

    Attributes:
        device: as the graph's nodes name it.
        timeline: of the lane.
        plan: for the lane's share of its pool's budget.
        pool: the memory that its tensors are in.
    """

    device: str
    timeline: Timeline
    plan: OffloadPlan
    pool: Pool = Pool()


@dataclass(frozen=True, eq=False)
class LaneShare:
    """A lane, and the memory that it may use.

    Attributes:
        device: as the graph's nodes name it.
        timeline: of the lane.
        budget: bytes of its pool's budget.
        pool: the memory that its tensors are in.
        part: of each byte more in its pool's budget, what the lane would get.
    """

    device: str
    timeline: Timeline
    budget: int
    pool: Pool
    part: float = 1.0


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
    options: OffloadOptions,
    *,
    relax: bool = True,
    effort: Effort = Effort.SEARCHED,
) -> tuple[LanePlan, ...]:
    """A plan for each lane of a step.

    Args:
        graph: the step's graph.
        timeline: the whole step's, all lanes in one order.
        pools: the memory of all lanes.
        default: the device of ops that name none.
        options: the policy and its thresholds.
        relax: see `plan_offload`.
        effort: how long each plan is looked for.

    Raises:
        InfeasibleBudgetError: no plan of a lane keeps its share of the budget.
    """
    found = []
    for lane in lane_shares(graph, timeline, pools, default):
        device, part, pool = lane.device, lane.timeline, lane.pool
        try:
            plan = plan_offload(
                part,
                pool.link,
                lane.budget,
                options,
                How(
                    layers=[at for at in roles.layers(graph, part) if graph[part.steps[at].node].device == device],
                    convolution_inputs=roles.convolution_inputs(graph, part),
                    relax=relax,
                    effort=effort,
                ),
            )
        except InfeasibleBudgetError as error:
            raise _of_pool(error, lane) from error
        found.append(LanePlan(device, part, plan, pool))
    return tuple(found)


def lane_shares(graph: Graph, timeline: Timeline, pools: Sequence[Pool], default: str) -> tuple[LaneShare, ...]:
    """Each lane of a step, and what of its pool's budget it may use; see `plan_lanes`."""
    found = []
    for pool in pools:
        parts = {device: lane_of(graph, timeline, device, default) for device in pool.devices}
        own = {device: held_by(graph, device, default) for device in pool.devices}
        own[pool.devices[0]] += max(0, pool.in_use - sum(own.values()))  # what else the process holds
        parts = {device: replace(part, base=own[device]) for device, part in parts.items()}
        wanted = {device: part.peak - own[device] for device, part in parts.items()}
        gets = _parts_of(wanted, pool.planned_budget - sum(own.values()))
        found += [
            LaneShare(device, part, own[device] + gets[device][0], pool, gets[device][1])
            for device, part in parts.items()
        ]
    return tuple(found)


def tighter_margins(plans: Sequence[LanePlan], over: Mapping[str, int]) -> dict[str, int]:
    """The margin of each pool with which to plan again.

    Args:
        plans: what ran.
        over: bytes beyond its budget that a pool's devices took, by name of the pool.
    """
    planned: dict[str, int] = {}
    for each in plans:
        planned[each.pool.name] = planned.get(each.pool.name, 0) + each.plan.after.peak
    pools = {each.pool.name: each.pool for each in plans}
    return {
        name: max(pool.margin, (pool.budget or 0) - planned[name]) + over[name] if over.get(name) else pool.margin
        for name, pool in pools.items()
    }


def _of_pool(error: InfeasibleBudgetError, lane: LaneShare) -> InfeasibleBudgetError:
    """What a user can do about a lane without a plan: the budget is that of the whole pool."""
    device, pool, share = lane.device, lane.pool, lane.budget
    if len(pool.devices) == 1:
        return InfeasibleBudgetError(f"on {device}: {error}", error.smallest_budget, error.op, error.least)
    part = lane.part or 1.0
    smallest, least = (
        pool.planned_budget + ceil((needed - share) / part) for needed in (error.smallest_budget, error.least)
    )
    return InfeasibleBudgetError(
        f"memory_budget is {pool.planned_budget:,} bytes for the {len(pool.devices)} devices of one allocator, so "
        f"{device} may use {share:,}; with every candidate tensor moved out it still needs between {error.least:,} and "
        f"{error.smallest_budget:,} bytes at op '{error.op}'; give a budget of at least {smallest:,} bytes, or a "
        "smaller batch",
        smallest,
        error.op,
        least,
    )


def _parts_of(wanted: Mapping[str, int], rest: int) -> dict[str, tuple[int, float]]:
    """What each lane gets of the `rest` of a pool, and the part that it would get of each byte more: in proportion to
    what it would take without a plan. A lane that would take little gets all of that: hardly any tensor could move."""
    little = {device for device, nbytes in wanted.items() if nbytes * _LITTLE <= rest}
    rest -= sum(wanted[device] for device in little)
    total = max(1, sum(nbytes for device, nbytes in wanted.items() if device not in little))
    return {
        device: (nbytes, 1.0) if device in little else (rest * nbytes // total, nbytes / total)
        for device, nbytes in wanted.items()
    }
