"""Loops that end before their bound when their states say so: TensorFlow's executor beside tfmem, on a CPU.

    python -m benchmarks.recurrent.ended --output benchmarks/results/recurrent_ended_cpu.json
    python -m benchmarks.recurrent.ended --table benchmarks/results/recurrent_ended_cpu.json

A step is `h = where(goes on, tanh(x[i] + h @ R), h)`; the bound is 256 steps. In inference all states are listed, in
training the gradient of `R` is taken. A loop that tfmem leaves to TensorFlow has the word "loop" in its row."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.recurrent.loops import Case, Inputs, Loops

BOUND = 256


def loop(case: Case) -> Any:
    """The function of a case, whose last argument are the steps of each row."""
    size = (case.units, case.units)
    matrix = tf.Variable(tf.random.stateless_normal(size, (1, 2), stddev=case.units**-0.5))

    def states(x: tf.Tensor, h: tf.Tensor, left: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def body(i: Any, h: Any, left: Any, listed: Any) -> Any:
            h = tf.where(left[:, None] > 0.5, tf.tanh(x[i] + h @ matrix), h)
            return i + 1, h, left - 1.0, listed.write(i, h)

        listed = tf.TensorArray(tf.float32, BOUND, element_shape=[case.rows, case.units])
        found = tf.while_loop(lambda i, h, left, _: (i < BOUND) & tf.reduce_any(left > 0.5), body, (0, h, left, listed))
        return found[1], found[3].stack()

    def gradient(x: tf.Tensor, h: tf.Tensor, left: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(states(x, h, left)[0])
        return tape.gradient(loss, matrix)

    return tf.function(states if case.mode == "infer" else gradient, autograph=False)


def given(case: Case, steps: int) -> Inputs:
    """Inputs of all steps, the first state, and after how many steps each row ends."""
    numbers = np.random.default_rng(0).standard_normal((BOUND, case.rows, case.units)).astype(np.float32)
    return tf.constant(numbers), tf.zeros([case.rows, case.units]), tf.fill([case.rows], float(steps))


LOOPS = Loops(
    name="ended",
    text=__doc__,
    title="Loops that their states end, on a CPU",
    sizes=((1, 32), (8, 256), (16, 128), (16, 256), (32, 64)),
    steps=(4, 9, 21, 66, 256),
    rounds=30,
    make=loop,
    given=given,
)

if __name__ == "__main__":
    sys.exit(LOOPS.main())
