"""A plan that takes more than the budget once it runs without probes, as TensorFlow's CPU allocator makes some: others
run instead, and what stays is within the budget, or nearest to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import Missed
from graph_passes.report import Report
from tests.tf.memory_in_use import in_use
from tests.tf.optimized_runs import SPARE, bits
from tests.tf.test_step_machine import step_in
from tfmem.api import make_engine, optimize_with
from tfmem.runtime.measured_call import Meter
from tfmem.runtime.measuring_lock import WaitsFor
from tfmem.steps.checking import REPLANS, _checked
from tfmem.steps.states import Checking

CALLS = 30
KIB = 1 << 10


class Counting(Meter):
    """Meters that say how many bytes each plan takes beyond the budget; what each call ran."""

    over: tuple[int, ...] = ()
    budget = 0
    ran: list[Any]

    def watched(self, function: Any, waits: WaitsFor = WaitsFor.NOTHING) -> tuple[Any, int]:
        made = function.args[0]
        if made not in self.ran:
            self.ran.append(made)
        number = self.ran.index(made)
        return function(), self.budget + (self.over[number] if number < len(self.over) else self.over[-1])


def meter(over: Sequence[int], budget: int) -> type[Meter]:
    """The meters of one test."""
    return type("Meters", (Counting,), {"over": tuple(over), "budget": budget, "ran": []})


@pytest.fixture(name="budget")
def fixture_budget(new_net: Any, batch: Any, flow: Any, smallest: Any) -> int:
    in_use()
    return 8 * SPARE + int(
        smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
    )


def trained(new_net: Any, batch: Any, budget: int, over: Sequence[int], split: Any = "auto") -> tuple[Any, Any, Any]:
    """Train until the step is settled, to the bit as an unmodified one; the function, its meter and what runs."""
    net, plain = new_net(), tf.function(new_net().step)
    offload = tfmem.OffloadOptions(split=split)
    engine = make_engine(tfmem.Options(memory_budget=budget, cache_directory="", offload=offload), called=True)
    counting = meter(over, budget)
    engine = replace(engine, meter=counting(engine.library, engine.settings.target))
    function = optimize_with(engine, tf.function(net.step))
    for _ in range(CALLS):
        assert bits(function(*batch)) == bits(plain(*batch))
        if step_in(function).settled:
            return function, counting, step_in(function)._state.function
    pytest.fail("the step did not settle")


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_the_first_other_plan_that_meets_the_budget_stays(new_net: Any, batch: Any, budget: int) -> None:
    function, meters, runs = trained(new_net, batch, budget, [3 * KIB, 2 * KIB, -400 * KIB])
    assert len(meters.ran) == 3
    assert runs is meters.ran[2]
    report = tfmem.report(function)
    assert report.peak_measured <= budget
    assert len([note for note in report.notes if str(note).startswith("replanned")]) == 2


@pytest.mark.filterwarnings("ignore:.*OVER BUDGET")
@pytest.mark.parametrize("nearest", [0, 1, 2])
def test_where_none_does_the_nearest_stays(new_net: Any, batch: Any, budget: int, nearest: int) -> None:
    over = [(9 + place % 3) * KIB for place in range(REPLANS + 1)]
    over[nearest] = KIB
    function, meters, runs = trained(new_net, batch, budget, over)
    assert len(meters.ran) > nearest + 1
    assert runs is meters.ran[nearest]
    report = tfmem.report(function)
    assert report.peak_measured == budget + KIB + report.peak_uncounted
    assert "OVER BUDGET" in str(report)


@pytest.mark.parametrize(("split", "says"), [("auto", True), ("needed", True), ("never", False), ("faster", False)])
def test_a_missed_budget_names_the_option_that_may_help(
    new_net: Any, batch: Any, budget: int, split: str, says: bool
) -> None:
    with pytest.warns(tfmem.TfmemWarning, match="OVER BUDGET") as warned:
        trained(new_net, batch, budget, [KIB], split)
    assert [("set offload=tfmem.OffloadOptions(split='faster')" in str(each.message)) for each in warned] == [says]


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_a_step_that_fits_by_estimates_alone_is_measured(new_net: Any, batch: Any, caplog: Any) -> None:
    """As with convolutions of float16, which take workspace on some CPUs of which estimates know nothing."""
    with caplog.at_level(logging.DEBUG, "tfmem.steps"):
        function, meters, runs = trained(new_net, batch, 1 << 30, [40 * KIB, -400 * KIB])
    moves = [record.args[2] for record in caplog.records if record.msg.startswith("%s: %s --")]
    assert moves[:4] == ["CHOSEN", "MISJUDGED", "RAN", "CHOSEN"]
    assert runs is meters.ran[1]
    report = tfmem.report(function)
    assert report.peak_measured == (1 << 30) - 400 * KIB + report.peak_uncounted


def test_a_note_of_a_budget_that_was_met_since_is_told_once() -> None:
    missed, job = Missed.of(" by 7 bytes"), mock.MagicMock(limit=10)
    report = Report("f", "CPU", "optimal", "moved", peak_before=8, peak_predicted=8, notes=(missed,))
    state = Checking(function=1, report=report, notes=(missed,), peaks=(9, 9), timeline=None, plan=None)
    left = _checked(job, state, 9 - state.uncounted).state
    assert left.report.notes == (missed.once,)
