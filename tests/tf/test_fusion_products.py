"""Products of a region on the CPU, by the region's loops, beside the definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.fusion.region import Call, Region, TensorType
from custom_ops.load import load
from tests.tf.fusion_calls import call, run_region
from tests.tf.vectors import AVX512

SIZES = [
    (1, 1, 1),
    (1, 1, 300),
    (1, 30, 7),
    (1, 2000, 64),
    (2, 33, 129),
    (4, 512, 512),
    (7, 64, 257),
    (8, 9, 40),
    (9, 100, 300),
    (32, 500, 130),
    (49, 65, 49),
    (100, 10, 784),
    (300, 1, 50),
    (500, 3, 200),
    (700, 70, 20),
    (250, 130, 1),
    (6, 48, 128),
]


@pytest.fixture(params=[16, 32, 64])
def vector_bytes(request: pytest.FixtureRequest) -> Iterator[int]:
    load().limit_vector_bytes(request.param)
    yield request.param
    load().limit_vector_bytes(64)


@pytest.fixture
def _narrow() -> Iterator[None]:
    load().limit_vector_bytes(16)
    yield
    load().limit_vector_bytes(64)


def numbers(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def run(made: Call, operands: list[Any], shape: tuple[int, ...], vector_bytes: int = 64) -> Any:
    """What a region of one call gives. TensorFlow keeps the kernels of equal ops with what they have chosen, so regions
    for other vectors have other names in them."""
    types = tuple(TensorType(str(operands[0].dtype), each) for each in (*(each.shape for each in operands), shape))
    made = replace(made, members=(f"{made.op}_{vector_bytes}",))
    last = len(operands)
    return run_region(Region(last, (), types, (made,), (last,)), operands, [])[0].numpy()


def fused(a: Any, b: Any, bias: Any, ops: list[str], vector_bytes: int = 64, **transposed: bool) -> Any:
    """By a region: the product of two matrices, given as they lie, with what Grappler's remapper fuses into it."""
    shape = a.shape[transposed.get("transpose_a", False)], b.shape[not transposed.get("transpose_b", False)]
    made = call("_FusedMatMul", (0, 1, 2), (3,), T=tf.float32, **transposed, num_args=1, fused_ops=ops)
    return run(made, [a, b, bias], shape, vector_bytes)


def multiplied(a: Any, b: Any, vector_bytes: int = 64, **transposed: bool) -> Any:
    """By a region: the product of two matrices, given as they lie."""
    shape = a.shape[transposed.get("transpose_a", False)], b.shape[not transposed.get("transpose_b", False)]
    return run(call("MatMul", (0, 1), (2,), T=tf.as_dtype(a.dtype), **transposed), [a, b], shape, vector_bytes)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_products(dtype: str, a_transposed: bool, b_transposed: bool, vector_bytes: int) -> None:
    rng = np.random.default_rng(0)
    for rows, columns, depth in SIZES:
        a, b = numbers(rng, (rows, depth), dtype), numbers(rng, (depth, columns), dtype)
        exact = a.astype("longdouble") @ b.astype("longdouble")
        bound = depth * np.finfo(dtype).eps * (np.abs(a) @ np.abs(b))
        found = multiplied(
            np.ascontiguousarray(a.T) if a_transposed else a,
            np.ascontiguousarray(b.T) if b_transposed else b,
            vector_bytes,
            transpose_a=a_transposed,
            transpose_b=b_transposed,
        )
        assert (np.abs(found - exact) <= bound).all(), (rows, columns, depth)


