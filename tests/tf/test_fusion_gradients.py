"""A stitched inference function has the gradient of the ops that it was."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import batch, close, optimized, require_stitched

WEIGHTS = tf.Variable(tf.random.stateless_normal([12, 5], [1, 2]))


@tf.function
def network(x: Any) -> Any:
    return tf.nn.softmax(tf.tanh(x @ WEIGHTS) * 2.0 - 1.0)


def gradient(function: Any, x: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(function(x) ** 2)
    return loss, tape.gradient(loss, [x, WEIGHTS])


def test_under_a_tape() -> None:
    fused = optimized(network)
    x, _ = batch()
    close(fused(x), network(x))
    require_stitched(fused, "Tanh", "Softmax")
    with pytest.warns(tfmem.TfmemWarning, match="runs as it was before tfmem"):
        close(gradient(fused, x), gradient(network, x))


def test_in_a_function_with_a_tape() -> None:
    fused = optimized(network)
    x, _ = batch()
    expected = gradient(network, x)
    found = tf.function(lambda x: gradient(fused, x))(x)
    close(found, expected)


def test_of_second_order() -> None:
    fused = optimized(network)
    x, _ = batch()

    def second(function: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            _, (first, _) = gradient(function, x)
            total = tf.reduce_sum(first**2)
        return outer.gradient(total, x)

    close(second(fused), second(network), 1e-4)


def test_a_function_that_trains_within_a_tape_trains_once() -> None:
    count = tf.Variable(0.0)

    @tf.function
    def step(x: Any) -> Any:
        count.assign_add(1.0)
        return tf.reduce_sum(tf.tanh(x) * count)

    fused = optimized(step)
    x, _ = batch()
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = fused(x)
    close(tape.gradient(loss, x), 1 - tf.tanh(x) ** 2)
    assert count.numpy() == 1.0
