"""What only cycles of Python's objects hold is no reason to refuse a step, or to divide it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tests.tf.optimized_runs import SPARE
from tests.tf.test_planning_faults import v1_graph

MIB = 1 << 20


@pytest.fixture(name="cycle")
def fixture_cycle() -> Iterator[Any]:
    """Makes a cycle that holds 8 MiB, which the collector finds only if it is asked to."""

    def make() -> None:
        held: list[Any] = [tf.ones([8, MIB // 4])]
        held.append(held)

    was_on = gc.isenabled()
    gc.disable()
    yield make
    if was_on:
        gc.enable()


def test_a_step_runs_as_if_they_were_gone(new_net: Any, batch: Any, flow: Any, smallest: Any, cycle: Any) -> None:
    def optimized(budget: int) -> Any:
        return tfmem.optimize(tf.function(new_net().step), memory_budget=budget, passes=("offload",))

    budget = SPARE + smallest(lambda size: optimized(size)(*batch))
    cycle()
    function = optimized(budget)
    function(*batch)
    assert tfmem.report(function).transfers
    assert not tfmem.report(function).splits


def test_a_graph_is_planned_as_if_they_were_gone(flow: Any, smallest: Any, cycle: Any) -> None:
    def ask(budget: int) -> Any:
        return tfmem.optimize(v1_graph(), memory_budget=budget, fetches=["loss:0", "train"], passes=("offload",))

    budget = SPARE + smallest(ask)
    cycle()
    assert tfmem.report(ask(budget)).transfers


def test_what_is_held_is_in_use(new_net: Any, batch: Any, flow: Any, smallest: Any) -> None:
    def optimized(budget: int) -> Any:
        return tfmem.optimize(tf.function(new_net().step), memory_budget=budget, offload=NEVER, passes=("offload",))

    budget = SPARE + smallest(lambda size: optimized(size)(*batch))
    held = tf.ones([8, MIB // 4])
    with pytest.raises(tfmem.InfeasibleBudgetError):
        optimized(budget)(*batch)
    del held


NEVER = tfmem.OffloadOptions(split="never")
