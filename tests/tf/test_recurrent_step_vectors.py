"""Vectors that are an item of each step and meet all rows of a batch, and ops that mix their numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.recurrent_training import TOLERANCE, UNITS, numbers

BATCH = 3
ROWS = (BATCH, 1, UNITS)  # as many rows as units are taken for rows where a vector is taken for a column
LENGTHS = (4, 0, 1, 9)

OPS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda v: v,
    "softmax": tf.nn.softmax,
    "log_softmax": tf.nn.log_softmax,
    "cumsum": tf.cumsum,
    "cumsum from the end": lambda v: tf.cumsum(v, -1, exclusive=True, reverse=True),
    "cumprod": tf.math.cumprod,
    "roll": lambda v: tf.roll(v, 2, 0),
    "roll in two axes": lambda v: tf.roll(tf.stack([v, 2 * v]), [1, -2], [0, 1])[0],
    "concat": lambda v: tf.concat([v[3:], v[:3]], 0),
    "concat with a constant": lambda v: tf.concat([v[3:], tf.ones([3])], -1),
    "reversed": lambda v: v[::-1],
    "unstack": lambda v: tf.stack(tf.unstack(v)[::-1]),
    "stack": lambda v: tf.stack([v, tf.ones([UNITS])], 1)[:, 0],
    "stack along the last axis": lambda v: tf.reduce_prod(tf.stack([v, tf.ones([UNITS])], -1), -1),
    "max": lambda v: v - tf.reduce_max(v),
    "mean": lambda v: v * tf.reduce_mean(v, 0, keepdims=True),
    "newaxis": lambda v: v[tf.newaxis, :][0],
    "ellipsis": lambda v: tf.stack([v, v])[..., ::-1][1],
}
Step = Callable[[Any, Any, Any], Any]
STEPS: dict[str, Step] = {
    "added": lambda _, product, v: tf.tanh(product + v),
    "added first": lambda h, product, v: tf.tanh(v + (product + h)),
    "as a bias": lambda _, product, v: tf.tanh(tf.nn.bias_add(product, v)),
    "multiplied": lambda _, product, v: tf.tanh(product) * v,
    "multiplied and added": lambda h, product, v: tf.tanh(product * v + v) - h * v,
    "chosen": lambda h, product, v: tf.where(v > 0.0, h, tf.tanh(product)),
}


def check(step: Step, op: Callable[[Any], Any], training: bool, rows: int | None, written: Any = None) -> None:
    weight = tf.Variable(numbers(UNITS, UNITS) * 0.3)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, UNITS]), tf.TensorSpec([rows, UNITS])])
    def run(y: Any, h: Any) -> Any:
        count = tf.shape(y)[0]

        def body(i: Any, h: Any, array: Any) -> Any:
            h = step(h, h @ weight, op(y[i]))
            return i + 1, h, array.write(i, tf.reduce_sum(h) if written is None else written)

        with tf.GradientTape() as tape:
            tape.watch(y)
            array = tf.TensorArray(tf.float32, count, element_shape=[])
            _, last, array = tf.while_loop(lambda i, *_: i < count, body, (0, h, array))
            sums = array.stack()
            loss = tf.reduce_sum(last**2) + tf.reduce_sum(sums)
        return (last, sums, *tape.gradient(loss, [weight, y])) if training else (last, sums)

    optimized = tfmem.optimize(run, passes=("recurrent",))
    for length in LENGTHS:
        for batch in ROWS if rows is None else (rows,):
            given = tf.constant(numbers(length, UNITS)), tf.constant(numbers(batch, UNITS, seed=1))
            for a, b in zip(optimized(*given), run(*given), strict=True):
                assert a.shape == b.shape
                np.testing.assert_allclose(a, b, rtol=2 * TOLERANCE, atol=2 * TOLERANCE)
    report = tfmem.report(optimized)
    assert report.replaced
    assert not report.not_replaced


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", [None, *ROWS])
@pytest.mark.parametrize("name", STEPS)
def test_a_vector_meets_all_rows(name: str, rows: int | None, training: bool) -> None:
    check(STEPS[name], OPS["itself"], training, rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_a_small_recurrence(rows: int, training: bool) -> None:
    def step(h: Any, product: Any, v: Any) -> Any:
        return tf.nn.softmax(product + v) * v + h * tf.reduce_max(h, 1)[:, None]

    check(step, OPS["itself"], training, rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", OPS)
def test_ops_that_mix_the_numbers_of_a_step(name: str, training: bool) -> None:
    check(STEPS["added"], OPS[name], training, BATCH)


@pytest.mark.parametrize("training", [False, True])
def test_a_number_that_each_step_gives_out(training: bool) -> None:
    check(STEPS["added"], OPS["itself"], training, BATCH, written=1.5)
