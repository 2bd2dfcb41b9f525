"""A step whose moves are settled, beside the same step on pieces of the batch: the one that is clearly faster stays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes import pipeline, splitting
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.simulate import Link
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.refusals import Reason
from graph_passes.report import Report
from graph_passes.splitting import SplitStep, split_step
from tests.tf.memory_in_use import in_use
from tests.tf.split_steps import read
from tests.tf.test_split import images
from tests.tf.test_step_machine import step_in
from tfmem.runtime import settings
from tfmem.steps import dividing
from tfmem.steps.phases import Phase
from tfmem.steps.trace import Trace

CALLS = 40  # at most
BUDGET = 6 << 20
KEPT = 1e-9  # share of the unlimited rate that moves are said to keep
ALWAYS, NEVER = float("inf"), 1e-6


class Run(NamedTuple):
    """Training until the step is settled: losses, phases in order, and the report."""

    losses: list[float]
    phases: list[Phase]
    report: Report


@pytest.fixture(name="slow_link")
def fixture_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan with moves keeps next to nothing of the unlimited rate, as measured."""
    monkeypatch.setattr(dividing, "rate_of", lambda *_: KEPT)


@pytest.fixture(name="trained")
def fixture_trained(new_net: Any, library: Any, slow_link: None) -> Callable[..., Run]:
    """Trains within a budget that moves meet."""

    def train(wrapped: Callable[[Any], Any] = lambda net: net.step, **options: Any) -> Run:
        offload, arguments = tfmem.OffloadOptions(**{"split": "faster", **options}), images(64)
        how = {"passes": ("offload",), "cache_directory": "", "memory_budget": in_use() + BUDGET}
        function = tfmem.optimize(tf.function(wrapped(new_net())), offload=offload, **how)
        losses, phases = [], []
        for _ in range(CALLS):
            losses.append(float(function(*arguments)))
            step = step_in(function)
            phases += [step.phase] if step.phase not in phases[-1:] else []
            if step.settled:
                break
            step.wait()
        assert step.settled
        losses += [float(function(*arguments)) for _ in range(2)]
        return Run(losses, phases, tfmem.report(function))

    return train


def plain(wrapped: Any, count: int) -> list[float]:
    function = tf.function(wrapped)
    return [float(function(*images(64))) for _ in range(count)]


def contest(monkeypatch: pytest.MonkeyPatch, predicted: float, measured: float) -> None:
    """How much of the other's time a split may take, as predicted and as measured."""
    monkeypatch.setattr(splitting, "CLEARLY", predicted)
    monkeypatch.setattr(dividing, "CLEARLY", ALWAYS)
    monkeypatch.setattr(dividing, "FASTER", measured)


def test_a_split_that_is_faster_runs_from_then_on(trained: Any, new_net: Any, monkeypatch: Any) -> None:
    contest(monkeypatch, ALWAYS, ALWAYS)
    run = trained()
    assert run.phases[-3:] == [Phase.DIVIDING, Phase.CHECKING, Phase.SETTLED]
    assert run.report.splits
    assert run.report.peak_measured <= run.report.budget
    assert any(str(note).startswith("split along the batch: ") for note in run.report.notes)
    moves = ", with moves" if run.report.transfers else ""  # a busy machine's peak may leave room for pieces alone
    assert run.report.verdict.how == f"split along the batch{moves}"
    np.testing.assert_allclose(run.losses, plain(new_net().step, len(run.losses)), rtol=1e-5)


@pytest.mark.parametrize(("predicted", "tried"), [(ALWAYS, True), (0.0, False)])
def test_a_step_that_stays_whole_is_equal_to_the_bit(
    trained: Any, new_net: Any, monkeypatch: Any, predicted: float, tried: bool
) -> None:
    contest(monkeypatch, predicted, NEVER)
    run = trained()
    assert run.phases[-2:] == [Phase.DIVIDING, Phase.SETTLED]
    assert not run.report.splits
    noted = any(str(note).startswith("not split along the batch: that takes ") for note in run.report.notes)
    assert noted is tried
    assert run.losses == plain(new_net().step, len(run.losses))


@pytest.mark.parametrize("measured", [ALWAYS, NEVER])
def test_random_streams_go_on(trained: Any, new_net: Any, monkeypatch: Any, measured: float) -> None:
    def noisy(net: Any) -> Any:
        return lambda x, y: net.step(tf.nn.dropout(x, 0.3, seed=5), y)

    contest(monkeypatch, ALWAYS, measured)
    tf.random.set_seed(3)
    run = trained(noisy)
    assert bool(run.report.splits) is (measured == ALWAYS)
    tf.random.set_seed(3)
    np.testing.assert_allclose(run.losses, plain(noisy(new_net()), len(run.losses)), rtol=1e-5)


@pytest.mark.parametrize("split", ["auto", "needed", "never"])
def test_on_a_cpu_a_clock_decides_only_where_the_user_asks(trained: Any, split: str) -> None:
    assert Phase.DIVIDING not in trained(split=split).phases