@pytest.mark.parametrize("op", ["BatchMatMul", "BatchMatMulV2"])
@pytest.mark.parametrize("adj_x", [False, True])
@pytest.mark.parametrize("adj_y", [False, True])
def test_batches(op: str, adj_x: bool, adj_y: bool) -> None:
    """Broadcast as NumPy does, by the op that may."""
    batches = [((3,), (3,)), ((2, 3), (2, 3)), ((0,), (0,))]
    if op == "BatchMatMulV2":
        batches += [((4, 8), (1, 8)), ((), (5,)), ((2, 1), (3,)), ((1,), (6,)), ((2, 3), (1, 1))]
    rng = np.random.default_rng(1)
    for of_a, of_b in batches:
        for rows, columns, depth in ((1, 33, 64), (4, 100, 3), (100, 4, 64), (20, 1, 9)):
            a, b = numbers(rng, (*of_a, rows, depth), "float32"), numbers(rng, (*of_b, depth, columns), "float32")
            made = call(op, (0, 1), (2,), T=tf.float32, adj_x=adj_x, adj_y=adj_y)
            wanted = a.astype("float64") @ b.astype("float64")
            operands = [
                np.ascontiguousarray(np.swapaxes(a, -1, -2)) if adj_x else a,
                np.ascontiguousarray(np.swapaxes(b, -1, -2)) if adj_y else b,
            ]
            found = run(made, operands, wanted.shape)
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("columns", [1, 5, 40, 300])
def test_nan_and_infinity_go_where_they_belong(rows: int, columns: int) -> None:
    rng = np.random.default_rng(2)
    a, b = numbers(rng, (rows, 40), "float32"), numbers(rng, (40, columns), "float32")
    a[rows // 2, 3], b[7, columns // 2], b[9, 0] = np.nan, np.inf, 0.0
    a[0, 9] = -np.inf  # times that zero it is NaN
    with np.errstate(invalid="ignore"):
        wanted = tf.matmul(a, b).numpy()
    found = multiplied(a, b)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))
    np.testing.assert_allclose(found[np.isfinite(found)], wanted[np.isfinite(wanted)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [40, 300])
def test_a_row_is_the_same_whatever_rows_are_beside_it(columns: int) -> None:
    """So results depend neither on how a product is divided, nor on the threads.

    Where vectors have 32 bytes, TensorFlow's kernel multiplies more rows than 64.
    """
    rng, rows = np.random.default_rng(3), 999 if AVX512 else 64
    a, b = numbers(rng, (rows, 300), "float32"), numbers(rng, (300, columns), "float32")
    whole = multiplied(a, b)
    parts = ((0, 20), (13, 77), (500, 999), (990, 999)) if AVX512 else ((0, 20), (13, 60), (32, 64), (55, 64))
    for first, end in parts:
        np.testing.assert_array_equal(multiplied(a[first:end], b), whole[first:end])


def test_signed_zeros_and_nothing_to_add() -> None:
    nothing = multiplied(np.ones((3, 0), np.float32), np.ones((0, 50), np.float32))
    np.testing.assert_array_equal(nothing, np.zeros((3, 50), np.float32))
    negative = multiplied(np.full((10, 1), -0.0, np.float32), np.ones((1, 70), np.float32))
    np.testing.assert_array_equal(negative, np.zeros((10, 70), np.float32))


ACTIVATIONS = {
    "": lambda x: x,
    "Relu": lambda x: np.where(x < 0, 0, x),  # NaN stays
    "Relu6": lambda x: np.where(x < 0, 0, np.where(x > 6, 6, x)),
}


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_and_activation(a_transposed: bool, b_transposed: bool, activation: str, vector_bytes: int) -> None:
    """TensorFlow's op takes no float64."""
    rng = np.random.default_rng(4)
    for rows, columns, depth in SIZES:
        a, b, bias = (numbers(rng, shape, "float32") for shape in ((rows, depth), (depth, columns), (columns,)))
        exact = a.astype("longdouble") @ b.astype("longdouble") + bias
        bound = (depth + 1) * np.finfo("float32").eps * (np.abs(a) @ np.abs(b) + np.abs(bias))
        found = fused(
            np.ascontiguousarray(a.T) if a_transposed else a,
            np.ascontiguousarray(b.T) if b_transposed else b,
            bias,
            ["BiasAdd", activation] if activation else ["BiasAdd"],
            vector_bytes,
            transpose_a=a_transposed,
            transpose_b=b_transposed,
        )
        assert (np.abs(found - ACTIVATIONS[activation](exact)) <= bound).all(), (rows, columns, depth)


@pytest.mark.parametrize(
    ("rows", "columns"), [(2, 1), (2, 300), (5, 5), (5, 40), (40, 5), (40, 40), (40, 300), (300, 1), (300, 5)]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_beside_a_bias(rows: int, columns: int, activation: str) -> None:
    """As TensorFlow's ops one after the other have them: its ReLU of NaN is NaN, which its fused kernel does not keep.
    Of sizes that AVX2 suffices for."""
    rng = np.random.default_rng(7)
    a, b, bias = (numbers(rng, shape, "float32") for shape in ((rows, 40), (40, columns), (columns,)))
    a[rows // 2, 3], b[7, columns // 2], bias[0], bias[-1] = np.nan, np.inf, -np.inf, np.nan
    wanted = tf.nn.bias_add(tf.matmul(a, b), bias)
    wanted = (getattr(tf.nn, activation.lower())(wanted) if activation else wanted).numpy()
    found = fused(a, b, bias, ["BiasAdd", activation] if activation else ["BiasAdd"])
    assert np.isnan(wanted).any()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))
    np.testing.assert_allclose(found[np.isfinite(found)], wanted[np.isfinite(wanted)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(3, 50), (50, 3), (50, 1), (0, 5), (5, 0)])
def test_a_bias_and_nothing_to_add_it_to(rows: int, columns: int) -> None:
    a, b, bias = np.ones((rows, 0), np.float32), np.ones((0, columns), np.float32), np.arange(columns) - np.float32(1)
    found = fused(a, b, bias.astype(np.float32), ["BiasAdd", "Relu"])
    np.testing.assert_array_equal(found, np.broadcast_to(np.maximum(bias, 0), (rows, columns)))


def test_a_bias_of_another_length_is_tensorflows_error() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="bias"):
        fused(np.ones((4, 3), np.float32), np.ones((3, 5), np.float32), np.ones(4, np.float32), ["BiasAdd"])


