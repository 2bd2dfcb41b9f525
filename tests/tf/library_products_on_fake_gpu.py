"""Products of regions on the fake cuBLASLt: by which algorithm, of which types. Run by test_fusion_gpu.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config

from custom_ops.fusion.region import Region, TensorType
from tests.tf.fake_gpu import ALGORITHMS, FakeGpu
from tests.tf.fusion_calls import call, product

pytest_plugins = ("tests.tf.fake_gpu",)

ROWS = itertools.count(40)  # of products: each is timed once in a process
SPLIT, WHOLE, OTHER_SPLIT, OTHER, REFUSED = range(ALGORITHMS)
R32F, R16F, R16BF = 0, 2, 14
IN_32F = 68


@pytest.fixture(autouse=True)
def fixture_times(gpu: FakeGpu) -> Iterator[None]:
    yield
    for algorithm in range(ALGORITHMS):
        gpu.set_time(algorithm, 0)


def multiplied(gpu: FakeGpu, rows: int, timed: bool = True) -> list[int]:
    """How many products ran by each algorithm in a first run; each of the next two ran one by the last of them."""
    rng = np.random.default_rng(rows)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, 5), (5, 3)))
    values = tuple(TensorType("float32", shape) for shape in ((rows, 5), (5, 3), (rows, 3)))
    region = Region(2, (), values, (product((0, 1), 2, transposed=False),), (2,))

    @tf.function
    def step(*args: Any) -> Any:
        return gpu.fusion(region, args, (), (), timed)

    counts = [gpu.runs()]
    for _ in range(3):
        np.testing.assert_allclose(step(a, b)[0], a @ b, rtol=1e-5, atol=1e-5)
        counts.append(gpu.runs())
    first, second, third = (
        [now - then for now, then in zip(after, before, strict=True)] for before, after in itertools.pairwise(counts)
    )
    assert second == third
    assert sum(second) == 1
    assert first[second.index(1)] >= 1
    return [*first, second.index(1)]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((900, 800, 700, 300, 1), OTHER),
        ((300, 800, 700, 900, 1), SPLIT),
        ((300, 305, 700, 900, 1), WHOLE),  # no faster, as far as that can be told
        ((300, 330, 295, 900, 1), SPLIT),
        ((300, 330, 280, 900, 1), OTHER_SPLIT),
    ],
)
def test_the_fastest_algorithm_runs(gpu: FakeGpu, times: Sequence[float], chosen: int) -> None:
    for algorithm, milliseconds in enumerate(times):
        gpu.set_time(algorithm, milliseconds)
    rows = next(ROWS)
    *first, last = multiplied(gpu, rows)
    assert last == chosen
    assert all(first[algorithm] > 1 for algorithm in (SPLIT, WHOLE, OTHER_SPLIT, OTHER))
    assert first[REFUSED] == 0
    for algorithm in range(ALGORITHMS):  # another op, in whose time another one would have been faster
        gpu.set_time(algorithm, 1 if algorithm != chosen else 1000)
    *first, last = multiplied(gpu, rows)
    assert (sum(first), last) == (1, chosen)


def test_without_a_trial_the_first_algorithm_runs(gpu: FakeGpu) -> None:
    gpu.set_time(SPLIT, 1000)
    assert multiplied(gpu, next(ROWS), timed=False) == [1, 0, 0, 0, 0, SPLIT]


def test_where_ops_have_to_be_deterministic_nothing_is_timed(gpu: FakeGpu) -> None:
    gpu.set_time(SPLIT, 1000)
    tf.config.experimental.enable_op_determinism()
    try:
        assert multiplied(gpu, next(ROWS)) == [1, 0, 0, 0, 0, SPLIT]
    finally:
        framework_config.disable_op_determinism()


@pytest.mark.parametrize(
    "function", ["cuEventElapsedTime", "cuGraphInstantiateWithFlags", "cuStreamBeginCapture_v2", "cublasLtMatmul"]
)
def test_a_trial_that_fails_is_no_error(gpu: FakeGpu, function: str) -> None:
    for algorithm in range(ALGORITHMS):
        gpu.set_time(algorithm, 1000 - algorithm)
    rows = next(ROWS)
    gpu.fail(function)
    *_, last = multiplied(gpu, rows)
    assert last == SPLIT
    *first, last = multiplied(gpu, rows)  # nor is it tried again: what is computed stays the same
    assert (sum(first), last) == (1, SPLIT)


@pytest.mark.parametrize(("dtype", "number"), [(tf.float16, R16F), (tf.bfloat16, R16BF)])
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("size", [(7, 5, 3), (16, 8, 24), (1, 300, 1)])
def test_half_types(gpu: FakeGpu, dtype: Any, number: int, timed: bool, size: tuple[int, int, int]) -> None:
    """Multiplied and summed up in float32, rounded once; with a bias and ReLU, too."""
    rows, depth, columns = size
    rng = np.random.default_rng(0)
    a, b, bias = (tf.constant(rng.normal(size=shape), dtype) for shape in ((rows, depth), (depth, columns), (columns,)))
    types = [TensorType(dtype.name, tuple(each.shape)) for each in (a, b, bias)]
    types += [TensorType(dtype.name, (rows, columns))] * 2
    steps = (
        call("MatMul", (0, 1), (3,), T=dtype, transpose_a=False, transpose_b=False),
        call("_FusedMatMul", (0, 1, 2), (4,), T=dtype, num_args=1, fused_ops=["BiasAdd", "Relu"]),
    )
    region = Region(3, (), tuple(types), steps, (3, 4))
    found, fused = tf.function(lambda *args: gpu.fusion(region, args, (), (), timed))(a, b, bias)
    exact = tf.cast(a, tf.float64) @ tf.cast(b, tf.float64)
    np.testing.assert_array_equal(tf.cast(found, tf.float32), tf.cast(tf.cast(exact, dtype), tf.float32))
    exact = tf.nn.relu(exact + tf.cast(bias, tf.float64))
    np.testing.assert_array_equal(tf.cast(fused, tf.float32), tf.cast(tf.cast(exact, dtype), tf.float32))
    plain = tf.matmul(a, b)
    unit = 2**-7 if dtype == tf.bfloat16 else 2**-10
    np.testing.assert_allclose(tf.cast(found, tf.float32), tf.cast(plain, tf.float32), rtol=unit, atol=unit)
    assert gpu.asked() == (number, IN_32F, R32F, 16)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_types_in_batches_that_are_no_strides(gpu: FakeGpu, dtype: Any) -> None:
    """One launch for each matrix of the right operand, the 15 numbers of which end in the middle of 4 bytes."""
    rng = np.random.default_rng(0)
    a, b = (tf.constant(rng.normal(size=shape), dtype) for shape in ((2, 3, 4, 5), (2, 1, 5, 3)))
    plain = tf.matmul(a, b)
    types = tuple(TensorType(dtype.name, tuple(each.shape)) for each in (a, b, plain))
    step = call("BatchMatMulV2", (0, 1), (2,), T=dtype, adj_x=False, adj_y=False)
    (found,) = tf.function(lambda *args: gpu.fusion(Region(2, (), types, (step,), (2,)), args, (), ()))(a, b)
    exact = tf.cast(tf.matmul(tf.cast(a, tf.float64), tf.cast(b, tf.float64)), dtype)
    np.testing.assert_array_equal(tf.cast(found, tf.float32), tf.cast(exact, tf.float32))
    *_, alignment = gpu.asked()
    assert alignment == 2