def test_no_clock_decides_about_deterministic_numbers(trained: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(settings, "is_deterministic", lambda: True)
    assert Phase.DIVIDING not in trained().phases


def test_an_op_with_other_effects_runs_no_second_time(trained: Any) -> None:
    seen: list[int] = []

    def told(net: Any) -> Any:
        def step(x: Any, y: Any) -> Any:
            tf.py_function(lambda: seen.append(1), [], [])
            return net.step(x, y)

        return step

    run = trained(told)
    assert Phase.DIVIDING not in run.phases
    assert len(seen) == len(run.losses)


@pytest.mark.parametrize("place", ["divide", "plan"])
def test_after_a_fault_the_step_keeps_its_moves(trained: Any, new_net: Any, monkeypatch: Any, place: str) -> None:
    given = getattr(Trace, place)

    def broken(trace: Trace, *args: Any, **how: Any) -> Any:
        if place == "divide" or trace.split is not None:
            raise KeyError(168)
        return given(trace, *args, **how)

    contest(monkeypatch, ALWAYS, ALWAYS)
    monkeypatch.setattr(Trace, place, broken)
    with pytest.warns(tfmem.TfmemWarning, match="failed with KeyError"):
        run = trained()
    assert run.phases[-2:] == [Phase.DIVIDING, Phase.SETTLED]
    assert run.losses == plain(new_net().step, len(run.losses))


def test_a_slower_split_is_taken_where_moves_exceed_the_budget(trained: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(dividing, "rate_of", lambda *_: 1.0)
    monkeypatch.setattr(dividing, "total_over", lambda report: 0 if report.splits else 168)
    monkeypatch.setattr(dividing, "FASTER", NEVER)
    run = trained()
    assert run.report.splits


def test_the_report_says_why_a_step_is_not_split(trained: Any, monkeypatch: Any) -> None:
    contest(monkeypatch, 0.0, ALWAYS)
    found = "not split along the batch: no division is predicted to be clearly faster"
    assert found in map(str, trained().report.notes)
    monkeypatch.setattr(dividing, "_divided", lambda *_: Reason.SPLIT_WAITS())
    assert f"not split along the batch: {Reason.SPLIT_WAITS()}" in map(str, trained().report.notes)


def test_a_step_over_its_budget_is_told_what_a_division_needs(trained: Any, monkeypatch: Any) -> None:
    contest(monkeypatch, 0.0, ALWAYS)
    monkeypatch.setattr(dividing, "total_over", lambda *_: 168)
    notes = list(map(str, trained().report.notes))
    assert any(note.startswith("not split along the batch: no division into up to ") for note in notes), notes


def test_a_split_over_the_budget_is_not_taken(trained: Any, monkeypatch: Any) -> None:
    contest(monkeypatch, ALWAYS, ALWAYS)
    monkeypatch.setattr(dividing, "more_over", lambda *_: 168)
    run = trained()
    assert not run.report.splits
    assert "not split along the batch: that takes 168 bytes more than the budget" in map(str, run.report.notes)


def vgg() -> Any:
    """The first blocks of a VGG: the results of few convolutions are most of what the step holds."""
    layers = tf.keras.layers
    h = given = layers.Input((128, 128, 3))
    for width, count in ((64, 2), (128, 2), (256, 3)):
        for _ in range(count):
            h = layers.Conv2D(width, 3, padding="same", activation="relu")(h)
        h = layers.MaxPool2D()(h)
    model = tf.keras.Model(given, layers.Dense(10)(layers.Flatten()(h)))
    variables = model.trainable_variables

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.reduce_mean(losses)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return tf.function(step)


def test_a_larger_budget_is_not_slower_than_a_smaller_one() -> None:
    """On an H100 by its profile. Just where moves begin to be enough, they keep less of a VGG's rate than the pieces
    that a smaller budget needs."""
    arguments = (tf.TensorSpec([64, 128, 128, 3]), tf.TensorSpec([64], tf.int32))
    step, profile = read(vgg(), arguments).step, load("h100")
    link, costs = Link(profile.offload, profile.prefetch), Roofline(profile, is_gpu=True)
    timeline, options = step.timeline(costs), OffloadOptions(policy="hybrid")
    verdict = pipeline.plan_step(step, timeline, link, timeline.peak, options).verdict
    assert verdict is not None
    least = verdict.smallest_budget
    moved, best = [], []
    for budget in (least * 7 // 10, least * 101 // 100, least * 11 // 10, timeline.peak):
        seconds, rate = float("inf"), 0.0
        with suppress(InfeasibleBudgetError):
            seconds = pipeline.plan_step(step, timeline, link, budget, options).after.seconds
            rate = float(timeline.begins[-1]) / seconds
        moved.append(seconds)
        found = split_step(step, lambda each: each.timeline(costs), link, budget, options, rate)
        if isinstance(found, SplitStep):
            edited = pipeline.Step.read(found.graph, found.order, step.fetches)
            seconds = pipeline.plan_step(edited, edited.timeline(costs), link, budget, options).after.seconds
        best.append(seconds)
    assert all(0.9 * later <= earlier for earlier, later in pairwise(best)), best
    assert moved[0] == float("inf")
    assert best[0] < 0.9 * moved[1] < float("inf")
