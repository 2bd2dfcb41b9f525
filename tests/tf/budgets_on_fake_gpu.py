"""Steps in which tensors move, whose regions run as on a GPU, on the fake driver. Run by test_fusion_gpu.py."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.memory.observe import observe
from graph_passes.decision import Decision, Fusion
from graph_passes.report import UNDECIDED
from tests.tf.fake_gpu import FakeGpu
from tests.tf.stitched_steps import optimized, stitched_ops
from tfmem.steps import measuring
from tfmem.timing import ab_timing

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")

SIZE, LAYERS = 320, 6


class Layers:
    """Layers of tanh behind a layer normalization, trained by momentum."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = (SIZE, SIZE)
        self.variables = [tf.Variable(rng.normal(size=shape).astype(np.float32) / 18) for _ in range(LAYERS)]
        self.momenta = [tf.Variable(tf.zeros(shape)) for _ in self.variables]
        self.step = tf.function(self.run)

    def run(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weights in self.variables:
                mean = tf.reduce_mean(x, -1, keepdims=True)
                x = (x - mean) * tf.math.rsqrt(tf.reduce_mean((x - mean) ** 2, -1, keepdims=True) + 1e-3)
                x = tf.tanh(tf.sigmoid(x @ weights) * x)
            loss = tf.reduce_mean(x**2)
        for variable, momentum, gradient in zip(
            self.variables, self.momenta, tape.gradient(loss, self.variables), strict=True
        ):
            momentum.assign(0.9 * momentum + gradient)
            variable.assign_sub(0.5 * momentum)
        return loss


def losses(x: Any, count: int) -> tuple[list[float], list[np.ndarray]]:
    """The losses of the step as it is, and its weights in the end."""
    model = Layers()
    found = [float(model.step(x)) for _ in range(count)]
    return found, [each.numpy() for each in model.variables]


def peak(x: Any) -> int:
    """Bytes that the step takes unchanged."""
    step = tfmem.optimize(Layers().step, memory_budget=1 << 34, passes=("offload",), cache_directory="")
    for _ in range(4):
        step(x)
    found = tfmem.report(step).peak_measured
    assert found is not None
    return found


def even(timeline: Any, moves: Any, samples: Any, paddings: Any = ()) -> Any:
    """What probes read, with as long for each op: so that at any load the same moves and divisions follow."""
    return observe(timeline, moves, [replace(each, seconds=0.01 * each.index) for each in samples], paddings)


@pytest.mark.timeout(900)  # each of three divisions may run, and be timed
def test_a_step_moves_and_is_stitched(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    on_gpu()
    x = tf.constant(np.random.default_rng(1).normal(size=(SIZE, SIZE)).astype(np.float32))
    budget = peak(x) * 7 // 10
    gc.collect()
    model = Layers()
    full = tfmem.FusionOptions(tune="full")
    step = optimized(model.step, passes=("fusion", "offload"), memory_budget=budget, fusion=full)
    launched = gpu.calls("cuGraphLaunch")
    found = []
    with (
        mock.patch.object(measuring, "observe", even),
        mock.patch.object(ab_timing, "ROUNDS", 2),
        mock.patch.object(ab_timing.Times, "is_faster", property(lambda _: True)),
    ):
        while len(found) < 60 and (not found or tfmem.report(step).fusion.startswith(UNDECIDED)):
            found.append(float(step(x)))
            for (known,) in [tuple(steps.values()) for steps in step._steps.values()]:
                known.wait()
    report = tfmem.report(step)
    assert report.fusion_state is Fusion.STITCHED, report
    assert report.decision is Decision.MOVED
    assert report.peak_measured is not None
    assert report.peak_measured <= budget
    found_ops = set(stitched_ops(report))  # of any division: by what its calls take in turn, the first one may not stay
    assert "Tanh" in found_ops
    assert any(op.startswith("Assign") for op in found_ops)
    assert gpu.calls("cuGraphLaunch") > launched
    expected, weights = losses(x, len(found))
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    for one, other in zip(model.variables, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
