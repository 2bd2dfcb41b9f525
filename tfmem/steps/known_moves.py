"""The plan that a step settled on, on disk: on a CPU another process runs it from the first call on.

    graph, device, budget, options, code of tfmem --digest--> key
    no file      the step is planned, and plans are tried, as the first process did
    a file       the same moves, if the profile says that they meet the budget with the memory that is in use now;
                 three calls check their peak, as that of any plan

On a GPU cuDNN chooses its algorithms again in each process, by the memory that is free, so there plans are tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from custom_ops.code_digest import code_digest
from custom_ops.jit.cache import Cache
from custom_ops.timing.remembered import Remembered
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.errors import StalePlanError
from graph_passes.passes.offload.check import faults
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.plan_file import PlannedMove
from graph_passes.report import Report
from tfmem.steps.given_plan import moves_of, plan_of, planned_moves
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import KnownProfiles
from tfmem.steps.phases import Transition
from tfmem.steps.settling import settle
from tfmem.steps.states import StepState

FORMAT = "moves 1"
NOTE = "an earlier process settled on this plan, and measured it"
ALIKE = 64  # part of the budget by which the memory in use may differ: the plan for another room may be faster
_LARGEST = 16 << 20  # bytes of a file


@dataclass(frozen=True)
class KnownMoves:
    """A plan that was checked.

    Attributes:
        moves: what moves.
        in_use: bytes that were taken while no step ran.
        step_ns, stall_ns: what a step took as measured, in nanoseconds; None where it was not.
        least: seconds that no plan goes below; None where no program was solved.
    """

    moves: tuple[PlannedMove, ...]
    in_use: int
    step_ns: int | None = None
    stall_ns: int | None = None
    least: float | None = None

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> KnownMoves:
        """What `asdict` wrote. Raises ValueError, TypeError or KeyError for other content."""
        known = cls(**{**found, "moves": tuple(PlannedMove(**each) for each in found["moves"])})
        numbers = (known.in_use, known.step_ns or 0, known.stall_ns or 0)
        least = known.least or 0.0
        if not all(type(each) is int and each >= 0 for each in numbers):
            raise ValueError("a plan with impossible numbers")
        if type(least) is not float or not 0 <= least < float("inf"):
            raise ValueError("a plan with an impossible bound")
        for move in known.moves:
            *names, recomputed = astuple(move)
            if type(recomputed) is not bool or not all(type(name) is str for name in names):
                raise ValueError("a plan with a move that names no ops")
        return known


def run(job: Job, state: StepState) -> Transition[StepState] | None:
    """What follows if the step runs by a plan that an earlier process settled on; None if there is none that serves.

    Args:
        job: the step, read.
        state: what is known.
    """
    kept = _plans(job).find(_key(job)) if _serves(job) else None
    if kept is None:
        return None
    job.engine.memory.separate(job.trace.concrete.variables)
    in_use, profile = job.engine.memory.in_use_alone, KnownProfiles(job.engine, job.trace, job.others).find()
    if profile is None or in_use is None or abs(in_use - kept.in_use) > job.limit // ALIKE:
        return None
    timeline, note = job.timeline(profile[0]), profile[1]
    try:
        moves = moves_of(kept.moves, timeline, {step.node: step.node for step in timeline.steps})
        plan = plan_of(job, timeline, moves, kept.least)
    except (StalePlanError, TypeError):  # TypeError: what is no name
        return None
    if plan.after.peak > job.limit or faults(timeline, plan):
        return None
    job.engine.memory.require_host_room(timeline, plan)
    move = settle(job, replace(state, notes=(*state.notes, note, NOTE)), timeline, plan, force=True)
    report = replace(move.state.report, step_measured_ns=kept.step_ns, stall_measured_ns=kept.stall_ns)
    return Transition(move.event, replace(move.state, report=report))


def keep(job: Job, timeline: Timeline, plan: OffloadPlan, report: Report) -> None:
    """Keep a plan that was checked, if its peak met the budget.

    Args:
        job: the step.
        timeline: what it was planned by.
        plan: the plan.
        report: what was measured of it.
    """
    in_use, peak = job.engine.memory.in_use_alone, report.peak_measured
    if not _serves(job) or in_use is None or peak is None or peak > job.limit or plan.paddings:
        return
    least = report.verdict.least if report.verdict else None
    kept = KnownMoves(
        planned_moves(plan.moves, timeline), in_use, report.step_measured_ns, report.stall_measured_ns, least
    )
    _plans(job).keep(_key(job), kept)


def _serves(job: Job) -> bool:
    """Whether plans of the step are kept: a divided step is chosen by the graph that it was divided from."""
    settings = job.engine.settings
    return bool(settings.options.cache_directory) and settings.observes and not (job.is_gpu or job.trace.split)


def _plans(job: Job) -> Remembered[KnownMoves]:
    cache = Cache(Path(job.engine.settings.options.cache_directory) / "plans", _LARGEST)
    return Remembered(FORMAT, cache, asdict, KnownMoves.read)


def _key(job: Job) -> str:
    settings = job.engine.settings
    facts = {
        "budget": job.limit,
        "code": code_digest(),
        "options": repr(settings.options.offload),
        "surely_fits": settings.surely_fits,
    }
    return _plans(job).key(facts, job.trace.fingerprint())
