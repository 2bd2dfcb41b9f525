"""Memory that differs from the plan: another budget for later steps, or less of it free. Numbers stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import Missed
from tests.tf.memory_in_use import in_use
from tests.tf.optimized_runs import SPARE, bits
from tests.tf.test_step_machine import step_in
from tfmem.steps.phases import Phase

MIB = 1 << 20
CALLS = 20  # at most, until a step is settled


@pytest.fixture(name="least")
def fixture_least(new_net: Any, batch: Any, flow: Any, smallest: Any) -> int:
    in_use()
    return int(smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch)))


def settled(function: Any, batch: Any, expected: Callable[..., Any]) -> None:
    """Train until the step is settled, to the bit as `expected`."""
    for _ in range(CALLS):
        assert bits(function(*batch)) == bits(expected(*batch))
        if step_in(function).settled:
            return
    pytest.fail("the step did not settle")


def test_a_budget_that_changes_between_steps_changes_no_number(new_net: Any, batch: Any, least: int) -> None:
    net, plain = new_net(), tf.function(new_net().step)
    for budget in (least + 8 * SPARE, least + SPARE, least + 4 * SPARE):
        function = tfmem.optimize(tf.function(net.step), memory_budget=budget, cache_directory="")
        settled(function, batch, plain)
        report = tfmem.report(function)
        assert report.budget == budget
        assert report.peak_measured <= budget


@pytest.mark.filterwarnings("ignore:.*OVER BUDGET")
def test_less_free_memory_than_was_planned_for_is_planned_for_or_said(new_net: Any, batch: Any, least: int) -> None:
    net, plain, budget = new_net(), tf.function(new_net().step), least + 4 * SPARE
    function = tfmem.optimize(tf.function(net.step), memory_budget=budget, cache_directory="")
    phase = None
    while phase is not Phase.CHECKING:
        assert bits(function(*batch)) == bits(plain(*batch))
        phase = step_in(function).phase
    held = tf.zeros([2 * MIB], tf.uint8) + tf.ones([], tf.uint8)  # by another part of the program
    settled(function, batch, plain)
    report = tfmem.report(function)
    missed = any(isinstance(note, Missed) for note in report.notes)
    assert missed == (report.peak_measured > budget)
    assert missed or any("replanned" in note for note in report.notes)
    del held
