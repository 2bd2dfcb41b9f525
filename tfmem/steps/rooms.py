"""The memory that a step with regions may take, and what its moves would cost there: on one device, or on several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from graph_passes.checks import LARGEST
from graph_passes.passes.offload.lanes import pools_of
from graph_passes.passes.offload.options import Effort
from tfmem.runtime.engine import Engine
from tfmem.runtime.estimate import estimate
from tfmem.steps.job import Job
from tfmem.steps.replicas import budgets_on_devices, in_use_on_devices, plan_replicas, pool_name
from tfmem.steps.trace import Trace


class Predicted(NamedTuple):
    """Seconds of a step by the cost model; of several devices those of the slowest.

    Attributes:
        moved: with its moves.
        unlimited: without a budget.
    """

    moved: float
    unlimited: float


class StepRoom(Protocol):
    """The memory of the devices of a step."""

    @property
    def least(self) -> int:
        """Bytes of the budget for one device, where there are several the smallest."""
        ...

    def predicted(self, trace: Trace, engine: Engine) -> Predicted:
        """What a trace takes that was read.

        Raises:
            BudgetError: no plan keeps within the budget, or the host cannot take what moves.
        """
        ...


@dataclass(frozen=True)
class DeviceRoom:
    """The memory of one device; a `StepRoom`.

    Attributes:
        least: bytes of the budget.
        in_use: bytes that are taken while no step runs.
    """

    least: int
    in_use: int

    def predicted(self, trace: Trace, engine: Engine) -> Predicted:
        """See `StepRoom`."""
        target = engine.settings.target
        timeline = trace.step.timeline(estimate(target, self.in_use, workspace=not target.is_gpu))
        plan = trace.plan(timeline, self.least, effort=Effort.ONCE)  # the one that runs is planned again, as measured
        return Predicted(plan.after.seconds, plan.before.seconds)


@dataclass(frozen=True)
class LaneRooms:
    """The memory of all devices of a step of replicas; a `StepRoom`.

    Attributes:
        least: see `StepRoom`. Lanes of one allocator share its budget.
        budgets: bytes by allocator; None for no limit.
        in_use: bytes by allocator that are taken while no step runs.
    """

    least: int
    budgets: Mapping[str, int | None]
    in_use: Mapping[str, int]

    def predicted(self, trace: Trace, engine: Engine) -> Predicted:
        """See `StepRoom`."""
        plans = plan_replicas(trace.step, engine, self.budgets, effort=Effort.GREEDY, in_use=self.in_use)
        moved = max(each.plan.after.seconds for each in plans)
        return Predicted(moved, max(each.plan.before.seconds for each in plans))


def room_of(job: Job) -> StepRoom:
    """The memory of a step that was read, between two of its calls: what is in use then is no tensor of a call."""
    step, engine = job.trace.step, job.engine
    if not step.shared:
        return DeviceRoom(job.limit, engine.memory.in_use)
    budgets, lanes = budgets_on_devices(step, engine), pools_of(step.graph, pool_name)
    shares = [budget // len(lanes[name]) for name, budget in budgets.items() if budget is not None]
    return LaneRooms(min(shares, default=LARGEST), budgets, in_use_on_devices(step.graph, engine))
