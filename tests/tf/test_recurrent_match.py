"""Recurrent layers as Keras 3 and tf_keras write them, rolled and unrolled: replaced, run, and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.passes.recurrent.match import RECURRENT_OP
from tests.tf.recurrent_replacements import (
    BATCH,
    INPUTS,
    KERAS,
    LENGTHS,
    MASK,
    SEQUENCE,
    STEPS,
    TIME,
    UNITS,
    R,
    W,
    X,
    check,
    compare,
    data,
    plain,
    randomised,
    with_layers_replaced,
)

FORMS: dict[str, Callable[[Any], Any]] = {
    "LSTM": lambda layers: layers.LSTM(UNITS, return_sequences=True),
    "LSTM, last output": lambda layers: layers.LSTM(UNITS),
    "LSTM, states": lambda layers: layers.LSTM(UNITS, return_sequences=True, return_state=True),
    "LSTM, no bias": lambda layers: layers.LSTM(UNITS, use_bias=False),
    "LSTM, one unit": lambda layers: layers.LSTM(1, return_sequences=True),
    "GRU": lambda layers: layers.GRU(UNITS, return_sequences=True, return_state=True),
    "GRU, reset before": lambda layers: layers.GRU(UNITS, reset_after=False, return_sequences=True),
    "SimpleRNN": lambda layers: layers.SimpleRNN(UNITS),
    "backwards": lambda layers: layers.LSTM(UNITS, go_backwards=True, return_sequences=True, return_state=True),
    "activations": lambda layers: layers.LSTM(UNITS, activation="relu", recurrent_activation="hard_sigmoid"),
    "other activations": lambda layers: layers.GRU(UNITS, activation="gelu", recurrent_activation="softsign"),
    "swish": lambda layers: layers.SimpleRNN(UNITS, activation="swish"),
    "selu": lambda layers: layers.SimpleRNN(UNITS, activation="selu"),
    "elu": lambda layers: layers.SimpleRNN(UNITS, activation="elu"),
    "softplus": lambda layers: layers.SimpleRNN(UNITS, activation="softplus"),
    "bidirectional": lambda layers: layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True)),
    "bidirectional, last": lambda layers: layers.Bidirectional(layers.GRU(UNITS), merge_mode="sum"),
    "bidirectional, states": lambda layers: layers.Bidirectional(
        layers.LSTM(UNITS, return_state=True, return_sequences=True)
    ),
    "cell": lambda layers: layers.RNN(layers.LSTMCell(UNITS), return_sequences=True),
    "cells on cells": lambda layers: layers.RNN(
        [layers.LSTMCell(UNITS), layers.GRUCell(UNITS)], return_sequences=True, return_state=True
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_layers(package: Any, form: str) -> None:
    layer = randomised(FORMS[form](package.layers))
    check(layer, [SEQUENCE], [X])


@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
@pytest.mark.parametrize("reset_after", [False, True])
def test_gates_of_the_input_are_read_where_they_lie(package: Any, reset_after: bool) -> None:
    """They are not cut apart first, which would copy them all."""
    layer = randomised(package.layers.GRU(UNITS, reset_after=reset_after))
    plan = check(layer, [SEQUENCE], [X])
    (launch,) = plan.matches[0].launches
    assert launch.cell.sequences == (3,)


@pytest.mark.parametrize("width", [UNITS, UNITS + 1])
def test_parts_of_the_input_that_are_not_all_read(width: int) -> None:
    weights = data(INPUTS, 3 * width, seed=2)

    def run(x: Any) -> Any:
        h, outputs = tf.zeros([tf.shape(x)[1], UNITS]), tf.TensorArray(tf.float32, TIME)

        def body(t: Any, written: Any, h: Any) -> Any:
            first, _, last = (part[:, :UNITS] for part in tf.split(x[t] @ weights, 3, -1))
            h = tf.tanh(first + h @ R * tf.sigmoid(last))
            return t + 1, written.write(t, h), h

        return tf.while_loop(lambda t, *_: t < TIME, body, (0, outputs, h))[2]

    check(run, [tf.TensorSpec([TIME, None, INPUTS])], [STEPS])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
@pytest.mark.parametrize(
    "make",
    [
        lambda layers: layers.LSTM(UNITS),
        lambda layers: layers.GRU(UNITS, return_sequences=True, return_state=True),
        lambda layers: layers.SimpleRNN(UNITS, go_backwards=True, return_sequences=True),
        lambda layers: layers.RNN(layers.LSTMCell(UNITS), return_sequences=True, zero_output_for_mask=True),
        lambda layers: layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True)),
    ],
    ids=["LSTM", "GRU", "backwards", "zeros where masked", "bidirectional"],
)
def test_masks(package: Any, make: Callable[[Any], Any]) -> None:
    layer = randomised(make(package.layers))
    holes = np.random.default_rng(1).random((BATCH, TIME)) < 0.5
    check(lambda x, mask: layer(x, mask=mask), [SEQUENCE, MASK], [X, LENGTHS])
    check(lambda x, mask: layer(x, mask=mask), [SEQUENCE, MASK], [X, holes])


@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
def test_initial_states(package: Any) -> None:
    layer = randomised(package.layers.LSTM(UNITS, return_sequences=True, return_state=True))
    state = tf.TensorSpec([None, UNITS])
    values = [X, data(BATCH, UNITS, seed=1), data(BATCH, UNITS, seed=2)]
    check(lambda x, h, c: layer(x, initial_state=[h, c]), [SEQUENCE, state, state], values)


@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
def test_stateful_layers_keep_their_state(package: Any) -> None:
    layer = package.layers.LSTM(UNITS, stateful=True)
    layer.build((BATCH, TIME, INPUTS))
    check(layer, [tf.TensorSpec(X.shape)], [X])


@pytest.mark.parametrize("shape", [(BATCH, TIME), (1, TIME), (BATCH, 1), (None, TIME), (BATCH, None), (1, None)])
def test_shapes_that_are_known(shape: tuple[int | None, int | None]) -> None:
    layers = [
        randomised(keras.layers.LSTM(UNITS, return_sequences=True), (*shape, INPUTS)),
        randomised(keras.layers.GRU(2 * UNITS), (*shape, UNITS)),
    ]
    value = X[: shape[0], : shape[1]]
    plan = check(lambda x: layers[1](layers[0](x)), [tf.TensorSpec([*shape, INPUTS])], [value], launches=2)
    assert [launch.batch for match in plan.matches for launch in match.launches] == 2 * [shape[0]]


@pytest.mark.parametrize("shape", [(BATCH, 1), (1, TIME), (0, TIME), (1, 1)])
def test_shapes_that_are_not_known(shape: tuple[int, int]) -> None:
    layer = randomised(keras.layers.Bidirectional(keras.layers.LSTM(UNITS, return_sequences=True)))
    check(layer, [SEQUENCE], [data(*shape, INPUTS)])


def test_no_steps_at_all() -> None:
    """The original cannot even stack nothing where the batch is unknown; its states are what they were."""
    layer = randomised(keras.layers.GRU(UNITS, return_state=True))
    trace, replaced, *_ = with_layers_replaced(
        lambda x, h: layer(x, initial_state=h)[1], SEQUENCE, tf.TensorSpec([None, UNITS])
    )
    compare(trace, replaced, [data(BATCH, 0, INPUTS), data(BATCH, UNITS)])


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_float16", 4e-3), ("mixed_bfloat16", 3e-2), ("float64", 1e-12)]
)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_types(policy: str, tolerance: float, kind: str) -> None:
    layer = randomised(getattr(keras.layers, kind)(UNITS, dtype=policy, return_sequences=True))
    dtype = "float64" if policy == "float64" else "float32"
    check(layer, [tf.TensorSpec(SEQUENCE.shape, dtype)], [X.astype(dtype)], tolerance=tolerance)


@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
def test_dropout_of_states(package: Any, kind: str) -> None:
    settings = {"seed": 1} if package is keras else {}
    layer = randomised(getattr(package.layers, kind)(UNITS, recurrent_dropout=0.4, dropout=0.3, **settings))
    trace, replaced, plan, ops = with_layers_replaced(lambda x: layer(x, training=True), SEQUENCE)
    assert ops.count(RECURRENT_OP) == 1, str(plan)
    if package is keras:  # its masks come from a seed that is a variable; others draw other numbers in each call
        compare(trace, replaced, [X])


@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
@pytest.mark.parametrize("units", [UNITS, 1])
def test_layer_normalisation_in_a_cell(package: Any, units: int) -> None:
    """Equal weights each time: with some, in one of 60 draws, four units are normalised that hardly differ, and
    float32 is off from float64 by 1e-5, before and after."""
    package.utils.set_random_seed(0)

    class Cell(package.layers.Layer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.state_size, self.output_size = [units, units], units
            self.norms = [package.layers.LayerNormalization(epsilon=1e-3) for _ in range(3)]

        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(INPUTS, 4 * units), name="kernel")
            self.recurrent = self.add_weight(shape=(units, 4 * units), name="recurrent")
            for norm, width in zip(self.norms, (4 * units, 4 * units, units), strict=True):
                norm.build((None, width))
            self.built = True

        def call(self, x: Any, states: Any, training: Any = None) -> Any:
            gates = self.norms[0](tf.matmul(x, self.kernel)) + self.norms[1](tf.matmul(states[0], self.recurrent))
            i, f, g, o = tf.split(gates, 4, axis=1)
            c = self.norms[2](tf.sigmoid(f) * states[1] + tf.sigmoid(i) * tf.tanh(g))
            h = tf.sigmoid(o) * tf.tanh(c)
            return h, [h, c]

    cell = Cell()
    layer = package.layers.RNN(cell, return_sequences=True)
    layer.build((None, None, INPUTS))
    check(layer, [SEQUENCE], [X], tolerance=2e-5)


UNROLLED: dict[str, Callable[[Any], Any]] = {
    "LSTM": lambda layers: layers.LSTM(UNITS, unroll=True, return_sequences=True),
    "LSTM, last output": lambda layers: layers.LSTM(UNITS, unroll=True),
    "GRU": lambda layers: layers.GRU(UNITS, unroll=True, return_sequences=True, return_state=True),
    "GRU, reset before": lambda layers: layers.GRU(UNITS, unroll=True, reset_after=False),
    "SimpleRNN": lambda layers: layers.SimpleRNN(UNITS, unroll=True),
    "backwards": lambda layers: layers.LSTM(UNITS, unroll=True, go_backwards=True, return_sequences=True),
    "bidirectional": lambda layers: layers.Bidirectional(layers.LSTM(UNITS, unroll=True, return_sequences=True)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
@pytest.mark.parametrize("form", UNROLLED)
@pytest.mark.parametrize("length", [3, TIME])
def test_unrolled_layers(package: Any, form: str, length: int) -> None:
    layer = randomised(UNROLLED[form](package.layers), (None, length, INPUTS))
    plan = check(layer, [tf.TensorSpec([None, length, INPUTS])], [X[:, :length]])
    assert {match.carrier for match in plan.matches} == {"unrolled"}


@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_unrolled_layers_with_masks(package: Any, kind: str) -> None:
    layer = randomised(getattr(package.layers, kind)(UNITS, unroll=True), (None, TIME, INPUTS))
    specs = [tf.TensorSpec([None, TIME, INPUTS]), tf.TensorSpec([None, TIME], tf.bool)]
    check(lambda x, mask: layer(x, mask=mask), specs, [X, LENGTHS])


def test_unrolled_layers_behind_each_other() -> None:
    first = randomised(keras.layers.LSTM(UNITS, unroll=True, return_sequences=True), (None, TIME, INPUTS))
    second = randomised(keras.layers.LSTM(UNITS, unroll=True), (None, TIME, UNITS))
    dense = randomised(keras.layers.Dense(2), (None, UNITS))
    check(lambda x: dense(second(first(x))), [tf.TensorSpec([None, TIME, INPUTS])], [X], launches=2)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_python_loop(axis: int) -> None:
    def run(x: Any) -> Any:
        h = tf.zeros([tf.shape(x)[1 - axis], UNITS])
        outputs = []
        for item in tf.unstack(x, axis=axis):
            h = plain(item, h)
            outputs.append(h)
        return tf.stack(outputs, axis), h

    shape = [None, None, INPUTS]
    shape[axis] = TIME
    check(run, [tf.TensorSpec(shape)], [STEPS if axis == 0 else X])


def test_steps_that_no_cell_can_say_stay_unrolled() -> None:
    def run(x: Any) -> Any:
        h = tf.zeros([tf.shape(x)[0], UNITS])
        for item in tf.unstack(x, axis=1):
            h = tf.math.lgamma(item @ W + h @ R)
        return h

    *_, plan, ops = with_layers_replaced(run, tf.TensorSpec([None, TIME, INPUTS]))
    assert ops.count("Lgamma") == TIME
    assert [loop.carrier for loop in plan.unmatched] == ["unrolled"]


def test_items_that_do_not_meet_are_no_recurrence() -> None:
    def run(x: Any) -> Any:
        return tf.add_n([item @ W for item in tf.unstack(x, axis=1)])

    *_, plan, ops = with_layers_replaced(run, tf.TensorSpec([None, TIME, INPUTS]))
    assert ops.count("MatMul") == TIME
    assert not plan.matches
    assert not plan.unmatched


def test_a_model_with_an_embedding() -> None:
    model = keras.Sequential(
        [
            keras.layers.Embedding(10, 6, mask_zero=True),
            keras.layers.Bidirectional(keras.layers.LSTM(UNITS, return_sequences=True)),
            keras.layers.Bidirectional(keras.layers.GRU(UNITS)),
            keras.layers.Dense(1),
        ]
    )
    words = np.random.default_rng(0).integers(0, 10, (BATCH, TIME)).astype("int32")
    model(words)
    check(model, [tf.TensorSpec([None, None], tf.int32)], [words], launches=2)


def test_optimize_without_a_budget_replaces_and_reports() -> None:
    model = keras.Sequential([keras.layers.Input((None, INPUTS)), randomised(keras.layers.LSTM(UNITS))])
    expected = model.predict(X, verbose=0)
    tfmem.optimize(model)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, atol=1e-6)
    report = tfmem.report(model)
    assert report.decision == "replaced"
    assert len(report.replaced) == 1
    assert "recurrent" in report.passes
    assert tfmem.Report.from_json(report.to_json()) == report


def test_optimize_leaves_alone_what_has_no_recurrence() -> None:
    dense = keras.layers.Dense(3)
    dense.build((None, INPUTS))
    trace = tf.function(dense).get_concrete_function(tf.TensorSpec([None, INPUTS]))
    assert tfmem.optimize(trace) is trace
