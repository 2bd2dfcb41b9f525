"""Regions that fail when they run within a budget: the step goes on with its moves, and its own errors stay its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import FusionWhy
from graph_passes.graph.ops import FUSION_OP
from graph_passes.passes.fuse.plan import FusionPlan
from tests.tf import composed_steps
from tests.tf.composed_steps import trained
from tests.tf.optimized_runs import in_a_process
from tests.tf.test_composed import FULL, PASSES, composing, part_of
from tfmem.capture.concrete_function import call_traced
from tfmem.steps import composed, managed_step
from tfmem.steps.phases import Phase
from tfmem.steps.variants import Composition

AT_REGION = tf.errors.InvalidArgumentError(None, None, "no such kernel\n\t [[{{node fusion_0}}]] [Op:__inference_step]")
ELSEWHERE = tf.errors.InvalidArgumentError(None, None, "row 7 of 5\n\t [[{{node gather}}]] [Op:__inference_step]")


def with_a_region() -> Any:
    region = mock.Mock()
    region.name = "fusion_0"
    return replace(composing(1), compositions=(Composition(mock.Mock(), FusionPlan((region,))),))


def call(state: Any, error: Exception, wrote_nothing: bool, without: Any = None) -> tuple[Any, list[Any]]:
    """What a call gives or raises whose step raises `error`, and the states that follow."""
    taken: list[Any] = []

    def take(transition: Any) -> Any:
        taken.append(transition.state)
        return transition.state

    step = mock.Mock(wrote_nothing=wrote_nothing)
    run = mock.Mock(side_effect=without) if isinstance(without, Exception) else mock.Mock(return_value=without)
    try:
        return composed.called(state, step, mock.Mock(side_effect=error), run, take), taken
    except Exception as raised:
        return raised, taken


def test_regions_that_fail_before_anything_is_written_are_left_out_and_the_call_succeeds() -> None:
    with pytest.warns(tfmem.TfmemWarning, match="running regions within the budget"):
        found, (after,) = call(with_a_region(), AT_REGION, True, "result")
    assert found == "result"
    assert (after.phase, after.function, after.report.fusion) == (Phase.FAILED, "moved", FusionWhy.FAILED)


def test_an_error_of_the_program_is_the_programs_and_regions_stay() -> None:
    own = tf.errors.InvalidArgumentError(None, None, "plain")
    assert call(with_a_region(), AT_REGION, True, own) == (own, [])
    assert call(with_a_region(), ELSEWHERE, False) == (ELSEWHERE, [])


def test_an_error_outside_of_regions_does_not_run_the_step_twice() -> None:
    """Its side effects, and what it takes from an iterator, would come twice."""
    assert call(with_a_region(), ELSEWHERE, True, "result") == (ELSEWHERE, [])


def test_regions_that_fail_in_a_call_that_writes_raise_once() -> None:
    with pytest.warns(tfmem.TfmemWarning, match="running regions within the budget"):
        found, (after,) = call(with_a_region(), AT_REGION, False)
    assert found is AT_REGION
    assert after.phase is Phase.FAILED


def test_a_lack_of_memory_gives_the_regions_up() -> None:
    error = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
    with pytest.warns(tfmem.TfmemWarning, match="was to be stitched"):
        found, (after,) = call(with_a_region(), error, True)
    assert found is error
    assert after.report.fusion == FusionWhy.NO_ROOM


def test_workers_raise_what_regions_raise() -> None:
    """The others are in the same step."""
    state = with_a_region()
    state = replace(state, fuser=replace(state.fuser, board=mock.Mock()))
    with pytest.warns(tfmem.TfmemWarning, match="running regions within the budget"):
        found, (after,) = call(state, AT_REGION, True, "result")
    assert found is AT_REGION
    assert after.phase is Phase.FAILED


@pytest.mark.timeout(600)
def test_a_step_whose_regions_fail_trains_on() -> None:
    in_a_process(trains_on, part_of(composed_steps.mlp, 65))


def trains_on(budget: int) -> None:
    tf.config.threading.set_inter_op_parallelism_threads(1)
    failed: list[Any] = []

    def failing(function: Any, args: Any, kwargs: Any) -> Any:
        graph = getattr(function, "graph", None)
        if graph is not None and any(op.type == FUSION_OP for op in graph.get_operations()):
            failed.append(function)
            raise AT_REGION
        return call_traced(function, args, kwargs)

    broken = mock.patch.object(managed_step, "call_traced", failing)
    with broken, pytest.warns(tfmem.TfmemWarning, match="no such kernel"):
        found = trained(composed_steps.mlp, 8, memory_budget=budget, passes=PASSES, fusion=FULL)
    plain = trained(composed_steps.mlp, len(found.losses))
    assert len(failed) == 1
    assert found.settled
    assert found.report is not None
    assert found.report.fusion == FusionWhy.FAILED
    assert found.report.transfers
    np.testing.assert_allclose(found.losses, plain.losses, rtol=2e-4)
