"""Products of one operand that are merged: how they are timed, and a step that has them. Needs a GPU."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.jit.cublas import CublasLt, MatrixProduct
from custom_ops.jit.device import DeviceContext
from graph_passes.report import UNDECIDED

SIZE = 768
ROWS = 4096
DECIDED = 90  # seconds

pytestmark = pytest.mark.usefixtures("float32_products", "first_gpu")


def test_products_side_by_side() -> None:
    """All are computed, and together they take no longer than one after the other."""
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(SIZE, SIZE)).astype(np.float32) for _ in range(4)]
    form = MatrixProduct(SIZE, SIZE, SIZE, tf32=False)
    with DeviceContext() as device, ExitStack() as opened:
        left, *rights = (device.upload(matrix) for matrix in given)
        results = [device.allocate(left_.nbytes) for left_ in given[1:]]
        calls = []
        for right, result in zip(rights, results, strict=True):
            library = opened.enter_context(CublasLt(device))
            calls.append(opened.enter_context(library.prepared(form, left, right, result))[0])
        together = opened.enter_context(device.branches(len(calls)))
        seconds = device.time(lambda: together(calls))

        def each() -> None:
            for call in calls:
                call(device.stream)

        in_turn = device.time(each)
        for matrix, result in zip(given[1:], results, strict=True):
            found = device.download(result, np.empty((SIZE, SIZE), np.float32))
            np.testing.assert_allclose(found, given[0] @ matrix, rtol=1e-3, atol=1e-3)
        for place in (left, *rights, *results):
            device.free(place)
    assert seconds < 1.2 * in_turn


class Projections(tf.Module):
    """Queries, keys and values, and a step of gradient descent."""

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        shape = (3, SIZE, SIZE)
        self.weights = [tf.Variable(each) for each in (rng.normal(size=shape) / SIZE**0.5).astype(np.float32)]

    def step(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            inner = tf.tanh(x)
            queries, keys, values = (inner @ matrix for matrix in self.weights)
            mixed = tf.tanh(queries) * tf.sigmoid(keys) + tf.nn.relu(values)
            loss = tf.reduce_mean(tf.square(mixed))
        for variable, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            variable.assign_sub(10.0 * gradient)
        return loss


def test_a_step_whose_products_may_be_merged() -> None:
    """Whether they are is measured; what the step computes is the same."""
    plain, model = Projections(), Projections()
    given = tf.function(plain.step)
    step = tfmem.optimize(tf.function(model.step), passes=("fusion",), cache_directory="")
    x = tf.random.stateless_normal([ROWS, SIZE], [1, 2])
    count, deadline = 0, time.monotonic() + DECIDED
    while count < 3 or tfmem.report(step).fusion.startswith(UNDECIDED):
        np.testing.assert_allclose(step(x), given(x), rtol=1e-5)
        count += 1
        assert time.monotonic() < deadline, tfmem.report(step).fusion
    for _ in range(3):
        np.testing.assert_allclose(step(x), given(x), rtol=1e-5)
    ops = [op for region in tfmem.report(step).regions for each in region.steps for _, op in each.ops]
    print(tfmem.report(step).fusion, "products:", sum("MatMul" in op for op in ops))
    for one, other in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
