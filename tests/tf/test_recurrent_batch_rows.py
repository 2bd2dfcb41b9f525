"""A step's value of one row, such as a mean over the batch, meets all rows of the batch, whose size may be unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.recurrent_training import TOLERANCE, UNITS, numbers

STEPS, BATCH, INPUTS = 5, 4, 3


def mean(x: Any) -> Any:
    return tf.reduce_mean(x, 0, keepdims=True)


def normalised(x: Any, kernel: Any) -> Any:
    average, variance = tf.nn.moments(x, [0], keepdims=True)
    return ((x - average) * tf.math.rsqrt(variance + 1e-3)) @ kernel


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "normalised over the batch": normalised,
    "product": lambda x, kernel: x @ kernel + mean(x) @ kernel,
    "factor": lambda x, kernel: x @ kernel * mean(x)[:, :1],
    "tanh": lambda x, kernel: x @ kernel + tf.tanh(mean(x) @ kernel),
    "softmax": lambda x, kernel: x @ kernel * tf.nn.softmax(mean(x) @ kernel),
    "both sides": lambda x, kernel: (x - mean(x)) @ kernel + mean(x) @ kernel,
    "columns": lambda x, kernel: x @ kernel + tf.concat([mean(x), mean(x), mean(x)], 1)[:, :UNITS],
    "vector": lambda x, kernel: x @ kernel + tf.expand_dims(tf.reduce_mean(x @ kernel, 0), 0),
    "row alone": lambda x, kernel: mean(x) @ kernel,
    "largest": lambda x, kernel: x @ kernel * tf.reduce_max(tf.abs(x @ kernel), 0, keepdims=True),
}


def compare(form: Callable[[Any, Any], Any], rows: int | None, training: bool) -> tfmem.Report:
    weight, kernel = tf.Variable(numbers(UNITS, UNITS) * 0.3), tf.Variable(numbers(INPUTS, UNITS, seed=2))

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([rows, STEPS, INPUTS])])
    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            state = tf.zeros([tf.shape(x)[0], UNITS])
            _, last = tf.while_loop(
                lambda i, _: i < STEPS,
                lambda i, h: (i + 1, tf.tanh(h @ weight + form(x[:, i], kernel))),
                (0, state),
                shape_invariants=(tf.TensorShape([]), tf.TensorShape([rows, UNITS])),
            )
            loss = tf.reduce_sum(last**2)
        return (last, *tape.gradient(loss, [weight, kernel, x])) if training else last

    optimized = tfmem.optimize(run, passes=("recurrent",), cache_directory="")
    for count in (1, BATCH, 7) if rows is None else (rows,):
        given = tf.constant(numbers(count, STEPS, INPUTS, seed=1))
        for found, expected in zip(tf.nest.flatten(optimized(given)), tf.nest.flatten(run(given)), strict=True):
            np.testing.assert_allclose(found, expected, rtol=4 * TOLERANCE, atol=4 * TOLERANCE)
    return tfmem.report(optimized)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rows", [None, BATCH])
@pytest.mark.parametrize("form", FORMS)
def test_one_row_meets_all_rows(form: str, rows: int | None, training: bool) -> None:
    report = compare(FORMS[form], rows, training)
    assert report.replaced
    assert not report.not_replaced


def test_rows_of_a_batch_of_unknown_size_are_not_taken_for_the_batch() -> None:
    with pytest.warns(tfmem.TfmemWarning, match="does not keep the rows of the batch"):
        assert not compare(lambda x, kernel: x @ kernel + x[:1] @ kernel, None, training=False).replaced
    assert compare(lambda x, kernel: x @ kernel + x[:1] @ kernel, BATCH, training=False).replaced


def test_rows_of_a_table_that_trains_are_looked_up_in_each_step() -> None:
    table, weight = tf.Variable(numbers(9, UNITS)), tf.Variable(numbers(UNITS, UNITS, seed=1) * 0.3)

    @tf.function(autograph=False)
    def run(numbers_of_rows: Any) -> Any:
        with tf.GradientTape() as tape:
            _, last = tf.while_loop(
                lambda i, _: i < STEPS,
                lambda i, h: (i + 1, tf.tanh(h @ weight + tf.nn.embedding_lookup(table, numbers_of_rows[:, i]))),
                (0, tf.zeros([BATCH, UNITS])),
            )
            loss = tf.reduce_sum(last**2)
        return last, *(tf.convert_to_tensor(each) for each in tape.gradient(loss, [weight, table]))

    optimized = tfmem.optimize(run, passes=("recurrent",), cache_directory="")
    given = tf.constant(np.random.default_rng(0).integers(0, 9, (BATCH, STEPS)))
    for found, expected in zip(optimized(given), run(given), strict=True):
        np.testing.assert_allclose(found, expected, rtol=4 * TOLERANCE, atol=4 * TOLERANCE)
    assert tfmem.report(optimized).replaced
