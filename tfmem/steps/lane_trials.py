"""Plans of all devices of a step together that are run to be compared: which to run, and which of them to keep.

A plan of one device says little alone: replicas meet in every step, so the slowest of them decides how long it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import tensorflow as tf

from custom_ops.errors import TfmemError
from custom_ops.timing.rounds import fastest
from graph_passes.analysis.cost.model import CostModel
from graph_passes.analysis.memory.observe import Sample, observe
from graph_passes.passes.offload.lanes import LanePlan
from graph_passes.passes.offload.options import Effort
from graph_passes.pipeline import Step
from graph_passes.report import Report
from tfmem.runtime.engine import Engine
from tfmem.runtime.estimate import TimedCosts
from tfmem.steps.replicas import estimated, plan_replicas, timed_lanes
from tfmem.steps.trials import AS_PREDICTED

Lanes = tuple[LanePlan, ...]  # a plan for each device

SPARE = 5  # percent of each budget that one of the plans leaves free: near its limit an allocator is fragmented


class TrialOutcome(NamedTuple):
    """What came of plans that were run.

    Attributes:
        seconds: of the fastest call; infinite where none was measured.
        over: bytes beyond budgets.
    """

    seconds: float
    over: int


@dataclass(frozen=True)
class LaneTrial:
    """Plans of all devices that were run, and what came of it.

    Attributes:
        plans: one for each device.
        function: runs them.
        report: with the peaks that were measured.
        peaks: of each call, the bytes that it took of each device.
        seconds: of the fastest call, with all replicas.
    """

    plans: Lanes
    function: Any
    report: Report
    peaks: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def over(self) -> int:
        """Bytes beyond budgets, of all devices together."""
        return sum(found.over for found in self.report.devices)

    @property
    def as_predicted(self) -> bool:
        """Whether the step kept within its budgets, and within the time of its slowest device by plan."""
        return not self.over and self.seconds <= AS_PREDICTED * max(each.plan.after.seconds for each in self.plans)

    def __str__(self) -> str:
        peaks = " and ".join(f"{found.peak_measured or 0:,} on {found.device}" for found in self.report.devices)
        return f"{self.seconds * 1e3:.1f} ms, peak {peaks}"


def measured_costs(engine: Engine, plans: Lanes, samples: Sequence[Sequence[Sample]]) -> TimedCosts:
    """What ops took in a call in which all lanes ran: their times, and on GPUs their workspace.

    Logical devices of a CPU have one allocator, whose peaks say nothing of a single lane.

    Args:
        engine: options and the first device.
        plans: what ran in each lane.
        samples: what the probes of each lane read.
    """
    workspace: dict[str, int] = {}
    for each, read in zip(plans, samples, strict=True):
        if each.plan.ordered and tf.DeviceSpec.from_string(each.device).device_type == "GPU":
            seen = observe(each.timeline, each.plan.moves, read, each.plan.paddings)
            more = max(0, seen.base - each.timeline.base)
            names = (each.timeline.steps[position].node for position in each.plan.ordered)
            workspace.update((name, seen.workspace[name] + more) for name in names)
    return TimedCosts(timed_lanes(plans, samples), estimated(engine), workspace)


def worth_running(
    step: Step, engine: Engine, first: Lanes, ran: Lanes, budgets: Mapping[str, int | None], costs: CostModel
) -> tuple[Lanes, ...]:
    """What may be faster than the plans by measured times: plans that leave some memory free, and those by estimates.

    Args:
        step: of all replicas.
        engine: options and budgets.
        first: the plans by measured times.
        ran: the plans by estimates, which ran with probes.
        budgets: bytes by allocator; None for no limit.
        costs: what was measured.
    """
    candidates = [ran]
    with suppress(TfmemError):  # the budget may have no room to spare
        spare = {name: budget * SPARE // 100 for name, budget in budgets.items() if budget is not None}
        candidates.insert(0, plan_replicas(step, engine, budgets, spare, costs, Effort.ONCE))
    found: list[Lanes] = []
    for plans in candidates:
        if not any(same(plans, other) for other in (first, *found)):
            found.append(plans)
    return tuple(found)


def same(left: Sequence[LanePlan], right: Sequence[LanePlan]) -> bool:
    """Whether two tuples of plans do the same on each device."""
    return [each.plan.actions for each in left] == [each.plan.actions for each in right]


def best_of(trials: Sequence[LaneTrial]) -> LaneTrial:
    """The fastest trial within all budgets; where none is, the one that exceeds them least."""
    return trials[best_number([TrialOutcome(trial.seconds, trial.over) for trial in trials])]


def best_number(outcomes: Sequence[TrialOutcome]) -> int:
    """The number of the best of several trials; see `best_of`."""
    number = fastest([inf if found.over else found.seconds for found in outcomes])
    if number is not None:
        return number
    return min(range(len(outcomes)), key=lambda at: (outcomes[at].seconds == inf, outcomes[at].over))
