"""Einsums of two operands within regions: values and gradients are TensorFlow's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.stitched_steps import optimized, require_stitched, stitched_ops
from tests.tf.vectors import AVX512

EQUATIONS = {
    "projection": ("btd,dhk->bthk", (3, 5, 7), (7, 2, 4)),
    "scores": ("bthd,bshd->bhts", (3, 5, 2, 4), (3, 6, 2, 4)),
    "mixed": ("bhts,bshd->bthd", (3, 2, 5, 6), (3, 6, 2, 4)),
    "out": ("bthd,hdo->bto", (3, 5, 2, 4), (2, 4, 9)),
    "columns first": ("ij,kj->ki", (3, 5), (7, 5)),
    "batch last": ("ijb,jkb->ikb", (3, 5, 2), (5, 4, 2)),
    "two of depth": ("abcd,ecbd->ae", (2, 3, 4, 5), (6, 4, 3, 5)),
    "one of each": ("ij,jk->ik", (1, 1), (1, 1)),
    "vectors": ("be,bce->bc", (3, 5), (3, 4, 5)),
    "a vector": ("ij,j->i", (3, 5), (5,)),
    "dot products": ("be,be->b", (3, 5), (3, 5)),
    "no depth": ("bi,bj->bji", (2, 3), (2, 4)),
}
STAYS = {
    "a sum": ("ij,jk->i", (3, 5), (5, 7)),
    "a diagonal": ("ii,ij->j", (4, 4), (4, 5)),
    "an ellipsis": ("...ij,jk->...ik", (2, 3, 5), (5, 7)),
}


def both(equation: str, left: Any, right: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch((left, right))
        made = tf.raw_ops.Einsum(inputs=[tf.tanh(left), tf.sin(right)], equation=equation)
        loss = tf.reduce_sum(tf.cast(made, tf.float32) ** 2)
    return made, tape.gradient(loss, (left, right))


def given(shape: tuple[int, ...], dtype: Any, seed: int) -> tf.Tensor:
    return tf.cast(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16])
@pytest.mark.parametrize("name", EQUATIONS)
def test_values_and_gradients(name: str, dtype: Any) -> None:
    equation, *shapes = EQUATIONS[name]
    plain, step = (tf.function(lambda x, y: both(equation, x, y)) for _ in range(2))
    step = optimized(step)
    inputs = [given(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    tolerance = 3e-2 if dtype == tf.bfloat16 else 1e-5
    for found, expected in zip(tf.nest.flatten(step(*inputs)), tf.nest.flatten(plain(*inputs)), strict=True):
        assert found.dtype == expected.dtype
        ours, theirs = (tf.cast(each, "float64").numpy() for each in (found, expected))
        ulps = 0.0 if AVX512 or dtype != tf.bfloat16 else 3 * 2**-8 * np.max(np.abs(theirs))
        np.testing.assert_allclose(ours, theirs, tolerance, max(tolerance, ulps))
    exact = np.einsum(equation, *(f(tf.cast(x, "float64")) for f, x in zip((np.tanh, np.sin), inputs, strict=True)))
    np.testing.assert_allclose(tf.cast(step(*inputs)[0], "float64"), exact, 2 * tolerance, 2 * tolerance)
    report = require_stitched(step)
    assert {"MatMul", "BatchMatMulV2"} & set(stitched_ops(report))
    assert "Einsum" not in stitched_ops(report)
    assert not [name for name, _ in report.not_stitched if name.endswith("Einsum")]


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    equation, *shapes = STAYS[name]
    plain, step = (
        tf.function(lambda x, y: tf.raw_ops.Einsum(inputs=[tf.tanh(x), tf.sin(y)], equation=equation) * 2)
        for _ in range(2)
    )
    step = optimized(step)
    inputs = [given(shape, tf.float32, seed) for seed, shape in enumerate(shapes)]
    np.testing.assert_allclose(step(*inputs), plain(*inputs), 1e-5, 1e-5)
    report = tfmem.report(step)
    assert "Einsum" in stitched_ops(report) or report.not_stitched


def test_a_batch_whose_size_is_not_known() -> None:
    signature = [tf.TensorSpec([None, 5, 2, 4]), tf.TensorSpec([None, 6, 2, 4])]
    plain, step = (tf.function(lambda x, y: both("bthd,bshd->bhts", x, y), input_signature=signature) for _ in range(2))
    step = optimized(step)
    for batch in (3, 1, 4):
        inputs = [given((batch, *spec.shape[1:]), tf.float32, seed) for seed, spec in enumerate(signature)]
        for found, expected in zip(tf.nest.flatten(step(*inputs)), tf.nest.flatten(plain(*inputs)), strict=True):
            np.testing.assert_allclose(found, expected, 1e-5, 1e-5)
    assert "BatchMatMulV2" in stitched_ops(require_stitched(step))


def test_what_is_not_finite() -> None:
    """As in TensorFlow's kernel: NaN and infinity reach each sum that they are in, and -0 adds nothing."""
    equation, *shapes = EQUATIONS["scores"]
    left, right = (given(shape, tf.float32, seed).numpy() for seed, shape in enumerate(shapes))
    left[0, 0, 0, 0], left[1, 1, 1, 1], left[2, 2, 0, 2], right[2, 2] = np.nan, np.inf, -np.inf, -0.0
    plain, step = (
        tf.function(lambda x, y: tf.raw_ops.Einsum(inputs=[x * 2, y + 0.0], equation=equation)) for _ in range(2)
    )
    np.testing.assert_allclose(optimized(step)(left, right), plain(left, right), 1e-5, 1e-5)
