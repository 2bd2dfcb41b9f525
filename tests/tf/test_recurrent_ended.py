"""Loops that end before their bound when their states say so: values, counts and gradients are those of TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.passes.recurrent.lower.ended import MOST_STEPS
from graph_passes.passes.recurrent.match import RECURRENT_OP
from graph_passes.refusals import Reason
from tests.tf.recurrent_replacements import with_layers_replaced
from tests.tf.recurrent_training import INPUTS, TOLERANCE, UNITS, numbers
from tfmem.kernels.recurrent import MOST_ENDED_PRODUCTS

BATCH, BOUND, WORDS = 3, 60, 5
R = tf.Variable(numbers(UNITS, UNITS, seed=1) * 0.4)
W = tf.Variable(numbers(INPUTS, UNITS) * 0.5)
# After how many steps the condition fails: before the first one, at ends of launches and beside them, never.
ENDS = (0, 1, 5, 7, 8, 9, 19, 20, 21, 38, 39, BOUND, BOUND + 1)


def check(function: Any, *arguments: Any, replaced: bool = True) -> tfmem.Report:
    """What each tuple of arguments gives."""
    optimized = tfmem.optimize(function, passes=("recurrent",))
    for given in arguments:
        expected = [np.asarray(each) for each in tf.nest.flatten(function(*given))]
        found = [np.asarray(each) for each in tf.nest.flatten(optimized(*given))]
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert b.dtype == bool or np.isfinite(b).all()
            np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)
    report = tfmem.report(optimized)
    assert bool(report.replaced) == replaced, report.not_replaced
    assert bool(report.not_replaced) == (not replaced), report.not_replaced
    return report


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


def ended(step: Callable[[Any, Any], Any], bound: Any) -> Callable[[Any, Any], Any]:
    """A loop of `ends` steps whose bound is larger; `step` makes what is added to the state in step `i`."""

    def run(x: Any, ends: Any) -> Any:
        def body(i: Any, h: Any, left: Any) -> Any:
            return i + 1, tf.tanh(step(x, i) + h @ R), left - 1.0

        start = (0, tf.zeros([BATCH, UNITS]), ends)
        return tf.while_loop(lambda i, h, left: tf.reduce_any(left > 0.5), body, start, maximum_iterations=bound)

    return run


TABLE = tf.constant(numbers(WORDS, UNITS, seed=8))
VARIABLE = tf.Variable(TABLE)


def listed(x: Any, i: Any) -> Any:
    return tf.TensorArray(tf.float32, BOUND).unstack(tf.transpose(x, [1, 0, 2])).read(i) @ W


# Steps that fail from step 40 on, or from step 60 on, which a loop does not reach that ends before.
FAILS: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda x, i: x[:, i] @ W,
    "gathered item": lambda x, i: tf.gather(x, i, axis=1) @ W,
    "place": lambda x, i: tf.gather(TABLE, i // 8),
    "place of data": lambda x, i: tf.gather(TABLE, tf.cast(x[:, i % 40, 0], tf.int32) * 0 + i // 8),
    "variable": lambda x, i: tf.gather(VARIABLE, tf.fill([BATCH], i // 8)),
    "division": lambda x, i: tf.cast(100 // (40 - i), tf.float32) * tf.ones([BATCH, UNITS]),
    "remainder": lambda x, i: tf.cast(100 % (40 - i), tf.float32) * tf.ones([BATCH, UNITS]),
    "power": lambda x, i: tf.cast(tf.pow(2, 20 - i // 2), tf.float32) * tf.ones([BATCH, UNITS]) * 1e-6,
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", FAILS)
def test_nothing_fails_behind_the_end(name: str, known: bool) -> None:
    specs = [tf.TensorSpec([BATCH, BOUND if known else None, INPUTS]), tf.TensorSpec([BATCH])]
    run = tf.function(ended(FAILS[name], 100), specs, autograph=False)
    x = tf.constant(numbers(BATCH, BOUND, INPUTS))
    report = check(run, *[(x, tf.constant([end, 3.0, 2.0])) for end in (30.0, 0.0)], replaced=False)
    reason = Reason.OTHER_ITEMS if "item" in name else Reason.STEP_FAILS
    assert reason.value[1].rpartition("}")[2][:30] in report.not_replaced[0]
    with pytest.raises(tf.errors.InvalidArgumentError):
        tfmem.optimize(run, passes=("recurrent",))(x, tf.constant([70.0, 3.0, 2.0]))


@pytest.mark.parametrize("name", ["item", "even", "from the end"])
def test_items_that_are_there_up_to_the_bound(name: str) -> None:
    steps: dict[str, Callable[[Any, Any], Any]] = {
        "item": lambda x, i: x[:, i] @ W,
        "even": lambda x, i: x[:, i] @ W + tf.cast(i % 2, tf.float32),
        "from the end": lambda x, i: x[:, BOUND - 1 - i] @ W,
    }
    run = tf.function(ended(steps[name], BOUND), autograph=False)
    x = tf.constant(numbers(BATCH, BOUND, INPUTS))
    check(run, *[(x, tf.constant([end, 3.0, 2.0])) for end in (30.0, 0.0, 60.0)])


def test_a_bound_that_no_loop_is_expected_to_reach() -> None:
    """What is computed up to it would take no end of time and memory."""
    x = tf.constant(numbers(BATCH, BOUND, INPUTS))
    ends = [(x, tf.constant([end, 3.0, 2.0])) for end in (20.0, 600.0)]
    run = tf.function(ended(lambda x, i: x[:, 0] @ W, 10**9), autograph=False)
    report = check(run, *ends, replaced=False)
    assert str(Reason.LOOP_BOUND_LARGE(steps=10**9, most=MOST_STEPS)) in report.not_replaced[0]
    bound = tf.Variable(10**7)  # known to the step alone
    run = tf.function(ended(lambda x, i: x[:, 0] @ W, bound), autograph=False)
    started = time.monotonic()
    check(run, *ends)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_effects_of_a_condition(early: bool, inner: bool) -> None:
    """A condition may assign, print or check: a cell has no condition."""
    asked = tf.Variable(0)

    def goes_on(bound: int) -> Callable[..., Any]:
        def condition(i: Any, h: Any, left: Any) -> Any:
            with tf.control_dependencies([asked.assign_add(1)]):
                going = tf.identity(i < bound)
            return going & tf.reduce_any(left > 0.5) if early else going

        return condition

    @tf.function(autograph=False)
    def run(h: Any) -> Any:
        def body(i: Any, h: Any, left: Any) -> Any:
            return i + 1, tf.tanh(h @ R + 1.0), left - 1.0

        def around(i: Any, h: Any, left: Any) -> Any:
            return i + 1, tf.while_loop(goes_on(3), body, (0, h, left))[1], left

        start = (0, h, tf.constant([6.0, 5.0, 3.0]))
        return tf.while_loop(lambda i, *_: i < 9, around, start)[1] if inner else tf.while_loop(goes_on(9), body, start)

    start = tf.constant(numbers(BATCH, UNITS))
    run(start)
    expected = asked.numpy()
    asked.assign(0)
    tfmem.optimize(run, passes=("recurrent",))(start)
    assert asked.numpy() == expected


@pytest.mark.parametrize("early", [True, False])
def test_a_check_in_a_condition_raises(early: bool) -> None:
    @tf.function(autograph=False)
    def run(h: Any) -> Any:
        def goes_on(i: Any, h: Any) -> Any:
            with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(tf.abs(h)), 0.5)]):
                going = tf.identity(i < 20)
            return going & (tf.reduce_max(h) < 100) if early else going

        return tf.while_loop(goes_on, lambda i, h: (i + 1, tf.tanh(h @ R + 1.0)), (0, h))[1]

    with pytest.raises(tf.errors.InvalidArgumentError):
        tfmem.optimize(run, passes=("recurrent",))(tf.zeros([BATCH, UNITS]))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("size", [0, 3, 12, 50])
def test_lists_that_grow(size: int, known: bool, early: bool) -> None:
    """`tf.TensorArray(size=0, dynamic_size=True)` is as long as there are steps, or keeps its size."""

    def run(h: Any, ends: Any, bound: Any) -> Any:
        def body(i: Any, h: Any, left: Any, outputs: Any) -> Any:
            h = tf.tanh(h @ R + 0.3)
            return i + 1, h, left - 1.0, outputs.write(i, h)

        def goes_on(i: Any, _: Any, left: Any, __: Any) -> Any:
            going = i < (12 if known else bound)
            return going & tf.reduce_any(left > 0.5) if early else going

        outputs = tf.TensorArray(tf.float32, size, dynamic_size=True, element_shape=[BATCH, UNITS])
        found = tf.while_loop(goes_on, body, (0, h, ends, outputs))
        return found[1], found[3].stack(), found[3].size()

    h = tf.constant(numbers(BATCH, UNITS))
    check(
        tf.function(run, autograph=False), *[(h, tf.fill([BATCH], end), tf.constant(12)) for end in (5.0, 12.0, 20.0)]
    )


def test_a_list_that_is_too_short_raises() -> None:
    @tf.function(autograph=False)
    def run(h: Any, bound: Any) -> Any:
        outputs = tf.TensorArray(tf.float32, 3, element_shape=[BATCH, UNITS])

        def body(i: Any, h: Any, outputs: Any) -> Any:
            return i + 1, tf.tanh(h @ R), outputs.write(i, h)

        found = tf.while_loop(lambda i, *_: i < bound, body, (0, h, outputs))
        return found[1], found[2].stack()

    h = tf.constant(numbers(BATCH, UNITS))
    check(run, (h, tf.constant(2)))
    for bound in (tf.constant(5), 5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            tfmem.optimize(run, passes=("recurrent",))(h, bound)
