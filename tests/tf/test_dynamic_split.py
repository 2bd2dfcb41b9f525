"""Batches that memory is short for run in parts: losses, gradients and updates are those of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.errors import TfmemWarning
from tests.tf.dynamic_nets import TreeLSTM, nodes, random_trees
from tfmem import dynamic
from tfmem.dynamic import handle as handles

MOST = 2  # examples for which there is memory


@pytest.fixture(name="short_memory")
def fixture_short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the allocator says it, before anything is written."""

    def limited(run):
        def call(*args, **options):
            batch = next(arg for arg in args if isinstance(arg, dynamic.Batch))
            if batch.kinds.nrows() > MOST:
                raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
            return run(*args, **options)

        return call

    monkeypatch.setattr(handles, "forward_backward", limited(handles.forward_backward))

    def exhausted(traced, given):
        if given[1].shape[0] - 1 > MOST:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
        return call_unrecorded(traced, given)

    call_unrecorded = handles.call_unrecorded
    monkeypatch.setattr(handles, "call_unrecorded", exhausted)


def made(optimizer: dynamic.SGD | dynamic.Adam) -> tuple[TreeLSTM, dynamic.Handle, dynamic.Batch]:
    net = TreeLSTM(hidden=6, width=4)
    handle = net.specialize(optimizer=optimizer)
    return net, handle, handle.batch([nodes(handle, tree) for tree in random_trees(7, most=5)])


OPTIMIZERS = [dynamic.SGD(0.1), dynamic.SGD(0.1, 0.9), dynamic.Adam(0.05)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_in_parts_are_those_of_the_whole(optimizer, request) -> None:
    weights = tf.constant(np.linspace(0.5, 2, 7), tf.float32)
    net, handle, batch = made(optimizer)
    expected = [handle.step(batch, loss_weights=weights).losses.numpy() for _ in range(3)]
    request.getfixturevalue("short_memory")
    other, handle, batch = made(optimizer)
    with pytest.warns(TfmemWarning, match="a batch needs more memory .* runs in two parts"):
        found = [handle.step(batch, loss_weights=weights).losses.numpy() for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for a, b in zip(other.parameters, net.parameters, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_in_parts_are_those_of_the_whole(request) -> None:
    _, handle, batch = made(dynamic.SGD())
    expected = handle.forward_backward(batch)
    request.getfixturevalue("short_memory")
    with pytest.warns(TfmemWarning, match="runs in two parts"):
        found = handle.forward_backward(batch)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    np.testing.assert_allclose(found.outputs[0], expected.outputs[0], rtol=1e-6)
    for a, b in zip(found.gradients, expected.gradients, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(a), tf.convert_to_tensor(b), rtol=1e-5, atol=1e-6)


def test_one_example_that_is_too_large_is_an_error(short_memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.MOST", 0)
    net, handle, _ = made(dynamic.Adam())
    before = [parameter.numpy() for parameter in net.parameters]
    batch = handle.batch([nodes(handle, tree) for tree in random_trees(1)])
    for call in (handle.step, handle.forward_backward):
        with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM"):
            call(batch)
    for parameter, value in zip(net.parameters, before, strict=True):
        np.testing.assert_array_equal(parameter, value)
