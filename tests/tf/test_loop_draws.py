"""Seeded random ops in a loop that stays a loop draw what they draw in TensorFlow.

That is, in iterations that do not overlap: where several run at once, TensorFlow draws in the order in which they
happen to come, so that plain TensorFlow differs from itself (10, 1 and 1 of 12 runs of this loop agreed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem

TIME, BATCH, UNITS = 20, 16, 32
X = np.random.default_rng(0).normal(size=(TIME, BATCH, UNITS)).astype(np.float32)
STEPS = 6


def training() -> Any:
    weights = tf.Variable(tf.random.stateless_normal([2 * UNITS, UNITS], [1, 2], stddev=0.2))

    @tf.function
    def step(x: Any) -> Any:
        inputs = tf.TensorArray(tf.float32, TIME).unstack(x)

        def body(time: Any, state: Any) -> Any:
            joined = tf.concat([inputs.read(time), state], 1)
            dropped = tf.nn.dropout(joined, 0.5, seed=3) + tf.nn.dropout(joined, 0.3, seed=4)
            return time + 1, tf.tanh(dropped @ weights)

        with tf.GradientTape() as tape:
            start = 0, tf.zeros([BATCH, UNITS])
            _, state = tf.while_loop(lambda time, _: time < TIME, body, start, parallel_iterations=1)
            loss = tf.reduce_mean(state**2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    return step


@pytest.mark.parametrize("options", [{"passes": ()}, {"passes": ("offload",), "memory_budget": "1GiB"}])
def test_a_loop_draws_as_in_tensorflow(options: dict[str, Any]) -> None:
    def losses(change: Callable[[Any], Any]) -> list[float]:
        tf.random.set_seed(7)
        step = change(training())
        return [float(step(tf.constant(X))) for _ in range(STEPS)]

    expected = losses(lambda step: step)
    assert losses(lambda step: step) == expected
    assert losses(lambda step: tfmem.optimize(step, cache_directory="", **options)) == expected
