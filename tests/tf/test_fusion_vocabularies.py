"""Cross entropies over large vocabularies: rows longer than shared memory and registers hold, in kernels of a GPU, run
on the CPU, and in regions on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.fusion.codegen.kernel import make
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.ranking import ranked
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import Module
from tests.fusion_kernels import run
from tests.tf.fusion_lowering import Lowered
from tests.tf.stitched_steps import optimized, require_stitched

pytest_plugins = ("tests.fusion_device",)

ROWS = 3
raw = tf.raw_ops


def entropies(logits: Any, labels: Any) -> Any:
    """The loss of each row, and the gradient."""
    dense = len(labels.shape) == 2
    op = raw.SoftmaxCrossEntropyWithLogits if dense else raw.SparseSoftmaxCrossEntropyWithLogits
    return op(features=logits, labels=labels)


def given(words: int, dense: bool) -> list[Any]:
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(ROWS, words)) * 3).astype(np.float32)
    logits[1, 5], logits[2, words - 1] = np.inf, -np.inf
    if not dense:
        return [logits, np.array([0, 5, words - 2])]
    labels = np.zeros((ROWS, words), np.float32)
    labels[:, :: words // 8][:, :8] = rng.dirichlet(np.ones(8), ROWS)
    return [logits, labels]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("words", [50_257, 262_144])
def test_kernels_of_a_gpu(device: DeviceContext, words: int, dense: bool) -> None:
    """By the configuration that the model chooses for many rows; close to TensorFlow's kernel and to float64."""
    tensors = given(words, dense)
    shapes = [(None, *tensor.shape[1:]) for tensor in tensors]
    lowered = Lowered(entropies, *tensors, shapes=shapes, one_batch=True)
    pattern = Pattern.of(lowered.kernel.program, lowered.kernel.input_shapes)
    many = tuple(tuple(size or 2048 for size in shape) for shape in lowered.kernel.input_shapes)
    kernel = make(pattern, ranked(pattern, many, 132)[0][0])
    code = device.compile_source(kernel.source.text, device.arch, contract=False)
    found = run(device, kernel, lowered.tensors(), Module(code, device.driver), code)
    exact = entropies(tf.constant(tensors[0], tf.float64), tf.cast(tensors[1], tf.float64) if dense else tensors[1])
    for one, other, true in zip(found, lowered.expected(), exact, strict=True):
        np.testing.assert_allclose(one.reshape(other.shape), other, 2e-6, 1e-6)
        np.testing.assert_allclose(one.reshape(other.shape), true, 2e-5, 1e-5)


@pytest.mark.parametrize("dense", [False, True])
def test_a_region_on_a_cpu(dense: bool) -> None:
    def step(logits: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss = tf.reduce_mean(entropies(logits * 2, labels)[0])
        return loss, tape.gradient(loss, logits)

    plain, step = tf.function(step), optimized(tf.function(step))
    logits, labels = given(50_257, dense)
    logits = np.nan_to_num(logits, posinf=0, neginf=0)
    for found, expected in zip(step(tf.constant(logits), labels), plain(tf.constant(logits), labels), strict=True):
        np.testing.assert_allclose(found, expected, 1e-5, 1e-7)
    require_stitched(step, f"{'' if dense else 'Sparse'}SoftmaxCrossEntropyWithLogits")
