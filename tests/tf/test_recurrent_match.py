"""Recurrent layers in graphs as Keras 3, tf_keras and people write them: swapped, run, and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from custom_ops.load import load
from graph_passes.recurrent.match import RECURRENT_OP, RecurrentPlan
from tfmem.capture.function import capture_concrete, restore_concrete
from tfmem.devices import find_target
from tfmem.recurrent import swap_recurrent

LOOPS = ("While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall", "LoopCond")
UNITS, INPUTS, TIME, BATCH = 4, 3, 7, 5
SEQUENCE = tf.TensorSpec([None, None, INPUTS], tf.float32)
MASK = tf.TensorSpec([None, None], tf.bool)


@pytest.fixture(autouse=True, scope="module")
def _ops() -> None:
    load()


def data(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype("float32")


X = data(BATCH, TIME, INPUTS)
LENGTHS = np.arange(TIME)[None] < np.array([7, 3, 1, 0, 5])[:, None]


def swap(function: Callable[..., Any], *specs: Any) -> tuple[Any, Any, RecurrentPlan, list[str]]:
    """The trace, the swapped function, what was done, and the op types that run."""
    trace = tf.function(autograph=False)(lambda *inputs: function(*inputs)).get_concrete_function(*specs)  # noqa: PLW0108
    captured, plan = swap_recurrent(capture_concrete(trace), find_target("", load()), tfmem.Options())
    ops = [node.op for node in captured.graph_def.node]
    return trace, restore_concrete(trace, captured, captured.graph_def), plan, ops


def check(
    function: Callable[..., Any],
    specs: Sequence[Any],
    values: Sequence[Any],
    launches: int = 1,
    tolerance: float = 1e-5,
) -> RecurrentPlan:
    """All loops are swapped, for so many launches, and compute the same."""
    trace, swapped, plan, ops = swap(function, *specs)
    assert not plan.unmatched, str(plan)
    assert ops.count(RECURRENT_OP) == launches, str(plan)
    assert not set(ops) & set(LOOPS)
    compare(trace, swapped, values, tolerance)
    return plan


def compare(trace: Any, swapped: Any, values: Sequence[Any], tolerance: float = 1e-5) -> None:
    before = [variable.numpy() for variable in trace.graph.variables]
    arguments = [tf.constant(value) for value in values]
    expected = tf.nest.flatten(trace(*arguments))
    written = [variable.numpy() for variable in trace.graph.variables]
    for variable, value in zip(trace.graph.variables, before, strict=True):
        variable.assign(value)
    found = tf.nest.flatten(swapped(*arguments))
    for new, old in zip(found, expected, strict=True):
        assert new.dtype == old.dtype
        numbers = [tf.cast(each, tf.float64).numpy() for each in (new, old)]
        np.testing.assert_allclose(*numbers, rtol=tolerance, atol=tolerance)
    for variable, value in zip(trace.graph.variables, written, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=tolerance, atol=tolerance)


def randomised(layer: Any, shape: Sequence[int | None] = (None, None, INPUTS)) -> Any:
    """`layer`, built, with weights that are no special case (biases and gains of 0 and 1 are)."""
    layer.build(tuple(shape))
    for seed, weight in enumerate(layer.weights):
        if "float" in str(weight.dtype) and tuple(weight.shape):
            weight.assign(data(*weight.shape, seed=seed, scale=0.5))
    return layer


KERAS = [keras, tf_keras]
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


@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_layers(package: Any, form: str) -> None:
    layer = randomised(FORMS[form](package.layers))
    check(layer, [SEQUENCE], [X])


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
    check(lambda x: layers[1](layers[0](x)), [tf.TensorSpec([*shape, INPUTS])], [value], launches=2)


@pytest.mark.parametrize("shape", [(BATCH, 1), (1, TIME), (0, TIME), (1, 1)])
def test_shapes_that_are_not_known(shape: tuple[int, int]) -> None:
    layer = randomised(keras.layers.Bidirectional(keras.layers.LSTM(UNITS, return_sequences=True)))
    check(layer, [SEQUENCE], [data(*shape, INPUTS)])


def test_no_steps_at_all() -> None:
    """The original cannot even stack nothing where the batch is unknown; its states are what they were."""
    layer = randomised(keras.layers.GRU(UNITS, return_state=True))
    trace, swapped, *_ = swap(lambda x, h: layer(x, initial_state=h)[1], SEQUENCE, tf.TensorSpec([None, UNITS]))
    compare(trace, swapped, [data(BATCH, 0, INPUTS), data(BATCH, UNITS)])


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
    trace, swapped, plan, ops = swap(lambda x: layer(x, training=True), SEQUENCE)
    assert ops.count(RECURRENT_OP) == 1, str(plan)
    if package is keras:  # its masks come from a seed that is a variable; others draw anew in each call
        compare(trace, swapped, [X])


@pytest.mark.parametrize("package", KERAS, ids=lambda package: package.__name__)
@pytest.mark.parametrize("units", [UNITS, 1])
def test_layer_normalisation_in_a_cell(package: Any, units: int) -> None:
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
            h = tf.nn.softmax(item @ W + h @ R)
        return h

    *_, plan, ops = swap(run, tf.TensorSpec([None, TIME, INPUTS]))
    assert ops.count("Softmax") == TIME
    assert [loop.carrier for loop in plan.unmatched] == ["unrolled"]


def test_items_that_do_not_meet_are_no_recurrence() -> None:
    def run(x: Any) -> Any:
        return tf.add_n([item @ W for item in tf.unstack(x, axis=1)])

    *_, plan, ops = swap(run, tf.TensorSpec([None, TIME, INPUTS]))
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


# Loops by hand. Time is the first dimension.

W, R = data(INPUTS, UNITS, seed=1, scale=0.5), data(UNITS, UNITS, seed=2, scale=0.5)
WR, B = data(INPUTS + UNITS, 4 * UNITS, seed=3, scale=0.5), data(4 * UNITS, seed=4)
STEPS = X.transpose(1, 0, 2)


def loop(step: Callable[..., Any], states: int = 1, size: int = UNITS) -> Callable[[Any], Any]:
    """`step(x, states, time) -> output, states`, over TensorArrays."""

    def run(x: Any) -> Any:
        time, batch = tf.shape(x)[0], tf.shape(x)[1]
        inputs = tf.TensorArray(tf.float32, size=time).unstack(x)
        outputs = tf.TensorArray(tf.float32, size=time)

        def body(t: Any, written: Any, *before: Any) -> Any:
            output, after = step(inputs.read(t), before, t)
            return (t + 1, written.write(t, output), *after)

        start = [tf.zeros([batch, size]) for _ in range(states)]
        end = tf.while_loop(lambda t, *_: t < time, body, (0, outputs, *start))
        return (end[1].stack(), *end[2:])

    return run


def plain(x: Any, h: Any) -> Any:
    return tf.tanh(x @ W + h @ R)


def joined_lstm(x: Any, states: Any, _: Any) -> Any:
    c, h = states
    i, j, f, o = tf.split(tf.concat([x, h], 1) @ WR + B, 4, 1)
    c = c * tf.sigmoid(f + 1.0) + tf.sigmoid(i) * tf.tanh(j)
    h = tf.tanh(c) * tf.sigmoid(o)
    return h, [c, h]


def nas(x: Any, states: Any, _: Any) -> Any:
    c, m = states
    weights = data(INPUTS, 8 * UNITS, seed=5), data(UNITS, 8 * UNITS, seed=6, scale=0.5)
    inputs, hidden = (tf.split(part, 8, 1) for part in (x @ weights[0], m @ weights[1]))
    kinds = [tf.sigmoid, tf.nn.relu, tf.sigmoid, tf.nn.relu, tf.tanh, tf.sigmoid, tf.tanh, tf.sigmoid]
    first = [kind(a * b if place == 3 else a + b) for place, (kind, a, b) in enumerate(zip(kinds, inputs, hidden))]  # noqa: B905
    c = tf.tanh(tf.tanh(first[0] * first[1]) + c) * tf.tanh(first[2] + first[3])
    m = tf.tanh(c * tf.tanh(tf.tanh(first[4] * first[5]) + tf.sigmoid(first[6] + first[7])))
    return m, [c, m]


def one(change: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    def step(x: Any, states: Any, t: Any) -> Any:
        h = change(x, states[0], t)
        return h, [h]

    return step


def wide(x: Any, states: Any, _: Any) -> Any:
    h = plain(x, states[0])
    return tf.concat([h, states[0]], 1), [h]


def with_output(output: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(x: Any, states: Any, _: Any) -> Any:
        h = plain(x, states[0])
        return output(x, h), [h]

    return step


BY_HAND: dict[str, tuple[Callable[[Any], Any]]] = {
    "simple": (loop(one(lambda x, h, t: plain(x, h))),),
    "inputs and state in one product": (loop(joined_lstm, 2),),
    "NAS": (loop(nas, 2),),
    "transposed weights": (loop(one(lambda x, h, t: tf.tanh(x @ W + tf.matmul(h, R, transpose_b=True)))),),
    "the step's number": (loop(one(lambda x, h, t: tf.tanh(x @ W + (h @ R) / tf.cast(t + 1, tf.float32)))),),
    "unit length": (loop(one(lambda x, h, t: tf.math.l2_normalize(x @ W + h @ R, -1))),),
    "a gate for each row": (loop(one(lambda x, h, t: tf.sigmoid(tf.reduce_sum(h, 1, keepdims=True)) * plain(x, h))),),
    "a state that stays": (loop(lambda x, s, t: (plain(x, s[0]) + s[1], [plain(x, s[0]), s[1]]), 2),),
    "an output of one number a row": (loop(with_output(lambda x, h: tf.reduce_sum(h, 1))),),
    "an output of one column": (loop(with_output(lambda x, h: tf.reduce_max(x, 1, keepdims=True))),),
    "an output of another width": (loop(with_output(lambda x, h: h @ data(UNITS, 9))),),
    "probabilities": (loop(with_output(lambda x, h: tf.nn.softmax(h @ data(UNITS, 9) + x @ data(INPUTS, 9)))),),
    "an output of two columns": (loop(wide),),
    "an output without the state": (loop(with_output(lambda x, h: 2 * x)),),
    "maximum iterations": (
        lambda x: tf.while_loop(
            lambda t, h: t < tf.shape(x)[0],
            lambda t, h: (t + 1, plain(tf.gather(x, t), h)),
            (0, tf.zeros([tf.shape(x)[1], UNITS])),
            maximum_iterations=3,
        ),
    ),
    "items of a tensor": (
        lambda x: tf.while_loop(
            lambda t, h: t < tf.shape(x)[1],
            lambda t, h: (t + 1, plain(x[:, t, :], h)),
            (0, tf.zeros([tf.shape(x)[0], UNITS])),
        ),
    ),
    "scan": (lambda x: tf.scan(lambda h, item: plain(item, h), x, tf.zeros([tf.shape(x)[1], UNITS])),),
    "foldl": (lambda x: tf.foldl(lambda h, item: plain(item, h), x, tf.zeros([tf.shape(x)[1], UNITS])),),
    "reversed": (lambda x: loop(one(lambda x, h, t: plain(x, h)))(x[::-1]),),
    "no inputs": (lambda x: tf.while_loop(lambda t, h: t < 5, lambda t, h: (t + 1, tf.tanh(h @ R)), (0, x[0] @ W)),),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_loops_by_hand(name: str) -> None:
    check(BY_HAND[name][0], [SEQUENCE], [STEPS])


def test_lengths_compared_with_the_step() -> None:
    def run(x: Any, lengths: Any) -> Any:
        return loop(one(lambda x, h, t: tf.where((t < lengths)[:, None], plain(x, h), h)))(x)

    check(run, [SEQUENCE, tf.TensorSpec([None], tf.int32)], [STEPS, np.array([7, 3, 1, 0, 5], "int32")])


def test_rows_that_are_the_same_for_the_whole_batch() -> None:
    def run(x: Any, h: Any, gate: Any) -> Any:
        def step(t: Any, h: Any) -> Any:
            return t + 1, plain(x[t], h) * gate + tf.reduce_sum(x[t], 1, keepdims=True)

        return tf.while_loop(lambda t, h: t < tf.shape(x)[0], step, (0, h))[1]

    specs = [tf.TensorSpec([None, 1, INPUTS]), tf.TensorSpec([None, UNITS]), tf.TensorSpec([None, UNITS])]
    for rows in (1, BATCH):  # of the gate
        check(run, specs, [STEPS[:, :1], data(BATCH, UNITS, seed=7), data(rows, UNITS, seed=8)])


def test_autograph() -> None:
    @tf.function
    def run(x: Any) -> Any:
        h = tf.zeros([tf.shape(x)[1], UNITS])
        for t in tf.range(tf.shape(x)[0]):
            h = plain(x[t], h)
        return h

    check(run, [SEQUENCE], [STEPS])


NOT_MATCHED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a condition on data": (
        lambda x: tf.while_loop(lambda h: tf.reduce_sum(h) < 5, lambda h: [tf.tanh(h @ R) + 1], [x[0] @ W]),
        "not a count of steps",
    ),
    "a mean over the batch": (
        loop(one(lambda x, h, t: plain(x, h) - tf.reduce_mean(h, 0))),
        r"'while/Mean' \(Mean\) sums over the batch",
    ),
    "an op without a word": (loop(one(lambda x, h, t: tf.nn.softmax(h @ R) + x @ W)), "'while/Softmax' is a Softmax"),
    "a random op": (
        loop(one(lambda x, h, t: plain(x, h) * tf.cast(tf.random.categorical(h, 1), tf.float32))),
        r"Multinomial\) has side effects, or is random",
    ),
    "a product with itself": (
        loop(one(lambda x, h, t: plain(x, h @ tf.matmul(h, h, transpose_a=True)))),
        r"MatMul\) is not a product of a state with a fixed matrix",
    ),
    "widths that differ": (
        lambda x: tf.while_loop(
            lambda t, h, c: t < 3,
            lambda t, h, c: (t + 1, tf.tanh(h @ R), c),
            (0, x[0] @ W, x[0]),
        )[1:],
        "",
    ),
}


@pytest.mark.parametrize("name", NOT_MATCHED)
def test_what_a_cell_cannot_say_stays(name: str) -> None:
    function, reason = NOT_MATCHED[name]
    trace, swapped, plan, ops = swap(function, SEQUENCE)
    if not reason:  # the third variable never changes, so it is no state
        assert ops.count(RECURRENT_OP) == 1
        compare(trace, swapped, [STEPS])
        return
    assert RECURRENT_OP not in ops
    assert set(ops) & set(LOOPS)
    with pytest.raises(AssertionError, match=reason):
        assert not plan.unmatched, str(plan)


def test_stacked_cells_of_different_width_stay() -> None:
    cells = [keras.layers.LSTMCell(UNITS), keras.layers.LSTMCell(UNITS + 1)]
    layer = randomised(keras.layers.RNN(cells))
    *_, plan, ops = swap(layer, SEQUENCE)
    assert RECURRENT_OP not in ops
    assert "states of different widths" in plan.unmatched[0].reason


def test_a_loop_that_data_decides_about_stays() -> None:
    layer = randomised(keras.layers.LSTM(UNITS))

    def run(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: layer(x), lambda: tf.zeros([tf.shape(x)[0], UNITS]))

    *_, plan, ops = swap(run, SEQUENCE)
    assert RECURRENT_OP not in ops
    assert plan.unmatched[0].carrier == "If"
    assert "whether it runs is decided by data" in plan.unmatched[0].reason


@pytest.mark.parametrize("activation", [tf.tanh, tf.nn.softmax])
def test_an_implementation_is_inlined_only_if_it_is_swapped(activation: Callable[[Any], Any]) -> None:
    """Grappler may still choose another one, such as cuDNN's."""

    @tf.function(autograph=False, experimental_attributes={"api_implements": "mine", "api_preferred_device": "CPU"})
    def run(x: Any) -> Any:
        return loop(one(lambda x, h, t: activation(x @ W + h @ R)))(x)

    trace, swapped, plan, ops = swap(lambda x: run(x)[0], SEQUENCE)
    if activation is tf.tanh:
        assert ops.count(RECURRENT_OP) == 1
        assert not set(ops) & set(LOOPS)
        compare(trace, swapped, [STEPS])
    else:
        assert "PartitionedCall" in ops
        assert [loop.carrier for loop in plan.unmatched] == ["StatelessWhile"]
        assert "Softmax" in plan.unmatched[0].reason


