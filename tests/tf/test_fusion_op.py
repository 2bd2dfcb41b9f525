"""TfmemFusion on the CPU: what it computes, beside the same step in TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr.text import from_text
from custom_ops.fusion.region import Kernel, Region, Shape, TensorType, View
from custom_ops.load import load
from tests.fusion_regions import softmax_step
from tests.tf.fusion_calls import call, product, run_region


def data(rows: int, features: int = 784) -> tuple[Any, Any]:
    rng = np.random.default_rng(rows)
    return rng.random((rows, features), np.float32) / 8, np.eye(10, dtype=np.float32)[rng.integers(0, 10, rows)]


def variables(features: int = 784) -> tuple[Any, Any]:
    return tf.Variable(tf.zeros((features, 10))), tf.Variable(tf.zeros((10,)))


def plain_step(x: Any, y: Any, w: Any, b: Any) -> Any:
    """What `softmax_step` does."""
    p = tf.nn.softmax(tf.matmul(x, w) + b)
    loss = tf.reduce_mean(-tf.reduce_sum(y * tf.math.log(p), 1))
    gradient = (p - y) / tf.cast(tf.shape(x)[0], tf.float32)
    step_w, step_b = tf.matmul(x, gradient, transpose_a=True), tf.reduce_sum(gradient, 0)
    w.assign_sub(0.1 * step_w)
    b.assign_sub(0.1 * step_b)
    return loss


def kernel(text: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Kernel:
    return Kernel(from_text(text), inputs, outputs)


def floats(*shape: int | None) -> TensorType:
    return TensorType("float32", shape)


@pytest.mark.parametrize("rows", [100, None])
def test_softmax_regression_learns_as_in_tensorflow(rows: int | None) -> None:
    x, y = data(100)
    w, b = variables()
    plain_w, plain_b = variables()
    region = softmax_step(product, rows)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return run_region(region, [x, y], [w.handle, b.handle])[0]

    plain = tf.function(plain_step)
    for _ in range(30):
        np.testing.assert_allclose(step(x, y), plain(x, y, plain_w, plain_b), rtol=2e-6)
    np.testing.assert_allclose(w, plain_w, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(b, plain_b, rtol=1e-4, atol=1e-7)


def test_any_batch_runs() -> None:
    w, b = variables()
    plain_w, plain_b = variables()
    region = softmax_step(product)

    @tf.function(input_signature=[tf.TensorSpec([None, 784]), tf.TensorSpec([None, 10])])
    def step(x: Any, y: Any) -> Any:
        return run_region(region, [x, y], [w.handle, b.handle])[0]

    for rows in [1, 7, 100, *range(20, 40), 7, 1]:  # more than are known at a time
        x, y = data(rows)
        np.testing.assert_allclose(step(x, y), plain_step(x, y, plain_w, plain_b), rtol=2e-6, err_msg=f"{rows} rows")
    np.testing.assert_allclose(w, plain_w, rtol=1e-4, atol=1e-7)


NORMALIZE = """program 1
axes 0 0
tensor float32 2
input 0 a0 a1
reduce mean 0 1
subtract 0 1
multiply 2 2
reduce mean 3 1
constant float32 1e-06
add 4 5
sqrt 6
divide 2 7
reduce sum 0 0
output 8 0 1
output 9 1
output 1 0
"""


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (3, 5)])
def test_tensors_without_numbers(shape: tuple[int, int]) -> None:
    types = (floats(None, None), floats(None, None), floats(None), floats(None))
    steps = (kernel(NORMALIZE, (0,), (1, 2, 3)),)
    x = np.random.default_rng(0).random(shape, np.float32)
    normal, sums, means = run_region(Region(1, (), types, steps, (1, 2, 3)), [x])
    with np.errstate(all="ignore"):
        centred = x - tf.reduce_mean(x, 1, keepdims=True)
        wanted = centred / tf.sqrt(tf.reduce_mean(centred * centred, 1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(normal, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sums, tf.reduce_sum(x, 0), rtol=1e-6)
    np.testing.assert_allclose(means, tf.reduce_mean(x, 1), rtol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_products_without_numbers(shape: tuple[int, int]) -> None:
    types = (floats(None, None), floats(None, None), floats(None, None))
    region = Region(2, (), types, (product((0, 1), 2, False),), (2,))
    a, b = np.ones(shape, np.float32), np.ones(shape[::-1], np.float32)
    np.testing.assert_array_equal(run_region(region, [a, b])[0], a @ b)


TWICE = """program 1
axes 0
tensor float32 1
input 0 a0
add 0 0
output 1 0
"""


def test_views_share_memory_and_take_any_shape() -> None:
    # [2, 3, 4] -> [24] -> twice -> [6, 4] and [1, 24]
    types = (floats(None, 3, 4), floats(None), floats(24), floats(None, 4), floats(1, None))
    steps = (View(0, 1), kernel(TWICE, (1,), (2,)), View(2, 3), View(2, 4))
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    found = run_region(Region(1, (), types, steps, (3, 4, 0, 1)), [x])
    np.testing.assert_array_equal(found[0], 2 * x.reshape(6, 4))
    np.testing.assert_array_equal(found[1], 2 * x.reshape(1, 24))
    np.testing.assert_array_equal(found[2], x)
    np.testing.assert_array_equal(found[3], x.reshape(24))
    assert list(load().sharing(found)) == [0, 0, 2, 2]


def test_views_between_kernels_lie_in_the_arena() -> None:
    types = (floats(None), floats(None), floats(2, None), floats(2, None), floats(2, None))
    steps = (
        kernel(TWICE, (0,), (1,)),
        View(1, 2),
        call("Relu", (2,), (3,), T=tf.float32),
        call("AddV2", (2, 3), (4,), T=tf.float32),
    )
    x = np.arange(-5, 5, dtype=np.float32)
    (found,) = run_region(Region(1, (), types, steps, (4,)), [x])
    np.testing.assert_array_equal(found, (2 * x + np.maximum(2 * x, 0)).reshape(2, 5))


def test_calls_run_tensorflows_kernels() -> None:
    """Products that no loop of ours computes: with an activation, and of half types."""
    rng = np.random.default_rng(3)
    a, b, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((7, 5), (5, 6), (6,)))
    activated = call("_FusedMatMul", (0, 1, 2), (3,), T=tf.float32, num_args=1, fused_ops=["BiasAdd", "LeakyRelu"])
    types = (floats(None, 5), floats(5, 6), floats(6), floats(None, 6))
    (found,) = run_region(Region(3, (), types, (activated,), (3,)), [a, b, bias])
    np.testing.assert_array_equal(found, tf.nn.leaky_relu(tf.matmul(a, b) + bias))

    half = call("BatchMatMulV2", (0, 1), (2,), T=tf.bfloat16, adj_x=False, adj_y=False)
    types = tuple(TensorType("bfloat16", shape) for shape in ((None, 5), (5, 6), (None, 6)))
    a, b = tf.cast(a, tf.bfloat16), tf.cast(b, tf.bfloat16)
    (found,) = run_region(Region(2, (), types, (half,), (2,)), [a, b])
    np.testing.assert_array_equal(tf.cast(found, tf.float32), tf.cast(tf.matmul(a, b), tf.float32))


def test_an_output_that_nobody_reads_may_have_another_shape() -> None:
    """SelfAdjointEigV2 without vectors gives a scalar for them; its op says that they have no elements."""
    a = np.float32([[3, 1], [1, 2]])
    types = (floats(2, 2), floats(2), floats(0), floats(2))
    steps = (
        call("SelfAdjointEigV2", (0,), (1, 2), T=tf.float32, compute_v=False),
        kernel(TWICE, (1,), (3,)),
    )
    (found,) = run_region(Region(1, (), types, steps, (3,)), [a])
    np.testing.assert_array_equal(found, 2 * tf.linalg.eigvalsh(a))


def test_calls_that_pass_an_input_on() -> None:
    """Identity gives its input's memory out as its own."""
    types = (floats(None), floats(None), floats(None), floats(None), floats(None))
    steps = (
        kernel(TWICE, (0,), (1,)),
        call("Identity", (1,), (2,), T=tf.float32),
        View(2, 3),
        kernel(TWICE, (3,), (4,)),
    )
    region = Region(1, (), types, steps, (2, 4))
    kept = [run_region(region, [np.float32([1, 2, 3]) * run]) for run in range(3)]
    for run, (one, two) in enumerate(kept):
        np.testing.assert_array_equal(one, run * np.float32([2, 4, 6]))
        np.testing.assert_array_equal(two, run * np.float32([4, 8, 12]))


