"""Ops of images that only oneDNN's kernels run on a CPU: in a step that is stitched they run, and give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem

BY_MODEL = {
    "passes": ("fusion",),
    "fusion": tfmem.FusionOptions(tune="off"),
    "cache_directory": "",
    "progress": False,
}
LAST, FIRST = (2, 9, 8, 3), (2, 3, 9, 8)
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "channels first": (lambda x, w: tf.nn.conv2d(x, w, 1, "SAME", data_format="NCHW"), (FIRST, (3, 3, 3, 4))),
    "channels first, transposed": (
        lambda x, w: tf.nn.conv2d_transpose(x, w, [2, 4, 18, 16], 2, "SAME", data_format="NCHW"),
        (FIRST, (3, 3, 4, 3)),
    ),
    "channels first, maximum": (lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID", data_format="NCHW"), (FIRST,)),
    "channels first, average": (lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID", data_format="NCHW"), (FIRST,)),
    "channels first, 3D": (
        lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME", data_format="NCDHW"),
        ((2, 3, 4, 5, 6), (2, 2, 2, 3, 4)),
    ),
    "dilated": (lambda x, w: tf.nn.conv2d(x, w, 1, "SAME", dilations=2), (LAST, (3, 3, 3, 4))),
    "dilated, 1D": (lambda x, w: tf.nn.conv1d(x, w, 1, "SAME", dilations=2), ((2, 9, 3), (3, 3, 4))),
    "dilated, transposed": (
        lambda x, w: tf.nn.conv2d_transpose(x, w, [2, 9, 8, 4], 1, "SAME", dilations=2),
        (LAST, (3, 3, 4, 3)),
    ),
    "dilated, 3D": (
        lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME", dilations=[1, 2, 2, 2, 1]),
        ((2, 4, 5, 6, 3), (2, 2, 2, 3, 4)),
    ),
}


def values(*shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(len(shape)).normal(size=shape), tf.float32)


@pytest.mark.parametrize("name", CASES)
def test_a_step_with_its_gradient(name):
    op, shapes = CASES[name]
    given = tuple(values(*shape) for shape in shapes)

    def step(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = op(*(2.0 * each + 1.0 for each in given))
            loss = tf.reduce_sum(tf.nn.relu(y) * y)
        return loss, *tape.gradient(loss, given)

    try:
        expected = tf.function(step)(*given)
    except tf.errors.InvalidArgumentError:
        pytest.skip("TensorFlow runs it without oneDNN here, and cannot")
    made = tfmem.optimize(tf.function(step), **BY_MODEL)
    for found, wanted in zip(made(*given), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    assert tfmem.report(made).regions


def test_a_convolution_of_no_image():
    """oneDNN's says that nothing has the shape of its input."""
    made = tfmem.optimize(
        tf.function(
            lambda x: tf.nn.relu(tf.nn.conv2d(x * 2.0, values(3, 3, 3, 4), 1, "SAME") + 1.0),
            input_signature=[tf.TensorSpec([None, 8, 8, 3])],
        ),
        **BY_MODEL,
    )
    assert made(values(2, 8, 8, 3)).shape == [2, 8, 8, 4]
    assert made(tf.zeros([0, 8, 8, 3])).shape == [0, 8, 8, 4]