def test_assignments_in_a_loop_stay() -> None:
    counted = tf.Variable(0.0)

    def run(x: Any) -> Any:
        def body(t: Any, h: Any) -> Any:
            counted.assign_add(1.0)
            return t + 1, plain(x[t], h)

        return tf.while_loop(lambda t, h: t < tf.shape(x)[0], body, (0, tf.zeros([tf.shape(x)[1], UNITS])))[1]

    *_, plan, ops = swap(run, SEQUENCE)
    assert RECURRENT_OP not in ops
    assert "AssignAddVariableOp) has side effects" in plan.unmatched[0].reason


def test_weights_are_read_when_the_function_runs() -> None:
    layer = randomised(keras.layers.LSTM(UNITS))
    trace, swapped, *_ = swap(layer, SEQUENCE)
    for weight in layer.weights:
        weight.assign(weight * 0.5)
    compare(trace, swapped, [X])


def test_equal_layers_give_equal_cells() -> None:
    cells = set()
    for _ in range(2):
        layer = randomised(keras.layers.LSTM(UNITS, return_sequences=True))
        *_, plan, _ops = swap(layer, SEQUENCE)
        cells.add(plan.matches[0].launches[0].cell.to_text())
    assert len(cells) == 1


def test_nan_and_infinity_propagate() -> None:
    layer = randomised(keras.layers.LSTM(UNITS, return_sequences=True))
    value = X.copy()
    value[0, 3, 0], value[1, 2, 1] = np.nan, np.inf
    check(layer, [SEQUENCE], [value])


