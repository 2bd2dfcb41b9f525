"""What the workers of a cluster agree on once their first steps ran: plan again for less, or go on as they are.

    peaks of each worker -> who is over its budget, and has a plan for less -> the same calls are watched again by all

Workers count the calls that begin, since all of them take part in each. So they agree between the same two calls, when
none of them is in a collective. A plan for less is made and built before a worker says that it has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from tfmem.runtime.workers import Board
from tfmem.steps.agreement import unmoved
from tfmem.steps.job import Job
from tfmem.steps.phases import Event, Transition
from tfmem.steps.replicas import measured_replicas, replanned
from tfmem.steps.settling import left
from tfmem.steps.states import StepState, WatchingTogether
from tfmem.steps.trials import CPU_RETRIES
from tfmem.steps.worker_records import exchange

CALLS = 4  # that are watched; the first has cuDNN's trying of algorithms in it, and does not count

_PEAKS = "peaks"  # part of keys on the board


@dataclass(frozen=True)
class Said:
    """What a worker says of its first steps.

    Attributes:
        over: bytes beyond its budget, by device.
        again: whether it has a plan for less.
        why: what keeps it from planning again; "" if nothing does.
    """

    over: Mapping[str, int] = field(default_factory=dict)
    again: bool = False
    why: str = ""


@dataclass(frozen=True)
class PeaksVerdict:
    """What all workers do.

    Attributes:
        plain: why all run the step without moves; "" if they do not.
        stays: why each goes on with the plan that it has, unwatched; "" if nothing keeps them from planning again.
        again: who runs a plan for less from now on, and why; all watch their peaks again. "" where none does.
    """

    plain: str = ""
    stays: str = ""
    again: str = ""


def begins(state: WatchingTogether) -> WatchingTogether:
    """`state` of a call that begins."""
    return replace(state, calls=state.calls + 1)


def ran(job: Job, state: WatchingTogether, peaks: tuple[int, ...] | None, seconds: float) -> Transition[StepState]:
    """What follows a call that ended well.

    Args:
        job: the trace.
        state: what ran.
        peaks: bytes that it took of each device; None if another call was measured meanwhile.
        seconds: that it took.
    """
    if peaks is not None and state.calls > 1:
        state = replace(state, peaks=(*state.peaks, peaks), seconds=(*state.seconds, seconds))
        state = replace(state, report=measured_replicas(state.report, state.peaks, last=False))
    return job.told(Transition(Event.RAN, state))


def agreed(job: Job, board: Board | None, state: WatchingTogether) -> Transition[StepState]:
    """What follows `CALLS` calls, on all workers.

    Args:
        job: the trace.
        board: where all of them read and write; None where the cluster is gone, and nothing can be agreed on.
        state: what ran.

    Raises:
        tf.errors.OpError: the cluster has lost a worker.
        ReplicasError: the coordination service has failed.
    """
    if board is None:
        return job.told(following(job, state, None, PeaksVerdict(stays="there is no coordination service any more")))
    workers = job.engine.workers
    said, tighter = _said(job, state)

    def judge(texts: Mapping[str, str | None]) -> str:
        found = {task: None if text is None else Said(**json.loads(text)) for task, text in texts.items()}
        return json.dumps(asdict(verdict_of(found, workers.patience)))

    name = f"{job.trace.concrete.graph.name}/{_PEAKS}"
    verdict = PeaksVerdict(**json.loads(exchange(board, workers, name, json.dumps(asdict(said)), judge)))
    return job.told(following(job, state, tighter, verdict))


def verdict_of(said: Mapping[str, Said | None], patience: float) -> PeaksVerdict:
    """What all workers do.

    Args:
        said: by each worker; None where one said nothing in time.
        patience: seconds that the others waited.
    """
    known = {task: found for task, found in said.items() if found is not None}
    for task, found in known.items():
        if found.why:
            return PeaksVerdict(plain=f"{task} cannot plan again ({found.why})")
    for task in said:
        if task not in known:
            return PeaksVerdict(stays=f"{task} said nothing of its peaks within {patience:g} seconds")
    again = [
        f"{size:,} bytes on {device} of {task}"
        for task, found in known.items()
        if found.again
        for device, size in found.over.items()
    ]
    return PeaksVerdict(again=" and ".join(again))


def _said(job: Job, state: WatchingTogether) -> tuple[Said, WatchingTogether | None]:
    """What this worker says, and what follows if all say so, too; None where it goes on as it is."""
    over = {found.device: found.over for found in state.report.devices if found.over}
    if not over or state.replans == CPU_RETRIES:
        return Said(over), None
    try:
        plans = replanned(job.trace.step, job.engine, state.plans, state.report, state.costs)
        if plans is None:
            return Said(over), None
        function, report = job.trace.build_lanes(plans), job.trace.describe_lanes(plans, state.costs is not None)
    except Exception as error:  # the others have to know
        note = job.noted(error, "planning by measured peaks", "the unmodified step runs on all workers")
        state = replace(state, report=replace(state.report, notes=(*state.report.notes, note)))
        return Said(over, why=f"{type(error).__name__}: {error}"), state
    return Said(over, again=True), replace(state, function=function, report=report, plans=plans)


def following(
    job: Job, state: WatchingTogether, tighter: WatchingTogether | None, verdict: PeaksVerdict
) -> Transition[StepState]:
    """What the workers agreed on.

    Args:
        job: the trace.
        state: what ran.
        tighter: what runs if this worker's new plan may run; None if it has none.
        verdict: of all workers.
    """
    if verdict.plain:
        return _plain(job, tighter or state, verdict.plain)
    if verdict.again:
        note = f"replanned: steps ran over their budgets by {verdict.again}"
        state = tighter or state
        notes = (*state.notes, note)
        report = replace(state.report, notes=tuple(dict.fromkeys((*state.report.notes, *notes))))
        state = replace(state, report=report, notes=notes, replans=state.replans + 1, calls=0, peaks=(), seconds=())
        return Transition(Event.OVER, state)
    report = measured_replicas(state.report, state.peaks, last=True) if state.peaks else state.report
    unmeasured = () if state.peaks else ("not measured: another step was measured meanwhile",)
    stays = (f"planned once: {verdict.stays}",) if verdict.stays else ()
    report = replace(report, notes=(*report.notes, *unmeasured, *stays))
    return left(job, replace(state, report=report), Event.WITHIN)


def _plain(job: Job, state: WatchingTogether, why: str) -> Transition[StepState]:
    """The step without moves, as TensorFlow has it or in pieces, with the random numbers of what ran."""
    what = "unchanged" if job.trace.split is None else "in pieces and without moves"
    job.engine.notices.warn("workers", f"{job.trace.name} runs {what} on all workers", why)
    report = unmoved(state.report, job.budget, state.plans)
    notes = (*report.notes, f"{what} on all workers: {why}")
    state = replace(state, function=job.trace.unmoved(), report=replace(report, notes=notes))
    return left(job, state, Event.FAULT)
