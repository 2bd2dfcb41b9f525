"""A step that is stitched in another layout than TensorFlow's needs Grappler twice: side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.cost.device_costs import load
from tfmem.api import make_engine
from tfmem.devices import Target
from tfmem.steps import planning
from tfmem.steps import trace as traces
from tfmem.steps.after_grappler import grappled
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import BatchProfiles


@pytest.fixture(name="trace")
def fixture_trace() -> traces.Trace:
    step = tf.function(lambda x: tf.reduce_sum(tf.tanh(x) * x))
    concrete = step.get_concrete_function(tf.TensorSpec([4, 4]))
    return traces.Trace(concrete, make_engine(tfmem.Options(cache_directory="")))


def after(wait: Callable[[], Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        wait()
        return grappled(*arguments)

    return run


def test_grappler_makes_both_at_the_same_time(trace: traces.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(traces, "grappled", after(both.wait))
    monkeypatch.setattr(traces, "grappled_to_stitch", after(both.wait))
    found = trace.to_stitch()
    plain = trace.optimized()
    assert found is not plain
    assert found.graph_def == plain.graph_def


def test_what_is_known_is_not_made_again(trace: traces.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trace.optimized()
    monkeypatch.setattr(traces, "grappled", after(lambda: {}[168]))
    assert trace.to_stitch() is plain
    assert trace.optimized() is plain


@pytest.fixture(name="made")
def fixture_made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Grappler made in the other layout."""
    found: list[Any] = []

    def other(captured: Any, engine: Any) -> Any:
        found.append(grappled(captured, engine))
        return found[-1]

    monkeypatch.setattr(traces, "grappled_to_stitch", other)
    return found


def test_what_was_begun_is_made_once(trace: traces.Trace, made: list[Any]) -> None:
    trace.begin_to_stitch().wait()
    assert trace.to_stitch() is made[0]
    assert len(made) == 1


@pytest.mark.parametrize("passes", [("recurrent", "fusion"), ("recurrent",), ("fusion",)])
def test_planning_begins_the_other_layout(passes: tuple[tfmem.options.PassName, ...], trace: traces.Trace) -> None:
    """On a GPU, where regions come next and the trace was read for its recurrent layers."""
    engine = make_engine(tfmem.Options(cache_directory=""))
    target = Target("/device:GPU:0", "NVIDIA H200", 1 << 30, load("h200"))
    engine = engine.under(replace(engine.settings, target=target, passes=passes, budget=None))
    trace = traces.Trace(trace.concrete, engine)
    with mock.patch.object(traces.Trace, "begin_to_stitch") as begun:
        planning.start(Job(engine, trace, BatchProfiles(), None, 0))
    assert begun.called == (len(passes) == 2)


@pytest.mark.parametrize("name", ["grappled", "grappled_to_stitch"])
def test_an_error_of_either_reaches_the_caller(name: str, trace: traces.Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"grappled": "grappled_to_stitch", "grappled_to_stitch": "grappled"}[name]
    monkeypatch.setattr(traces, name, after(lambda: {}[168]))
    monkeypatch.setattr(traces, other, grappled)
    with pytest.raises(KeyError, match="168"):
        trace.to_stitch()