# Random cells.

UNARY = [tf.tanh, tf.sigmoid, tf.nn.relu, tf.nn.softplus, tf.nn.elu, tf.sin, tf.square, tf.negative, tf.nn.softsign]
BINARY = [tf.add, tf.multiply, tf.subtract, tf.maximum, tf.minimum]


@st.composite
def random_steps(draw: Any) -> tuple[Callable[..., Any], int, int]:
    """A step of random ops over random states, bounded by a tanh in the end."""
    units, states = draw(st.sampled_from([1, 2, 3, 5])), draw(st.integers(1, 3))
    program = draw(
        st.lists(
            st.tuples(st.sampled_from(["unary", "binary", "product", "vector", "mean"]), *[st.integers(0, 99)] * 3),
            min_size=3,
            max_size=12,
        )
    )
    chosen = draw(st.lists(st.integers(0, 99), min_size=states + 1, max_size=states + 1))

    def step(x: Any, before: Any, _: Any) -> Any:
        values = [*before, x @ data(INPUTS, units, seed=9)]
        for kind, a, b, c in program:
            left, right = values[a % len(values)], values[b % len(values)]
            if kind == "unary":
                values.append(UNARY[c % len(UNARY)](left))
            elif kind == "binary":
                values.append(BINARY[c % len(BINARY)](left, right))
            elif kind == "product":
                values.append(tf.tanh(left @ data(units, units, seed=c, scale=0.5)))
            elif kind == "vector":
                values.append(left * data(units, seed=c))
            else:
                values.append(left - tf.reduce_mean(left, -1, keepdims=True))
        ends = [tf.tanh(values[place % len(values)]) for place in chosen]
        return ends[0], ends[1:]

    return step, states, units


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(random_steps())
def test_random_cells(case: tuple[Callable[..., Any], int, int]) -> None:
    step, states, units = case
    trace, swapped, plan, ops = swap(loop(step, states, units), SEQUENCE)
    if plan.unmatched:  # optimised away: no state is left
        assert "no state" in plan.unmatched[0].reason
        return
    assert ops.count(RECURRENT_OP) == 1
    compare(trace, swapped, [STEPS], 5e-5)


def test_optimize_without_a_budget_swaps_and_reports() -> None:
    model = keras.Sequential([keras.layers.Input((None, INPUTS)), randomised(keras.layers.LSTM(UNITS))])
    expected = model.predict(X, verbose=0)
    tfmem.optimize(model)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, atol=1e-6)
    report = tfmem.report(model)
    assert report.decision == "swapped"
    assert len(report.swapped) == 1
    assert "recurrent" in report.passes
    assert tfmem.Report.from_json(report.to_json()) == report


def test_optimize_leaves_alone_what_has_no_recurrence() -> None:
    dense = keras.layers.Dense(3)
    dense.build((None, INPUTS))
    trace = tf.function(dense).get_concrete_function(tf.TensorSpec([None, INPUTS]))
    assert tfmem.optimize(trace) is trace
