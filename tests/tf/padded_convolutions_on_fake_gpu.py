"""Convolutions whose padding differs before and behind, in regions on the fake cuDNN. Run by test_fusion_gpu.py."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.fake_gpu import FakeGpu
from tests.tf.padded_reference import BACK, DEPTHWISE, EXPLICIT, UNEVEN, attributes, convolved, numbers
from tests.tf.planned_on_fake_gpu import saved_stitched
from tests.tf.python_server import run_python
from tests.tf.stitched_steps import close, optimized, require_stitched, stitched_ops
from tfmem import report

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")
pytestmark = pytest.mark.filterwarnings("error::tfmem.TfmemWarning")

# Serves a model in a process that has no GPU, not even a fake one.
SERVED = """
import sys
import numpy
from tests.tf.planned_on_fake_gpu import served_without_a_gpu
_, model, given, made = sys.argv
numpy.save(made, served_without_a_gpu(model, numpy.load(given)))
"""


def training(convolve: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution between activations, and both gradients."""

    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = tf.nn.tanh(convolve(tf.nn.tanh(x), w))
            loss = tf.reduce_sum(tf.cast(y * y, tf.float32))
        return y, *tape.gradient(loss, (x, w))

    return step


def check(op: str, size: Any, window: Any, strides: Any, padding: Any) -> None:
    x, w = tf.constant(numbers(2, *size, 3)), tf.constant(numbers(*window, 3, 2 if op == DEPTHWISE else 4))
    step = tf.function(training(lambda x, w: convolved(op, x, w, strides, (1, 1), padding)))
    stitched = optimized(step)
    for _ in range(2):
        close(stitched(x, w), step(x, w), 2e-4)
    done = require_stitched(stitched, op, f"{op}BackpropInput", f"{op}BackpropFilter")
    assert len(done.regions) == 1


@pytest.mark.parametrize(("size", "strides", "window"), UNEVEN)
def test_same(gpu: FakeGpu, on_gpu: Callable[..., None], size: Any, strides: Any, window: Any) -> None:
    on_gpu()
    check("Conv2D", size, window, strides, "SAME")


@pytest.mark.parametrize("padding", EXPLICIT)
@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (3, 2)])
def test_explicit(gpu: FakeGpu, on_gpu: Callable[..., None], padding: Any, strides: Any) -> None:
    on_gpu()
    check("Conv2D", (8, 7), (3, 2), strides, padding)


@pytest.mark.parametrize("padding", ["SAME", *EXPLICIT])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_depthwise(gpu: FakeGpu, on_gpu: Callable[..., None], stride: int, padding: Any) -> None:
    on_gpu()
    check(DEPTHWISE, (8, 9), (3, 2), (stride, stride), padding)


