"""Whatever goes wrong inside the fusion pass, values are TensorFlow's, the user is told, and others are stitched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from graph_passes.fusion import apply, stitching
from graph_passes.fusion.lower.writer import LoweringError
from graph_passes.graph import rewrite
from tests.tf.stitched_steps import batch, close, optimized, require_stitched
from tfmem.runtime import fusion_stage


class InjectedError(Exception):
    """No error that anybody expects."""


def failing(original: Any, calls: range, error: type[Exception] = InjectedError) -> Callable[..., Any]:
    """`original`, which fails in some of its calls."""
    count = iter(range(1_000_000))

    def function(*arguments: Any, **options: Any) -> Any:
        if next(count) in calls:
            raise error("on purpose")
        return original(*arguments, **options)

    return function


def two_regions() -> Any:
    """A function of what lies before a random op, and what lies behind it; each draws its numbers from the start."""

    @tf.function
    def step(x: Any) -> Any:
        scale = tf.reduce_sum(tf.tanh(x) * 2.0 + 1.0)
        with tf.control_dependencies([scale]):
            noise = tf.random.normal([32, 12], seed=1)
        return scale + tf.reduce_sum(tf.sigmoid(noise) * x - 1.0)

    return step


ALL = range(1_000_000)


@pytest.mark.parametrize(
    ("module", "name", "calls", "regions"),
    [
        (stitching, "lower_region", range(1), 1),
        (stitching, "lower_region", ALL, 0),
        (stitching, "to_text", range(1, 2), 1),
        (stitching, "plan_fusion", ALL, 0),
        (apply, "_rewrite", ALL, 0),
        (rewrite, "apply_rewrites", range(1), 0),
        (fusion_stage, "stitched", ALL, 0),
        (fusion_stage, "key_of", ALL, 0),
    ],
)
def test_a_fault_costs_as_little_as_can_be(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: range, regions: int
) -> None:
    monkeypatch.setattr(module, name, failing(getattr(module, name), calls))
    plain = two_regions()
    step = optimized(two_regions())
    x, _ = batch()
    with pytest.warns(tfmem.TfmemWarning, match="on purpose"):
        close(step(x), plain(x))
    report = tfmem.report(step)
    assert "InjectedError: on purpose" in "".join(report.notes)
    ran = 0 if report.fusion == "left as it was: stitching failed" else len(report.regions)
    assert ran == regions
    assert (report.decision == "stitched") == (regions > 0)


def test_a_region_that_cannot_be_written_stays_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    original = stitching.lower_region
    monkeypatch.setattr(stitching, "lower_region", failing(original, range(1), LoweringError))
    plain = two_regions()
    step = optimized(two_regions())
    x, _ = batch()
    close(step(x), plain(x))
    report = require_stitched(step, "Sigmoid")
    assert tfmem.explain(step, "Tanh") == "'Tanh' is in no region: on purpose."
    assert not report.notes


@pytest.mark.parametrize("name", ["Copies", "flat_arguments"])
def test_a_fault_while_timing_leaves_the_step_as_it_was(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fusion_stage, name, failing(getattr(fusion_stage, name), ALL))
    plain = two_regions()
    step = optimized(two_regions(), fusion=tfmem.FusionOptions(tune="full"))
    x, _ = batch()
    with pytest.warns(tfmem.TfmemWarning, match="on purpose"):
        close(step(x), plain(x))
    assert tfmem.report(step).fusion.startswith("left as it was: timing failed")
    close(step(x), plain(x))


def test_a_step_that_fails_while_it_is_timed_fails_as_before() -> None:
    @tf.function
    def step(x: Any) -> Any:
        largest = tf.reduce_max(tf.abs(x) * 2.0 + 1.0)
        with tf.control_dependencies([tf.debugging.Assert(largest < 0.0, [largest])]):
            return tf.reduce_sum(tf.sigmoid(x) - 1.0)

    x, _ = batch()
    fused = optimized(step, fusion=tfmem.FusionOptions(tune="full"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
        fused(x)
