"""Loops that end before their bound when their states say so: values, counts and gradients are those of TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import tensorflow as tf

from graph_passes.passes.recurrent.match import RECURRENT_OP
from graph_passes.refusals import Reason
from tests.tf.ended_loops import BATCH, BOUND, WORDS, R, W, check
from tests.tf.recurrent_replacements import with_layers_replaced
from tests.tf.recurrent_training import INPUTS, UNITS, numbers
from tfmem.kernels.recurrent import MOST_ENDED_PRODUCTS

# After how many steps the condition fails: before the first one, at ends of launches and beside them, never.
ENDS = (0, 1, 5, 7, 8, 9, 19, 20, 21, 38, 39, BOUND, BOUND + 1)


def adaptive(x: Any, ends: Any, bound: Any) -> Any:
    """Adaptive computation: a row goes on until its halting number is 0, the loop until those of all rows are.

    Args:
        x: float32 `[batch, time, inputs]`.
        ends: float32 `[batch]`, the halting numbers at first; each step takes 1 away.
        bound: of the number of steps.

    Returns:
        The number of steps, the state, the halting numbers, the steps of each row, all states.
    """
    items = tf.transpose(x, [1, 0, 2])

    def body(i: Any, h: Any, left: Any, steps: Any, outputs: Any) -> Any:
        going = left > 0.5
        h = tf.where(going[:, None], tf.tanh(items[i] @ W + h @ R), h)
        return i + 1, h, left - 1.0, steps + tf.cast(going, tf.int32), outputs.write(i, h)

    def goes_on(i: Any, _: Any, left: Any, *__: Any) -> Any:
        return (i < bound) & tf.reduce_any(left > 0.5)

    outputs = tf.TensorArray(tf.float32, bound, element_shape=[BATCH, UNITS])
    start = (0, tf.zeros([BATCH, UNITS]), ends, tf.zeros([BATCH], tf.int32), outputs)
    count, h, left, steps, outputs = tf.while_loop(goes_on, body, start)
    return count, h, left, steps, outputs.stack()


def inputs() -> list[tuple[Any, Any]]:
    x = tf.constant(numbers(BATCH, BOUND, INPUTS))
    return [(x, tf.constant([float(end), end - 1.0, end / 2])) for end in ENDS]


@pytest.mark.parametrize("known", [True, False])
def test_adaptive_computation(known: bool) -> None:
    @tf.function(autograph=False)
    def run(x: Any, ends: Any) -> Any:
        return adaptive(x, ends, BOUND if known else tf.shape(x)[1])

    if not known:
        run = tf.function(run.python_function, [tf.TensorSpec([BATCH, None, INPUTS]), tf.TensorSpec([BATCH])], False)
    (line,) = check(run, *inputs()).replaced
    assert "ends when its states say so" in line


@pytest.mark.parametrize("known", [True, False])
def test_its_gradient(known: bool) -> None:
    def step(x: Any, ends: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, h, _, _, outputs = adaptive(x, ends, BOUND if known else tf.shape(x)[1])
            loss = tf.reduce_sum(h**2) + tf.reduce_mean(tf.sin(outputs))
        return loss, tape.gradient(loss, [W, R, x])

    specs = [tf.TensorSpec([BATCH, BOUND if known else None, INPUTS]), tf.TensorSpec([BATCH])]
    check(tf.function(step, specs, autograph=False), *inputs())


def test_nothing_is_computed_behind_the_end() -> None:
    """The next steps would overflow, and their gradient would be no number."""

    @tf.function(autograph=False)
    def step(v: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(v)
            start = [0, v, tf.zeros([BATCH, UNITS])]
            count, squared, h = tf.while_loop(
                lambda i, v, _: (i < BOUND) & tf.reduce_any(v < 1e6),
                lambda i, v, h: (i + 1, v * v, tf.tanh(h @ R + 1 / v[:, None])),
                start,
            )
            loss = tf.reduce_sum(tf.math.log(squared)) + tf.reduce_sum(h)
        return count, loss, tape.gradient(loss, v)

    check(step, (tf.constant([2.0, 3.0, 4.0]),), (tf.constant([1.5, 1.7, 1.9]),))


@pytest.mark.parametrize("speed", [0.5, 0.13, 0.06])
def test_a_condition_that_would_hold_again(speed: float) -> None:
    @tf.function(autograph=False)
    def run(angle: Any) -> Any:
        def body(i: Any, angle: Any, h: Any) -> Any:
            return i + 1, angle + speed, tf.tanh(h @ R + tf.sin(angle)[:, None])

        def goes_on(_: Any, angle: Any, __: Any) -> Any:
            return tf.reduce_all(tf.cos(angle) > -0.9)

        return tf.while_loop(goes_on, body, [0, angle, tf.zeros([BATCH, UNITS])], maximum_iterations=200)

    check(run, (tf.constant([0.0, 0.1, 0.2]),), (tf.constant([3.0, 0.1, 0.2]),))


def decoded(h: Any, table: Any, head: Any, freeze: bool) -> Any:
    """Greedy decoding until every row has given the word 1: the number of steps, who has ended, words, lengths."""
    noise = tf.constant(2 * numbers(BOUND, BATCH, UNITS, seed=5))

    def body(i: Any, ended: Any, word: Any, h: Any, lengths: Any, words: Any) -> Any:
        new = tf.tanh(tf.gather(table, word) + 2.0 * h @ R + noise[i])
        h = tf.where(ended[:, None], h, new) if freeze else new
        word = tf.where(ended, 0, tf.argmax(h @ head, 1, tf.int32))
        lengths += tf.cast(~ended, tf.int32)
        return i + 1, ended | tf.equal(word, 1), word, h, lengths, words.write(i, tf.cast(word, tf.float32))

    start = (
        0, tf.zeros([BATCH], tf.bool), tf.zeros([BATCH], tf.int32), h, tf.zeros([BATCH], tf.int32),
        tf.TensorArray(tf.float32, BOUND, element_shape=[BATCH]),
    )  # fmt: skip
    found = tf.while_loop(lambda i, ended, *_: ~tf.reduce_all(ended), body, start, maximum_iterations=BOUND)
    return *found[:5], found[5].stack()


@pytest.mark.parametrize("freeze", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_greedy_decoding(freeze: bool, training: bool) -> None:
    table, head = (tf.Variable(numbers(*shape, seed=3)) for shape in ((WORDS, UNITS), (UNITS, WORDS)))

    @tf.function(autograph=False)
    def run(h: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(h)
            found = decoded(h, table, head, freeze)
            loss = tf.reduce_sum(found[3] ** 2)
        return (loss, tape.gradient(loss, [R, table, h])) if training else found

    starts = [(tf.constant(numbers(BATCH, UNITS, seed=seed)),) for seed in range(8)]
    counts = {int(decoded(start, table, head, freeze)[0]) for (start,) in starts}
    assert len(counts) > 3
    check(run, *starts)


def test_autograph() -> None:
    @tf.function
    def run(h: Any, bound: Any) -> Any:
        left, i = tf.ones([BATCH]), 0
        while i < bound and tf.reduce_max(left) > 0.1:
            h = tf.tanh(h @ R)
            left *= tf.sigmoid(h[:, 0])
            i += 1
        return h, left, i

    start = tf.constant(numbers(BATCH, UNITS))
    check(run, (start, tf.constant(3)), (start, tf.constant(BOUND)), (start, tf.constant(0)))


def test_no_early_end_for_other_branches() -> None:
    """`or` and a branch that returns something else are no conjunction."""

    @tf.function
    def run(h: Any, bound: Any) -> Any:
        left, i = tf.ones([BATCH]), 0
        while i < bound or tf.reduce_max(left) > 0.1:
            h = tf.tanh(h @ R)
            left *= tf.sigmoid(h[:, 0])
            i += 1
        return h, left, i

    start = tf.constant(numbers(BATCH, UNITS))
    check(run, (start, tf.constant(3)), (start, tf.constant(BOUND)), replaced=False)


def kept(going: Callable[..., Any], change: Callable[[Any], Any] = lambda h: h) -> Any:
    @tf.function(autograph=False)
    def run(h: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            return i + 1, change(0.5 * tf.tanh(h))

        return tf.while_loop(going, body, [0, h])

    return run


def test_what_stays() -> None:
    start = (tf.constant(numbers(BATCH, UNITS)),)

    def norm(h: Any) -> Any:
        return tf.reduce_max(tf.abs(h)) > 0.05

    report = check(kept(lambda _, h: norm(h)), start, replaced=False)
    assert "counts no steps to a bound" in report.not_replaced[0]
    by_count = kept(lambda i, h: (i < BOUND) & (tf.reduce_max(tf.abs(h)) > 0.01 * tf.cast(i, tf.float32)))
    report = check(by_count, start, replaced=False)
    assert "counts no steps to a bound" in report.not_replaced[0]


def test_boolean_states() -> None:
    """A state that holds once a threshold was passed, in a loop of a known length."""

    @tf.function(autograph=False)
    def run(x: Any) -> Any:
        def step(states: Any, item: Any) -> Any:
            h, passed, wide = states
            h = tf.tanh(item @ W + h @ R) * tf.where(passed[:, None], 0.5, 1.0)
            return h, passed | (h[:, 0] > 0.3), tf.math.logical_xor(wide, h > 0.1)

        start = (tf.zeros([BATCH, UNITS]), tf.zeros([BATCH], tf.bool), tf.zeros([BATCH, UNITS], tf.bool))
        return tf.scan(step, tf.transpose(x, [1, 0, 2]), start)[0]

    check(run, (tf.constant(numbers(BATCH, 7, INPUTS)),))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("rows", "units", "replaced"), [(1, 512, True), (8, 256, True), (16, 256, False)])
def test_a_cpu_keeps_a_large_loop_that_its_states_end(rows: int, units: int, replaced: bool, training: bool) -> None:
    weights, work = tf.Variable(numbers(units, units) * units**-0.5), rows * units**2

    @tf.function(autograph=False)
    def run(h: Any, ends: Any) -> Any:
        def body(i: Any, h: Any, left: Any) -> Any:
            return i + 1, tf.where(left[:, None] > 0.5, tf.tanh(h @ weights), h), left - 1.0

        with tf.GradientTape() as tape:
            start = (0, h, ends)
            found = tf.while_loop(lambda i, _, left: (i < BOUND) & tf.reduce_any(left > 0.5), body, start)
            loss = tf.reduce_sum(found[1])
        return (loss / work, tape.gradient(loss, weights)) if training else found

    report = check(run, (tf.constant(numbers(rows, units)), tf.fill([rows], 5.0)), replaced=replaced)
    assert replaced or str(Reason.STATES_END(work=work, most=MOST_ENDED_PRODUCTS)) in str(report.not_replaced)


def test_inference_runs_no_step_twice() -> None:
    """All recurrent ops follow each other: each starts from the states of the one before."""
    specs = [tf.TensorSpec([BATCH, BOUND, INPUTS]), tf.TensorSpec([BATCH])]
    _, _, plan, ops = with_layers_replaced(lambda x, ends: adaptive(x, ends, BOUND), *specs)
    (match,) = plan.matches
    launches = (*match.counting, *match.launches)
    assert len(match.launches) == 1
    assert ops.count(RECURRENT_OP) == len(launches)
    for before, after in pairwise(launches):
        assert {state.node for state in after.directions[0].states} == {before.name}


def test_rows_that_have_ended_keep_their_states() -> None:
    """Decoding to a bound, whose condition counts alone; the first state is a whole number for each row."""
    table, readout = tf.constant(numbers(6, UNITS, seed=5)), tf.constant(numbers(UNITS, 6, seed=6))

    @tf.function(autograph=False)
    def run(x: Any) -> Any:
        def body(i: Any, token: Any, h: Any, ended: Any) -> Any:
            new = tf.tanh(tf.gather(table, token) + h @ R)
            best = tf.argmax(new @ readout, 1, output_type=tf.int32)
            token, h = tf.where(ended > 0, token, best), tf.where(ended[:, None] > 0, h, new)
            return i + 1, token, h, tf.where(tf.equal(token, 0), tf.ones_like(ended), ended)

        start = (0, tf.ones([BATCH], tf.int32), tf.reduce_sum(x, 1) @ W, tf.zeros([BATCH]))
        return tf.while_loop(lambda i, *_: i < 9, body, start)[2]

    check(run, (tf.constant(numbers(BATCH, 4, INPUTS)),))
