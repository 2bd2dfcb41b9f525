"""Regions over many axes: as many as a program has, and more, of which several kernels are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import tfmem
from custom_ops.expr.program import MOST_AXES
from tests.tf.stitched_steps import optimized, require_stitched

Array = np.ndarray[Any, Any]
MANY = MOST_AXES + 36


def arrays(shapes: Sequence[Sequence[int]], seed: int = 0) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]


def same(step: Callable[..., Any], inputs: Sequence[Array], *ops: str) -> None:
    """That the stitched step, which holds `ops`, gives what TensorFlow does."""
    stitched = optimized(tf.function(step))
    found, expected = stitched(*map(tf.constant, inputs)), tf.function(step)(*map(tf.constant, inputs))
    require_stitched(stitched, *ops)
    for ours, theirs in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)


@pytest.mark.long
@given(st.integers(1, MANY), st.integers(1, 2))
@example(32, 0)
@example(33, 0)
@example(33, 1)
@example(MOST_AXES, 1)
@example(MOST_AXES + 1, 1)
@example(MANY, 1)
@settings(max_examples=4, derandomize=True, suppress_health_check=list(HealthCheck))
def test_axes_that_have_nothing_to_do_with_each_other(count: int, kind: int) -> None:
    """Tensors no two of which share a size: one sum of all, rows that are reduced, or both sums and rows."""

    def step(*inputs: tf.Tensor) -> Any:
        sums = [tf.reduce_sum(tf.square(x)) for x in inputs]
        rows = [tf.nn.softmax(x * 2) for x in inputs]
        return (tf.sqrt(tf.add_n(sums)), rows, (sums, rows))[kind]

    same(step, arrays([(2 + number, 103 + number) for number in range(count)], count), "Mul" if kind == 1 else "Sum")


def test_the_global_norm_of_many_variables() -> None:
    variables = [tf.Variable(each) for each in arrays([(3 + k, 50 + k) for k in range(33)])]

    def step(scale: tf.Tensor) -> tf.Tensor:
        return tf.linalg.global_norm([variable * scale for variable in variables])

    same(step, [np.float32(1)], "L2Loss")


def test_rows_of_many_inputs_whose_sizes_are_not_known() -> None:
    spec = [tf.TensorSpec([None, 5])] * 24
    inputs = [tf.constant(each) for each in arrays([(6 + k, 5) for k in range(24)])]

    def step(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return [tf.nn.softmax(x * 2) for x in inputs]

    stitched = optimized(tf.function(step, input_signature=spec))
    found = stitched(*inputs)
    require_stitched(stitched, "Mul")
    for ours, x in zip(found, inputs, strict=True):
        np.testing.assert_allclose(ours, tf.nn.softmax(x * 2), 1e-5, 1e-6)


def test_axes_that_are_taken_apart_are_no_more_than_a_program_has() -> None:
    """Each output is an axis as it is written; the parts of all of them are twice as many."""
    sizes = [(2 + k, 5 + 3 * k) for k in range(MOST_AXES * 2 // 3)]
    inputs = arrays([(size,) for pair in sizes for size in pair])

    def step(*inputs: tf.Tensor) -> list[tf.Tensor]:
        pairs = zip(inputs[::2], inputs[1::2], strict=True)
        return [tf.tanh(tf.reshape(x[:, None] + y[None, :], [-1])) for x, y in pairs]

    same(step, inputs, "Tanh")


def test_clipping_by_a_global_norm_trains_as_keras_does() -> None:
    """A variable's axes are those of its weights and of its bias: 36 together."""

    def losses(optimize: bool) -> list[float]:
        tf.keras.utils.set_random_seed(1)
        hidden = [tf.keras.layers.Dense(8 + k, "tanh") for k in range(18)]
        model = tf.keras.Sequential([tf.keras.Input([8]), *hidden, tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.SGD(0.1, global_clipnorm=0.1), "mse", jit_compile=False)
        if optimize:
            model = tfmem.optimize(
                model, passes=("fusion",), fusion=tfmem.FusionOptions(tune="off"), cache_directory=""
            )
        (x,) = arrays([(64, 8)])
        history = model.fit(x, x[:, :1], epochs=3, verbose=0, shuffle=False).history["loss"]
        if optimize:
            require_stitched(model)
        return [float(loss) for loss in history]

    np.testing.assert_allclose(losses(True), losses(False), 1e-5)