@pytest.mark.parametrize("activation", ["Elu", "Tanh", "Sigmoid", "LeakyRelu"])
def test_other_activations_round_as_in_the_graph(activation: str) -> None:
    """They are left to TensorFlow's kernel."""
    rng = np.random.default_rng(8)
    a, b, bias = (numbers(rng, shape, "float32") for shape in ((7, 50), (50, 60), (60,)))
    name = "x" if activation in ("Tanh", "Sigmoid") else "features"

    @tf.function
    def graph(a: Any, b: Any, bias: Any) -> Any:  # what the remapper fuses
        return getattr(tf.raw_ops, activation)(**{name: tf.nn.bias_add(tf.matmul(a, b), bias)})

    np.testing.assert_array_equal(fused(a, b, bias, ["BiasAdd", activation]), graph(a, b, bias))


@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 512, 512), (4, 512, 2000), (33, 700, 10)])
def test_without_wide_vectors_products_round_as_in_the_graph(rows: int, depth: int, columns: int) -> None:
    """Then TensorFlow's own kernel multiplies."""
    rng = np.random.default_rng(rows)
    x, w = numbers(rng, (rows, depth), "float32"), numbers(rng, (depth, columns), "float32")
    np.testing.assert_array_equal(multiplied(x, w, 16), tf.function(tf.matmul)(x, w))


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_half_types_round_as_in_the_graph(dtype: Any) -> None:
    """They are left to TensorFlow's kernel."""
    rng = np.random.default_rng(5)
    x, w = (numbers(rng, shape, "float32").astype(dtype.as_numpy_dtype) for shape in ((9, 70), (70, 33)))
    types = tuple(TensorType(dtype.name, shape) for shape in ((9, 70), (70, 33), (9, 33)))
    made = call("MatMul", (0, 1), (2,), T=dtype, transpose_a=False, transpose_b=False)
    found = run_region(Region(2, (), types, (made,), (2,)), [x, w], [])[0]
    wanted = tf.function(tf.matmul)(x, w)
    np.testing.assert_array_equal(tf.cast(found, tf.float32), tf.cast(wanted, tf.float32))


def test_results_are_the_same_in_every_run() -> None:
    rng = np.random.default_rng(6)
    a, b = numbers(rng, (129, 500), "float32"), numbers(rng, (500, 700), "float32")
    first = multiplied(a, b)
    for _ in range(10):
        np.testing.assert_array_equal(multiplied(a, b), first)


@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 512, 512), (1, 700, 1000)])
def test_what_tensorflow_multiplies_rounds_as_in_the_graph(rows: int, depth: int, columns: int) -> None:
    """TensorFlow's executor runs oneDNN's kernels in place of Eigen's, whose sums differ; so does a region."""
    rng = np.random.default_rng(rows)
    x, w = numbers(rng, (rows, depth), "float32"), numbers(rng, (depth, columns), "float32")
    np.testing.assert_array_equal(multiplied(x, w), tf.function(tf.matmul)(x, w))
