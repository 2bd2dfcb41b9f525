"""Fusion that was asked for runs wherever nothing moves, and where it does not the user is told, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import Fusion, FusionWhy
from graph_passes.report import Report

v1 = tf.compat.v1
PASSES = ("recurrent", "fusion", "offload")
X = np.random.default_rng(0).normal(size=(4096, 64)).astype("float32")
MOST = "8GiB"  # nothing has to move


def options(budget: Any) -> tfmem.Options:
    return tfmem.Options(memory_budget=budget, passes=PASSES, cache_directory="", observe=False)


def weights(make: Callable[..., Any] = tf.Variable) -> list[Any]:
    values = np.random.default_rng(1).normal(size=(8, 64, 64)).astype("float32") / 8
    return [make(value) for value in values]


def loss_of(x: Any, variables: list[Any]) -> Any:
    for variable in variables:
        x = tf.tanh(x @ variable) * 0.5 + x
    return tf.reduce_mean(x**2)


class Graph:
    """A step of `tf.compat.v1`."""

    def __init__(self, budget: Any = None, gradients: Any = None) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            x = v1.placeholder(tf.float32, X.shape, name="x")
            variables = weights(lambda value: v1.get_variable(f"w{v1.get_default_graph().version}", initializer=value))
            loss = loss_of(x, variables)
            found = (gradients or tf.gradients)(loss, variables, **({"options": options(budget)} if gradients else {}))
            updates = [
                variable.assign_sub(0.01 * gradient) for variable, gradient in zip(variables, found, strict=True)
            ]
            with tf.control_dependencies([loss]):
                self.train = tf.group(*updates, name="train")
            self.init = v1.global_variables_initializer()
            self.loss = loss.name

    def losses(self, graph: Any = None) -> list[float]:
        with v1.Session(graph=graph or self.graph, config=tfmem.session_config()) as session:
            session.run(self.init.name)
            return [session.run([self.loss, "train"], {"x:0": X})[0] for _ in range(3)]


def imported(graph_def: Any) -> tf.Graph:
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    return graph


def as_graph(budget: Any) -> tuple[Report, list[float]]:
    made = Graph()
    tfmem.optimize(made.graph, options=options(budget), fetches=[made.loss, "train"])
    return tfmem.report(made.graph), made.losses()


def as_gradients(budget: Any) -> tuple[Report, list[float]]:
    made = Graph(budget, tfmem.avm_gradients)
    return tfmem.report(made.graph), made.losses()


def as_graph_def(budget: Any) -> tuple[Report, list[float]]:
    made = Graph()
    given = made.graph.as_graph_def()
    found = tfmem.optimize(given, options=options(budget), fetches=[made.loss, "train", made.init.name])
    return tfmem.report(found), made.losses(imported(found))


def step_of(variables: list[Any]) -> Any:
    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(x, variables)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    return step


def as_concrete_function(budget: Any) -> tuple[Report, list[float]]:
    variables = weights()
    concrete = step_of(variables).get_concrete_function(tf.TensorSpec(X.shape))
    found = tfmem.optimize(concrete, options=options(budget))
    return tfmem.report(found), [float(found(tf.constant(X))) for _ in range(3)]


def as_called_within(budget: Any) -> tuple[Report, list[float]]:
    step = tfmem.optimize(step_of(weights()), options=options(budget))
    outer = tf.function(step)
    losses = [float(outer(tf.constant(X))) for _ in range(3)]
    return tfmem.report(step), losses


WAYS = [as_graph, as_gradients, as_graph_def, as_concrete_function, as_called_within]


def told(way: Callable[[Any], tuple[Report, list[float]]], budget: Any) -> tuple[Report, list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tfmem.TfmemWarning)
        report, losses = way(budget)
    return report, losses, [str(each.message) for each in caught if "stitched" in str(each.message)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [None, MOST])
def test_what_fits_is_stitched(way: Any, budget: Any) -> None:
    report, losses, messages = told(way, budget)
    assert report.fusion_state is Fusion.STITCHED, report
    assert report.running
    assert not messages
    np.testing.assert_allclose(losses, Graph().losses(), rtol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [as_concrete_function, as_called_within])
def test_where_something_moves_regions_and_moves_are_chosen_together(way: Any) -> None:
    with pytest.raises(tfmem.InfeasibleBudgetError) as refused:
        way(1 << 20)
    budget = refused.value.smallest_budget + (1 << 20)
    report, losses, messages = told(way, budget)
    assert report.fusion in (FusionWhy.BY_MODEL, FusionWhy.SLOWER, FusionWhy.NO_ROOM)
    assert bool(report.running) == (report.fusion == FusionWhy.BY_MODEL)
    assert report.transfers or report.running
    assert report.peak_predicted <= budget
    assert len(messages) == (report.fusion == FusionWhy.NO_ROOM)
    np.testing.assert_allclose(losses, Graph().losses(), rtol=1e-4)


@pytest.mark.parametrize("way", [as_graph, as_gradients, as_graph_def])
def test_where_something_moves_the_user_is_told(way: Any) -> None:
    with pytest.raises(tfmem.InfeasibleBudgetError) as refused:
        way(1 << 20)
    report, losses, messages = told(way, refused.value.smallest_budget + (1 << 20))
    assert report.transfers
    assert (report.fusion, report.fusion_state) == (FusionWhy.PLANNED, Fusion.LEFT)
    assert f"to have it stitched, {FusionWhy.PLANNED.cure}" in report.notes
    assert len(messages) == 1
    assert FusionWhy.PLANNED in messages[0]
    assert FusionWhy.PLANNED.cure in messages[0]
    np.testing.assert_allclose(losses, Graph().losses(), rtol=1e-4)


@pytest.mark.parametrize("budget", [None, MOST])
def test_what_is_still_being_traced_stays_and_the_user_is_told(budget: Any) -> None:
    variables = weights()
    reports = []

    @tf.function
    def step(x: Any) -> Any:
        loss = loss_of(x, variables)
        found = tfmem.avm_gradients(loss, variables, options=options(budget))
        reports.append(tfmem.report(loss.graph))
        for variable, gradient in zip(variables, found, strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    with pytest.warns(tfmem.TfmemWarning, match=f"{FusionWhy.TRACED}; {FusionWhy.TRACED.cure}"):
        losses = [float(step(tf.constant(X))) for _ in range(3)]
    assert (reports[0].fusion, reports[0].fusion_state) == (FusionWhy.TRACED, Fusion.LEFT)
    np.testing.assert_allclose(losses, Graph().losses(), rtol=1e-4)


def test_the_report_names_the_passes_that_were_asked_for_from_the_first_call_on() -> None:
    passes = ("recurrent", "fusion", "offload")
    step = tfmem.optimize(tf.function(lambda x: tf.tanh(x) * x), memory_budget="1GiB", passes=passes)
    step(tf.ones([8]))
    assert tfmem.report(step).passes == passes
    assert "passes      recurrent, fusion, offload" in str(tfmem.report(step))
