"""What the workers of a cluster agree on while plans are tried: which set of plans all go on with.

    calls 1 and 2    probes, where tensors move          -> each worker plans by the times of its devices
    calls 3 to 6     a set of plans: one for each device of each worker
    before call 7    time and excess of each worker      -> another set for four calls, or the best of those that ran

The number of a call decides what runs, and plans change no collective. So no worker begins a collective that the
others do not begin, and none runs a call again. Workers agree between two calls, when none is in a collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from tfmem.runtime.measuring_lock import WaitsFor
from tfmem.runtime.workers import Board
from tfmem.steps import agreed_peaks, measuring
from tfmem.steps.agreed_peaks import CALLS, PeaksVerdict
from tfmem.steps.job import Job
from tfmem.steps.lane_trials import LaneTrial, TrialOutcome, best_number
from tfmem.steps.phases import Event, Transition
from tfmem.steps.states import Round, StepState, WatchingTogether
from tfmem.steps.worker_records import exchange

PROBED = 2  # calls with probes; kernels are made in the first, which does not count

_TRIALS = "trials"  # part of keys on the board


@dataclass(frozen=True)
class Tried:
    """What came of a set of plans, on a worker; or on all of them together.

    Attributes:
        seconds: of the fastest call; infinite where none was measured.
        over: bytes beyond budgets.
        more: whether there is another set that may be faster.
        late: who said nothing in time; "" if all did.
    """

    seconds: float
    over: int = 0
    more: bool = False
    late: str = ""


def is_due(state: WatchingTogether) -> bool:
    """Whether something else may follow before the next call."""
    return state.calls == (PROBED if state.round is Round.PROBES else CALLS)


def run(job: Job, state: WatchingTogether, function: Callable[[], Any]) -> tuple[Any, Transition[StepState]]:
    """A call that all workers watch: its result, and what follows it here."""
    meter = job.engine.meter
    if state.tables:
        result, samples, _ = meter.sampled_on(state.tables, function, waits=WaitsFor.PROCESSES)
        job.trace.ran(state.function)
        return result, measuring.timed_on(job, state, samples)
    result, peaks, seconds = meter.timed_on(state.devices, function, waits=WaitsFor.PROCESSES)
    job.trace.ran(state.function)
    return result, agreed_peaks.ran(job, state, peaks, seconds)


def agreed(job: Job, board: Board | None, state: WatchingTogether) -> Transition[StepState]:
    """What follows the calls of a round, on all workers.

    Args:
        job: the trace.
        board: where all of them read and write; None where the cluster is gone, and nothing can be agreed on.
        state: what ran.

    Raises:
        tf.errors.OpError: the cluster has lost a worker.
        ReplicasError: the coordination service has failed.
    """
    if state.round is Round.PROBES:
        return Transition(Event.RAN, replace(state, round=Round.TRIALS, calls=0, peaks=(), seconds=()))
    if state.round is Round.PEAKS or board is None:
        return agreed_peaks.agreed(job, board, state)
    trial = LaneTrial(state.plans, state.function, state.report, state.peaks, min(state.seconds, default=inf))
    verdict = _verdict(job, board, Tried(trial.seconds, trial.over, bool(state.waiting) and not trial.as_predicted))
    if verdict.late:
        return job.told(agreed_peaks.following(job, _best(state), None, PeaksVerdict(stays=verdict.late)))
    outcomes = (*state.outcomes, TrialOutcome(verdict.seconds, verdict.over))
    state = replace(state, trials=(*state.trials, trial), outcomes=outcomes)
    if verdict.more:
        return Transition(Event.RAN, _next(job, state))
    return agreed_peaks.agreed(job, board, replace(_best(state), round=Round.PEAKS))


def verdict_of(said: Mapping[str, Tried | None], patience: float) -> Tried:
    """What all workers go by: the time of the slowest, and what is in excess on any of them.

    Args:
        said: by each worker; None where one said nothing in time.
        patience: seconds that the others waited.
    """
    known = [tried for tried in said.values() if tried is not None]
    for task, tried in said.items():
        if tried is None:
            return Tried(inf, late=f"{task} said nothing of its plans within {patience:g} seconds")
    return Tried(
        seconds=max(tried.seconds for tried in known),
        over=sum(tried.over for tried in known),
        more=any(tried.more for tried in known),
    )


def _verdict(job: Job, board: Board, own: Tried) -> Tried:
    workers = job.engine.workers

    def judge(texts: Mapping[str, str | None]) -> str:
        said = {task: None if text is None else Tried(**json.loads(text)) for task, text in texts.items()}
        return json.dumps(asdict(verdict_of(said, workers.patience)))

    name = f"{job.trace.concrete.graph.name}/{_TRIALS}"
    return Tried(**json.loads(exchange(board, workers, name, json.dumps(asdict(own)), judge)))


def _next(job: Job, state: WatchingTogether) -> WatchingTogether:
    """The next set; on a worker that has no other plans, those that ran."""
    following, waiting = state.waiting[:1], state.waiting[1:]
    state = replace(state, waiting=waiting, calls=0, peaks=(), seconds=())
    try:
        return measuring.trying(job, state, following[0]) if following else state
    except Exception as error:  # the other workers need not know: they run their plans beside any
        note = job.noted(error, "planning by measured times", "the plan before runs")
        return replace(state, report=replace(state.report, notes=(*state.report.notes, note)))


def _best(state: WatchingTogether) -> WatchingTogether:
    """The state in which the best set runs, of those that all workers have tried; what runs if there is none."""
    if not state.outcomes:
        return state
    best = state.trials[best_number(state.outcomes)]
    report = best.report
    if len(state.trials) > 1:
        tried = f"plans tried: {'; '.join(map(str, state.trials))}"
        report = replace(report, notes=tuple(dict.fromkeys((*report.notes, *state.notes, tried))))
    state = replace(state, waiting=(), trials=(), outcomes=())
    return replace(state, function=best.function, report=report, plans=best.plans, peaks=best.peaks)
