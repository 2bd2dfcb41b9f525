"""Real steps go through the phases of `tfmem.steps.phases`, and the value of their budget takes a short way."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tests.tf.optimized_runs import SPARE
from tfmem.steps import xla_runner
from tfmem.steps.phases import Event, Phase
from tools.value_way import follow


@pytest.fixture(name="moves")
def fixture_moves(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The moves of all steps since it was last asked for them."""
    caplog.set_level(logging.DEBUG, "tfmem.steps")

    def moves() -> list[str]:
        found = [record.getMessage().partition(": ")[2] for record in caplog.records if record.name == "tfmem.steps"]
        caplog.clear()
        return found

    return moves


def edge(before: Phase, event: Event, after: Phase) -> str:
    return f"{before.value} --{event.name}--> {after.value}"


def step_in(function: Any) -> Any:
    """The `ManagedStep` of an optimised function's one trace."""
    ((known,),) = [list(found.values()) for found in function._steps.values()]
    return known


def test_a_step_that_is_planned(new_net: Any, batch: Any, flow: Any, smallest: Any, moves: Any) -> None:
    budget = SPARE + smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
    moves()
    function = tfmem.optimize(tf.function(new_net().step), memory_budget=budget, cache_directory="")
    function(*batch)
    step = step_in(function)
    assert step.phase is Phase.OBSERVING
    assert moves() == [
        edge(Phase.GIVEN, Event.UNKNOWN, Phase.WARMING),
        edge(Phase.WARMING, Event.RAN, Phase.OBSERVING),
    ]
    for _ in range(12):
        function(*batch)
        assert step.function is getattr(step._state.function, "portable", step._state.function)
    found = moves()
    assert found[0] == edge(Phase.OBSERVING, Event.NEXT, Phase.TRYING)
    assert found[-2:] == [
        edge(Phase.CHECKING, Event.WITHIN, Phase.PLACED),
        edge(Phase.PLACED, Event.STAYS, Phase.SETTLED),
    ]
    assert step.settled


def test_a_step_that_fits_is_checked_and_left(new_net: Any, batch: Any, flow: Any, moves: Any) -> None:
    function = tfmem.optimize(tf.function(new_net().step), memory_budget="1GiB", cache_directory="")
    for _ in range(4):
        function(*batch)
    assert moves() == [
        edge(Phase.GIVEN, Event.CHOSEN, Phase.CHECKING),
        *[edge(Phase.CHECKING, Event.RAN, Phase.CHECKING)] * 2,
        edge(Phase.CHECKING, Event.WITHIN, Phase.PLACED),
        edge(Phase.PLACED, Event.STAYS, Phase.SETTLED),
    ]
    assert step_in(function).unchanged


def test_a_step_whose_regions_are_timed(
    new_net: Any, batch: Any, flow: Any, moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xla_runner, "loses", lambda _: "")
    function = tfmem.optimize(tf.function(new_net().step), passes=("fusion",), cache_directory="")
    function(*batch)
    step = step_in(function)
    assert step.phase is Phase.FUSING
    step.wait()
    for _ in range(60):
        if step.settled:
            break
        function(*batch)
        step.wait()
    found = moves()
    assert found[:3] == [
        edge(Phase.GIVEN, Event.UNWATCHED, Phase.PLACED),
        edge(Phase.PLACED, Event.THREAD, Phase.FUSING),
        edge(Phase.FUSING, Event.TIMED, Phase.COMPARING),
    ]
    unclear = edge(Phase.COMPARING, Event.UNCLEAR, Phase.COMPARING)
    assert [move for move in found[3:] if move != unclear] == [
        edge(Phase.COMPARING, Event.COMPILES, Phase.COMPILING),
        edge(Phase.COMPILING, Event.BEGUN, Phase.COMPILING),
        edge(Phase.COMPILING, Event.TIMED, Phase.COMPARING),
        edge(Phase.COMPARING, Event.CLEAR, Phase.SETTLED),
    ]


def test_a_step_whose_regions_were_planned_by_a_thread_is_freed(new_net: Any, batch: Any, flow: Any) -> None:
    """An error that a library keeps while it is imported keeps the frames of the thread that imports it."""

    def settled() -> weakref.ref[Any]:
        net = new_net()
        function = tfmem.optimize(tf.function(net.step), passes=("fusion",), cache_directory="")
        function(*batch)
        step_in(function).wait()
        while not step_in(function).settled:
            function(*batch)
            step_in(function).wait()
        return weakref.ref(net.variables[0])

    variable = settled()
    gc.collect()
    assert variable() is None


def test_a_step_with_faults_alone(
    new_net: Any, batch: Any, flow: Any, moves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError(168)

    monkeypatch.setattr("tfmem.steps.fuser.stitched", broken)
    fusion = tfmem.FusionOptions(xla=False)
    function = tfmem.optimize(tf.function(new_net().step), passes=("fusion",), fusion=fusion, cache_directory="")
    function(*batch)
    step_in(function).wait()
    with pytest.warns(tfmem.TfmemWarning, match="stitching failed with KeyError"):
        function(*batch)
    assert moves()[-1] == edge(Phase.FUSING, Event.FAULT, Phase.FAILED)
    assert step_in(function).unchanged


def test_the_way_of_a_budget_is_short(new_net: Any, batch: Any, flow: Any) -> None:
    """From `optimize` to the first plan; it was 20 stays with 9 returns, by the same measure."""
    budget = 1_234_567

    def call() -> None:
        tfmem.optimize(tf.function(new_net().step), memory_budget=budget, cache_directory="")(*batch)

    way = follow(budget, call, "plan_offload")
    assert way.steps[0] == ("tfmem/api.py", "optimize")
    assert way.steps[-1] == ("graph_passes/passes/offload/plan.py", "plan_offload")
    stays = way.stays()
    assert len(stays) < 15, way.steps
    assert len(stays) - len(set(stays)) <= 4, way.steps
