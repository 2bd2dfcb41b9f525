"""Loops whose steps have loops inside: with their gradients they give what TensorFlow gives, or they stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.passes.recurrent.find.plain_steps import MOST_INNER_STEPS
from graph_passes.refusals import Reason
from tests.tf.recurrent_training import INPUTS, UNITS, numbers

ROWS, TIME = 4, 5
W, R = numbers(INPUTS, UNITS) * 0.5, numbers(UNITS, UNITS, seed=1) * 0.4

Inner = Callable[[Any, Any], Any]  # a state and a weight -> the state behind the inner loop


def check(inner: Inner, replaced: bool = True, time: int = TIME, dtype: str = "float32", value: float = 0.0) -> Any:
    """Values and gradients beside TensorFlow's; the report."""
    kernel, recurrent = (tf.Variable(tf.cast(value, dtype)) for value in (W, R))
    weight = tf.Variable(tf.cast(numbers(UNITS, UNITS, seed=3) * 0.3, dtype))

    @tf.function(input_signature=[tf.TensorSpec([ROWS, None, INPUTS], dtype)])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            start = tf.zeros([ROWS, UNITS], dtype)
            items = tf.transpose(x, [1, 0, 2])
            states = tf.scan(lambda h, item: inner(tf.tanh(item @ kernel + h @ recurrent), weight), items, start)
            loss = tf.reduce_sum(states * tf.cos(tf.cast(tf.range(UNITS), dtype)))
        return states, tape.gradient(loss, [x, kernel, recurrent, weight], unconnected_gradients="zero")

    x = numbers(ROWS, time, INPUTS).astype(dtype)
    if time > 2:
        x[1, 2, 0] += value
    optimized = tfmem.optimize(step, passes=("recurrent",))
    tolerance = 1e-9 if dtype == "float64" else 2e-5
    for a, b in zip(tf.nest.flatten(optimized(x)), tf.nest.flatten(step(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    report = tfmem.report(optimized)
    assert bool(report.replaced) == replaced, report
    return report


def euler(steps: Any, limit: int | None = None) -> Inner:
    def inner(h: Any, weight: Any) -> Any:
        def body(k: Any, h: Any) -> Any:
            return k + 1, h + 0.2 * tf.tanh(h @ weight) + 0.01 * tf.cast(k, h.dtype)

        return tf.while_loop(lambda k, _: k < steps, body, (0, h), maximum_iterations=limit)[1]

    return inner


def counting_down(h: Any, weight: Any) -> Any:
    return tf.while_loop(lambda k, _: k > 0, lambda k, h: (k - 2, tf.tanh(h @ weight)), (5, h))[1]


def one_after_the_other(h: Any, weight: Any) -> Any:
    return euler(2)(tf.sigmoid(euler(3)(h, weight)), tf.transpose(weight))


def by_range(h: Any, weight: Any) -> Any:
    for _ in tf.range(3):
        h = tf.tanh(h @ weight) + h
    return h


def weightless(h: Any, _: Any) -> Any:
    return tf.while_loop(lambda k, _: k < 3, lambda k, h: (k + 1, tf.tanh(h)), (0, h))[1]


REPLACED: dict[str, Inner] = {
    "one step": euler(1),
    "three steps": euler(3),
    "cut by a maximum": euler(9, limit=4),
    "the most steps": euler(MOST_INNER_STEPS),
    "counting down": counting_down,
    "two, one after the other": one_after_the_other,
    "autograph": tf.autograph.experimental.do_not_convert(tf.autograph.to_graph(by_range)),
    "without weights": weightless,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REPLACED)
def test_loops_of_a_known_number_of_steps(name: str) -> None:
    check(REPLACED[name])


@pytest.mark.parametrize("time", [0, 1])
def test_few_steps_around(time: int) -> None:
    check(euler(3), time=time)


def test_float64() -> None:
    check(one_after_the_other, dtype="float64")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    check(euler(3), value=value)


def until_small(h: Any, weight: Any) -> Any:
    def body(k: Any, h: Any) -> Any:
        return k + 1, 0.5 * tf.tanh(h @ weight)

    return tf.while_loop(lambda k, h: (k < 9) & (tf.reduce_max(h) > 0.1), body, (0, h))[1]


def as_data_says(h: Any, weight: Any) -> Any:
    return euler(tf.cast(tf.reduce_max(h) < 9.0, tf.int32) + 2)(h, weight)


def weightless_and_long(h: Any, _: Any) -> Any:
    return tf.while_loop(lambda k, _: k < MOST_INNER_STEPS + 1, lambda k, h: (k + 1, tf.tanh(h)), (0, h))[1]


@pytest.mark.parametrize("inner", [euler(MOST_INNER_STEPS + 1), as_data_says, until_small, weightless_and_long])
def test_other_loops_stay(inner: Inner) -> None:
    (line,) = check(inner, replaced=False).not_replaced
    assert Reason.INNER_LOOP.sentence.split(";")[-1].strip() in line


def test_a_loop_without_steps() -> None:
    check(euler(0), replaced=False)  # the gradient of the weight, which is zero, is of nothing that the cell reads


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _clipped(h: Any) -> Any:
    return tf.tanh(h), lambda g: tf.clip_by_value(g, -0.1, 0.1) * (1 - tf.tanh(h) ** 2)


def test_a_custom_gradient_in_an_inner_loop_stays() -> None:
    def inner(h: Any, weight: Any) -> Any:
        return tf.while_loop(lambda k, _: k < 3, lambda k, h: (k + 1, _clipped(h @ weight)), (0, h))[1]

    (line,) = check(inner, replaced=False).not_replaced
    assert Reason.CUSTOM_GRADIENT.sentence.split("; ")[-1].split(",")[0] in line
