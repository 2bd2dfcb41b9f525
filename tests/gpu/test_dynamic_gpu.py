"""Dynamic nets on a real GPU: losses and gradients are TensorFlow's, updates the CPU op's, each run is the same."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tfmem import dynamic

pytestmark = pytest.mark.usefixtures("float32_products")


def as_arrays(gradients):
    return [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


@pytest.mark.parametrize("hidden", [1, 33, 128, 257, 512])
@pytest.mark.parametrize("count", [1, 40])
def test_losses_and_gradients_are_tensorflows(hidden: int, count: int) -> None:
    net = TreeLSTM(hidden=hidden, width=min(hidden, 128))
    for variable in net.parameters:
        variable.assign(variable / max(1.0, hidden / 32) ** 0.5)
    handle = net.specialize()
    assert handle.plan is not None
    trees = random_trees(count, most=20)
    outcome = handle.forward_backward([nodes(handle, tree) for tree in trees])
    losses, gradients = net.gradients(trees)
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-5)
    for found, expected in zip(as_arrays(outcome.gradients), gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


def test_each_run_is_the_same() -> None:
    net = TreeLSTM(hidden=128, width=64)
    handle = net.specialize()
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(20, most=20)])
    first = as_arrays(handle.forward_backward(batch).gradients)
    for _ in range(20):
        for a, b in zip(first, as_arrays(handle.forward_backward(batch).gradients), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("optimizer", [dynamic.SGD(0.01), dynamic.SGD(0.01, 0.9), dynamic.Adam(0.003)])
def test_training_lowers_the_loss(optimizer: dynamic.SGD | dynamic.Adam) -> None:
    net = TreeLSTM(hidden=64, width=32)
    handle = net.specialize(optimizer=optimizer)
    step = tf.function(
        lambda *batch: handle.step(dynamic.Batch(*batch)).losses,
        input_signature=[tf.RaggedTensorSpec([None, None], tf.int32)] * 3,
    )
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(8, most=12)])
    losses = [float(tf.reduce_mean(step(*batch))) for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
