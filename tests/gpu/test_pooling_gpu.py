"""Pooling and its gradients as calls of regions on a GPU, MaxPool equal to TensorFlow's to the bit. Needs a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem

pytestmark = pytest.mark.usefixtures("first_gpu")

# image, window, strides, padding
FORMS = {
    "halves": ((4, 18, 22, 16), (2, 2), (2, 2), "VALID"),
    "overlapping": ((4, 19, 23, 16), (3, 3), (2, 2), "SAME"),
    "more behind": ((4, 18, 24, 7), (3, 3), (2, 2), "SAME"),
    "every pixel": ((2, 17, 13, 5), (3, 2), (1, 1), "SAME"),
    "apart": ((2, 19, 19, 3), (2, 2), (3, 4), "VALID"),
    "whole image": ((3, 7, 7, 33), (7, 7), (1, 1), "VALID"),
}


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_pooling_and_its_gradient(form: str, dtype: str, layout: str) -> None:
    """Sums of whole numbers are exact in any order. Many are equal, which shows which maximum has the gradient."""
    (n, h, w, c), window, strides, padding = FORMS[form]
    shape = (n, h, w, c) if layout == "NHWC" else (n, c, h, w)
    x = tf.cast(tf.constant(np.random.default_rng(0).integers(-2, 3, shape)), dtype)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.max_pool2d(tf.nn.relu(x) * 2, window, strides, padding, layout)
            loss = tf.reduce_sum(y * y)
        return y, tape.gradient(loss, x)

    options = tfmem.FusionOptions(tune="off")
    stitched = tfmem.optimize(tf.function(step), passes=("fusion",), fusion=options, cache_directory="")
    for _ in range(2):
        for found, expected in zip(stitched(x), tf.function(step)(x), strict=True):
            np.testing.assert_array_equal(tf.cast(found, tf.float32), tf.cast(expected, tf.float32))
    steps = [step for region in tfmem.report(stitched).regions for step in region.steps]
    inside = Counter(op for step in steps for _, op in step.ops)
    assert inside["MaxPool"] == inside["MaxPoolGrad"] == 1, inside


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_an_average_and_its_gradient(form: str, dtype: str, layout: str) -> None:
    (n, h, w, c), window, strides, padding = FORMS[form]
    shape = (n, h, w, c) if layout == "NHWC" else (n, c, h, w)
    x = tf.cast(tf.constant(np.random.default_rng(0).normal(size=shape)), dtype)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.avg_pool2d(tf.nn.tanh(x) * 2, window, strides, padding, layout)
            loss = tf.reduce_sum(tf.cast(y * y, tf.float32))
        return y, tape.gradient(loss, x)

    options = tfmem.FusionOptions(tune="off")
    stitched = tfmem.optimize(tf.function(step), passes=("fusion",), fusion=options, cache_directory="")
    unit = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for found, expected in zip(stitched(x), tf.function(step)(x), strict=True):
        largest = float(tf.reduce_max(tf.abs(tf.cast(expected, tf.float32))))
        np.testing.assert_allclose(
            tf.cast(found, tf.float32), tf.cast(expected, tf.float32), atol=unit * largest, rtol=0
        )
    steps = [step for region in tfmem.report(stitched).regions for step in region.steps]
    inside = Counter(op for step in steps for _, op in step.ops)
    assert inside["AvgPool"] == inside["AvgPoolGrad"] == 1, inside


def test_numbers_that_are_none() -> None:
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 8, 8, 8)), tf.float32)
    x = tf.tensor_scatter_nd_update(
        x, [[0, 4, 4, 0], [1, 2, 2, 3], [1, 3, 3, 4]], [float("nan"), float("inf"), -np.inf]
    )
    step = tf.function(lambda x: tf.nn.max_pool2d(x + 1.0, 2, 2, "VALID") * 2.0)
    options = tfmem.FusionOptions(tune="off")
    stitched = tfmem.optimize(step, passes=("fusion",), fusion=options, cache_directory="")
    np.testing.assert_array_equal(stitched(x), step(x))
