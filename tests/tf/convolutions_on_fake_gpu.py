"""Convolutions as calls in regions on the fake cuDNN, and their gradients. Run by test_fusion_gpu.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from custom_ops.fusion.region import Call, Region, TensorType
from graph_passes.analysis import device_support
from tests.tf.fake_gpu import FakeGpu
from tests.tf.fusion_calls import call
from tests.tf.stitched_steps import close, optimized, require_stitched, stitched_ops
from tfmem import report

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")

# Height, width and channels of images, filters, strides, dilations, padding.
FORMS = {
    "same": ((7, 9, 3), (3, 5, 3, 4), (1, 1), (1, 1), "SAME"),
    "valid": ((8, 7, 2), (3, 2, 2, 5), (2, 3), (1, 1), "VALID"),
    "strided": ((7, 9, 3), (3, 3, 3, 4), (2, 2), (1, 1), "SAME"),
    "explicit": ((6, 5, 3), (3, 3, 3, 2), (1, 2), (1, 1), ((2, 2), (1, 1))),
    "pixels": ((5, 7, 6), (1, 1, 6, 4), (1, 1), (1, 1), "VALID"),
    "strided pixels": ((5, 7, 6), (1, 1, 6, 4), (2, 2), (1, 1), "SAME"),
    "whole image": ((3, 4, 5), (3, 4, 5, 7), (1, 1), (1, 1), "VALID"),
}
PADDED = {
    "even": ((8, 8, 3), (3, 3, 3, 4), (2, 2), (1, 1), "SAME"),
    "even filter": ((8, 7, 3), (2, 3, 3, 4), (1, 1), (1, 1), "SAME"),
    "explicit": ((6, 5, 3), (3, 3, 3, 2), (1, 2), (1, 1), ((0, 1), (1, 1))),
}


def convolved(x: Any, w: Any, form: Any) -> Any:
    _, _, strides, dilations, padding = form
    padding = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
    return tf.nn.conv2d(x, w, strides, padding, dilations=dilations)


def given(form: Any, dtype: Any = tf.float32, batch: int = 2) -> tuple[Any, Any]:
    image, filters, *_ = form
    rng = np.random.default_rng(0)
    return tuple(tf.constant(rng.normal(size=shape), dtype) for shape in ((batch, *image), filters))  # type: ignore[return-value]


def step_of(form: Any) -> Callable[..., Any]:
    """A convolution between activations, and both gradients."""

    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = tf.nn.tanh(convolved(tf.nn.tanh(x), w, form))
            loss = tf.reduce_sum(tf.cast(y * y, tf.float32))
        return y, *tape.gradient(loss, (x, w))

    return step


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("name", FORMS)
def test_convolutions_and_gradients_are_in_regions(gpu: FakeGpu, on_gpu: Callable[..., None], name: str) -> None:
    on_gpu()
    x, w = given(FORMS[name])
    step = tf.function(step_of(FORMS[name]))
    stitched = optimized(step)
    for _ in range(2):
        close(stitched(x, w), step(x, w), 2e-4)
    done = require_stitched(stitched, "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
    assert len(done.regions) == 1


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize(("stride", "padding"), [(1, "SAME"), (2, "SAME"), (2, "VALID")])
def test_depthwise(gpu: FakeGpu, on_gpu: Callable[..., None], multiplier: int, stride: int, padding: str) -> None:
    on_gpu()
    rng = np.random.default_rng(0)
    x, w = (tf.constant(rng.normal(size=shape), tf.float32) for shape in ((2, 7, 9, 5), (3, 5, 5, multiplier)))

    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = tf.nn.tanh(tf.nn.depthwise_conv2d(tf.nn.tanh(x), w, (1, stride, stride, 1), padding))
            loss = tf.reduce_sum(y * y)
        return y, *tape.gradient(loss, (x, w))

    plain = tf.function(step)
    stitched = optimized(plain)
    close(stitched(x, w), plain(x, w), 2e-4)
    name = "DepthwiseConv2dNative"
    done = require_stitched(stitched, name, f"{name}BackpropInput", f"{name}BackpropFilter")
    assert len(done.regions) == 1


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("name", ["same", "valid", "pixels"])
def test_half_types(gpu: FakeGpu, on_gpu: Callable[..., None], name: str, dtype: Any) -> None:
    on_gpu()
    x, w = given(FORMS[name], dtype)
    step = tf.function(step_of(FORMS[name]))
    stitched = optimized(step)
    wide = [tf.cast(each, tf.float64) for each in (x, w)]
    exact = step_of(FORMS[name])(*wide)
    unit = 0.08 if dtype == tf.bfloat16 else 0.01
    for found, expected in zip(stitched(x, w), exact, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(tf.cast(found, tf.float64), expected, rtol=unit, atol=unit * np.abs(expected).max())
    require_stitched(stitched, "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("name", PADDED)
def test_what_is_padded_unlike_on_both_sides(gpu: FakeGpu, on_gpu: Callable[..., None], name: str) -> None:
    on_gpu()
    x, w = given(PADDED[name])
    step = tf.function(step_of(PADDED[name]))
    stitched = optimized(step)
    for _ in range(2):
        close(stitched(x, w), step(x, w), 2e-4)
    done = require_stitched(stitched, "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
    assert len(done.regions) == 1


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
@pytest.mark.parametrize("name", FORMS)
def test_a_batch_may_be_of_any_size(gpu: FakeGpu, on_gpu: Callable[..., None], name: str) -> None:
    """Also of the image's gradient, whose sizes are a tensor then."""
    on_gpu()
    form = FORMS[name]
    signature = [tf.TensorSpec((None, *form[0])), tf.TensorSpec(form[1])]

    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch((x, w))
            y = tf.nn.tanh(convolved(tf.nn.tanh(x), w, form))
        return y, *tape.gradient(y, (x, w), y * y)

    plain = tf.function(step, input_signature=signature)
    stitched = optimized(plain)
    for batch in (1, 3, 2):
        x, w = given(form, batch=batch)
        close(stitched(x, w), plain(x, w), 2e-4)
    done = require_stitched(stitched, "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
    assert len(done.regions) == 1


def test_transposed_convolutions_of_any_batch(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """As Keras makes them: the sizes are stacked."""
    on_gpu()
    w = tf.constant(np.random.default_rng(0).normal(size=(3, 3, 4, 3)), tf.float32)

    def step(x: Any) -> Any:
        x = tf.nn.tanh(x)
        return tf.nn.tanh(tf.nn.conv2d_transpose(x, w, (tf.shape(x)[0], 11, 9, 4), 2, "VALID"))

    plain = tf.function(step, input_signature=[tf.TensorSpec((None, 5, 4, 3))])
    stitched = optimized(plain)
    for batch in (1, 3, 2):
        x = tf.constant(np.random.default_rng(batch).normal(size=(batch, 5, 4, 3)), tf.float32)
        close(stitched(x), plain(x), 2e-4)
    require_stitched(stitched, "Conv2DBackpropInput")


def test_without_convolutions_they_stay_outside(
    gpu: FakeGpu, on_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    none = replace(device_support.CUDA, convolutions=frozenset())
    monkeypatch.setattr("tests.tf.planned_on_fake_gpu.CUDA", none)
    on_gpu()
    x, w = given(FORMS["same"])
    step = tf.function(step_of(FORMS["same"]))
    stitched = optimized(step)
    close(stitched(x, w), step(x, w), 2e-4)
    assert not {op for op in stitched_ops(report(stitched)) if "Conv" in op}


def attributes(**other: Any) -> dict[str, Any]:
    return {"T": tf.float32, "padding": "VALID", "strides": [1, 1, 1, 1], "dilations": [1, 1, 1, 1], **other}


def stepped(
    gpu: FakeGpu, op: str, args: list[Any], made: tuple[int, ...], timed: bool = False, **given: Any
) -> Callable[..., Any]:
    """A function of one convolution in a region."""
    types = [TensorType("float32", tuple(each.shape)) for each in args] + [TensorType("float32", made)]
    step: Call = call(op, (0, 1), (2,), **attributes(**given))
    region = Region(2, (), tuple(types), (step,), (2,))
    return tf.function(lambda *args: gpu.fusion(region, args, (), (), timed))


def one(gpu: FakeGpu, op: str, args: list[Any], made: tuple[int, ...], **given: Any) -> Any:
    return stepped(gpu, op, args, made, **given)(*args)[0]


def test_convolutions_run_one_after_the_other(gpu: FakeGpu) -> None:
    """They share the memory of cuDNN's handle, though nothing passes between them."""
    rng = np.random.default_rng(2)
    args = [tf.constant(rng.normal(size=(2, 6 + place, 5, 3)), tf.float32) for place in range(4)]
    args.append(tf.constant(rng.normal(size=(3, 3, 3, 4)), tf.float32))
    expected = [tf.nn.conv2d(each, args[4], 1, "VALID") for each in args[:4]]
    values = tuple(TensorType("float32", tuple(each.shape)) for each in (*args, *expected))
    steps = tuple(call("Conv2D", (place, 4), (5 + place,), **attributes()) for place in range(4))
    region = Region(5, (), values, steps, (5, 6, 7, 8))
    step = tf.function(lambda *args: gpu.fusion(region, args, (), ()))
    for _ in range(20):
        close(step(*args), expected, 1e-4)


@pytest.mark.parametrize("groups", [2, 3])
def test_groups(gpu: FakeGpu, groups: int) -> None:
    rng = np.random.default_rng(1)
    x, w = (tf.constant(rng.normal(size=shape), tf.float32) for shape in ((2, 5, 6, 4 * groups), (3, 2, 4, 3 * groups)))
    found = one(gpu, "Conv2D", [x, w], (2, 3, 5, 3 * groups))
    parts = zip(tf.split(x, groups, 3), tf.split(w, groups, 3), strict=True)
    np.testing.assert_allclose(found, tf.concat([tf.nn.conv2d(*part, 1, "VALID") for part in parts], 3), atol=1e-4)


def test_dilations(gpu: FakeGpu) -> None:
    """TensorFlow has no gradients of dilated convolutions on a CPU."""
    form = ((9, 11, 2), (3, 3, 2, 3), (1, 1), (2, 3), "SAME")
    x, w = given(form)
    found = one(gpu, "Conv2D", [x, w], (2, 9, 11, 3), padding="SAME", dilations=[1, 2, 3, 1])
    np.testing.assert_allclose(found, convolved(x, w, form), atol=1e-4)


def test_channels_first(gpu: FakeGpu) -> None:
    rng = np.random.default_rng(1)
    x, w = (tf.constant(rng.normal(size=shape), tf.float32) for shape in ((2, 4, 5, 6), (3, 2, 4, 3)))
    found = one(gpu, "Conv2D", [x, w], (2, 3, 3, 5), data_format="NCHW")
    expected = tf.transpose(tf.nn.conv2d(tf.transpose(x, (0, 2, 3, 1)), w, 1, "VALID"), (0, 3, 1, 2))
    np.testing.assert_allclose(found, expected, atol=1e-4)


ENGINES = 6  # too large; not deterministic; rounds to TF32; fails when it runs; two that may be taken


def runs(gpu: FakeGpu) -> list[int]:
    """How often each engine of the fake cuDNN ran."""
    return [gpu.cudnn.fake_cudnn_runs(number) for number in range(ENGINES)]


@pytest.fixture(name="tf32", params=[False, True])
def fixture_tf32(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(request.param)
    yield request.param
    tf.config.experimental.enable_tensor_float_32_execution(before)


def test_plans_are_deterministic_and_small_and_round_what_they_may(gpu: FakeGpu, tf32: bool) -> None:
    before = runs(gpu)
    x, w = given(FORMS["same"], batch=3)
    one(gpu, "Conv2D", [x, w], (3, 5, 5, 4))
    ran = [now - then for now, then in zip(runs(gpu), before, strict=True)]
    assert ran == [0, 0, 2 * tf32, 0, 2 * (not tf32), 0]


@contextmanager
def taking(gpu: FakeGpu, times: Mapping[int, float]) -> Iterator[None]:
    """A block in which convolutions by these engines take so many milliseconds, and may be by TF32."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(True)
    for engine, milliseconds in times.items():
        gpu.cudnn.fake_cudnn_time(engine, ctypes.c_float(milliseconds))
    yield
    for engine in times:
        gpu.cudnn.fake_cudnn_time(engine, ctypes.c_float(0))
    tf.config.experimental.enable_tensor_float_32_execution(before)


def ran(gpu: FakeGpu, batch: int, width: int) -> list[int]:
    """How often each engine ran in the first call of a region that times a convolution of such images."""
    x, w = given(((7, width, 3), FORMS["same"][1]), batch=batch)
    step = stepped(gpu, "Conv2D", [x, w], (batch, 5, width - 4, 4), timed=True)
    before = runs(gpu)
    close(step(x, w), [tf.nn.conv2d(x, w, 1, "VALID")], 1e-4)
    return [now - then for now, then in zip(runs(gpu), before, strict=True)]


@pytest.mark.parametrize(
    ("width", "times", "tried", "chosen"),
    [
        (10, {2: 1.0, 4: 0.5, 5: 0.2}, {2, 4, 5}, 5),
        (11, {2: 0.5, 4: 0.495, 5: 0.7}, {2, 4, 5}, 2),  # a little faster may be noise
        (12, {2: 0.5, 4: 1.0, 5: 0.1}, {2, 4}, 2),  # what comes behind one that is far slower is not tried
    ],
)
def test_the_fastest_of_several_plans_runs(
    gpu: FakeGpu, width: int, times: dict[int, float], tried: set[int], chosen: int
) -> None:
    with taking(gpu, times):
        assert {engine for engine, count in enumerate(ran(gpu, 3, width)) if count} == tried
        assert ran(gpu, 3, width) == [int(engine == chosen) for engine in range(ENGINES)]  # it is known


def test_batches_of_other_sizes_take_the_engine_of_the_first(gpu: FakeGpu) -> None:
    """A last batch that is smaller should not hold up a call until all plans were timed again."""
    with taking(gpu, {2: 1.0, 4: 0.5, 5: 0.2}):
        assert ran(gpu, 4, 13)[2]
    with taking(gpu, {2: 0.1, 4: 0.5, 5: 1.0}):
        for batch in (1, 3):
            assert ran(gpu, batch, 13) == [0, 0, 0, 0, 0, 2]  # tried, and captured


@pytest.mark.parametrize("wrong", [(2, 5, 5, 5), (2, 6, 5, 4), (3, 5, 5, 4)])
def test_shapes_that_do_not_fit_are_refused(gpu: FakeGpu, wrong: tuple[int, ...]) -> None:
    x, w = given(FORMS["same"])
    with pytest.raises(tf.errors.InvalidArgumentError):
        one(gpu, "Conv2D", [x, w], wrong)


@pytest.mark.parametrize("name", ["constant_2", "constant_9", "constant_-1", "constant_x", "constant_"])
def test_constants_that_are_no_input_are_refused(gpu: FakeGpu, name: str) -> None:
    x, w = given(FORMS["same"])
    plain = call("Conv2D", (0, 1), (2,), **attributes(padding="SAME"))
    node = node_def_pb2.NodeDef.FromString(plain.attrs)
    node.attr[name].tensor.CopyFrom(tf.make_tensor_proto([1, 2]))
    types = tuple(TensorType("float32", tuple(each.shape)) for each in (x, w, tf.nn.conv2d(x, w, 1, "SAME")))
    region = Region(2, (), types, (replace(plain, attrs=node.SerializeToString()),), (2,))
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.function(lambda *args: gpu.fusion(region, args, (), ()))(x, w)


@pytest.mark.parametrize(
    "function", ["cudnnCreateTensorDescriptor", "cudnnBackendSetAttribute", "cudnnBackendFinalize", "cudnnSetStream"]
)
def test_failures_are_errors_and_leave_nothing(gpu: FakeGpu, function: str) -> None:
    x, w = given(FORMS["same"], batch=4)
    live = gpu.cudnn.fake_live_cudnn()
    gpu.fail(function, times=9)
    with pytest.raises(tf.errors.InternalError, match="cuDNN status"):
        one(gpu, "Conv2D", [x, w], (4, 5, 5, 4))
    gpu.fail(function, times=0)
    assert gpu.cudnn.fake_live_cudnn() == live