def test_channels_first_with_dilations(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """TensorFlow has no gradients of these on a CPU."""
    on_gpu()
    x, w = tf.constant(numbers(2, 3, 8, 9)), tf.constant(numbers(3, 2, 3, 4))

    def step(x: Any, w: Any) -> Any:
        attrs = attributes((2, 1), (1, 2), ((0, 1), (2, 1)), "NCHW")
        return tf.nn.tanh(tf.raw_ops.Conv2D(input=tf.nn.tanh(x), filter=w, **attrs))

    stitched = optimized(tf.function(step))
    last = tf.transpose(x, BACK["NCHW"])
    expected = tf.nn.tanh(convolved("Conv2D", tf.nn.tanh(last), w, (2, 1), (1, 2), ((0, 1), (2, 1))))
    close(tf.transpose(stitched(x, w), BACK["NCHW"]), expected, 2e-4)
    require_stitched(stitched, "Conv2D")


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_types(gpu: FakeGpu, on_gpu: Callable[..., None], dtype: Any) -> None:
    on_gpu()
    x, w = (tf.cast(numbers(*shape), dtype) for shape in ((2, 8, 8, 3), (3, 3, 3, 4)))
    step = training(lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"))
    stitched = optimized(tf.function(step))
    unit = 0.08 if dtype == tf.bfloat16 else 0.01
    exact = step(tf.cast(x, tf.float64), tf.cast(w, tf.float64))
    for found, expected in zip(stitched(x, w), exact, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(tf.cast(found, tf.float64), expected, rtol=unit, atol=unit * np.abs(expected).max())
    require_stitched(stitched, "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


def test_images_that_are_given_and_gradients_that_are_fetched(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """So that nothing but the padding is between the call and what is outside."""
    on_gpu()
    x, w = tf.constant(numbers(2, 8, 8, 3)), tf.constant(numbers(3, 3, 3, 4))

    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = tf.nn.conv2d(x, w, 2, "SAME")
        return tf.abs(y), *tape.gradient(y, (x, w), y * y)

    stitched = optimized(tf.function(step))
    close(stitched(x, w), step(x, w), 2e-4)
    require_stitched(stitched, "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


@pytest.mark.parametrize("op", ["Conv2D", DEPTHWISE])
def test_a_batch_may_be_of_any_size(gpu: FakeGpu, on_gpu: Callable[..., None], op: str) -> None:
    """Also of the image's gradient, whose sizes are a tensor then."""
    on_gpu()
    signature = [tf.TensorSpec((None, 8, 8, 3)), tf.TensorSpec((3, 3, 3, 4))]

    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = tf.nn.tanh(convolved(op, tf.nn.tanh(x), w, (2, 2), (1, 1), "SAME"))
        return y, *tape.gradient(y, (x, w), y * y)

    plain = tf.function(step, input_signature=signature)
    stitched = optimized(plain)
    w = tf.constant(numbers(3, 3, 3, 4))
    for batch in (1, 3, 2):
        x = tf.constant(numbers(batch, 8, 8, 3))
        close(stitched(x, w), plain(x, w), 2e-4)
    done = require_stitched(stitched, op, f"{op}BackpropInput", f"{op}BackpropFilter")
    assert len(done.regions) == 1


@pytest.mark.parametrize("batch", [4, None])
def test_keras(gpu: FakeGpu, on_gpu: Callable[..., None], batch: int | None) -> None:
    """The strided layers of Keras's examples."""
    on_gpu()
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((16, 16, 3)),
            layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False, activation="relu"),
            layers.SeparableConv2D(8, 3, strides=2, padding="same", use_bias=False, activation="relu"),
            layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2DTranspose(3, 4, strides=2, padding="same"),
        ]
    )
    variables = model.trainable_variables

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - x) ** 2)
        return loss, tape.gradient(loss, variables)

    stitched = optimized(tf.function(step, input_signature=[tf.TensorSpec((batch, 16, 16, 3))]))
    for size in [batch] * 2 if batch else (4, 1, 3):
        x = tf.constant(numbers(size, 16, 16, 3))
        close(stitched(x), step(x), 2e-4)
    counts = Counter(op for op in stitched_ops(report(stitched)) if "onv" in op)
    assert counts == {
        "Conv2D": 4,
        "Conv2DBackpropInput": 3,
        "Conv2DBackpropFilter": 4,
        DEPTHWISE: 1,
        f"{DEPTHWISE}BackpropInput": 1,
        f"{DEPTHWISE}BackpropFilter": 1,
    }


def test_a_saved_model_runs_on_a_cpu(gpu: FakeGpu, on_gpu: Callable[..., None], tmp_path: Any) -> None:
    """For batches of any size, with gradients and convolutions that are transposed."""
    on_gpu()
    model = tf.Module()
    w, deep = tf.constant(numbers(3, 3, 3, 4)), tf.constant(numbers(3, 3, 4, 1))

    def serve(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.tanh(tf.nn.conv2d(tf.nn.tanh(x), w, 2, "SAME"))
            y = tf.nn.tanh(tf.nn.depthwise_conv2d(y, deep, (1, 2, 2, 1), "SAME"))
            y = tf.nn.tanh(tf.nn.conv2d_transpose(y, w, (tf.shape(x)[0], 4, 4, 3), 2))
        return tape.gradient(y, x)

    model.serve = tf.function(serve, input_signature=[tf.TensorSpec((None, 8, 8, 3))])
    x = tf.constant(numbers(5, 8, 8, 3))
    expected = model.serve(x)
    path = saved_stitched(model, tmp_path)
    launched = gpu.calls("cuGraphLaunch")
    served = tf.saved_model.load(path).signatures["serving_default"]
    close(next(iter(served(x).values())), expected, 2e-4)
    assert gpu.calls("cuGraphLaunch") > launched
    np.save(tmp_path / "x.npy", x)
    for onednn in "10":  # without it, kernels want to be told the batch of a gradient
        environment = {"PATH": os.environ["PATH"], "TF_ENABLE_ONEDNN_OPTS": onednn}
        done = run_python(["-c", SERVED, path, str(tmp_path / "x.npy"), str(tmp_path / "y.npy")], environment)
        assert done.returncode == 0, done.stderr[-2000:]
        close(np.load(tmp_path / "y.npy"), expected, 2e-4)
