"""Variables to which every step adds the same, as a generator of keras.random: the stream and what is left stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.recurrent_training import INPUTS, STEPS, TOLERANCE, UNITS, numbers

L = keras.layers
BATCH = 3


class Drawing(L.Layer):  # type: ignore[misc]
    """A GRU cell whose step draws in one way or another."""

    def __init__(self, draw: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.cell, self.seeds, self.draw = L.GRUCell(UNITS), keras.random.SeedGenerator(1), draw
        self.state_size, self.output_size = [UNITS], UNITS

    def build(self, shape: Any) -> None:
        self.cell.build(shape)

    def call(self, x: Any, states: Any) -> Any:
        new = self.draw(states[0], self.cell(x, states)[1][0], self.seeds)
        return new, [new]


def zoneout(old: Any, new: Any, seeds: Any) -> Any:
    return keras.ops.where(keras.random.uniform(keras.ops.shape(old), seed=seeds) < 0.3, old, new)


def dropped(_: Any, new: Any, seeds: Any) -> Any:
    return keras.random.dropout(new, 0.3, seed=seeds)


def noisy(_: Any, new: Any, seeds: Any) -> Any:
    return new + 0.1 * keras.random.normal([BATCH, UNITS], seed=seeds)


def both(old: Any, new: Any, seeds: Any) -> Any:
    """Two draws from one generator."""
    return dropped(old, zoneout(old, new, seeds), seeds)


def outcome(function: Any, variable: tf.Variable, x: Any) -> tuple[list[Any], list[int]]:
    """What two calls give, and what they leave in the variable, from the same start."""
    variable.assign(tf.constant([1, 5], variable.dtype) if variable.shape.rank else tf.constant(5, variable.dtype))
    found = [np.asarray(each) for _ in range(2) for each in tf.nest.flatten(function(x))]
    return found, variable.numpy().tolist()


def check(function: Any, variable: tf.Variable, x: Any) -> tfmem.Report:
    expected, left = outcome(function, variable, x)
    optimized = tfmem.optimize(function, passes=("recurrent",))
    found, now = outcome(optimized, variable, x)
    assert now == left
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    return tfmem.report(optimized)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("draw", [zoneout, dropped, noisy, both], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("backwards", [False, True])
def test_keras_random_in_a_cell(draw: Any, training: bool, backwards: bool) -> None:
    cell = Drawing(draw)
    layer = L.RNN(cell, return_sequences=True, go_backwards=backwards)
    layer.build((None, None, INPUTS))
    weights, state = [weight.value for weight in layer.trainable_weights], cell.seeds.state.value

    @tf.function
    def step(x: Any) -> Any:
        x = keras.random.dropout(x, 0.2, seed=cell.seeds)  # the same generator, before and behind
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(y**2)
        behind = keras.random.uniform([4], seed=cell.seeds)
        return (loss, tape.gradient(loss, [*weights, x]), behind) if training else (y, behind)

    report = check(step, state, tf.constant(numbers(BATCH, STEPS, INPUTS)))
    assert len(report.replaced) == 1
    assert not report.not_replaced


@pytest.mark.long
def test_fit() -> None:
    """The losses of `fit`, whose step assigns the weights as well."""

    def losses(optimized: bool) -> tuple[list[float], list[int]]:
        keras.utils.set_random_seed(0)
        cell = Drawing(both)
        model = keras.Sequential([keras.Input([STEPS, INPUTS]), L.RNN(cell), L.Dense(1)])
        model.compile("adam", "mse")
        if optimized:
            model = tfmem.optimize(model)
        x, y = numbers(12, STEPS, INPUTS), numbers(12, 1)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False).history["loss"]
        if optimized:
            assert tfmem.report(model).replaced
        return history, cell.seeds.state.numpy().tolist()

    (plain, left), (found, now) = losses(False), losses(True)
    np.testing.assert_allclose(found, plain, rtol=1e-4)
    assert now == left == [1, 2 * (STEPS + 1) * 8]  # Keras runs one step in front of the loop


# ---- variables of a program's own ----


R = tf.constant(numbers(UNITS, UNITS) * 0.4)


def counting(change: Callable[[tf.Variable, Any], Any], dtype: Any, bound: bool = False) -> tuple[Any, tf.Variable]:
    """A loop whose step changes a variable, and returns what the state is to be multiplied with."""
    variable = tf.Variable(5, dtype=dtype)

    @tf.function(autograph=False)
    def run(x: Any) -> Any:
        items = tf.transpose(x, [1, 0, 2])

        def body(i: Any, h: Any) -> Any:
            return i + 1, tf.tanh(h @ R + items[i][:, :1]) * change(variable, items[i])

        def goes_on(i: Any, _: Any) -> Any:
            return i < (tf.minimum(STEPS, tf.cast(variable, tf.int32)) if bound else STEPS)

        h = tf.while_loop(goes_on, body, [0, tf.zeros([BATCH, UNITS])])[1]
        return h, variable.read_value()

    return run, variable


def share(variable: Any) -> Any:
    return 1 / tf.cast(variable, tf.float32)


def read_between(variable: tf.Variable, _: Any) -> Any:
    before = share(variable.read_value())
    variable.assign_add(2)
    between = share(variable.read_value())
    variable.assign(variable + 3)
    return before + between + share(variable.read_value())


def added(variable: tf.Variable, _: Any) -> Any:
    variable.assign_add(1)
    return 1.0


def added_item(variable: tf.Variable, item: Any) -> Any:
    variable.assign_add(tf.cast(item[0, 0] * 10, variable.dtype))
    return share(variable.read_value())


def doubled(variable: tf.Variable, _: Any) -> Any:
    variable.assign(variable * 2)
    return share(variable.read_value())


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("change", [read_between, added], ids=lambda change: change.__name__)
def test_whole_numbers(change: Any, dtype: Any) -> None:
    run, variable = counting(change, dtype)
    report = check(run, variable, tf.constant(numbers(BATCH, STEPS, INPUTS)))
    assert report.replaced
    assert not report.not_replaced


KEPT: Sequence[tuple[Any, Any, bool]] = (
    (added, tf.float32, False),
    (added_item, tf.int64, False),
    (doubled, tf.int64, False),
    (added, tf.int64, True),
)


@pytest.mark.parametrize(("change", "dtype", "bound"), KEPT)
def test_other_assignments_stay(change: Any, dtype: Any, bound: bool) -> None:
    run, variable = counting(change, dtype, bound)
    report = check(run, variable, tf.constant(numbers(BATCH, STEPS, INPUTS)))
    assert not report.replaced
    assert "assigns a variable" in report.not_replaced[0]
