"""TfmemMatMul on the CPU, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.load import load


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 1, 1), (7, 33, 5), (64, 100, 130), (0, 3, 2), (2, 0, 3)])
def test_the_cpu_multiplies(
    rows: int, depth: int, columns: int, transpose_a: bool, transpose_b: bool, with_bias: bool
) -> None:
    a, b, bias = numbers(rows, depth), numbers(depth, columns, seed=1), numbers(columns, seed=2)
    with tf.device("/CPU:0"):
        found = load().ops.tfmem_mat_mul(
            a=a.T if transpose_a else a,
            b=b.T if transpose_b else b,
            bias=[bias] if with_bias else [],
            transpose_a=transpose_a,
            transpose_b=transpose_b,
        )
    wanted = a.astype(np.float64) @ b + (bias if with_bias else 0)
    assert found.shape == wanted.shape
    terms = np.abs(a) @ np.abs(b) + (np.abs(bias) if with_bias else 0)
    assert (np.abs(found - wanted) <= 1e-6 * terms).all()


def test_nan_and_infinity_propagate() -> None:
    a, b = numbers(6, 9), numbers(9, 4)
    a[1, 2], a[3, 4], b[0, 1] = np.nan, np.inf, -np.inf
    with tf.device("/CPU:0"):
        found = load().ops.tfmem_mat_mul(a=a, b=b, bias=[])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(a @ b))
        np.testing.assert_array_equal(np.isnan(found), np.isnan(a @ b))


@pytest.mark.parametrize(
    ("a", "b", "bias", "message"),
    [
        ((2, 3), (4, 5), [], r"b of .* has shape \[4,5\]; expected 3 rows, as a of shape \[2,3\]"),
        ((2, 3, 4), (3, 5), [], r"a of .* has shape \[2,3,4\]; expected a matrix"),
        ((2, 3), (3,), [], r"b of .* has shape \[3\]; expected a matrix"),
        ((2, 3), (3, 5), [(4,)], r"bias of .* has shape \[4\]; expected \[5\]"),
        ((2, 3), (3, 5), [(5,), (5,)], "has 2 biases; it takes one"),
    ],
)
def test_shapes_that_do_not_fit_are_named(a: Any, b: Any, bias: Any, message: str) -> None:
    with tf.device("/CPU:0"), pytest.raises(tf.errors.InvalidArgumentError, match=message):
        load().ops.tfmem_mat_mul(a=numbers(*a), b=numbers(*b), bias=[numbers(*shape) for shape in bias])


def test_a_graph_knows_the_shape() -> None:
    @tf.function(input_signature=[tf.TensorSpec([3, None]), tf.TensorSpec([5, 3])])
    def product(a: Any, b: Any) -> Any:
        made = load().ops.tfmem_mat_mul(a=a, b=b, bias=[], transpose_a=True, transpose_b=True)
        assert made.shape.as_list() == [None, 5]
        return made

    with tf.device("/CPU:0"):
        assert product(numbers(3, 2), numbers(5, 3)).shape == (2, 5)

    @tf.function(input_signature=[tf.TensorSpec([2, 3]), tf.TensorSpec([4, 5])])
    def refused(a: Any, b: Any) -> Any:
        return load().ops.tfmem_mat_mul(a=a, b=b, bias=[])

    with pytest.raises(ValueError, match="must be equal"):
        refused.get_concrete_function()
