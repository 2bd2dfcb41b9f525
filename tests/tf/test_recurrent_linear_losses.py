"""Functions that give gradients alone, of losses that are linear in a recurrence's output: no loss reads its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.recurrent_training import INPUTS, STEPS, TOLERANCE, UNITS, numbers

L = keras.layers
LAYERS: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: L.LSTM(UNITS),
    "LSTM, sequences": lambda: L.LSTM(UNITS, return_sequences=True),
    "GRU": lambda: L.GRU(UNITS),
    "GRU, sequences": lambda: L.GRU(UNITS, return_sequences=True),
    "SimpleRNN": lambda: L.SimpleRNN(UNITS),
    "SimpleRNN, sequences": lambda: L.SimpleRNN(UNITS, return_sequences=True),
    "backwards": lambda: L.GRU(UNITS, return_sequences=True, go_backwards=True),
    "Bidirectional": lambda: L.Bidirectional(L.LSTM(UNITS)),
    "Bidirectional, sequences": lambda: L.Bidirectional(L.GRU(UNITS, return_sequences=True)),
    "stacked": lambda: keras.Sequential([L.LSTM(UNITS, return_sequences=True), L.GRU(UNITS, return_sequences=True)]),
}


def compared(function: Any, *arguments: Any) -> tfmem.Report:
    """The report of a `tf.function`, optimised, that gave what it gave before."""
    plain = tf.nest.flatten(function(*arguments))
    optimized = tfmem.optimize(function)
    for before, after in zip(plain, tf.nest.flatten(optimized(*arguments)), strict=True):
        np.testing.assert_allclose(after, before, rtol=TOLERANCE, atol=TOLERANCE)
    return tfmem.report(optimized)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LAYERS)
def test_weights_and_inputs(name: str) -> None:
    layer = LAYERS[name]()
    x = tf.constant(numbers(4, STEPS, INPUTS))
    layer(x)
    weights = [weight.value for weight in layer.trainable_weights]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x))
        return tape.gradient(loss, [*weights, x])

    report = compared(step, x)
    assert len(report.replaced) == (2 if name == "stacked" else 1), report
    assert not report.not_replaced


@pytest.mark.parametrize("name", ["LSTM", "GRU, sequences", "Bidirectional, sequences"])
def test_saliency_of_one_unit(name: str) -> None:
    layer = LAYERS[name]()

    @tf.function
    def saliency(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = layer(x)[..., 2]
        return tf.reduce_max(tf.abs(tape.gradient(score, x)), axis=-1)

    x = tf.constant(numbers(3, STEPS, INPUTS))
    layer(x)
    assert len(compared(saliency, x).replaced) == 1


def test_scan() -> None:
    weights = tf.Variable(numbers(UNITS, UNITS) * 0.3)

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            h = tf.scan(lambda h, item: tf.tanh(item + h @ weights), x, tf.zeros([4, UNITS]))
            loss = tf.reduce_sum(h)
        return tape.gradient(loss, [weights, x])

    assert len(compared(step, tf.constant(numbers(STEPS, 4, UNITS))).replaced) == 1


def test_gradients_in_a_graph() -> None:
    results = []
    for optimized in (False, True):
        graph = tf.Graph()
        with graph.as_default():
            x = tf.compat.v1.placeholder(tf.float32, [4, STEPS, INPUTS], name="x")
            weights = [tf.constant(numbers(*shape, seed=seed) * 0.3) for seed, shape in enumerate(
                [(INPUTS, UNITS), (UNITS, UNITS)]
            )]  # fmt: skip

            def step(t: Any, h: Any, out: Any) -> Any:
                h = tf.tanh(tf.gather(x, t, axis=1) @ weights[0] + h @ weights[1])  # noqa: B023
                return t + 1, h, out.write(t, h)

            start = (0, tf.zeros([4, UNITS]), tf.TensorArray(tf.float32, STEPS))
            _, _, out = tf.while_loop(lambda t, h, out: t < STEPS, step, start)
            gradients = tf.gradients(tf.reduce_sum(out.stack()), [x, *weights])
        if optimized:
            tfmem.optimize(graph, fetches=[tensor.name for tensor in gradients])
            assert len(tfmem.report(graph).replaced) == 1
        with tf.compat.v1.Session(graph=graph, config=tfmem.session_config()) as session:
            results.append(session.run(gradients, {x: numbers(4, STEPS, INPUTS)}))
    for before, after in zip(*results, strict=True):
        np.testing.assert_allclose(after, before, rtol=TOLERANCE, atol=TOLERANCE)
