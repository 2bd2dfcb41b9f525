"""The regions of one graph are planned several times: what comes before them runs once, and no plan sees another's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from graph_passes.passes.fuse.plan import FusionPlan
from graph_passes.passes.fuse.schedule_segments import segments
from tfmem.api import make_engine
from tfmem.capture.captured import Captured
from tfmem.kernels.fusion_needs import before_regions
from tfmem.options import Options
from tfmem.steps import after_grappler
from tfmem.steps.after_grappler import BeforeRegions, stitched
from tfmem.steps.trace import Trace

BOUNDS = ((None, True), (None, False), (1 << 14, True))  # bytes of a segment, and whether regions hold products


@pytest.fixture(scope="module")
def trace() -> Trace:
    """A step with an einsum, which the pass before regions makes a product of, and numbers that are equal."""
    weights = [tf.Variable(tf.random.stateless_normal((64, 64), [seed, 1])) for seed in range(3)]

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.gelu(tf.einsum("bi,ij->bj", x, weight)) + tf.exp(x) * tf.exp(x)
            loss = tf.reduce_mean(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    engine = make_engine(Options(memory_budget=1 << 30, passes=("fusion", "offload"), cache_directory=""))
    found = Trace(step.get_concrete_function(tf.TensorSpec((32, 64))), engine, False, None)
    found.read()
    return found


def plans(trace: Trace, before: Any) -> list[tuple[Captured, FusionPlan]]:
    graph, order = trace.step.graph, trace.step.order
    return [stitched(before(), segments=segments(graph, order, most), calls=calls) for most, calls in BOUNDS]


def test_what_comes_before_regions_runs_once(trace: Trace) -> None:
    given, engine = trace.to_stitch(), trace._engine
    shared = BeforeRegions(given, engine)
    with mock.patch.object(after_grappler, "before_regions", wraps=before_regions) as ran:
        found = plans(trace, lambda: shared)
    assert ran.call_count == 1
    alone = plans(trace, lambda: BeforeRegions(given, engine))
    assert len({tuple(region.schedule.members for region in done.regions) for _, done in alone}) == len(BOUNDS)
    for (captured, done), (expected, expected_done) in zip(found, alone, strict=True):
        assert captured.graph_def == expected.graph_def
        assert [region.schedule for region in done.regions] == [region.schedule for region in expected_done.regions]
        assert done.reasons == expected_done.reasons
