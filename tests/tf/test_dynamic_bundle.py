"""Small tensors that cross to another device as one: equal on the other side, and what is damaged is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.load import load

TENSORS = [
    np.arange(5, dtype=np.int32),
    np.array([0, 2, 5], np.int64),
    np.zeros([0], np.int32),
    np.zeros([3, 0, 2], np.float32),
    np.array(7, np.int64),
    np.array([np.nan, -0.0, np.inf], np.float32),
    np.array([[True], [False], [True]]),
    np.array(2.5),
]


def bundled(tensors):
    return load().ops.tfmem_bundle(tensors=list(map(tf.constant, tensors)))


def unbundled(bundle, tensors=TENSORS):
    return load().ops.tfmem_unbundle(
        bundle=bundle, T=[tensor.dtype for tensor in tensors], shapes=[tensor.shape for tensor in tensors]
    )


@pytest.mark.parametrize("count", range(1, len(TENSORS) + 1))
def test_tensors_come_out_as_they_went_in(count):
    bundle = bundled(TENSORS[:count])
    assert bundle.dtype == tf.uint8
    assert bundle.shape[0] % 8 == 0
    for found, expected in zip(unbundled(bundle, TENSORS[:count]), TENSORS[:count], strict=True):
        assert (found.dtype, found.shape) == (tf.as_dtype(expected.dtype), expected.shape)
        assert found.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("length", [*range(0, 200, 7), -1, 8])
def test_a_bundle_that_is_cut_or_longer_is_refused(length):
    whole = bundled(TENSORS).numpy()
    given = whole[:length] if length in range(len(whole)) and length != 8 else np.append(whole, np.zeros(8, np.uint8))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"a bundle of \d+ bytes does not have tensor \d of 8"):
        unbundled(given)


@pytest.mark.parametrize("number", [-1, 255, 1 << 40, (1 << 63) - 1])
def test_sizes_that_no_tensor_has_are_refused(number):
    """As the number of axes, or as the size of one."""
    for word in (0, 1):
        damaged = bundled(TENSORS).numpy().view(np.int64).copy()
        damaged[word] = number
        with pytest.raises(tf.errors.InvalidArgumentError, match="does not have tensor 0"):
            unbundled(damaged.view(np.uint8))


def test_shapes_are_known_while_a_graph_is_built():
    @tf.function
    def function(x):
        bundle = load().ops.tfmem_bundle(tensors=[x, tf.constant(3)])
        found = load().ops.tfmem_unbundle(bundle=bundle, T=[tf.float32, tf.int32], shapes=[[None, 2], []])
        assert [tensor.shape.as_list() for tensor in found] == [[None, 2], []]
        return found

    assert function(tf.ones([3, 2]))[1].numpy() == 3


def test_shapes_that_are_too_few_or_of_others_are_refused():
    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError), match="shapes has 1 shapes; expected one for each of 2 tensors"
    ):
        load().ops.tfmem_unbundle(bundle=bundled(TENSORS[:2]), T=[tf.int32, tf.int64], shapes=[[5]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not have tensor 1 of 2"):
        load().ops.tfmem_unbundle(bundle=bundled(TENSORS[:2]), T=[tf.int32, tf.int64], shapes=[[None], [4]])


def test_texts_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="a bundle takes numbers, not string"):
        load().ops.tfmem_bundle(tensors=[tf.constant("a")])
