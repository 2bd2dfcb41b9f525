"""Loops of unknown length that draw by a seed of each step: TensorFlow's executor beside tfmem, on a CPU.

    python -m benchmarks.recurrent.drawn --output benchmarks/results/recurrent_drawn_cpu.json
    python -m benchmarks.recurrent.drawn --table benchmarks/results/recurrent_drawn_cpu.json

A step is `h = tanh(x[i] @ K + h @ R + 0.1 * normal(seed=[i, 5]))`; all states are listed. In inference the list is the
result, in training the gradients of `K` and `R` are."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.recurrent.loops import Case, Inputs, Loops


def loop(case: Case) -> Any:
    """The function of a case, of inputs [steps, rows, units]."""
    size = (case.units, case.units)
    matrices = [
        tf.Variable(tf.random.stateless_normal(size, (place, 2), stddev=0.5 * case.units**-0.5)) for place in range(2)
    ]

    def states(x: tf.Tensor) -> tf.Tensor:
        def body(i: Any, h: Any, listed: Any) -> Any:
            noise = tf.random.stateless_normal([case.rows, case.units], tf.stack([i, 5]))
            h = tf.tanh(x[i] @ matrices[0] + h @ matrices[1] + 0.1 * noise)
            return i + 1, h, listed.write(i, h)

        count = tf.shape(x)[0]
        listed = tf.TensorArray(tf.float32, count, element_shape=[case.rows, case.units])
        first = (0, tf.zeros([case.rows, case.units]), listed)
        return tf.while_loop(lambda i, *_: i < count, body, first)[2].stack()

    def gradients(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(states(x) ** 2)
        return tape.gradient(loss, matrices)

    signature = [tf.TensorSpec([None, case.rows, case.units])]
    return tf.function(states if case.mode == "infer" else gradients, input_signature=signature, autograph=False)


def given(case: Case, steps: int) -> Inputs:
    """The inputs of so many steps."""
    numbers = np.random.default_rng(1).standard_normal((steps, case.rows, case.units)).astype(np.float32)
    return (tf.constant(numbers),)


LOOPS = Loops(
    name="drawn",
    text=__doc__,
    title="Loops that draw in each step, on a CPU",
    sizes=((1, 8), (8, 32), (32, 128)),
    steps=(1, 8, 50, 600),
    rounds=20,
    make=loop,
    given=given,
)

if __name__ == "__main__":
    sys.exit(LOOPS.main())
