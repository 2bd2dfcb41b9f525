"""Numbers that optimizers compute for each variable alike: a step under a budget computes them once, to the bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.graph.ir import Graph
from graph_passes.passes.equal import plan
from tests.tf.conftest import Flow, make_net, smallest_budget
from tfmem.steps import trace
from tfmem.steps.read_step import ReadStep

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": keras.optimizers.Adam,
    "adam, by a schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, 4)),
    "adam, averaged": lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=3),
    "adam, accumulated": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "adam, scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=8.0),
    "adamw, clipped": lambda: keras.optimizers.AdamW(clipnorm=0.1),
    "nadam": keras.optimizers.Nadam,
    "adamax": keras.optimizers.Adamax,
    "lion": keras.optimizers.Lion,
    "ftrl": keras.optimizers.Ftrl,
    "adafactor": keras.optimizers.Adafactor,
    "momentum": lambda: keras.optimizers.SGD(momentum=0.9, nesterov=True),
}


def trained_by(optimizer: Any, budget: int | None, batch: Any) -> tuple[list[bytes], Any]:
    """Bytes of five losses, of all weights and of the optimizer's variables; and the report."""
    net = make_net()
    optimizer.build(net.variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = net.loss(x, y)
        optimizer.apply(tape.gradient(loss, net.variables), net.variables)
        return loss, optimizer.iterations + 0  # read behind the update

    function = tf.function(step)
    if budget is not None:
        function = tfmem.optimize(function, memory_budget=budget, passes=("offload",))
    results = [function(*batch) for _ in range(5)]
    held = [*net.variables, *(variable.value for variable in optimizer.variables)]
    report = None if budget is None else tfmem.report(function)
    return [np.asarray(each).tobytes() for each in tf.nest.flatten([results, held])], report


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_under_a_budget_is_equal_to_the_bit(name: str, batch: Any, flow: Flow) -> None:
    del flow
    budget = smallest_budget(lambda least: trained_by(OPTIMIZERS[name](), least, batch))
    expected, _ = trained_by(OPTIMIZERS[name](), None, batch)
    found, report = trained_by(OPTIMIZERS[name](), budget, batch)
    assert report.transfers
    assert found == expected


def test_adams_numbers_are_computed_once(batch: Any, flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    del flow
    read: list[Graph] = []
    original = trace.read_step

    def recorded(*arguments: Any) -> ReadStep:
        found = original(*arguments)
        read.append(found.step.graph)
        return found

    monkeypatch.setattr(trace, "read_step", recorded)
    with pytest.raises(tfmem.InfeasibleBudgetError):
        trained_by(keras.optimizers.Adam(), 1000, batch)
    found = Counter(node.op for node in read[0])
    assert (found["Pow"], found["Sqrt"]) == (2, 1 + len(make_net().variables))


def test_a_pass_that_fails_leaves_the_numbers_as_they_are(batch: Any, flow: Flow, monkeypatch: Any) -> None:
    del flow
    budget = smallest_budget(lambda least: trained_by(keras.optimizers.Adam(), least, batch))

    def broken(*_: Any) -> None:
        raise KeyError(168)

    monkeypatch.setattr(plan, "equal_numbers", broken)
    expected, _ = trained_by(keras.optimizers.Adam(), None, batch)
    with pytest.warns(tfmem.TfmemWarning, match="equal numbers are not computed once: 168"):
        found, report = trained_by(keras.optimizers.Adam(), budget, batch)
    assert report.transfers
    assert found == expected
