"""TfmemStepDraws on a GPU, beside TensorFlow's op of each step on it: the numbers are equal. Needs a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.image_functions import named
from custom_ops.jit.device import DeviceContext
from custom_ops.load import load
from custom_ops.random import draw_kernels
from tests.tf.recurrent_training import INPUTS, numbers
from tests.tf.step_draws_on_fake_gpu import DRAWS, SEEDS, SHAPES, assert_same, bounds, keys_of
from tests.tf.test_recurrent_seeded import BATCH, loop
from tests.tf.test_recurrent_seeded import DRAWS as DRAWN_IN_LOOPS

pytestmark = pytest.mark.usefixtures("first_gpu")


@pytest.mark.parametrize("steps", [5, 1])
@pytest.mark.parametrize(("kind", "dtype"), DRAWS)
def test_numbers_of_every_step(kind: str, dtype: str, steps: int) -> None:
    op = f"Stateless{kind}V2"
    program = draw_kernels.build(op, dtype, DeviceContext().arch)
    with tf.device("CPU:0"):
        key, counter = keys_of(SEEDS[:steps])
    low, high = bounds(dtype, steps)
    more = [low, high] if kind == "RandomUniformInt" else []

    @tf.function(autograph=False)
    def drawn(*inputs: Any) -> Any:
        (found,) = load().ops.tfmem_step_draws(
            inputs=inputs,
            Tout=[tf.as_dtype(dtype)],
            op=op,
            of_steps=[False, True, True, False, *[True] * len(more)],
            shapes=[None],
            programs=[program.to_text()],
            images=named([program.code]),
        )
        return found

    for shape in (*SHAPES, (513, 1027)):  # the last has more numbers than the GPU has threads
        given = [tf.constant(shape, tf.int32), key, counter, tf.constant(1), *more]
        names = ("minval", "maxval")[: len(more)]
        types = {} if more else {"dtype": tf.as_dtype(dtype)}
        expected = [
            getattr(tf.raw_ops, op)(
                shape=given[0], key=key[step], counter=counter[step], alg=1, **types,
                **{name: each[step] for name, each in zip(names, more, strict=True)},
            )
            for step in range(steps)
        ]  # fmt: skip
        assert_same(op, dtype, drawn(*given), tf.stack(expected))


@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("draw", ["folded", "shifted", "whole", "float64"])
@pytest.mark.parametrize("training", [False, True])
def test_a_loop_draws_the_same_when_it_is_replaced(draw: str, training: bool) -> None:
    step = loop(DRAWN_IN_LOOPS[draw], training=training)
    optimized = tfmem.optimize(step, passes=("recurrent",), cache_directory="")
    for time in (17, 1, 5):
        given = tf.constant(numbers(time, BATCH, INPUTS)), tf.constant(time), tf.constant([3, time])
        for found, expected in zip(optimized(*given), step(*given), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert tfmem.report(optimized).replaced
