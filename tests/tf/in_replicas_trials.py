"""Plans of all devices, compared by steps under a MirroredStrategy; says "equal" when all was well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.in_replicas import BATCH, MIB, Training, mirrored, optimized, run_cases, usual_peak
from tests.tf.invented_costs import invent_costs
from tfmem.runtime.measured_call import Meter


def tried(peaks: Callable[[int, int], int | None], *seconds: float) -> list[Any]:
    """The report of each call where trials take faked bytes and seconds; what is computed stays equal to the bit.

    Args:
        peaks: bytes of the trial of a number under a budget; None if another call was measured meanwhile.
        seconds: of each trial.
    """
    plain, ours = (Training(mirrored(), 0.5) for _ in range(2))
    budget = round(0.85 * usual_peak(0.5))
    step, reference, batch = optimized(ours.in_all, budget), tf.function(plain.in_all), tf.constant(BATCH)
    plans: list[Any] = []

    def state() -> Any:
        ((managed,),) = [list(found.values()) for found in step._steps.values()]
        return managed._state

    def fake(meter: Any, devices: Any, function: Any, waits: Any) -> Any:
        result, known = meter.watched_on(devices, function, waits)
        if state().plans not in plans:
            plans.append(state().plans)
        number = len(plans) - 1
        peak = None if known is None else peaks(number, budget)
        return result, None if peak is None else (peak,), seconds[number]

    calls, losses, reports = 2 + 4 * len(seconds) + 2, [], []
    tf.random.set_seed(1)
    expected = [float(reference(batch)) for _ in range(calls)]
    tf.random.set_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meter, "timed_on", fake)
        invent_costs(patch)
        for _ in range(calls):
            losses.append(float(step(batch)))
            reports.append(tfmem.report(step))
    assert losses == expected
    assert len(plans) == len(seconds), len(plans)
    assert state().phase.is_final
    for weight, given in zip(ours.weights, plain.weights, strict=True):
        for mine, theirs in zip(weight.values, given.values, strict=True):
            np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    return reports


def of_trial(reports: Sequence[Any], number: int) -> Any:
    """What moved in the trial of a number: each has four calls, and two calls with probes come first."""
    return reports[2 + 4 * number].transfers


def the_fastest_plans_of_all_devices_stay() -> None:
    for seconds in ((3e3, 1e3, 2e3), (1e3, 2e3, 3e3)):
        reports = tried(lambda *_: 1, *seconds)
        kinds = [of_trial(reports, number) for number in range(3)]
        assert len(set(map(str, kinds))) == 3
        assert reports[-1].transfers == kinds[seconds.index(min(seconds))]
        (note,) = (note for note in reports[-1].notes if note.startswith("plans tried: "))
        assert note.count(" ms, peak ") == 3, note


def the_fastest_plans_within_the_budget_stay() -> None:
    """A trial that is over the budget ends with its first call that counts, and is not chosen."""
    reports = tried(lambda number, budget: budget + MIB if number == 1 else 1, 3e3, 1e3, 2e3)
    assert reports[-1].transfers == of_trial(reports, 2) != of_trial(reports, 1)
    assert not any("OVER BUDGET" in note for note in reports[-1].notes)
    assert reports[-1].devices[0].over == 0


def plans_that_are_as_fast_as_predicted_end_the_trials() -> None:
    reports = tried(lambda *_: 1, 1e-9)
    assert not any(note.startswith("plans tried: ") for note in reports[-1].notes)


def a_trial_that_cannot_be_measured_is_not_chosen() -> None:
    """The best one that was measured stays."""
    reports = tried(lambda number, _: None if number == 2 else 1, 3e3, 1e3, 2e3)
    assert reports[-1].transfers == of_trial(reports, 1) != of_trial(reports, 2)
    assert any(note.startswith("not measured: ") for note in reports[-1].notes)
    assert reports[-1].devices[0].over == 0


if __name__ == "__main__":
    run_cases(
        (
            the_fastest_plans_of_all_devices_stay,
            the_fastest_plans_within_the_budget_stay,
            plans_that_are_as_fast_as_predicted_end_the_trials,
            a_trial_that_cannot_be_measured_is_not_chosen,
        )
    )
