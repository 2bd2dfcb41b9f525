"""Plans of two workers, compared by steps that both run; `tests.tf.in_workers` runs these cases."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import pytest
import tensorflow as tf

import tfmem
from tests.tf.in_replicas import AMPLE, BATCH, MIB, Training
from tests.tf.invented_costs import invent_costs
from tests.tf.one_worker import Worker, digest, gives_up, survives, tells
from tfmem.runtime.measured_call import Meter
from tfmem.steps import agreed_trials, measuring
from tfmem.steps.agreed_peaks import CALLS
from tfmem.steps.agreed_trials import PROBED
from tfmem.steps.states import Round

ENDS = 3  # calls after the last round


def tried(
    worker: Worker,
    seconds: tuple[tuple[float, ...], tuple[float, ...]],
    peaks: Callable[[int, int], int | None] = lambda *_: 1,
    moves: tuple[bool, bool] = (True, True),
    rounds: int = 0,
    before: Callable[[int], None] = lambda _: None,
) -> list[tfmem.Report]:
    """The report of each call where sets of plans take faked bytes and seconds; losses and weights stay equal.

    Args:
        worker: this one.
        seconds: of each set, on each worker.
        peaks: bytes of the set of a number under a budget; None if another call was measured meanwhile.
        moves: whether the budget of each worker makes tensors move.
        rounds: of calls that follow the probes; by default one for each set.
        before: runs before the call of a number.
    """
    plain, ours = (Training(worker.strategy, 0.5) for _ in range(2))
    budget = round(1.06 * worker.scarce) if moves[worker.index] else AMPLE
    step, reference, batch = worker.optimized(ours.in_all, budget), tf.function(plain.in_all), tf.constant(BATCH)
    watched, sets = Meter.timed_on, set[int]()

    def state() -> Any:
        ((managed,),) = [list(found.values()) for found in step._steps.values()]
        return managed._state

    def fake(meter: Meter, devices: Any, function: Any, waits: Any) -> Any:
        result, known, taken = watched(meter, devices, function, waits)
        if state().round is not Round.TRIALS:
            return result, known, taken
        number = len(state().trials)
        sets.add(number)
        peak = None if known is None else peaks(number, budget)
        return result, None if peak is None else (peak,), seconds[worker.index][number]

    calls, losses, reports = PROBED + CALLS * (rounds or len(seconds[0])) + ENDS, [], []
    tf.random.set_seed(1)
    began = worker.keys()
    expected = [float(reference(batch)) for _ in range(calls)]
    tf.random.set_seed(1)
    between = worker.keys()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Meter, "timed_on", fake)
        invent_costs(patch)
        for number in range(calls):
            before(number)
            losses.append(float(step(batch)))
            reports.append(tfmem.report(step))
    assert losses == expected
    assert worker.keys() - between == between - began, "a deferred capture was not read once a call"
    assert sets == set(range(len(seconds[0]))), sets
    assert state().phase.is_final, state().phase
    assert digest(ours) == digest(plain)
    worker.both(digest(ours))
    return reports


def of_trial(reports: list[tfmem.Report], number: int) -> Any:
    """What moved in the calls of a set."""
    return reports[PROBED + CALLS * number].transfers


def plans_are_tried_on_both(worker: Worker) -> None:
    """The set stays whose slowest worker is the fastest, on both."""
    reports = tried(worker, ((3e3, 1e3, 2e3), (1e3, 3e3, 2e3)))
    kinds = [of_trial(reports, number) for number in range(3)]
    assert len(set(map(str, kinds))) == 3, kinds
    assert reports[-1].transfers == kinds[2]
    (note,) = (note for note in reports[-1].notes if note.startswith("plans tried: "))
    assert note.count(" ms, peak ") == 3, note


def plans_of_one_worker_are_tried(worker: Worker) -> None:
    """The other one, on which nothing moves, runs as many calls."""
    reports = tried(worker, ((2e3, 3e3, 1e3), (2e3, 1e3, 3e3)), moves=(False, True))
    moved = [of_trial(reports, number) for number in range(3)]
    assert reports[-1].transfers == moved[0]
    assert bool(moved[0]) == (worker.index == 1)


def plans_over_the_budget_of_one_worker_do_not_stay(worker: Worker) -> None:
    def peaks(number: int, budget: int) -> int:
        return budget + MIB if (number, worker.index) == (1, 0) else 1

    reports = tried(worker, ((3e3, 1e3, 2e3), (3e3, 1e3, 2e3)), peaks)
    assert reports[-1].transfers == of_trial(reports, 2) != of_trial(reports, 1)
    assert not any("OVER BUDGET" in note for note in reports[-1].notes)


def plans_that_one_worker_cannot_measure_do_not_stay(worker: Worker) -> None:
    def peaks(number: int, _: int) -> int | None:
        return None if (number, worker.index) == (1, 1) else 1

    reports = tried(worker, ((3e3, 1e3, 2e3), (3e3, 1e3, 2e3)), peaks)
    assert reports[-1].transfers == of_trial(reports, 2) != of_trial(reports, 1)


def a_worker_cannot_plan_by_measured_times(worker: Worker) -> None:
    """Then it goes on with what it has, while the other one tries its plans."""

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError(44)

    with pytest.MonkeyPatch.context() as patch:
        if worker.index == 1:
            patch.setattr(measuring, "worth_running", fail)
        reports = tried(worker, ((3e3, 2e3, 1e3), (3e3, 2e3, 1e3)))
    kinds = {str(of_trial(reports, number)) for number in range(3)}
    assert len(kinds) == (3, 1)[worker.index]
    assert reports[-1].transfers == of_trial(reports, 2)
    assert any("KeyError: 44" in note for note in reports[-1].notes) == (worker.index == 1), reports[-1].notes


def a_worker_pauses_between_trials(worker: Worker) -> None:
    """It may evaluate, for longer than the others wait: then each keeps the best plans that all have tried."""
    with pytest.MonkeyPatch.context() as patch:
        late = gives_up(worker, patch, agreed_trials, 1)

        def pause(number: int) -> None:
            if number == PROBED + 2 * CALLS:
                late()

        reports = tried(worker, ((3e3, 1e3), (3e3, 1e3)), before=pause)
    assert reports[-1].transfers == of_trial(reports, 0)
    note = next(note for note in reports[-1].notes if note.startswith("planned once: "))
    assert "/job:worker/task:1 said nothing of its plans within " in note
    worker.both(note)


def a_worker_cannot_make_other_plans(worker: Worker) -> None:
    """Then the plans that it has run once more beside those of the other one."""
    given, numbers = measuring.trying, count()

    def fail(*plans: Any) -> Any:
        if next(numbers) == 0 and worker.index == 1:
            raise KeyError(45)
        return given(*plans)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "trying", fail)
        reports = tried(worker, ((3e3, 1e3, 2e3), (3e3, 1e3, 2e3)))
    kinds = [of_trial(reports, number) for number in range(3)]
    assert reports[-1].transfers == kinds[1]
    assert (kinds[0] == kinds[1]) == (worker.index == 1)
    assert any("KeyError: 45" in note for note in reports[-1].notes) == (worker.index == 1), reports[-1].notes


def a_trial_of_a_worker_fails(worker: Worker) -> None:
    """The error of one ends the steps of both, and no variable is written."""
    training, batch = Training(worker.strategy), tf.constant(BATCH)
    step, watched = worker.optimized(training.in_all, round(1.06 * worker.scarce)), Meter.timed_on

    def fail() -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    def fake(meter: Meter, devices: Any, function: Any, waits: Any) -> Any:
        return watched(meter, devices, fail if worker.index == 1 else function, waits)

    for _ in range(PROBED + 1):
        step(batch)
    assert tfmem.report(step).decision == "moved"
    before = digest(training)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meter, "timed_on", fake)
        survives(lambda: step(batch))
    tells(worker)
    assert digest(training) == before


TRIALS = (
    plans_of_one_worker_are_tried,
    plans_over_the_budget_of_one_worker_do_not_stay,
    plans_that_one_worker_cannot_measure_do_not_stay,
    a_worker_cannot_plan_by_measured_times,
    a_worker_cannot_make_other_plans,
    a_worker_pauses_between_trials,
)
