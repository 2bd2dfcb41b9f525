"""Tapes, loops written by hand and graphs of TensorFlow 1: replaced with their gradients, they give what they gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.refusals import Reason
from tests.tf.recurrent_training import INPUTS, STEPS, TOLERANCE, UNITS, numbers

L = keras.layers


def results(step: Any, *arguments: Any) -> tuple[list[Any], Any]:
    """The results of a `tf.function` and of the same, optimised; and the report."""
    plain = [np.asarray(value) for value in tf.nest.flatten(step(*arguments))]
    optimized = tfmem.optimize(step)
    replaced = [np.asarray(value) for value in tf.nest.flatten(optimized(*arguments))]
    for a, b in zip(plain, replaced, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    return replaced, tfmem.report(optimized)


def test_gradients_of_inputs_and_states() -> None:
    layer = L.LSTM(UNITS, return_sequences=True, return_state=True)
    layer.build((None, None, INPUTS))
    weights = [weight.value for weight in layer.weights]

    @tf.function
    def step(x: Any, h: Any, c: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, h, c])
            y, last_h, last_c = layer(x, initial_state=[h, c])
            loss = tf.reduce_mean(y**2) + tf.reduce_mean(tf.sin(last_h)) + 2 * tf.reduce_mean(last_c**2)
        return loss, tape.gradient(loss, [*weights, x, h, c])

    x, h, c = numbers(4, STEPS, INPUTS), numbers(4, UNITS, seed=1), numbers(4, UNITS, seed=2)
    _, report = results(step, *map(tf.constant, (x, h, c)))
    assert len(report.replaced) == 1


def test_only_some_weights_are_trained() -> None:
    layer = L.LSTM(UNITS)
    layer.build((None, None, INPUTS))
    recurrent = layer.weights[1].value

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(recurrent)
            loss = tf.reduce_sum(layer(x) ** 2)
        return loss, tape.gradient(loss, recurrent)

    _, report = results(step, tf.constant(numbers(4, STEPS, INPUTS)))
    assert len(report.replaced) == 1


def hand_written(cell: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """A loop of `tf.while_loop` over `[batch, time, inputs]`, its outputs and its last state."""

    def run(x: Any) -> Any:
        time, rows = tf.shape(x)[1], tf.shape(x)[0]
        items = tf.TensorArray(tf.float32, time).unstack(tf.transpose(x, [1, 0, 2]))
        outputs = tf.TensorArray(tf.float32, time)

        def body(i: Any, h: Any, outputs: Any) -> Any:
            h = cell(items.read(i), h)
            return i + 1, h, outputs.write(i, h)

        _, h, outputs = tf.while_loop(lambda i, *_: i < time, body, (0, tf.zeros([rows, UNITS]), outputs))
        return outputs.stack(), h

    return run


@pytest.fixture(name="weights")
def fixture_weights() -> tuple[tf.Variable, tf.Variable]:
    return tf.Variable(numbers(INPUTS, UNITS) * 0.5), tf.Variable(numbers(UNITS, UNITS, seed=1) * 0.3)


def differentiated(loop: Callable[[Any], Any], weights: Sequence[tf.Variable]) -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None, None, INPUTS])])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs, last = loop(x)
            loss = tf.reduce_sum(outputs**2) + tf.reduce_sum(last)
        return loss, tape.gradient(loss, [*weights, x])

    return step


def test_a_cell_nobody_has_named(weights: tuple[tf.Variable, tf.Variable]) -> None:
    kernel, recurrent = weights

    def cell(x: Any, h: Any) -> Any:
        gate = tf.sigmoid(x @ kernel - h)
        return gate * tf.nn.softplus(h @ recurrent) + 0.1 * tf.exp(-(h**2))

    _, report = results(differentiated(hand_written(cell), weights), tf.constant(numbers(4, STEPS, INPUTS)))
    assert len(report.replaced) == 1


def test_a_gradient_of_the_users_own_stays(weights: tuple[tf.Variable, tf.Variable]) -> None:
    kernel, recurrent = weights

    @tf.custom_gradient
    def clipped(h: Any) -> Any:
        return tf.identity(h), lambda gradient: tf.clip_by_value(gradient, -0.1, 0.1)

    step = differentiated(hand_written(lambda x, h: clipped(tf.tanh(x @ kernel + h @ recurrent))), weights)
    _, report = results(step, tf.constant(numbers(4, STEPS, INPUTS)))
    assert not report.replaced
    assert "has a custom gradient" in report.not_replaced[0]


def test_a_stopped_gradient_is_stopped_in_the_cell(weights: tuple[tf.Variable, tf.Variable]) -> None:
    kernel, recurrent = weights
    step = differentiated(hand_written(lambda x, h: tf.tanh(x @ kernel + tf.stop_gradient(h) @ recurrent)), weights)
    _, report = results(step, tf.constant(numbers(4, STEPS, INPUTS)))
    assert report.replaced, report


def test_a_second_gradient_stays() -> None:
    layer = L.LSTM(UNITS)
    layer.build((None, None, INPUTS))

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(layer(x) ** 2)
            penalty = tf.reduce_sum(tape.gradient(loss, x) ** 2)
        return outer.gradient(penalty, x)

    _, report = results(step, tf.constant(numbers(2, STEPS, INPUTS)))
    assert not report.replaced
    assert any(str(Reason.SECOND_GRADIENT()) in line for line in report.not_replaced)


def test_one_tensor_as_two_states() -> None:
    layer = L.LSTM(UNITS)
    layer.build((None, None, INPUTS))

    @tf.function
    def step(x: Any, h: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(h)
            loss = tf.reduce_sum(layer(x, initial_state=[h, h]) ** 2)
        return tape.gradient(loss, h)

    results(step, tf.constant(numbers(2, STEPS, INPUTS)), tf.constant(numbers(2, UNITS, seed=1)))


def loop_above_a_loop(weights: Sequence[tf.Variable]) -> Callable[[Any], Any]:
    """Two loops with nothing between: what the one's gradient makes, the other's takes."""
    kernel, recurrent, *above = weights
    lower = hand_written(lambda x, h: tf.tanh(x @ kernel + h @ recurrent))
    upper = hand_written(lambda x, h: tf.tanh(x @ above[0] + h @ above[1]))

    def run(x: Any) -> Any:
        outputs, last = lower(x)
        outputs, upper_last = upper(tf.transpose(outputs, [1, 0, 2]))
        return outputs, last + upper_last

    return run


def test_two_loops_of_which_one_feeds_the_other(weights: tuple[tf.Variable, tf.Variable]) -> None:
    both = [
        *weights,
        tf.Variable(numbers(UNITS, UNITS, seed=2) * 0.3),
        tf.Variable(numbers(UNITS, UNITS, seed=3) * 0.3),
    ]
    _, report = results(differentiated(loop_above_a_loop(both), both), tf.constant(numbers(4, STEPS, INPUTS)))
    assert len(report.replaced) == 2


@pytest.mark.parametrize("way", ["optimize", "avm_gradients", "wrap_optimizer"])
def test_a_graph_of_tensorflow_1(way: str) -> None:
    def losses(optimized: bool) -> list[float]:
        v1 = tf.compat.v1
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None, None, INPUTS])
            shapes = [(INPUTS, UNITS), (UNITS, UNITS), (UNITS, UNITS), (UNITS, UNITS)]
            weights = [tf.Variable(numbers(*shape, seed=place) * 0.3) for place, shape in enumerate(shapes)]
            outputs, last = loop_above_a_loop(weights)(x)
            loss = tf.reduce_mean((outputs - 0.5) ** 2) + tf.reduce_mean(last**2)
            optimizer = v1.train.GradientDescentOptimizer(0.5)
            if way == "wrap_optimizer":
                train = (tfmem.wrap_optimizer(optimizer) if optimized else optimizer).minimize(loss)
            else:
                avm = optimized and way == "avm_gradients"
                gradients = (tfmem.avm_gradients if avm else tf.gradients)(loss, weights)
                train = optimizer.apply_gradients(zip(gradients, weights, strict=True))
            if optimized and way == "optimize":
                tfmem.optimize(graph, fetches=[loss.name, train.name])
            if optimized:
                assert len(tfmem.report(graph).replaced) == 2, str(tfmem.report(graph))
            initialize = v1.global_variables_initializer()
        with v1.Session(graph=graph, config=tfmem.session_config()) as session:
            session.run(initialize)
            steps = [numbers(4, STEPS + step, INPUTS, seed=step) for step in range(6)]
            found = [float(session.run([loss, train], {x: step})[0]) for step in steps]
            if optimized:  # the old loops are there, and do not run
                metadata = v1.RunMetadata()
                options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
                session.run(train, {x: steps[0]}, options, metadata)
                ran = [node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats]
                assert not [name for name in ran if "TensorListPushBack" in name]
        return found

    np.testing.assert_allclose(losses(optimized=True), losses(optimized=False), rtol=1e-5)


def test_a_function_that_is_being_traced() -> None:
    """The old loop would run too, so it stays; the report says what to do instead."""
    layer = L.LSTM(UNITS)
    layer.build((None, None, INPUTS))
    traced = []

    @tf.function
    def step(x: Any) -> Any:
        loss = tf.reduce_mean(layer(x) ** 2)
        gradients = tfmem.avm_gradients(loss, [weight.value for weight in layer.weights])
        traced.append(tfmem.report(loss.graph))
        return gradients

    step(tf.constant(numbers(4, STEPS, INPUTS)))
    assert not traced[0].replaced
    assert str(Reason.BEING_TRACED()) in traced[0].not_replaced[0]
