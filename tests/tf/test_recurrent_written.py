"""Recurrences as users write them (`benchmarks.recurrent.forms`): values and gradients are those of TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from benchmarks.recurrent.forms.run import FORMS, outcome
from graph_passes.refusals import Reason
from tests.tf.recurrent_replacements import (
    BATCH,
    INPUTS,
    SEQUENCE,
    TIME,
    UNITS,
    R,
    W,
    X,
    check,
    data,
    with_layers_replaced,
)

SHORT = ("LSTMP", "GAE, written at n - 1 - i", "tf.scan, reverse", "keras.ops.scan", "CRF forward", "keras ConvLSTM1D")
STAY = {"complex state"}
STAY_IN_TRAINING = STAY | {
    "spiking neurons, custom gradient",
    "moving average without an initial state",
}
NARROW = 3  # units of a second state
R2, P = data(NARROW, UNITS, seed=3), data(UNITS, NARROW, seed=4)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in FORMS]
)
def test_forms(name: str) -> None:
    for training, stay in ((False, STAY), (True, STAY_IN_TRAINING)):
        found = outcome(name, training)
        assert found.right, found
        assert (found.kind == "loop") == (name in stay), found
        assert bool(found.reason) == (name in stay)


# ---- with a batch and a number of steps that are unknown ----


def steps_of(x: Any) -> Any:
    return tf.transpose(x, [1, 0, 2])


def zeros(x: Any, units: int) -> Any:
    return tf.zeros([tf.shape(x)[0], units])


def from_the_end(x: Any) -> Any:
    items, count = steps_of(x), tf.shape(x)[1]
    array = tf.TensorArray(tf.float32, count, element_shape=[None, UNITS])

    def body(i: Any, h: Any, array: Any) -> Any:
        h = tf.tanh(items[count - 1 - i] @ W + h @ R)
        return i + 1, h, array.write(count - 1 - i, h)

    return tf.while_loop(lambda i, *_: i <= count - 1, body, (0, zeros(x, UNITS), array))[2].stack()


def downwards(x: Any) -> Any:
    items, count = steps_of(x), tf.shape(x)[1]
    return tf.while_loop(
        lambda i, _: i >= 0, lambda i, h: (i - 1, tf.tanh(items[i] @ W + h @ R)), (count - 1, zeros(x, UNITS))
    )


def projected(x: Any) -> Any:
    def step(states: Any, item: Any) -> Any:
        c = tf.tanh(item @ W + states[0] @ R2)
        return c @ P, c

    return tf.scan(step, steps_of(x), (zeros(x, NARROW), zeros(x, UNITS)))


def one_number_a_row(x: Any) -> Any:
    def step(states: Any, item: Any) -> Any:
        h = tf.tanh(item @ W + states[0] @ R + states[1][:, None])
        return h, states[1] * 0.9 + tf.reduce_sum(h, 1)

    return tf.scan(step, steps_of(x), (zeros(x, UNITS), tf.zeros([tf.shape(x)[0]])))


def matrices(x: Any) -> Any:
    def step(state: Any, item: Any) -> Any:
        return 0.9 * state + item[:, :, None] * tf.reduce_max(state, 1, keepdims=True) + item[:, None, :]

    return tf.scan(step, steps_of(x), tf.zeros([tf.shape(x)[0], INPUTS, INPUTS]))


def packed(x: Any) -> Any:
    def step(state: Any, item: Any) -> Any:
        c, h = state[:, :NARROW], state[:, NARROW:]
        c = c + tf.tanh(h @ P)
        return tf.concat([c, tf.tanh(item @ W + c @ R2)], 1)

    return tf.foldl(step, steps_of(x), zeros(x, NARROW + UNITS))


def counted(x: Any) -> Any:
    def body(i: Any, h: Any, active: Any) -> Any:
        h = tf.tanh(x[:, i] @ W + h @ R)
        return i + 1, h, active + tf.cast(h[:, 0] > 0, tf.int64)

    start = (0, zeros(x, UNITS), tf.zeros([tf.shape(x)[0]], tf.int64))
    return tf.while_loop(lambda i, *_: i < tf.shape(x)[1], body, start)


@pytest.mark.parametrize("form", [from_the_end, downwards, projected, one_number_a_row, matrices, packed, counted])
def test_unknown_sizes(form: Callable[[Any], Any]) -> None:
    check(form, [SEQUENCE], [X])
    check(form, [SEQUENCE], [X[:1, :1]])


@pytest.mark.parametrize("form", [downwards, packed])  # TensorFlow stacks no list without items
def test_no_steps_and_no_rows(form: Callable[[Any], Any]) -> None:
    check(form, [SEQUENCE], [X[:, :0]])
    check(form, [SEQUENCE], [X[:0]])


@pytest.mark.parametrize(
    ("start", "go_on", "step"),
    [(2, lambda i, n: i < n, 1), (7, lambda i, n: i < n, 1), (lambda n: n - 1, lambda i, n: i >= 4, -1)],
    ids=["from 2", "from 7", "down to 4"],
)
def test_a_loop_that_begins_behind_its_bound_makes_no_step(start: Any, go_on: Any, step: int) -> None:
    """What a step would read lies outside of the sequence then."""

    @tf.function(input_signature=[tf.TensorSpec([None, BATCH, INPUTS])])
    def function(x: Any) -> Any:
        count = tf.shape(x)[0]
        first = start(count) if callable(start) else tf.constant(start)
        state = tf.zeros([BATCH, UNITS])
        return tf.while_loop(
            lambda i, _: go_on(i, count), lambda i, h: (i + step, tf.tanh(h @ R + x[i] @ W)), [first, state]
        )

    replaced = tfmem.optimize(function, passes=("recurrent",), cache_directory="")
    for count in (9, 4, 3, 1, 0):
        x = tf.random.stateless_normal([count, BATCH, INPUTS], [1, count])
        for ours, theirs in zip(replaced(x), function(x), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
    assert tfmem.report(replaced).replaced


def test_a_bound_that_is_given_may_be_negative() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, BATCH, INPUTS]), tf.TensorSpec([], tf.int32)])
    def function(x: Any, count: Any) -> Any:
        state = tf.zeros([BATCH, UNITS])
        return tf.while_loop(lambda i, _: i < count, lambda i, h: (i + 1, tf.tanh(h @ R + x[i] @ W)), [0, state])

    replaced = tfmem.optimize(function, passes=("recurrent",), cache_directory="")
    x = tf.random.stateless_normal([4, BATCH, INPUTS], [1, 2])
    for count in (4, 2, 0, -1, -2):
        for ours, theirs in zip(replaced(x, count), function(x, count), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
    assert tfmem.report(replaced).replaced


def test_padding_that_is_not_finite_stays_in_the_padding() -> None:
    """The logarithm of the zeros of the padding, and its derivative, are infinite."""
    w, r, p = (tf.Variable(array) for array in (W, R2, P))

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)

            def step(states: Any, item: Any) -> Any:
                c = tf.tanh(item @ w + states[0] @ r)
                return tf.math.log(tf.nn.softplus(c @ p) * tf.ones([NARROW])), c

            loss = tf.reduce_sum(tf.scan(step, steps_of(x), (zeros(x, NARROW), zeros(x, UNITS)))[0])
        return loss, tape.gradient(loss, [x, w, r, p])

    plan = check(run, [SEQUENCE], [X], launches=2)
    assert plan.matches[0].launches[0].units == UNITS


def test_hidden_sizes_that_take_the_least_work() -> None:
    def units(*sizes: int) -> int:
        kernels = [
            tf.constant(data(before, after)) for before, after in zip(sizes, (*sizes[1:], sizes[0]), strict=True)
        ]

        def run(x: Any) -> Any:
            def step(states: Sequence[Any], item: Any) -> Any:
                states = [*states[-1:], *states[:-1]]
                return [tf.tanh(s @ k) for s, k in zip(states, kernels[-1:] + kernels[:-1], strict=True)]

            return tf.scan(step, steps_of(x), [zeros(x, size) for size in sizes])

        *_, plan, _ = with_layers_replaced(run, SEQUENCE)
        (match,) = plan.matches
        return match.launches[0].units

    assert units(64, 64) == 64
    assert units(128, 64) in (64, 128)
    assert units(10, 7) == 10


def reasons(function: Callable[[Any], Any], spec: Any = SEQUENCE) -> set[Reason]:
    *_, plan, _ = with_layers_replaced(function, spec)
    assert not plan.matches
    return {each.reason.reason for each in plan.unmatched}


def test_reasons() -> None:
    def complex_state(x: Any) -> Any:
        start = tf.zeros([tf.shape(x)[0], INPUTS], tf.complex64)
        return tf.math.real(tf.scan(lambda h, item: h + tf.cast(item, tf.complex64), steps_of(x), start))

    def two_types(x: Any) -> Any:
        def step(states: Any, item: Any) -> Any:
            return tf.tanh(item @ W + states[0] @ R), states[1] + tf.cast(item, tf.float64)

        start = (zeros(x, UNITS), tf.cast(zeros(x, INPUTS), tf.float64))
        return tf.scan(step, steps_of(x), start)

    def single(x: Any) -> Any:
        def step(states: Any, item: Any) -> Any:
            return tf.tanh(item @ W + states[0] * states[1]), states[1] * 0.9

        return tf.scan(step, steps_of(x), (zeros(x, UNITS), tf.constant(1.0)))

    def shifted(x: Any) -> Any:
        def step(h: Any, item: Any) -> Any:
            return tf.concat([h[:, 1:], tf.tanh(h[:, :1] + item[:, :1])], 1)

        return tf.scan(step, steps_of(x), zeros(x, 300))

    def seed(x: Any) -> Any:
        def step(states: Any, item: Any) -> Any:
            pair = tf.random.split(states[1], 2)
            noise = tf.random.stateless_normal(tf.shape(states[0]), pair[0])
            return tf.tanh(item @ W + states[0] @ R + noise), pair[1]

        return tf.scan(step, steps_of(x), (zeros(x, UNITS), tf.constant([1, 2])))

    assert reasons(seed) == {Reason.STATE_SEED}
    assert reasons(complex_state) == {Reason.STATE_COMPLEX}
    assert reasons(two_types) == {Reason.STATE_DTYPES}
    assert reasons(single) == {Reason.STATE_SINGLE}
    assert reasons(shifted) == {Reason.CELL_CUTS}


def test_large_states_of_other_shapes_stay() -> None:
    def run(x: Any) -> Any:
        def step(state: Any, item: Any) -> Any:
            return 0.9 * state + tf.reduce_max(state, 1, keepdims=True) + item[:, :1, None]

        return tf.scan(step, steps_of(x), tf.zeros([tf.shape(x)[0], 16, 16]))

    assert reasons(run) == {Reason.CELL_NUMBERS}
    assert X.shape[:2] == (BATCH, TIME)


def test_reasons_say_what_to_write_instead() -> None:
    def summed_up(x: Any) -> Any:
        return tf.scan(lambda h, item: 0.01 * tf.cumsum(h, 1) + item[:, :1], steps_of(x), zeros(x, 300))

    def wide_softmax(x: Any) -> Any:
        return tf.scan(lambda h, item: tf.nn.softmax(h) + item[:, :1], steps_of(x), zeros(x, 300))

    def many_ops(x: Any) -> Any:
        def step(h: Any, item: Any) -> Any:
            return tf.reduce_logsumexp(h[:, :, None] + h[:, None, :] + item[:, :1, None], 1)

        return tf.scan(step, steps_of(x), zeros(x, 64))

    generator = tf.Variable(0.0)

    def assigned(x: Any) -> Any:
        def step(h: Any, item: Any) -> Any:
            generator.assign_add(1.0)
            return tf.tanh(item @ W + h @ R)

        return tf.scan(step, steps_of(x), zeros(x, UNITS))

    def by_product(x: Any) -> Any:
        upper = tf.linalg.band_part(tf.ones([300, 300]), 0, -1)
        return tf.scan(lambda h, item: 0.01 * h @ upper + item[:, :1], steps_of(x), zeros(x, 300))

    check(by_product, [SEQUENCE], [X])
    assert reasons(summed_up) == {Reason.CELL_OP_INSTEAD}
    assert reasons(wide_softmax) == {Reason.BECAUSE_SMALL}
    assert reasons(many_ops) <= {Reason.BECAUSE_SMALL, Reason.CELL_NODES}
    assert reasons(assigned) == {Reason.STEP_ASSIGNS}


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _spike(v: Any) -> Any:
    return tf.cast(v > 0, tf.float32), lambda g: g / (1 + tf.abs(v)) ** 2


def _surrogate(v: Any) -> Any:
    """What the reason for `_spike` says to write."""
    smooth = v / (1 + tf.abs(v))
    return smooth + tf.stop_gradient(tf.cast(v > 0, tf.float32) - smooth)


def _inner_loop(v: Any) -> Any:
    return tf.while_loop(lambda k, _: k < 3, lambda k, h: (k + 1, tf.tanh(h)), (0, v))[1]


@pytest.mark.parametrize(("own", "reason"), [(_spike, Reason.CUSTOM_GRADIENT), (_inner_loop, None), (_surrogate, None)])
def test_gradients_of_the_users_own(own: Callable[[Any], Any], reason: Reason | None) -> None:
    weight = tf.Variable(R)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            found = tf.scan(lambda h, item: own(item @ W + h @ weight), steps_of(x), zeros(x, UNITS))
            loss = tf.reduce_sum(found * tf.cos(tf.range(float(UNITS))))
        return loss, tape.gradient(loss, weight)

    optimized = tfmem.optimize(step, passes=("recurrent",))
    for plain, found in zip(step(tf.constant(X)), optimized(tf.constant(X)), strict=True):
        np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4)
    report = tfmem.report(optimized)
    assert bool(report.replaced) == (reason is None), report
    if reason is not None:
        (line,) = report.not_replaced
        assert "test_recurrent_written.py:" in line  # the line of the program
        assert reason.sentence.split("}")[-1].split(";")[-1].strip() in line


def test_a_cpu_keeps_a_loop_of_few_rows_that_would_take_many_ops() -> None:
    def run(x: Any) -> Any:
        def step(h: Any, item: Any) -> Any:
            return tf.reduce_logsumexp(h[:, :, None] + h[:, None, :] + item[:, :1, None], 1)

        return tf.scan(step, steps_of(x), tf.zeros([tf.shape(x)[0], 20]))

    for rows, kept in ((1, True), (8, False)):
        x = tf.constant(data(rows, 4, INPUTS))
        optimized = tfmem.optimize(tf.function(run), passes=("recurrent",))
        np.testing.assert_allclose(optimized(x), run(x), rtol=1e-4, atol=1e-4)
        report = tfmem.report(optimized)
        assert bool(report.not_replaced) == kept, (rows, report)
        assert Reason.FEW_ROWS.sentence.split("; ")[-1].split("{")[0] in str(report) or not kept

    def trained(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(run(x))
        return tape.gradient(loss, x)

    optimized = tfmem.optimize(tf.function(trained), passes=("recurrent",))  # it would have 3,702 ops, of 3,072 at most
    np.testing.assert_allclose(optimized(x), trained(x), rtol=1e-4, atol=1e-4)
    (line,) = tfmem.report(optimized).not_replaced
    assert line.partition(" (test_")[0].endswith("for training")


def test_a_list_that_is_longer_than_a_loop_that_reads_backwards() -> None:
    def run(x: Any) -> Any:
        items, count = steps_of(x), tf.shape(x)[1]
        array = tf.TensorArray(tf.float32, count + 3, element_shape=[None, UNITS])

        def body(i: Any, h: Any, array: Any) -> Any:
            h = tf.tanh(items[count - 1 - i] @ W + h @ R)
            return i + 1, h, array.write(i, h)

        return tf.while_loop(lambda i, *_: i < count, body, (0, zeros(x, UNITS), array))[2].stack()

    check(run, [SEQUENCE], [X])


def test_a_mask_of_units_that_a_counter_gives() -> None:
    """A clockwork RNN: some units are updated in every second step."""

    def run(x: Any) -> Any:
        items, period = steps_of(x), tf.constant([1, 1, 2, 2])

        def body(i: Any, h: Any) -> Any:
            updated = tf.equal(i % period, 0)
            return i + 1, tf.where(updated[None], tf.tanh(items[i] @ W + h @ R), h)

        return tf.while_loop(lambda i, _: i < tf.shape(x)[1], body, (0, zeros(x, UNITS)))[1]

    check(run, [SEQUENCE], [X])
