"""Steps with products of matrices, planned as for a GPU, on the fake driver. Run by test_fusion_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.cost.kernel_costs import Small
from graph_passes.passes.fuse.partition.score import Measure
from tests.tf.fake_gpu import FakeGpu
from tests.tf.optimized_runs import in_a_process
from tests.tf.planned_on_fake_gpu import CPU, saved_stitched, served_without_a_gpu
from tests.tf.stitched_steps import Softmax, batch, close, optimized, require_stitched, values

pytest_plugins = ("tests.tf.fake_gpu", "tests.tf.planned_on_fake_gpu")

WITH_PRODUCTS = replace(CPU, product=1e-6, most=Small(1 << 24, 1 << 20))


class Layer(tf.Module):
    """Attention of two heads and two dense layers, with residuals, over sequences of 10 tokens."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        shapes = [(12, 12)] * 4 + [(12, 40), (40, 12), (12,), (40,), (12,)]
        drawn = [tf.Variable((rng.normal(size=shape) / 4).astype(np.float32)) for shape in shapes]
        self.projections, (self.inner, self.outer), self.biases = drawn[:4], drawn[4:6], drawn[6:]

    def __call__(self, x: Any) -> Any:
        split = [tf.transpose(tf.reshape(x @ matrix, [3, 10, 2, 6]), [0, 2, 1, 3]) for matrix in self.projections[:3]]
        scores = tf.matmul(split[0] * 0.4, split[1], transpose_b=True)
        mixed = tf.reshape(tf.transpose(tf.matmul(tf.nn.softmax(scores), split[2]), [0, 2, 1, 3]), [30, 12])
        x = x + (mixed @ self.projections[3] + self.biases[0])
        hidden = tf.nn.relu(tf.nn.bias_add(x @ self.inner, self.biases[1]))
        return x + (hidden @ self.outer + self.biases[2])


