"""Gradient loops that are not the derivative of their forward loop stay, custom gradients that are do not matter, and
`tf.stop_gradient` is part of a cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.graph import serde
from graph_passes.passes.recurrent.match import RecurrentPlan
from graph_passes.passes.recurrent.plan import plan_whole
from graph_passes.passes.recurrent.train.loop_pairs import Pair, gradient_loops
from graph_passes.refusals import Reason
from tests.tf.recurrent_training import INPUTS, STEPS, TOLERANCE, UNITS, numbers
from tfmem.capture import gradient_check
from tfmem.capture.gradient_check import step_gradient_fault
from tfmem.capture.inserted_gradients import gradients

v1 = tf.compat.v1


def clipped(x: Any) -> Any:
    return tf.custom_gradient(lambda y: (tf.identity(y), lambda dy: tf.clip_by_value(dy, -0.01, 0.01)))(x)


def turned(x: Any) -> Any:
    return tf.custom_gradient(lambda y: (tf.identity(y), lambda dy: -dy))(x)


def stopped(x: Any) -> Any:
    return 0.5 * x + 0.5 * tf.stop_gradient(x)


def straight_through(x: Any) -> Any:
    return x + tf.stop_gradient(tf.round(x * 4) / 4 - x)


def passed_through(x: Any) -> Any:
    return tf.grad_pass_through(lambda y: tf.tanh(y * 2))(x)


def recomputed(x: Any) -> Any:
    return tf.recompute_grad(lambda y: tf.tanh(y * 2))(x)


def overridden(x: Any) -> Any:
    with tf.Graph.gradient_override_map(v1.get_default_graph(), {"Identity": "TfmemTestHalf"}):
        return tf.identity(x)


@tf.RegisterGradient("TfmemTestHalf")
def _half(_: Any, gradient: Any) -> Any:
    return 0.5 * gradient


OWN = [clipped, turned, stopped, straight_through, passed_through, recomputed, overridden]


def scanned(cell: Callable[[Any, Any], Any], x: Any) -> Any:
    return tf.scan(lambda h, row: cell(row, h), tf.transpose(x, [1, 0, 2]), tf.zeros([tf.shape(x)[0], UNITS]))


def looped(cell: Callable[[Any, Any], Any], x: Any) -> Any:
    time, rows = tf.shape(x)[1], tf.shape(x)[0]
    outputs = tf.TensorArray(tf.float32, time, element_shape=[None, UNITS])

    def body(i: Any, h: Any, outputs: Any) -> Any:
        h = cell(x[:, i], h)
        return i + 1, h, outputs.write(i, h)

    zeros = tf.zeros([rows, UNITS])
    return tf.while_loop(lambda i, *_: i < time, body, (0, zeros, outputs))[2].stack()


def training(own: Callable[[Any], Any], loop: Callable[..., Any]) -> Any:
    kernel, recurrent = tf.Variable(numbers(INPUTS, 2 * UNITS)), tf.Variable(numbers(UNITS, 2 * UNITS, seed=1) / 3)

    def cell(x: Any, h: Any) -> Any:
        a, b = tf.split(x @ kernel + h @ recurrent, 2, axis=1)
        return own(tf.tanh(a) * tf.sigmoid(b)) + 0.1 * h

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loop(cell, x) ** 2)
        return loss, tape.gradient(loss, [kernel, recurrent])

    return step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loop", [scanned, looped])
@pytest.mark.parametrize("own", OWN)
def test_own_gradients(own: Any, loop: Any) -> None:
    step, x = training(own, loop), tf.constant(numbers(4, STEPS, INPUTS))
    plain = tf.nest.flatten(step(x))
    optimized = tfmem.optimize(step)
    for a, b in zip(plain, tf.nest.flatten(optimized(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    report = tfmem.report(optimized)
    # What `recomputed` gives is the derivative.
    assert bool(report.replaced) == (own in (recomputed, stopped, straight_through)), report
    assert "gradient" in str(report), report


def bare(graph_def: Any) -> Any:
    """As another tool could write it: nothing says any more that an op has a custom gradient."""
    result = v1.GraphDef()
    result.CopyFrom(graph_def)
    for node in [*result.node, *(node for function in result.library.function for node in function.node_def)]:
        node.attr.pop("_gradient_op_type", None)
        if node.op in ("StopGradient", "PreventGradient"):
            node.op = "Identity"
    return result


def trained(graph_def: Any, x: Any) -> list[Any]:
    with tf.Graph().as_default(), v1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        session.run("initialize")
        return session.run(["loss:0", "kernel_gradient:0", "recurrent_gradient:0"], {"x:0": x})


def graph_of(own: Callable[[Any], Any], loop: Callable[..., Any] = looped) -> Any:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, None, INPUTS], "x")
        names = (("kernel", numbers(INPUTS, 2 * UNITS)), ("recurrent", numbers(UNITS, 2 * UNITS, seed=1) / 3))
        weights = [v1.get_variable(name, initializer=value, use_resource=True) for name, value in names]

        def cell(row: Any, h: Any) -> Any:
            a, b = tf.split(row @ weights[0] + h @ weights[1], 2, axis=1)
            return own(tf.tanh(a) * tf.sigmoid(b)) + 0.1 * h

        loss = tf.reduce_sum(loop(cell, x) ** 2, name="loss")
        for gradient, name in zip(tf.gradients(loss, weights), ("kernel", "recurrent"), strict=True):
            tf.identity(gradient, name=f"{name}_gradient")
        v1.variables_initializer(v1.global_variables(), name="initialize")
    return graph.as_graph_def()


def optimized(graph_def: Any) -> tuple[Any, RecurrentPlan]:
    """The optimised graph and the plan: an unchanged GraphDef has no report."""
    names = ["loss", "kernel_gradient", "recurrent_gradient", "initialize"]
    result = tfmem.optimize(graph_def, feeds=["x"], fetches=names)
    graph = serde.from_graph_def(graph_def, functions=True)
    return result, plan_whole(graph, names, gradients, step_gradient_fault)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loop", [scanned, looped])
@pytest.mark.parametrize("own", [clipped, turned, stopped, overridden])
def test_nothing_but_the_gradient_loop_tells(own: Any, loop: Any) -> None:
    graph_def, x = bare(graph_of(own, loop)), numbers(4, STEPS, INPUTS)
    result, plan = optimized(graph_def)
    for a, b in zip(trained(graph_def, x), trained(result, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert not plan.matches
    assert Reason.CHECK_DIFFERS in {loop.reason.reason for loop in plan.unmatched}, plan


def test_an_edited_gradient_loop() -> None:
    graph_def, x = graph_of(tf.identity), numbers(4, STEPS, INPUTS)
    _, plan = optimized(graph_def)
    assert len(plan.matches) == 1, plan.unmatched
    concat = next(
        node
        for function in graph_def.library.function
        for node in function.node_def
        if node.op == "ConcatV2" and "split" in node.name
    )
    concat.input[0], concat.input[1] = concat.input[1], concat.input[0]
    result, plan = optimized(graph_def)
    for a, b in zip(trained(graph_def, x), trained(result, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert not plan.matches
    assert Reason.CHECK_DIFFERS in {loop.reason.reason for loop in plan.unmatched}, plan


@pytest.mark.parametrize(
    ("different", "reason"), [(None, Reason.CHECK_FINITE), (ValueError("no step"), Reason.CHECK_FAILED)]
)
def test_a_gradient_that_cannot_be_checked(
    monkeypatch: pytest.MonkeyPatch, different: Exception | None, reason: Reason
) -> None:
    def found(step: Any) -> None:
        if different is not None:
            raise different

    monkeypatch.setattr(gradient_check._Step, "different", found)
    _, plan = optimized(graph_of(tf.identity))
    assert {loop.reason.reason for loop in plan.unmatched} >= {reason}, plan


def test_a_step_with_effects_cannot_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_check, "_HARMLESS", ())
    graph = serde.from_graph_def(graph_of(tf.identity), functions=True)
    for function in graph.functions.values():
        for node in function.graph:
            node.stateful = True
    forward, backward = next(gradient_loops(graph))
    found = step_gradient_fault(graph, Pair(forward, backward, {}, frozenset()))
    assert found is not None
    assert found.reason is Reason.CHECK_EFFECTS
