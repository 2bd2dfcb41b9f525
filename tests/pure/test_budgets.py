"""Memory budgets by device: what users may give, and what it means on each device."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from graph_passes.errors import InvalidBudgetError
from tfmem.budgets import DeviceBudgets, budget_on
from tfmem.device_names import allocator_of, plain_name
from tfmem.options import Options, merged

GIB = 1 << 30
TWO = {"GPU:0": "10GiB", "GPU:1": "8GiB"}


@pytest.mark.parametrize(
    "name", ["GPU:1", "/gpu:1", "/device:GPU:1", "device:gpu:1", "/job:localhost/replica:0/task:0/device:GPU:1"]
)
def test_names_of_devices(name: str) -> None:
    assert plain_name(name) == "GPU:1"
    assert dict(DeviceBudgets.of({name: 5}).entries) == {"GPU:1": 5}


@pytest.mark.parametrize("name", ["", "GPU", "1", "GPU:-1", "GPU:1 ", "GPU:1:2"])
def test_what_is_no_name_of_a_device(name: str) -> None:
    assert plain_name(name) == ""


def test_all_cpus_have_one_allocator() -> None:
    assert [allocator_of(name) for name in ("CPU:0", "CPU:3", "GPU:3")] == ["CPU:0", "CPU:0", "GPU:3"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"expected a budget for each device, \{\"GPU:0\""),
        ({"GPU": "1GiB"}, "'GPU' is not the name of a device"),
        ({0: "1GiB"}, "0 is not the name of a device"),
        ({"GPU:0": "1GiB", "/gpu:0": "2GiB"}, "GPU:0 has two budgets; give one"),
        ({"GPU:0": "ten"}, r"memory_budget\['GPU:0'\]='ten' is not a size"),
        ({"GPU:0": 0}, r"memory_budget\['GPU:0'\]=0 leaves no memory"),
        ({"GPU:0": {"GPU:1": 5}}, r"memory_budget\['GPU:0'\]=\{'GPU:1': 5\}: expected bytes"),
        ({"CPU:1": "1GiB"}, "share the memory of CPU:0; give one budget, for CPU:0 instead of CPU:1"),
    ],
)
def test_wrong_budgets_by_device_are_refused_with_the_options(given: dict[Any, Any], words: str) -> None:
    with pytest.raises(InvalidBudgetError, match=words):
        Options(memory_budget=given)


def test_they_are_parsed_once_into_a_frozen_value() -> None:
    given: dict[str, Any] = dict(TWO)
    options = Options(memory_budget=given)
    given["GPU:0"] = "1GiB"
    assert options.memory_budget == DeviceBudgets.of(TWO)
    assert isinstance(options.memory_budget, DeviceBudgets)
    assert hash(options.memory_budget) == hash(DeviceBudgets.of(TWO))
    assert repr(options.memory_budget) == repr(TWO)
    assert pickle.loads(pickle.dumps(options)) == options
    assert replace(options, observe=False).memory_budget is options.memory_budget
    assert merged(Options(memory_budget=5), TWO, None).memory_budget == options.memory_budget


def test_devices_that_are_not_there_or_not_used_are_named() -> None:
    budgets = DeviceBudgets.of({**TWO, "CPU:0": "2GiB"})
    budgets.require_known(["CPU:0", "CPU:1", "GPU:0", "GPU:1"])
    with pytest.raises(InvalidBudgetError, match=r"there is no device GPU:1; there are: CPU:0, GPU:0$"):
        budgets.require_known(["CPU:0", "GPU:0"])


def test_what_is_given_need_not_be_checked_before() -> None:
    assert budget_on(TWO, "GPU:1", 80 * GIB) == 8 * GIB
