"""Memory budgets by device, met by devices: bytes, defaults, and devices that a step does not use."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.cost import device_costs as profiles
from graph_passes.errors import InvalidBudgetError
from tfmem.devices import Target
from tfmem.options import Options
from tfmem.runtime.settings import Settings

GIB = 1 << 30
TWO = {"GPU:0": "10GiB", "GPU:1": "8GiB"}


def target(name: str, memory: int) -> Target:
    return Target(f"/device:{name}", name, memory, profiles.load("unit"))


FIRST, SECOND, HOST = target("GPU:0", 80 * GIB), target("GPU:1", 40 * GIB), target("CPU:0", 4 * GIB)


def settings(budget: Any, on: Target = FIRST, **changes: Any) -> Settings:
    return Settings.of(Options(memory_budget=budget, **changes), on)


def test_each_device_has_its_own() -> None:
    found = settings(TWO)
    assert [found.budget_on(each) for each in (FIRST, SECOND, HOST)] == [10 * GIB, 8 * GIB, None]
    assert (found.budget, found.must_fit) == (10 * GIB, True)
    assert settings(TWO, SECOND).budget == 8 * GIB


def test_a_fraction_is_of_its_device() -> None:
    assert [settings({"GPU:0": 0.5, "GPU:1": "0.25"}).budget_on(each) for each in (FIRST, SECOND)] == [
        40 * GIB,
        10 * GIB,
    ]
    assert [settings(0.5).budget_on(each) for each in (FIRST, SECOND)] == [40 * GIB, 20 * GIB]


@pytest.mark.parametrize("entries", [{"GPU:1": "8GiB"}, {"GPU:1": "8GiB", "GPU:0": None}])
def test_a_device_without_a_budget_has_its_default(entries: dict[str, Any]) -> None:
    found = settings(entries)
    assert [found.budget_on(each) for each in (FIRST, SECOND, HOST)] == [80 * GIB, 8 * GIB, None]
    assert found.must_fit
    assert not settings({"GPU:0": None}).must_fit


def test_one_budget_is_for_each_device_of_a_kind() -> None:
    found = settings("10GiB")  # the CPU has 4 GiB
    assert [found.budget_on(each) for each in (FIRST, SECOND, HOST)] == [10 * GIB, 10 * GIB, None]


def test_a_budget_over_the_memory_of_its_device_is_refused() -> None:
    assert settings("60GiB").budget == 60 * GIB
    with pytest.raises(InvalidBudgetError, match=r"memory_budget='60GiB' is .* but the device has"):
        settings("60GiB").budget_on(SECOND)
    with pytest.raises(InvalidBudgetError, match=r"memory_budget\['GPU:1'\]='60GiB'"):
        settings({"GPU:1": "60GiB"}).budget_on(SECOND)


def test_without_the_pass_there_is_no_budget() -> None:
    found = settings(TWO, passes=("recurrent",))
    assert (found.budget, found.must_fit, found.budget_on(SECOND)) == (None, False, None)
    found.require_used(["GPU:0"])


def test_devices_that_are_not_used_are_named() -> None:
    found = settings({**TWO, "CPU:0": "2GiB"})
    found.require_used(["GPU:0", "GPU:1", "CPU:0"])
    with pytest.raises(InvalidBudgetError, match=r"does not use CPU:0; .* which are: GPU:0, GPU:1$"):
        found.require_used(["GPU:0", "GPU:1"])


def test_a_step_on_one_device_takes_the_entry_of_that_device() -> None:
    settings(TWO).require_used()
    settings("1GiB").require_used()
    with pytest.raises(InvalidBudgetError, match=r"does not use GPU:0, GPU:1; .* which are: CPU:0"):
        settings(TWO, HOST).require_used()


def test_devices_of_this_process(new_net, batch) -> None:
    with pytest.raises(InvalidBudgetError, match="there is no device GPU:7; there are: CPU:0"):
        tfmem.optimize(tf.function(new_net().step), memory_budget={"CPU:0": "1GiB", "GPU:7": "1GiB"})
    step = tfmem.optimize(tf.function(new_net().step), memory_budget={"/cpu:0": "2GiB"}, cache_directory="")
    step(*batch)
    assert tfmem.report(step).budget == 2 * GIB
