"""Loops as people write them, cells without a name, and what stays as it is: replaced, run, and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf

from graph_passes.graph import serde
from graph_passes.passes.recurrent.match import RECURRENT_OP
from graph_passes.passes.recurrent.plan import plan_inference
from graph_passes.refusals import Reason
from tests.tf.recurrent_replacements import (
    BATCH,
    INPUTS,
    LOOPS,
    SEQUENCE,
    STEPS,
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
from tests.tiers import examples
from tfmem.capture.concrete_function import capture_concrete

# Loops by hand. Time is the first dimension.

WR, B = data(INPUTS + UNITS, 4 * UNITS, seed=3, scale=0.5), data(4 * UNITS, seed=4)


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


@pytest.mark.sampled(2)
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
        "counts no steps to a bound",
    ),
    "a mean over the batch": (
        loop(one(lambda x, h, t: plain(x, h) - tf.reduce_mean(h, 0))),
        r"'while/Mean' \(Mean\) sums over the batch",
    ),
    "an op without a word": (loop(one(lambda x, h, t: tf.math.lgamma(h @ R) + x @ W)), "'while/Lgamma' is a Lgamma"),
    "a random op": (
        loop(one(lambda x, h, t: plain(x, h) * tf.cast(tf.random.categorical(h, 1), tf.float32))),
        r"Multinomial\) has side effects, or is random",
    ),
    "a product with itself": (
        loop(one(lambda x, h, t: plain(x, h @ tf.matmul(h, h, transpose_a=True)))),
        r"MatMul\) is not a product",
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
    trace, replaced, plan, ops = with_layers_replaced(function, SEQUENCE)
    if not reason:  # the third variable never changes, so it is no state
        assert ops.count(RECURRENT_OP) == 1
        compare(trace, replaced, [STEPS])
        return
    assert RECURRENT_OP not in ops
    assert set(ops) & set(LOOPS)
    with pytest.raises(AssertionError, match=reason):
        assert not plan.unmatched, str(plan)


def test_stacked_cells_of_different_width() -> None:
    cells = [keras.layers.LSTMCell(UNITS), keras.layers.LSTMCell(UNITS + 1)]
    check(randomised(keras.layers.RNN(cells)), [SEQUENCE], [X])


def test_a_loop_that_data_decides_about_stays() -> None:
    layer = randomised(keras.layers.LSTM(UNITS))

    def run(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: layer(x), lambda: tf.zeros([tf.shape(x)[0], UNITS]))

    *_, plan, ops = with_layers_replaced(run, SEQUENCE)
    assert RECURRENT_OP not in ops
    assert plan.unmatched[0].carrier == "If"
    assert plan.unmatched[0].reason.reason is Reason.LOOP_IN_BRANCH


@pytest.mark.parametrize("activation", [tf.tanh, tf.math.lgamma])
def test_an_implementation_is_inlined_only_if_it_is_replaced(activation: Callable[[Any], Any]) -> None:
    """Grappler may still choose another one, such as cuDNN's."""

    @tf.function(autograph=False, experimental_attributes={"api_implements": "mine", "api_preferred_device": "CPU"})
    def run(x: Any) -> Any:
        return loop(one(lambda x, h, t: activation(x @ W + h @ R)))(x)

    trace, replaced, plan, ops = with_layers_replaced(lambda x: run(x)[0], SEQUENCE)
    if activation is tf.tanh:
        assert ops.count(RECURRENT_OP) == 1
        assert not set(ops) & set(LOOPS)
        compare(trace, replaced, [STEPS])
    else:
        assert "PartitionedCall" in ops
        assert [loop.carrier for loop in plan.unmatched] == ["StatelessWhile"]
        assert "Lgamma" in str(plan.unmatched[0].reason)
        graph = serde.from_graph_def(capture_concrete(trace).graph_def, functions=True)
        assert plan_inference(graph).unmatched[0].reason.reason is Reason.LOOP_IN_CALL


def test_assignments_in_a_loop_stay() -> None:
    counted = tf.Variable(0.0)

    def run(x: Any) -> Any:
        def body(t: Any, h: Any) -> Any:
            counted.assign_add(1.0)
            return t + 1, plain(x[t], h)

        return tf.while_loop(lambda t, h: t < tf.shape(x)[0], body, (0, tf.zeros([tf.shape(x)[1], UNITS])))[1]

    *_, plan, ops = with_layers_replaced(run, SEQUENCE)
    assert RECURRENT_OP not in ops
    assert "AssignAddVariableOp) assigns a variable in every step" in str(plan.unmatched[0].reason)


def test_weights_are_read_when_the_function_runs() -> None:
    layer = randomised(keras.layers.LSTM(UNITS))
    trace, replaced, *_ = with_layers_replaced(layer, SEQUENCE)
    for weight in layer.weights:
        weight.assign(weight * 0.5)
    compare(trace, replaced, [X])


def test_equal_layers_give_equal_cells() -> None:
    cells = set()
    for _ in range(2):
        layer = randomised(keras.layers.LSTM(UNITS, return_sequences=True))
        *_, plan, _ops = with_layers_replaced(layer, SEQUENCE)
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


@hypothesis.settings(max_examples=examples(25), derandomize=True)
@hypothesis.given(random_steps())
def test_random_cells(case: tuple[Callable[..., Any], int, int]) -> None:
    step, states, units = case
    trace, replaced, plan, ops = with_layers_replaced(loop(step, states, units), SEQUENCE)
    if plan.unmatched:  # optimised away: no state is left
        assert "no state" in str(plan.unmatched[0].reason)
        return
    assert ops.count(RECURRENT_OP) == 1
    compare(trace, replaced, [STEPS], 5e-5)
