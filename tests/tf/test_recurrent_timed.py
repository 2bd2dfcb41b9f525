"""Recurrences over irregular times: a gate that opens in a part of its period, and states that decay between items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.recurrent_training import INPUTS, TOLERANCE, UNITS, numbers

L = keras.layers
BATCH, STEPS = 3, 11


class Timed(L.Layer):  # type: ignore[misc]
    """A cell whose inputs are `[values, time]`, time in seconds."""

    def __init__(self, kind: Any, states: list[int], step: Callable[..., Any]) -> None:
        super().__init__()
        self.cell, self.step = kind(UNITS), step
        self.state_size, self.output_size = states, UNITS

    def build(self, shape: Any) -> None:
        self.cell.build((None, INPUTS))
        self.period, self.shift = (self.add_weight(shape=[UNITS], initializer="zeros") for _ in range(2))
        self.period.assign(1.0 + np.linspace(0.3, 2.0, UNITS))
        self.shift.assign(np.linspace(-0.4, 0.9, UNITS))

    def call(self, inputs: Any, states: Any) -> Any:
        return self.step(self, inputs[:, :INPUTS], inputs[:, INPUTS:], states)


def openness(self: Timed, time: Any) -> Any:
    """How far each unit is open, by TensorFlow's floormod and where, as a Phased LSTM's authors write it."""
    phase = tf.math.floormod(time - self.shift, self.period) / self.period
    opening = tf.where(phase < 0.1, 2.0 * phase / 0.1, 2.0 - 2.0 * phase / 0.1)
    return tf.where(phase < 0.1, opening, 0.01 * phase)


def phased(self: Timed, x: Any, time: Any, states: Any) -> Any:
    k = openness(self, time)
    new = self.cell(x, states)[1]
    new = [k * after + (1 - k) * before for before, after in zip(states, new, strict=True)]
    return new[0], new


def own_time(self: Timed, x: Any, gap: Any, states: Any) -> Any:
    """The time is a state, which each step moves on by a real number, and wraps around."""
    *before, time = states
    time = tf.math.floormod(time + gap, 7.3)
    k = tf.where(tf.math.floordiv(time, self.period) < 2.0, openness(self, time), 0.5)
    after = self.cell(x, before)[1]
    new = [k * b + (1 - k) * a for a, b in zip(before, after, strict=True)]
    return new[0], [*new, time]


def decaying(self: Timed, x: Any, gap: Any, states: Any) -> Any:
    """GRU-D: the state decays with the time since the last item; missing values are decayed to a mean."""
    known = tf.cast(x > -0.5, tf.float32)
    last = known * x + (1 - known) * states[1]
    share = tf.exp(-tf.nn.relu(gap * tf.abs(self.period[:INPUTS])))
    seen = known * x + (1 - known) * (share * last + (1 - share) * 0.1)
    h = states[0] * tf.exp(-tf.nn.relu(gap * self.period + self.shift))
    new = self.cell(seen, [h])[1][0]
    return new, [new, last]


CELLS: dict[str, Callable[[], Timed]] = {
    "phased GRU": lambda: Timed(L.GRUCell, [UNITS], phased),
    "phased LSTM": lambda: Timed(L.LSTMCell, [UNITS, UNITS], phased),
    "phased LSTM, the time a state": lambda: Timed(L.LSTMCell, [UNITS] * 3, own_time),
    "GRU-D": lambda: Timed(L.GRUCell, [UNITS, INPUTS], decaying),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_irregular_times(name: str, training: bool) -> None:
    layer = L.RNN(CELLS[name](), return_sequences=True)
    layer.build((None, None, INPUTS + 1))
    weights = [weight.value for weight in layer.trainable_weights]
    times = np.random.default_rng(3).uniform(-2, 5, [BATCH, STEPS, 1]).astype("float32")
    x = tf.constant(np.concatenate([numbers(BATCH, STEPS, INPUTS), times], 2))

    @tf.function(input_signature=[tf.TensorSpec([None, None, INPUTS + 1])])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y**2)
        return (loss, tape.gradient(loss, [*weights, x])) if training else y

    optimized = tfmem.optimize(step, passes=("recurrent",))
    for found, expected in zip(tf.nest.flatten(optimized(x)), tf.nest.flatten(step(x)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)
    report = tfmem.report(optimized)
    assert len(report.replaced) == 1, report.not_replaced
    assert not report.not_replaced
