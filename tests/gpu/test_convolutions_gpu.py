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
DEPTHWISE = tuple(op.replace("Conv2D", "DepthwiseConv2dNative") for op in CONVOLUTIONS)

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
    # Padded more behind than before, or otherwise unlike.
    "stride 2 of even sizes": ((4, 20, 24, 16), (3, 3, 16, 24), (2, 2), (1, 1), "SAME"),
    "stride 3": ((2, 20, 23, 8), (4, 3, 8, 16), (3, 3), (1, 1), "SAME"),
    "even filter": ((2, 19, 24, 8), (2, 4, 8, 16), (1, 1), (1, 1), "SAME"),
    "7x7 of even sizes": ((2, 32, 32, 3), (7, 7, 3, 64), (2, 2), (1, 1), "SAME"),
    "dilated, even filter": ((2, 21, 20, 8), (2, 3, 8, 8), (1, 1), (3, 2), "SAME"),
    "before alone": ((2, 12, 13, 8), (3, 3, 8, 16), (1, 2), (1, 1), ((0, 0), (2, 0), (1, 0), (0, 0))),
    "explicit, unlike": ((2, 12, 13, 8), (3, 3, 8, 16), (2, 1), (1, 1), ((0, 0), (3, 1), (0, 2), (0, 0))),
    "groups of even sizes": ((2, 16, 16, 16), (3, 3, 8, 32), (2, 2), (1, 1), "SAME"),
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


@pytest.mark.parametrize("size", [(15, 17), (16, 18)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", ERRORS)
def test_depthwise_ones(dtype: str, stride: int, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x = tf.cast(tf.constant(rng.normal(size=(4, *size, 24))), dtype)
    w = tf.cast(tf.constant(rng.normal(size=(5, 5, 24, 2))), dtype)
    convolve = lambda x, w: tf.nn.depthwise_conv2d(x, w, (1, stride, stride, 1), "SAME")  # noqa: E731
    found, inside = in_a_region(step_of(convolve), x, w)
    assert all(inside[op] == 1 for op in DEPTHWISE), inside
    exact = tf.function(step_of(convolve))(tf.cast(x, tf.float64), tf.cast(w, tf.float64))
    for mine, theirs in zip(found, exact, strict=True):
        close(mine, theirs, dtype)


@pytest.mark.parametrize("layout", IMAGES)
def test_batches_of_any_size_with_other_padding_behind(layout: str) -> None:
    rng, order = np.random.default_rng(0), IMAGES[layout]
    w = tf.constant(rng.normal(size=(3, 3, 8, 16)), tf.float32)

    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = tf.nn.tanh(tf.nn.conv2d(tf.nn.tanh(x), w, 2, "SAME", layout) * tf.cast(0.1, x.dtype))
        return y, *tape.gradient(y, (x, w), y * y)

    shape = [None, *order(0, 20, 24, 8)[1:]]
    signature = [tf.TensorSpec(shape, tf.float32), tf.TensorSpec(w.shape, tf.float32)]
    options = tfmem.FusionOptions(tune="off")
    plain = tf.function(step, input_signature=signature)
    stitched = tfmem.optimize(plain, passes=("fusion",), fusion=options, cache_directory="")
    for batch in (1, 3, 2):
        x = tf.constant(rng.normal(size=order(batch, 20, 24, 8)), tf.float32)
        exact = tf.function(step)(tf.cast(x, tf.float64), tf.cast(w, tf.float64))
        for mine, theirs in zip(stitched(x, w), exact, strict=True):
            close(mine, theirs, "float32")
    inside = {op for region in tfmem.report(stitched).regions for each in region.steps for _, op in each.ops}
    assert {"Conv2D", "Conv2DBackpropFilter"} <= inside


def test_numbers_that_are_none_stay_so() -> None:
    x = tf.constant(np.random.default_rng(0).normal(size=(2, 9, 9, 8)), tf.float32)
    x = tf.tensor_scatter_nd_update(x, [[0, 4, 4, 0], [1, 2, 2, 3]], [float("nan"), float("inf")])
    w = tf.ones((3, 3, 8, 16))
    step = lambda x, w: tf.nn.relu(tf.nn.conv2d(tf.abs(x) + 1.0, w, 1, "SAME"))  # noqa: E731
    found, inside = in_a_region(lambda x, w: (step(x, w), tf.abs(w)), x, w)
    assert inside["Conv2D"] == 1
    np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(step(x, w)))
    np.testing.assert_array_equal(np.isinf(found[0]), np.isinf(step(x, w)))
