"""Convolutions and their gradients as calls of regions on a GPU, against float64. Needs a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem

pytestmark = pytest.mark.usefixtures("float32_products", "first_gpu")

ERRORS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 3e-6}  # of the largest number of a tensor
IMAGES = {"NHWC": lambda n, h, w, c: (n, h, w, c), "NCHW": lambda n, h, w, c: (n, c, h, w)}
CONVOLUTIONS = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")

# image as NHWC, filter, strides, dilations, padding as NHWC
FORMS = {
    "same": ((4, 19, 23, 16), (3, 3, 16, 24), (1, 1), (1, 1), "SAME"),
    "odd channels": ((3, 17, 13, 5), (3, 3, 5, 7), (1, 1), (1, 1), "SAME"),
    "high filter": ((2, 19, 23, 8), (5, 3, 8, 16), (1, 1), (1, 1), "SAME"),
    "stride 2": ((4, 19, 23, 16), (3, 3, 16, 24), (2, 2), (1, 1), "SAME"),
    "7x7": ((2, 37, 37, 3), (7, 7, 3, 64), (2, 2), (1, 1), "VALID"),
    "dilated": ((2, 21, 19, 8), (3, 3, 8, 8), (1, 1), (2, 3), "SAME"),
    "explicit": ((2, 12, 13, 8), (3, 3, 8, 16), (1, 2), (1, 1), ((0, 0), (2, 2), (1, 1), (0, 0))),
    "1x1": ((4, 14, 14, 48), (1, 1, 48, 40), (1, 1), (1, 1), "VALID"),
    "1x1, stride 2": ((4, 15, 15, 48), (1, 1, 48, 40), (2, 2), (1, 1), "VALID"),
    "groups": ((2, 15, 15, 16), (3, 3, 8, 32), (1, 1), (1, 1), "SAME"),
}


def step_of(convolve: Any) -> Any:
    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = tf.nn.tanh(convolve(tf.nn.tanh(x), w) * tf.cast(0.1, x.dtype))
            loss = tf.reduce_sum(tf.cast(y * y, tf.float64 if y.dtype == tf.float64 else tf.float32))
        return y, *tape.gradient(loss, (x, w))

    return step


def in_a_region(step: Any, x: Any, w: Any) -> tuple[list[Any], Counter[str]]:
    """What the stitched step gives, equal in two runs, and the ops of its regions."""
    options = tfmem.FusionOptions(tune="off")
    stitched = tfmem.optimize(tf.function(step), passes=("fusion",), fusion=options, cache_directory="")
    first, again = stitched(x, w), stitched(x, w)
    for left, right in zip(first, again, strict=True):
        np.testing.assert_array_equal(tf.cast(left, tf.float64), tf.cast(right, tf.float64))
    steps = [step for region in tfmem.report(stitched).regions for step in region.steps]
    return list(again), Counter(op for step in steps for _, op in step.ops)


def close(found: Any, exact: Any, dtype: str) -> None:
    exact = np.asarray(exact)
    distance = np.max(np.abs(tf.cast(found, tf.float64).numpy() - exact))
    assert distance <= ERRORS[dtype] * np.max(np.abs(exact))


@pytest.mark.parametrize("layout", IMAGES)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("form", FORMS)
def test_a_convolution_and_its_gradients(form: str, dtype: str, layout: str) -> None:
    image, weights, strides, dilations, padding = FORMS[form]
    rng, order = np.random.default_rng(0), IMAGES[layout]
    x = tf.cast(tf.constant(rng.normal(size=order(*image))), dtype)
    w = tf.cast(tf.constant(rng.normal(size=weights)), dtype)
    if not isinstance(padding, str):
        padding = [list(each) for each in order(*padding)]
    convolve = lambda x, w: tf.nn.conv2d(x, w, strides, padding, layout, dilations)  # noqa: E731
    found, inside = in_a_region(step_of(convolve), x, w)
    assert all(inside[op] == 1 for op in CONVOLUTIONS), inside
    exact = tf.function(step_of(convolve))(tf.cast(x, tf.float64), tf.cast(w, tf.float64))
    for mine, theirs in zip(found, exact, strict=True):
        close(mine, theirs, dtype)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", ERRORS)
def test_depthwise_ones(dtype: str, stride: int) -> None:
    rng = np.random.default_rng(0)
    x = tf.cast(tf.constant(rng.normal(size=(4, 15, 17, 24))), dtype)
    w = tf.cast(tf.constant(rng.normal(size=(5, 5, 24, 2))), dtype)
    convolve = lambda x, w: tf.nn.depthwise_conv2d(x, w, (1, stride, stride, 1), "SAME")  # noqa: E731
    found, _ = in_a_region(step_of(convolve), x, w)
    exact = tf.function(step_of(convolve))(tf.cast(x, tf.float64), tf.cast(w, tf.float64))
    for mine, theirs in zip(found, exact, strict=True):
        close(mine, theirs, dtype)


def test_numbers_that_are_none_stay_so() -> None:
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 9, 9, 8)), tf.float32)
    x = tf.tensor_scatter_nd_update(x, [[0, 4, 4, 0], [1, 2, 2, 3]], [float("nan"), float("inf")])
    w = tf.ones((3, 3, 8, 16))
    step = lambda x, w: tf.nn.relu(tf.nn.conv2d(tf.abs(x) + 1.0, w, 1, "SAME"))  # noqa: E731
    found, inside = in_a_region(lambda x, w: (step(x, w), tf.abs(w)), x, w)
    assert inside["Conv2D"] == 1
    np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(step(x, w)))
    np.testing.assert_array_equal(np.isinf(found[0]), np.isinf(step(x, w)))
