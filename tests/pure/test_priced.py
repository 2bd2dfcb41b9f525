"""A step under several cost models: its buffers are found once, and its ops cost what each model says."""

from unittest import mock

import pytest

from graph_passes import pipeline
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import MeasuredCosts, Roofline
from graph_passes.analysis.memory.liveness import build_timeline
from tests.pure.test_chains import block

CHEAP = Roofline(load("unit"))
DEAR = MeasuredCosts({"n0": 3.0}, {"n0": 5}, 7 << 20, CHEAP)


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
def test_a_step_costs_what_a_model_says(costs: Roofline | MeasuredCosts) -> None:
    step, _ = block("norm", "scale", "relu", "product")
    for other in (DEAR, CHEAP):
        step.timeline(other)
    expected = build_timeline(step.graph, step.order, costs, step.fetches)
    found = step.timeline(costs)
    assert found.steps == expected.steps
    assert found.base == expected.base
    assert found.buffers == expected.buffers
    assert (found.turn, found.updates) == (expected.turn, expected.updates)


def test_buffers_are_found_once() -> None:
    step, _ = block("norm", "scale", "relu", "product")
    step = pipeline.Step.read(step.graph)
    with mock.patch.object(pipeline, "build_timeline", wraps=build_timeline) as built:
        assert step.timeline(CHEAP).buffers is step.timeline(DEAR).buffers
    assert built.call_count == 1
