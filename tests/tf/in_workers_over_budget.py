"""Steps that take more than their budget on one of two workers; see `tests.tf.in_workers`, which runs these cases."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import pytest
import tensorflow as tf

import tfmem
from tests.tf.in_replicas import BATCH, MIB, Training
from tests.tf.one_worker import Worker, digest, gives_up, taking
from tfmem.runtime import measuring_lock
from tfmem.runtime.measured_call import Meter
from tfmem.runtime.measuring_lock import alone
from tfmem.steps import agreed_peaks, measuring
from tfmem.steps.agreed_peaks import CALLS
from tfmem.steps.agreed_trials import PROBED

WITHIN = MIB  # bytes that a worker takes whose peak is within its budget
OVER = 64 << 10  # bytes that worker 1 takes beyond its budget, besides those that no allocator counts
FIRST = PROBED + CALLS  # calls until workers agree on their peaks; before, they hold probes, and run one set of plans
STEPS = FIRST + CALLS + 2  # both rounds of calls that are watched, and more


def budget(worker: Worker) -> int:
    """Bytes in which tensors move, and more could."""
    return round(1.15 * worker.scarce)


def exceeding(worker: Worker, peaks: Callable[[int], int], pause: Callable[[], object] = list) -> tuple[Any, list[str]]:
    """The report of each call, and the warnings, of a step whose peaks are faked; it computes what it always did.

    Args:
        worker: this one.
        peaks: of each call that is watched, by its number.
        pause: called before what follows the second round of watched calls.
    """
    plain, ours = Training(worker.strategy, 0.3), Training(worker.strategy, 0.3)
    reference, batch, reports = tf.function(plain.in_all), tf.constant(BATCH), []
    tf.random.set_seed(1)
    expected = [float(reference(batch)) for _ in range(STEPS)]
    step = worker.optimized(ours.in_all, budget(worker))
    tf.random.set_seed(1)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(measuring, "worth_running", lambda *_: ())
        taking(patch, peaks)
        losses = []
        for number in range(STEPS):
            if number == FIRST + CALLS:
                pause()
            losses.append(float(step(batch)))
            reports.append(tfmem.report(step))
    assert losses == expected
    assert digest(ours) == digest(plain)
    ((managed,),) = [list(found.values()) for found in step._steps.values()]
    assert managed.settled
    worker.both(digest(ours))
    return reports, [str(each.message) for each in caught if issubclass(each.category, tfmem.TfmemWarning)]


def within_or_over(worker: Worker, over: int = OVER) -> int:
    return (WITHIN, budget(worker) + over)[worker.index]


def a_peak_is_over_its_budget(worker: Worker) -> None:
    """Both plan again between the same calls; the new plan is that of the worker whose peak it was."""
    reports, told = exceeding(worker, lambda call: within_or_over(worker) if call < CALLS else WITHIN)
    assert not told, told
    again = [any(note.startswith("replanned: ") for note in report.notes) for report in reports]
    assert again == [number >= FIRST for number in range(STEPS)]
    note = next(note for note in reports[-1].notes if note.startswith("replanned: "))
    assert note.endswith(" bytes on CPU:0 of /job:worker/task:1"), note
    worker.both(note)
    before, after = reports[PROBED], reports[-1]
    assert before.decision == after.decision == "moved"
    assert after.peak_measured == WITHIN + after.devices[0].peak_uncounted
    if worker.index == 1:
        assert after.peak_predicted <= before.peak_predicted - OVER, (before, after)
    else:
        assert after.transfers == before.transfers


def require_one_plan(reports: list[Any]) -> None:
    """That nothing else moves once op times were measured."""
    assert all(report.transfers == reports[PROBED].transfers for report in reports[PROBED:])


def a_peak_stays_over_its_budget(worker: Worker) -> None:
    """Where no plan takes so little, each keeps its plan, and the worker that is over says so."""
    reports, told = exceeding(worker, lambda call: within_or_over(worker, 1 << 40))
    require_one_plan(reports)
    assert len(told) == worker.index
    assert all("OVER BUDGET" in message for message in told), told
    assert any("OVER BUDGET" in note for note in reports[-1].notes) == (worker.index == 1)


def a_worker_cannot_plan_again(worker: Worker) -> None:
    """Then neither runs a plan."""

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError(168)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreed_peaks, "replanned", fail)
        reports, told = exceeding(worker, lambda call: within_or_over(worker))
    assert [report.decision == "moved" for report in reports] == [number < FIRST for number in range(STEPS)]
    assert any("runs unchanged on all workers; /job:worker/task:1 cannot plan again" in each for each in told), told
    assert len(told) == 1 + worker.index  # of the fault
    assert not reports[-1].devices[0].transfers


def a_worker_pauses(worker: Worker) -> None:
    """It may evaluate, for longer than the others wait: then each keeps its plan, although one is over its budget."""
    with pytest.MonkeyPatch.context() as patch:
        pause = gives_up(worker, patch, agreed_peaks, 1)
        reports, _ = exceeding(worker, lambda call: within_or_over(worker), pause)
    assert all(report.transfers == reports[FIRST].transfers for report in reports[FIRST:])
    note = next(note for note in reports[-1].notes if note.startswith("planned once: "))
    assert "/job:worker/task:1 said nothing of its peaks within " in note
    worker.both(note)


def a_peak_is_read_beside_another_step(worker: Worker) -> None:
    """A step that waits for other workers holds no lock, for which a step of theirs might wait."""
    watched, waited = Meter.watched_on, []

    def beside(*given: Any) -> Any:
        with alone():
            began = time.monotonic()
            result = watched(*given)
            waited.append(time.monotonic() - began)
            return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meter, "watched_on", beside)
        reports, told = exceeding(worker, lambda call: WITHIN)
    assert len(waited) == CALLS
    assert max(waited) < measuring_lock.PATIENCE, waited  # for which a call waits that asks for the lock
    assert not told, told
    assert reports[-1].peak_measured is None
    assert any(note.startswith("not measured: ") for note in reports[-1].notes)


OVER_BUDGET = (
    a_peak_is_over_its_budget,
    a_peak_stays_over_its_budget,
    a_worker_cannot_plan_again,
    a_worker_pauses,
    a_peak_is_read_beside_another_step,
)
