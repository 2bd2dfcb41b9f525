"""Loops whose replacement might do more or less than they: steps behind the end, effects of conditions, lists."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from graph_passes.passes.recurrent.lower.ended import MOST_STEPS
from graph_passes.refusals import Reason
from tests.tf.ended_loops import BATCH, BOUND, WORDS, R, W, check
from tests.tf.recurrent_training import INPUTS, UNITS, numbers


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
    started = time.process_time()
    check(run, *ends)
    assert time.process_time() - started < 60


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