@pytest.mark.filterwarnings("error::tfmem.TfmemWarning")
def test_products_are_in_kernels(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    on_gpu(device=WITH_PRODUCTS)
    model = Layer()
    step = tf.function(model)
    x = tf.random.stateless_normal([30, 12], [1, 2])
    stitched = optimized(step)
    launched = gpu.calls("cuGraphLaunch")
    for _ in range(2):
        np.testing.assert_allclose(stitched(x).numpy(), step(x).numpy(), rtol=4e-3, atol=4e-3)  # TF32 is allowed
    assert gpu.calls("cuGraphLaunch") == launched + 2
    (region,) = tfmem.report(stitched).regions
    kernels = [[op for _, op in each.ops] for each in region.steps if each.kind == "kernel"]
    products = [ops for ops in kernels if {"MatMul", "BatchMatMulV2", "_FusedMatMul"} & set(ops)]
    assert max(sum(op == "MatMul" for op in ops) for ops in products) == 3, products  # queries, keys and values
    assert any({"Relu", "AddV2"} & set(ops) for ops in products), products
    assert sum(op in ("MatMul", "BatchMatMulV2", "_FusedMatMul") for ops in products for op in ops) >= 5, products


@pytest.mark.parametrize("faster", [True, False])
def test_products_are_in_kernels_where_those_were_faster(
    gpu: FakeGpu, on_gpu: Callable[..., None], faster: bool
) -> None:
    asked: list[Sequence[str]] = []

    def seconds(members: Sequence[str]) -> float:
        asked.append(members)
        product = any("matmul" in name.lower() or name == "Relu" for name in members)  # one is fused, and named so
        return 1e-3 if product and not faster else 1e-6

    on_gpu(device=WITH_PRODUCTS, measure=Measure(seconds, lambda name: 1e-4))
    model = Layer()
    x = tf.random.stateless_normal([30, 12], [1, 2])
    stitched = optimized(tf.function(model))
    np.testing.assert_allclose(stitched(x), model(x), rtol=4e-3, atol=4e-3)
    (region,) = tfmem.report(stitched).regions
    called = [op for each in region.steps if each.kind == "call" for _, op in each.ops]
    assert len(called) == (0 if faster else 8)
    assert any(len(members) > 1 for members in asked)


class Projections(tf.Module):
    """Three projections of one operand, two of which have a bias, and a step of gradient descent."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        shapes = [(12, 12), (12, 20), (12, 12), (12,), (20,)]
        self.weights = [tf.Variable((rng.normal(size=shape) / 4).astype(np.float32)) for shape in shapes]

    def step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            inner = tf.tanh(x)
            q, k, v = (inner @ matrix for matrix in self.weights[:3])
            q, k = tf.nn.bias_add(q, self.weights[3]), tf.nn.bias_add(k, self.weights[4])
            loss = tf.reduce_mean(tf.square(tf.concat([tf.tanh(q), tf.sigmoid(k), tf.nn.relu(v)], 1)))
        for variable, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss, tf.reduce_sum(q)


def test_large_products_of_one_operand_are_merged(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """Where that was faster. What reads the weights reads them before they are updated."""
    on_gpu(device=replace(CPU, most=Small(0, 0)), beside=lambda forms: float(len(forms)))
    plain, model = Projections(), Projections()
    given, step = tf.function(plain.step), optimized(tf.function(model.step))
    for seed in range(4):
        x = tf.random.stateless_normal([30, 12], [seed, 2])
        for one, other in zip(step(x), given(x), strict=True):
            np.testing.assert_allclose(one, other, rtol=4e-3, atol=4e-3)  # TF32 is allowed
    close(values(model.variables), values(plain.variables), 4e-3)
    called = [op for region in tfmem.report(step).regions for each in region.steps for _, op in each.ops]
    assert sum(op in ("MatMul", "_FusedMatMul") for op in called) == 2, called  # forward, and of the weights


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_are_multiplied_in_kernels(gpu: FakeGpu, on_gpu: Callable[..., None], dtype: str) -> None:
    """The library of the fake GPU has no algorithm for them."""
    on_gpu(device=WITH_PRODUCTS)
    x, y = (tf.cast(tf.random.stateless_normal(shape, [1, 2]), dtype) for shape in ([20, 48], [16, 48]))
    step = tf.function(lambda x, y: tf.tanh(tf.matmul(x, y, transpose_b=True) * tf.cast(0.1, dtype)))
    found = optimized(step)(x, y)
    assert found.dtype == dtype
    np.testing.assert_allclose(tf.cast(found, "float32"), tf.cast(step(x, y), "float32"), atol=2e-2)


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_what_tensorflow_says(gpu: FakeGpu, on_gpu: Callable[..., None], allowed: bool) -> None:
    """A product is rounded where TensorFlow would round it; a sum of products that a program writes out is not."""
    on_gpu(device=WITH_PRODUCTS)
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(allowed)
    try:
        x, y = (tf.random.stateless_normal(shape, [1, 2]) for shape in ([20, 48], [48, 16]))
        step = tf.function(lambda x, y: (tf.tanh(x @ y), tf.reduce_sum(x[:, :, None] * y[None], 1)))
        stitched = optimized(step)
        found = [result.numpy().astype(np.float64) for result in stitched(x, y)]
        require_stitched(stitched, "MatMul", "Sum")
        exact = x.numpy().astype(np.float64) @ y.numpy().astype(np.float64)
        assert (np.abs(found[0] - np.tanh(exact)).max() > 1e-5) == allowed
        np.testing.assert_allclose(found[0], np.tanh(exact), atol=2e-2)
        np.testing.assert_allclose(found[1], exact, atol=1e-4)
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def test_a_saved_model_with_products_in_kernels_runs_on_a_cpu(
    gpu: FakeGpu, on_gpu: Callable[..., None], tmp_path: Any
) -> None:
    on_gpu(device=WITH_PRODUCTS)
    model = Layer()
    model.serve = tf.function(model.__call__, input_signature=[tf.TensorSpec((30, 12))])
    x = tf.random.stateless_normal([30, 12], [3, 4])
    expected = model.serve(x)
    path = saved_stitched(model, tmp_path)
    elsewhere = in_a_process(served_without_a_gpu, path, x.numpy())
    np.testing.assert_allclose(elsewhere, expected, rtol=1e-4, atol=1e-5)


def test_a_step_whose_products_are_timed(gpu: FakeGpu, on_gpu: Callable[..., None]) -> None:
    """In the first run with a shape; what it computes is the same."""
    on_gpu(timed=True)
    plain, model = Softmax(), Softmax()
    step = optimized(model.step)
    timed = gpu.calls("cuEventElapsedTime")
    close(step(*batch(0)), plain.step(*batch(0)))
    now = gpu.calls("cuEventElapsedTime")
    assert now > timed
    for seed in range(1, 4):
        close(step(*batch(seed)), plain.step(*batch(seed)))
    assert gpu.calls("cuEventElapsedTime") == now
    close(values(model.variables), values(plain.variables))
