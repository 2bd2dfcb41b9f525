"""Steps that are written one after the other, with their gradient: both become a recurrent op, or both stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from benchmarks.fusion.workloads import make
from graph_passes.refusals import Reason
from tests.tf.recurrent_training import INPUTS, STEPS, TOLERANCE, UNITS, numbers

L, T = keras.layers, tf_keras.layers
BATCH = 4
WITH_GRADIENT = "with their gradient"


def sequential(*layers: Any) -> Any:
    return keras.Sequential([keras.Input([STEPS, INPUTS]), *layers])


def training(network: Any, x: Any) -> Any:
    """A step that gives the loss, and its gradients by the trainable weights and by what goes in."""
    network(x)
    weights = [
        getattr(weight, "value", weight) if isinstance(network, keras.Model) else weight
        for weight in network.trainable_weights
    ]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(network(x, training=True) ** 2)
        return loss, tape.gradient(loss, [x, *weights])

    return step


def reported(function: Any, *arguments: Any) -> tfmem.Report:
    """The report of the optimised function, which computes the same."""
    plain = tf.nest.flatten(function(*arguments))
    optimized = tfmem.optimize(function)
    for before, after in zip(plain, tf.nest.flatten(optimized(*arguments)), strict=True):
        np.testing.assert_allclose(after, before, rtol=TOLERANCE, atol=TOLERANCE)
    return tfmem.report(optimized)


def replaced(function: Any, *arguments: Any) -> tuple[str, ...]:
    report = reported(function, *arguments)
    assert not report.not_replaced, report
    assert all("unrolled and its gradient" in line for line in report.replaced), report
    return report.replaced


LAYERS: dict[str, tuple[int, Callable[[], Any]]] = {
    "LSTM": (1, lambda: sequential(L.LSTM(UNITS, unroll=True))),
    "LSTM, sequences": (1, lambda: sequential(L.LSTM(UNITS, unroll=True, return_sequences=True))),
    "LSTM, backwards": (1, lambda: sequential(L.LSTM(UNITS, unroll=True, go_backwards=True))),
    "GRU": (1, lambda: sequential(L.GRU(UNITS, unroll=True))),
    "GRU, canonical": (1, lambda: sequential(L.GRU(UNITS, unroll=True, reset_after=False))),
    "SimpleRNN": (1, lambda: sequential(L.SimpleRNN(UNITS, unroll=True))),
    "masked LSTM": (1, lambda: sequential(L.Masking(), L.LSTM(UNITS, unroll=True))),
    "masked GRU": (1, lambda: sequential(L.Masking(), L.GRU(UNITS, unroll=True, return_sequences=True))),
    "Bidirectional": (1, lambda: sequential(L.Bidirectional(L.LSTM(UNITS, unroll=True)))),
    "stacked": (2, lambda: sequential(L.LSTM(UNITS, unroll=True, return_sequences=True), L.GRU(UNITS, unroll=True))),
    "behind it a layer": (1, lambda: sequential(L.GRU(UNITS, unroll=True), L.Dense(2))),
    "tf_keras": (1, lambda: tf_keras.Sequential([T.LSTM(UNITS, unroll=True)])),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    launches, network = LAYERS[name]
    x = tf.constant(numbers(BATCH, STEPS, INPUTS))
    assert len(replaced(training(network(), x), x)) == launches


def test_two_steps() -> None:
    network = keras.Sequential([keras.Input([2, INPUTS]), L.LSTM(UNITS, unroll=True)])
    x = tf.constant(numbers(BATCH, 2, INPUTS))
    assert len(replaced(training(network, x), x)) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fit(optimizer: str) -> None:
    x, y = numbers(8, STEPS, INPUTS), numbers(8, 1)
    network = sequential(L.GRU(UNITS, unroll=True), L.Dense(1))
    other = keras.models.clone_model(network)
    other.set_weights(network.get_weights())
    for each in (network, other):
        each.compile(optimizer, "mse")
    tfmem.optimize(network)
    for each in (network, other):
        each.fit(x, y, batch_size=4, epochs=3, verbose=0, shuffle=False)
    assert "unrolled and its gradient" in str(tfmem.report(network))
    for one, two in zip(network.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["birnn", "dynrnn"])
def test_workloads(name: str) -> None:
    """`dynrnn` compares the number of a step with the length of each sequence."""
    plain, optimized = make(name), make(name)
    step = tfmem.optimize(optimized.step, passes=("recurrent",), cache_directory="")
    for _ in range(5):
        before, after = plain.step(*plain.inputs), step(*optimized.inputs)
        np.testing.assert_allclose(after, before, rtol=TOLERANCE)
    for one, two in zip(optimized.state, plain.state, strict=True):
        np.testing.assert_allclose(one.numpy(), two.numpy(), rtol=1e-4, atol=TOLERANCE)
    assert "unrolled and its gradient" in str(tfmem.report(step).replaced)


def weights() -> tuple[Any, Any]:
    return tf.Variable(numbers(INPUTS, UNITS) * 0.5), tf.Variable(numbers(UNITS, UNITS, seed=1) * 0.5)


def unrolled(x: Any, h: Any, w: Any, r: Any, activation: Callable[[Any], Any] = tf.tanh) -> list[Any]:
    outputs = []
    for item in tf.unstack(x, axis=1):
        h = activation(item @ w + h @ r)
        outputs.append(h)
    return outputs


def test_a_state_that_another_recurrence_left() -> None:
    """The gradient, in an encoder and a decoder, of what the one hands to the other is wanted."""
    (w, r), (v, s) = weights(), weights()

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            state = unrolled(x, tf.zeros([BATCH, UNITS]), w, r)[-1]
            loss = tf.reduce_mean(tf.stack(unrolled(y, state, v, s)) ** 2)
        return loss, tape.gradient(loss, [w, r, v, s])

    x, y = (tf.constant(numbers(BATCH, STEPS, INPUTS, seed=seed)) for seed in (0, 1))
    assert len(replaced(step, x, y)) == 2


@pytest.mark.parametrize("masked", [False, True])
def test_a_frozen_layer(masked: bool) -> None:
    """TensorFlow writes its gradient, and nothing needs it."""
    layers = [L.Masking()] if masked else []
    network = sequential(*layers, L.LSTM(UNITS, unroll=True, trainable=False), L.Dense(2))
    x = tf.constant(numbers(BATCH, STEPS, INPUTS))
    network(x)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(network(x, training=True) ** 2)
        return tape.gradient(loss, [weight.value for weight in network.trainable_weights])

    report = reported(step, x)
    assert len(report.replaced) == 1
    assert not report.not_replaced


# ---- what stays ----


@tf.custom_gradient
def strange(x: Any) -> Any:
    """A tanh whose gradient is another."""
    return tf.tanh(x), lambda dy: dy * 0.5


def clipped(x: Any) -> Any:
    return tf.tanh(x) + tf.stop_gradient(tf.sigmoid(x))


@pytest.mark.parametrize("activation", [strange, clipped])
def test_a_gradient_that_is_not_that_of_the_steps_stays(activation: Callable[[Any], Any]) -> None:
    w, r = weights()

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(unrolled(x, tf.zeros([BATCH, UNITS]), w, r, activation)[-1] ** 2)
        return loss, tape.gradient(loss, [w, r])

    report = reported(step, tf.constant(numbers(BATCH, STEPS, INPUTS)))
    assert bool(report.replaced) == (activation is clipped), report
    if activation is strange:
        (line,) = report.not_replaced
        assert str(Reason.UNROLLED_TRAINED_BECAUSE(because=Reason.STEP_GRADIENT())) in line


def test_steps_that_a_loss_reads_one_by_one_stay() -> None:
    w, r = weights()

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = unrolled(x, tf.zeros([BATCH, UNITS]), w, r)
            loss = tf.add_n([tf.reduce_mean(output**2) for output in outputs])
        return loss, tape.gradient(loss, [w, r])

    assert not reported(step, tf.constant(numbers(BATCH, STEPS, INPUTS))).replaced


def test_weights_that_a_penalty_reads_too_stay() -> None:
    """Their gradient is one sum, of the steps' and of the penalty's."""
    w, r = weights()

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.stack(unrolled(x, tf.zeros([BATCH, UNITS]), w, r)) ** 2)
            loss += tf.nn.l2_loss(w) + tf.nn.l2_loss(r)
        return loss, tape.gradient(loss, [w, r])

    assert not reported(step, tf.constant(numbers(BATCH, STEPS, INPUTS))).replaced


def test_a_gradient_of_the_gradient_stays() -> None:
    network = sequential(L.SimpleRNN(UNITS, unroll=True))
    x = tf.constant(numbers(BATCH, STEPS, INPUTS))
    network(x)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                score = network(x)
            penalty = tf.reduce_mean(inner.gradient(score, x) ** 2) + tf.reduce_mean(score)
        return outer.gradient(penalty, [weight.value for weight in network.trainable_weights])

    reported(step, x)


def test_a_graph_that_is_edited_in_place_keeps_its_steps() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [BATCH, STEPS, INPUTS])
        r = tf.compat.v1.get_variable("r", [UNITS, UNITS])
        w = tf.compat.v1.get_variable("w", [INPUTS, UNITS])
        loss = tf.reduce_mean(unrolled(x, tf.zeros([BATCH, UNITS]), w, r)[-1] ** 2)
        fetched = [loss, *tf.gradients(loss, [w, r])]
    tfmem.optimize(graph, fetches=[tensor.name for tensor in fetched])
    (line,) = tfmem.report(graph).not_replaced
    assert WITH_GRADIENT in line
