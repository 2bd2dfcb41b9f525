"""Products of regions on a GPU: half types, algorithms that are timed, and branches side by side. Needs a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.fusion.region import Region, Step, TensorType
from custom_ops.fusion.text import to_text
from custom_ops.load import load
from tests.tf.fusion_calls import call

TYPES = ("float16", "bfloat16", "float32", "float64")
UNIT = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-18, "float64": 2**-44}  # of sums of a few thousand

pytestmark = pytest.mark.usefixtures("float32_products", "first_gpu")


def stitched(region: Region, timed: bool, *args: Any) -> list[Any]:
    types = [tf.as_dtype(region.values[value].dtype) for value in region.outputs]
    text = to_text(region)

    @tf.function
    def step(*given: Any) -> Any:
        return load().ops.tfmem_fusion(
            args=list(given), variables=[], T_out=types, region=text, programs=[], images=[], time_products=timed
        )

    first = step(*args)
    for found, again in zip(first, step(*args), strict=True):
        np.testing.assert_array_equal(tf.cast(found, tf.float64), tf.cast(again, tf.float64))
    return list(first)


def numbers(dtype: str, *shape: int, seed: int = 0) -> Any:
    return tf.cast(tf.constant(np.random.default_rng(seed).normal(size=shape)), dtype)


def close(found: Any, exact: Any, dtype: str) -> None:
    exact = np.asarray(exact)
    distance = np.max(np.abs(tf.cast(found, tf.float64).numpy() - exact), initial=0)
    assert distance <= 4 * UNIT[dtype] * np.max(np.abs(exact), initial=1e-30)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [(1, 1, 1), (7, 5, 3), (25, 512, 2048), (10, 6000, 784), (33, 17, 129)])
def test_products(dtype: str, timed: bool, size: tuple[int, int, int]) -> None:
    rows, depth, columns = size
    for left, right in ((False, False), (True, False), (False, True), (True, True)):
        a = numbers(dtype, *((depth, rows) if left else (rows, depth)))
        b = numbers(dtype, *((columns, depth) if right else (depth, columns)), seed=1)
        values = tuple(TensorType(dtype, shape) for shape in (tuple(a.shape), tuple(b.shape), (rows, columns)))
        step = call("MatMul", (0, 1), (2,), T=tf.as_dtype(dtype), transpose_a=left, transpose_b=right)
        (found,) = stitched(Region(2, (), values, (step,), (2,)), timed, a, b)
        exact = tf.matmul(tf.cast(a, tf.float64), tf.cast(b, tf.float64), transpose_a=left, transpose_b=right)
        close(found, exact, dtype)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("dtype", TYPES[:3])
def test_a_bias_and_relu(dtype: str, timed: bool) -> None:
    a, b, bias = numbers(dtype, 25, 48), numbers(dtype, 48, 96, seed=1), numbers(dtype, 96, seed=2)
    values = tuple(TensorType(dtype, shape) for shape in ((25, 48), (48, 96), (96,), (25, 96)))
    step = call("_FusedMatMul", (0, 1, 2), (3,), T=tf.as_dtype(dtype), num_args=1, fused_ops=["BiasAdd", "Relu"])
    (found,) = stitched(Region(3, (), values, (step,), (3,)), timed, a, b, bias)
    a, b, bias = (tf.cast(each, tf.float64) for each in (a, b, bias))
    close(found, tf.nn.relu(a @ b + bias), dtype)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("left", "right"), [((3, 4, 5), (3, 5, 2)), ((2, 3, 4, 5), (2, 1, 5, 3)), ((8, 25, 64), (8, 64, 25))]
)
def test_batches(dtype: str, timed: bool, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = numbers(dtype, *left), numbers(dtype, *right, seed=1)
    exact = tf.matmul(tf.cast(a, tf.float64), tf.cast(b, tf.float64))
    values = tuple(TensorType(dtype, shape) for shape in (left, right, tuple(exact.shape)))
    step = call("BatchMatMulV2", (0, 1), (2,), T=tf.as_dtype(dtype), adj_x=False, adj_y=False)
    (found,) = stitched(Region(2, (), values, (step,), (2,)), timed, a, b)
    close(found, exact, dtype)


@pytest.mark.parametrize("timed", [False, True])
def test_branches_of_one_operand(timed: bool) -> None:
    """Twelve branches of two products each, all of which are added to one: they run side by side, in memory apart."""
    branches, size = 12, 128
    x, weights = numbers("float32", 25, size), [numbers("float32", size, size, seed=seed) for seed in range(branches)]
    values = [TensorType("float32", tuple(each.shape)) for each in (x, *weights)]
    steps: list[Step] = []
    results = []
    for number in range(branches):
        for left in (0, len(values)):
            made = len(values)
            values.append(TensorType("float32", (25, size)))
            steps.append(
                call("MatMul", (left, 1 + number), (made,), T=tf.float32, transpose_a=False, transpose_b=False)
            )
        results.append(len(values) - 1)
    region = Region(1 + branches, (), tuple(values), tuple(steps), tuple(results))
    for _ in range(20):
        for found, weight in zip(stitched(region, timed, x, *weights), weights, strict=True):
            wide = tf.cast(weight, tf.float64)
            close(found, tf.cast(x, tf.float64) @ wide @ wide, "float32")
