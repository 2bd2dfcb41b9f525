"""A large step with dry runs trains by the plan that was observed, while a thread makes those that are tried.

On a CPU that says that it is a GPU, so that there are dry runs. Times come from the ops' places, so that the same plans
follow in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.memory.observe import observe
from tests.tf.memory_in_use import in_use
from tests.tf.optimized_runs import SPARE, bits
from tests.tf.test_step_machine import step_in
from tfmem.devices import Target
from tfmem.runtime.measured_call import Meter
from tfmem.steps import improving, job, measuring
from tfmem.steps.phases import Phase

CALLS = 40  # at most
Run = tuple[list[Phase], Any]


@pytest.fixture(name="observed", autouse=True)
def fixture_observed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A large step on what looks like a GPU; bytes to add to the peaks that probes read next."""
    more: list[int] = []

    def even(timeline: Any, moves: Any, samples: Any, paddings: Any = ()) -> Any:
        found = observe(timeline, moves, [replace(each, seconds=0.01 * each.index) for each in samples], paddings)
        return replace(found, peak=found.peak + (more.pop(0) if more else 0))

    monkeypatch.setattr(job, "LARGE", 0)
    monkeypatch.setattr(Target, "is_gpu", property(lambda _: True))
    monkeypatch.setattr(Meter, "clock", lambda _, row: row.host_ns)
    monkeypatch.setattr(measuring, "observe", even)
    return more


@pytest.fixture(name="trained")
def fixture_trained(new_net: Any, batch: Any, flow: Any, smallest: Any) -> Callable[[], Run]:
    """Trains within a little more than the smallest budget, to the bit as without; gives the phases after its calls,
    and its report."""

    def train() -> Run:
        in_use()
        least = smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
        plain, net = tf.function(new_net().step), new_net()
        budget = least + 4 * SPARE
        function = tfmem.optimize(tf.function(net.step), memory_budget=budget, passes=("offload",), cache_directory="")
        phases: list[Phase] = []
        for _ in range(CALLS):
            assert bits(function(*batch)) == bits(plain(*batch))
            step = step_in(function)
            phases.append(step.phase)
            if step.settled:
                break
            assert not tfmem.report(function).decided  # also while a plan is checked, of which no note says anything
            notes = tfmem.report(function).notes
            assert (improving.MEANWHILE in notes) is (step.phase is Phase.IMPROVING)
            step.wait()
        assert step.settled
        return phases, tfmem.report(function)

    return train


def test_the_first_call_trains_by_the_plan_that_was_observed(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    phases, report = trained()
    assert phases[0] is Phase.IMPROVING
    assert Phase.CHECKING in phases
    monkeypatch.setattr(improving, "may_begin", lambda *_: False)
    phases, other = trained()
    assert phases[0] is Phase.CHECKING
    assert report.transfers
    assert report.transfers == other.transfers


def test_a_plan_over_the_budget_does_not_train(trained: Any, observed: list[int]) -> None:
    observed.append(1 << 40)
    phases, _ = trained()
    assert phases[0] is Phase.CHECKING


def test_each_trial_runs_in_a_later_call(trained: Any, observed: list[int]) -> None:
    observed += [0, 1 << 40]  # the first trial
    phases, _ = trained()
    assert phases[:2] == [Phase.IMPROVING, Phase.IMPROVING]


def test_after_a_fault_of_the_thread_the_observed_plan_stays(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        return {}[168]

    monkeypatch.setattr(improving, "following", broken)
    with pytest.warns(tfmem.TfmemWarning, match="planning by measurement failed with KeyError"):
        phases, report = trained()
    assert phases[:2] == [Phase.IMPROVING, Phase.CHECKING]
    assert report.transfers
    assert any("the best plan that ran stays" in str(note) for note in report.notes)


@pytest.mark.long
def test_random_numbers_go_on_where_the_observed_plan_stopped(smallest: Any, flow: Any) -> None:
    weights = tf.random.stateless_normal((256, 256), (1, 2)) / 16

    def trained(x: Any) -> Any:
        found = []
        for _ in range(6):
            x = tf.tanh(x @ weights) * tf.random.uniform(tf.shape(x), seed=7)
            found.append(x)
        return tf.add_n([tf.reduce_sum(each**2) for each in reversed(found)])

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = trained(x)
        return loss, tf.reduce_sum(tape.gradient(loss, x))

    batch = tf.random.stateless_normal((1024, 256), (3, 4))
    in_use()
    least = smallest(lambda size: tfmem.optimize(tf.function(gradient), memory_budget=size)(batch))
    tf.random.set_seed(5)
    plain = tf.function(gradient)
    expected = [bits(plain(batch)) for _ in range(12)]
    tf.random.set_seed(5)
    budget = least + 4 * SPARE
    function = tfmem.optimize(tf.function(gradient), memory_budget=budget, passes=("offload",), cache_directory="")
    found, phases = [], set()
    for _ in expected:
        found.append(bits(function(batch)))
        phases.add(step_in(function).phase)
        step_in(function).wait()
    assert found == expected
    assert phases >= {Phase.IMPROVING, Phase.CHECKING}