MIXED = """program 1
axes 0
tensor float16 1
tensor int64 1
tensor bool 1
input 0 a0
input 1 a0
input 2 a0
cast float16 1
select 2 0 3
cast float64 4
cast int32 5
logical_not 2
output 4 0
output 5 0
output 6 0
output 7 0
"""


def test_dtypes() -> None:
    names = ("float16", "int64", "bool", "float16", "float64", "int32", "bool")
    types = tuple(TensorType(name, (None,)) for name in names)
    region = Region(3, (), types, (kernel(MIXED, (0, 1, 2), (3, 4, 5, 6)),), (3, 4, 5, 6, 1))
    half, whole, truth = np.float16([1.5, 2.5, 3.5]), np.int64([4, 5, 6]), np.array([True, False, True])
    found = run_region(region, [half, whole, truth])
    wanted = np.where(truth, half, whole.astype(np.float16))
    for value, expected in zip(found, (wanted, wanted.astype(float), wanted.astype(int), ~truth, whole), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_an_input_of_the_step_is_not_overwritten() -> None:
    """The op may write over an input that no other op holds, but over no other."""
    region = Region(1, (), (floats(None), floats(None)), (kernel(TWICE, (0,), (1,)),), (1,))

    @tf.function
    def steps(x: Any) -> Any:
        y = x + 1.0  # held by the op alone
        z = x + 2.0  # returned, too
        return run_region(region, [y])[0], run_region(region, [z])[0], z, run_region(region, [x])[0]

    x = tf.range(8.0)
    for _ in range(3):
        for value, expected in zip(steps(x), (2 * x + 2, 2 * x + 4, x + 2, 2 * x), strict=True):
            np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(x, np.arange(8))


def test_a_loop_runs_it() -> None:
    x, y = data(20)
    w, b = variables()
    plain_w, plain_b = variables()
    region = softmax_step(product, 20)

    @tf.function
    def steps(x: Any, y: Any) -> Any:
        losses = tf.TensorArray(tf.float32, 5)
        for i in tf.range(5):
            losses = losses.write(i, run_region(region, [x, y], [w.handle, b.handle])[0])
        return losses.stack()

    wanted = [float(plain_step(x, y, plain_w, plain_b)) for _ in range(5)]
    np.testing.assert_allclose(steps(x, y), wanted, rtol=2e-6)
    np.testing.assert_allclose(w, plain_w, rtol=1e-4, atol=1e-7)


class Model(tf.Module):
    """A model whose step is a region."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = variables()

    @tf.function(input_signature=[tf.TensorSpec([None, 784]), tf.TensorSpec([None, 10])])
    def step(self, x: Any, y: Any) -> Any:
        return run_region(softmax_step(product), [x, y], [self.w.handle, self.b.handle])[0]


def test_a_saved_model_keeps_it(tmp_path: Path) -> None:
    model, (x, y) = Model(), data(30)
    model.step(x, y)
    tf.saved_model.save(model, str(tmp_path))
    again = tf.saved_model.load(str(tmp_path))
    for _ in range(3):
        np.testing.assert_array_equal(again.step(x, y), model.step(x, y))
    np.testing.assert_array_equal(again.w, model.w)


@pytest.mark.parametrize("shape", [(None, None), (5, None), (5, 3)])
def test_shapes_are_known_when_a_graph_is_built(shape: Shape) -> None:
    region = Region(1, (), (floats(*shape), floats(*shape)), (View(0, 1),) if shape[0] else (), (0,))
    if shape[0] is None:
        region = Region(1, (), (floats(*shape),), (), (0,))
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 3])
        assert run_region(region, [x])[0].shape.as_list() == [None, 3]
        with pytest.raises(ValueError, match="rank"):
            run_region(region, [tf.compat.v1.placeholder(tf.float32, [3])])


def test_shapes_that_do_not_fit_are_named() -> None:
    region = softmax_step(product)
    (x, y), (w, b) = data(20), variables()
    step = tf.function(lambda x, y: run_region(region, [x, y], [w.handle, b.handle]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="axis 0 has 20 positions, and 21 in tensor 2"):
        step(x, data(21)[1])
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="784"):
        step(x[:, 1:], y)
    before = w.numpy()
    w.assign(tf.ones((784, 10)))
    step(x, y)
    assert not np.array_equal(w, before)
