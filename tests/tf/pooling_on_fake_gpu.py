"""MaxPool, AvgPool and their gradients as calls in regions on the fake cuDNN. Run by test_fusion_gpu.py.

TensorFlow makes no CPU kernel for channels first, so these are tested on a GPU (tests/gpu/test_pooling_gpu.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.fusion.region import Region, TensorType
from graph_passes.analysis import device_support
from tests.tf.fake_gpu import FakeGpu
from tests.tf.fusion_calls import call
from tests.tf.stitched_steps import close, optimized, require_stitched, stitched_ops
from tfmem import report

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")

# Height, width and channels of images, windows, strides, padding: of SAME also more behind the image than before it.
FORMS = {
    "halves": ((8, 6, 3), (2, 2), (2, 2), "VALID"),
    "overlapping": ((9, 7, 2), (3, 3), (2, 2), "SAME"),
    "more behind": ((8, 8, 3), (3, 3), (2, 2), "SAME"),
    "every pixel": ((5, 6, 4), (3, 2), (1, 1), "SAME"),
    "apart": ((9, 9, 1), (2, 2), (3, 4), "VALID"),
    "whole image": ((3, 4, 5), (3, 4), (1, 1), "VALID"),
}


def given(form: Any, dtype: Any = tf.float32, batch: int = 2) -> Any:
    """Whole numbers, many of them equal: of equal ones the first of a window has the gradient."""
    return tf.constant(np.random.default_rng(0).integers(-2, 3, (batch, *form[0])), dtype)


def step_of(form: Any) -> Callable[..., Any]:
    """Pooling between activations, and its gradient."""
    _, window, strides, padding = form

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.max_pool2d(tf.nn.relu(x) * 2, window, strides, padding)
            loss = tf.reduce_sum(tf.cast(y * y, tf.float32))
        return y, tape.gradient(loss, x)

    return step


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FORMS)
def test_pooling_and_its_gradient_are_in_one_region(
    gpu: FakeGpu, on_gpu: Callable[..., None], name: str, dtype: Any
) -> None:
    on_gpu()
    x = given(FORMS[name], dtype)
    step = tf.function(step_of(FORMS[name]))
    stitched = optimized(step)
    for _ in range(2):
        for found, expected in zip(stitched(x), step(x), strict=True):
            np.testing.assert_array_equal(tf.cast(found, tf.float32), tf.cast(expected, tf.float32))
    assert len(require_stitched(stitched, "MaxPool", "MaxPoolGrad").regions) == 1


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FORMS)
def test_averages_and_their_gradient_are_in_one_region(
    gpu: FakeGpu, on_gpu: Callable[..., None], name: str, dtype: Any
) -> None:
    on_gpu()
    _, window, strides, padding = FORMS[name]

    def averaged(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.avg_pool2d(tf.nn.relu(x) * 2, window, strides, padding)
            loss = tf.reduce_sum(tf.cast(y * y, tf.float32))
        return y, tape.gradient(loss, x)

    x, step = given(FORMS[name], dtype), tf.function(averaged)
    stitched = optimized(step)
    for _ in range(2):
        for found, expected in zip(stitched(x), step(x), strict=True):
            unit = 1e-6 if dtype == tf.float32 else 1.6e-2
            close(
                tf.cast(found, tf.float32), tf.cast(expected, tf.float32), unit * float(tf.reduce_max(tf.abs(expected)))
            )
    assert len(require_stitched(stitched, "AvgPool", "AvgPoolGrad").regions) == 1


@pytest.mark.parametrize("op", ["MaxPool", "AvgPool"])
def test_a_batch_may_be_of_any_size(gpu: FakeGpu, on_gpu: Callable[..., None], op: str) -> None:
    on_gpu()
    form = FORMS["overlapping"]
    pooled = {"MaxPool": tf.nn.max_pool2d, "AvgPool": tf.nn.avg_pool2d}[op]

    @tf.function(input_signature=[tf.TensorSpec((None, *form[0]))])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = pooled(tf.nn.relu(x) * 2, *form[1:])
            loss = tf.reduce_sum(y * y)
        return y, tape.gradient(loss, x)

    stitched = optimized(step)
    for batch in (1, 3, 2):
        x = given(form, batch=batch)
        close(stitched(x), step(x), 1e-5)
    require_stitched(stitched, op, f"{op}Grad")


def test_float64_stays_outside(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    on_gpu()
    x = given(FORMS["halves"], tf.float64)
    step = tf.function(step_of(FORMS["halves"]))
    stitched = optimized(step)
    close(stitched(x), step(x), 1e-12)
    assert not {op for op in stitched_ops(report(stitched)) if "Pool" in op}


def test_where_regions_pool_nothing_it_stays_outside(
    gpu: FakeGpu, on_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.tf.planned_on_fake_gpu.CUDA", replace(device_support.CUDA, pooled=frozenset()))
    on_gpu()
    x = given(FORMS["halves"])
    step = tf.function(step_of(FORMS["halves"]))
    stitched = optimized(step)
    close(stitched(x), step(x), 1e-6)
    assert not {op for op in stitched_ops(report(stitched)) if "Pool" in op}


def one(gpu: FakeGpu, x: Any, made: tuple[int, ...], **given: Any) -> Any:
    attributes = {"T": tf.float32, "padding": "VALID", "ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], **given}
    types = (TensorType("float32", tuple(x.shape)), TensorType("float32", made))
    region = Region(1, (), types, (call("MaxPool", (0,), (1,), **attributes),), (1,))
    return tf.function(lambda x: gpu.fusion(region, [x], (), ()))(x)[0]


@pytest.mark.parametrize("wrong", [(2, 4, 3, 2), (2, 4, 2, 3), (1, 4, 3, 3)])
def test_shapes_that_do_not_fit_are_refused(gpu: FakeGpu, wrong: tuple[int, ...]) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError):
        one(gpu, given(FORMS["halves"]), wrong)


@pytest.mark.parametrize(
    ("attributes", "error"),
    [
        ({"ksize": [1, 2, 2, 3]}, tf.errors.InvalidArgumentError),
        ({"padding": "EXPLICIT"}, tf.errors.UnimplementedError),
    ],
)
def test_what_regions_do_not_pool_is_an_error(gpu: FakeGpu, attributes: Any, error: Any) -> None:
    with pytest.raises(error):
        one(gpu, given(FORMS["halves"]), (2, 4, 3, 3), **attributes)


@pytest.mark.parametrize("function", ["cudnnCreatePoolingDescriptor", "cudnnSetPooling2dDescriptor", "cudnnSetStream"])
def test_failures_are_errors_and_leave_nothing(gpu: FakeGpu, function: str) -> None:
    live = gpu.cudnn.fake_live_cudnn()
    gpu.fail(function, times=9)
    with pytest.raises(tf.errors.InternalError, match="cuDNN status"):
        one(gpu, given(FORMS["halves"], batch=4), (4, 4, 3, 3))
    gpu.fail(function, times=0)
    assert gpu.cudnn.fake_live_cudnn() == live
