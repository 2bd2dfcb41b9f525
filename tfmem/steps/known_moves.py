"""The plan that a step settled on, on disk: on a CPU another process runs it from the first call on.

    graph, device, budget, options, code of tfmem --digest--> key
    no file      the step is planned, and plans are tried, as the first process did
    a file       the same moves, if the profile says that they meet the budget with the memory that is in use now;
                 three calls check their peak, as that of any plan

A step that was divided along the batch is found by the graph that it was divided from: the file says how, and has the
moves of the divided step. If only these do not serve, moves are planned again, and the division stays: another one adds
sums in another order. On a GPU cuDNN chooses its algorithms again in each process, by the memory that is free, so there
plans are tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

from custom_ops.code_digest import code_digest
from custom_ops.jit.cache import Cache
from custom_ops.timing.remembered import Remembered
from graph_passes.analysis.batch.separable import fed
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.errors import StalePlanError
from graph_passes.passes.offload.check import faults
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.passes.split.split_regions import BatchDivision
from graph_passes.plan_file import PlannedMove
from graph_passes.refusals import Refusal
from graph_passes.report import Report
from tfmem.steps.given_plan import moves_of, plan_of, planned_moves
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import KnownProfiles
from tfmem.steps.phases import Transition
from tfmem.steps.settling import settle
from tfmem.steps.states import StepState
from tfmem.steps.trace import Trace

FORMAT = "moves 2"
NOTE = "an earlier process settled on this plan, and measured it"
NOT_TAKEN = "a plan of an earlier process was not taken"
# part of the budget by which the memory in use may differ, but for what is fed: the plan for another room may be faster
ALIKE = 64
_LARGEST = 16 << 20  # bytes of a file


@dataclass(frozen=True)
class KnownMoves:
    """A plan that was checked.

    Attributes:
        moves: what moves.
        in_use: bytes that were taken before the step first ran.
        step_ns, stall_ns: what a step took as measured, in nanoseconds; None where it was not.
        least: seconds that no plan goes below; None where no program was solved.
        division: what runs on pieces of the batch; None where nothing does. The moves are those of the divided step.
    """

    moves: tuple[PlannedMove, ...]
    in_use: int
    step_ns: int | None = None
    stall_ns: int | None = None
    least: float | None = None
    division: BatchDivision | None = None

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> KnownMoves:
        """What `asdict` wrote. Raises ValueError, TypeError or KeyError for other content."""
        moves, division = tuple(PlannedMove(**each) for each in found["moves"]), found.get("division")
        known = cls(**{**found, "moves": moves, "division": None if division is None else BatchDivision.read(division)})
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


def run(job: Job, state: StepState) -> Transition[StepState] | StepState:
    """What follows if the step runs by a plan that an earlier process settled on; else `state`, with a note of why a
    plan that was kept does not serve.

    Args:
        job: the step, read.
        state: what is known.
    """
    kept = _found(job)
    if kept is None:
        return state
    try:
        return _run(job, state, kept)
    except _StaleError as error:
        if job.trace.not_taken:
            return state
        job.trace.not_taken = True
        return replace(state, notes=(*state.notes, f"{NOT_TAKEN}: {error}"))


def divide(job: Job) -> Refusal | None:
    """Divide the step along the batch, as an earlier process did where that meets the budget; or say why not."""
    kept = _found(job)
    if kept is not None and kept.division is not None:
        with suppress(Exception):  # whatever a file holds, another division takes its place
            return job.trace.divide(job.limit, known=(kept.division,))
    return job.trace.divide(job.limit)


class _StaleError(Exception):
    """Why a plan that was kept does not serve."""


def _run(job: Job, state: StepState, kept: KnownMoves) -> Transition[StepState]:
    """What follows if the step runs by `kept`. Raises _StaleError; `job.trace` then stays as it is."""
    job.engine.memory.separate(job.trace.concrete.variables)
    in_use = job.engine.memory.in_use_alone
    if in_use is None:
        raise _StaleError("other steps run, so what is in use before this one is not known")
    if abs(in_use - kept.in_use) > job.limit // ALIKE + fed(job.trace.step.graph):
        raise _StaleError(f"{in_use:,} bytes are in use before the step, where there were {kept.in_use:,}")
    trace = _divided(job, kept)
    tried = replace(job, trace=trace)
    profile = KnownProfiles(job.engine, trace, job.others).find()
    if profile is None:
        raise _StaleError("the measurements of the step are gone")
    timeline, note = tried.timeline(profile[0]), profile[1]
    try:
        moves = moves_of(kept.moves, timeline, {step.node: step.node for step in timeline.steps})
        plan = plan_of(tried, timeline, moves, kept.least)
    except (StalePlanError, TypeError) as error:  # TypeError: what is no name
        raise _StaleError("it names what the step does not have") from error
    if plan.after.peak > job.limit:
        raise _StaleError(f"it needs {plan.after.peak:,} bytes, more than the budget")
    if faults(timeline, plan):
        raise _StaleError("its moves cannot be made in this step")
    job.engine.memory.require_host_room(timeline, plan)
    trace.in_use = in_use
    job.trace.become(trace)
    transition = settle(job, replace(state, notes=(*state.notes, note, NOTE)), timeline, plan, force=True)
    report = replace(transition.state.report, step_measured_ns=kept.step_ns, stall_measured_ns=kept.stall_ns)
    return Transition(transition.event, replace(transition.state, report=report))


def _divided(job: Job, kept: KnownMoves) -> Trace:
    """The trace whose ops the moves name. Raises _StaleError."""
    trace = copy(job.trace)
    if trace.divided_from:
        if kept.division != _division(trace):
            raise _StaleError("it divides the step otherwise")
        return trace
    if kept.division is None:
        return trace
    with suppress(Exception):  # whatever a file holds, a new plan takes its place
        trace.divide(job.limit, known=(kept.division,), measured=True)
    if not trace.divided_from:
        raise _StaleError("the step cannot be divided along the batch as it says")
    return trace


def _division(trace: Trace) -> BatchDivision | None:
    """How the trace divided the step; None if it did not. A fused step is one of a graph that was divided before."""
    return BatchDivision.of(trace.split.plan)[0] if trace.split is not None and trace.divided_from else None


def keep(job: Job, timeline: Timeline, plan: OffloadPlan, report: Report) -> None:
    """Keep a plan that was checked, if its peak met the budget.

    Args:
        job: the step.
        timeline: what it was planned by.
        plan: the plan.
        report: what was measured of it.
    """
    in_use, peak = job.trace.in_use, report.peak_measured
    if not _serves(job) or in_use is None or peak is None or peak > job.limit or plan.paddings:
        return
    least = report.verdict.least if report.verdict else None
    times = report.step_measured_ns, report.stall_measured_ns
    kept = KnownMoves(planned_moves(plan.moves, timeline), in_use, *times, least, _division(job.trace))
    _plans(job).keep(_key(job), kept)


def _found(job: Job) -> KnownMoves | None:
    return _plans(job).find(_key(job)) if _serves(job) else None


def _serves(job: Job) -> bool:
    """Whether plans of the step are kept."""
    settings = job.engine.settings
    return bool(settings.options.cache_directory) and settings.observes and not job.is_gpu


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
    return _plans(job).key(facts, job.trace.divided_from or job.trace.fingerprint())
