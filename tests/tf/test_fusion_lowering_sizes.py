"""Sizes that are unknown before the step runs: one program serves them all, or says why not."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.expr import reference
from graph_passes.graph.ir import TensorId
from graph_passes.graph.serde import from_tf_graph
from graph_passes.lower.lower_nodes import LoweringError, lower_kernel
from graph_passes.lower.shapes import Shapes
from tests.tf.fusion_lowering import Lowered
from tests.tf.stitched_steps import optimized

BATCHES = (1, 2, 7)


def values(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def loss(x, labels, bias):
    """The loss of logits, and its gradient; written with primitive ops."""
    logits = x + bias
    shifted = logits - tf.reduce_max(logits, -1, keepdims=True)
    exponentials = tf.exp(shifted)
    total = tf.reduce_sum(exponentials, -1, keepdims=True)
    hot = tf.one_hot(labels, 5)
    losses = -tf.reduce_sum(hot * (shifted - tf.math.log(total)), -1)
    gradient = exponentials / total - hot
    return tf.reduce_mean(losses), gradient, tf.reduce_sum(gradient, 0)


def fused(x, labels, bias):
    losses, gradient = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=x + bias, labels=labels)
    return tf.reduce_sum(losses), gradient


def heads(x, labels, bias):
    """The heads of [batch, 5]: split, transposed and put together again."""
    split = tf.reshape(tf.tile(x, [1, 4]), [-1, 4, 5])
    turned = tf.transpose(split, [0, 2, 1]) * 2.0
    return tf.reshape(turned, [-1, 20]), tf.concat([x, turned[:, :, 1]], 1), tf.pad(x, [[0, 0], [1, 2]])


def padded(x, labels, bias):
    """With a number that is no integer where other ops have sizes."""
    return tf.pad(x + bias, [[0, 0], [2, 1]], constant_values=-np.inf)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("function", [loss, fused, heads, padded])
def test_one_program_for_all_batch_sizes(function, batch):
    given = values(batch, 5), np.arange(batch, dtype="int32") % 5, values(5, seed=1)
    shapes = [(None, 5), (None,), (5,)]
    lowered = Lowered(function, *given, shapes=shapes, one_batch=function is loss)
    assert 0 in lowered.kernel.program.axes
    for found, expected in zip(lowered.run(), lowered.expected(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
def test_all_elements_of_a_batch_are_more_than_its_rows(batch: int) -> None:
    """Rows of five become one axis, whose size is unknown as well, but it is not that of the labels."""
    given = values(batch, 5), values(batch), values(batch, 5, seed=1)
    shapes = [(None, 5), (None,), (None, 5)]
    lowered = Lowered(lambda x, y, z: (tf.exp(x + z), y * 2.0, z - 1.0), *given, shapes=shapes, one_batch=True)
    assert lowered.kernel.program.axes == (0, 0)
    for found, expected in zip(lowered.run(), lowered.expected(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_sizes_that_may_be_broadcast() -> None:
    with pytest.raises(LoweringError, match="is broadcast are unknown"):
        Lowered(lambda x, y: x * y, values(3, 5), values(3, 5), shapes=[(None, 5), (None, 5)])


def test_a_part_whose_size_nobody_knows() -> None:
    """The last one's size would be taken for that of what it is a part of."""
    with pytest.raises(LoweringError, match="takes a part of a tensor, whose size is unknown statically"):
        Lowered(lambda x: x[:-1] * 2.0, values(4), shapes=[(None,)])


def test_sizes_two_of_which_nobody_knows() -> None:
    """A view has at most one, so the program keeps the dimensions that its results have."""
    x = values(3, 4, 7)
    lowered = Lowered(lambda x: (tf.concat([x, x * 2.0], -1), x + 1.0), x, shapes=[(None, None, 7)])
    assert lowered.kernel.output_shapes[0] == (None, None, 14)
    joined, _ = reference.run(lowered.kernel.program, [x])
    np.testing.assert_array_equal(joined, lowered.expected()[0])


@pytest.mark.parametrize("op", [tf.ones_like, tf.zeros_like])
def test_a_kernel_holds_a_constant_whose_size_nobody_knows(op) -> None:
    """So it waits for nothing that the constant waits for, whether or not that is in its region."""

    def function(x, y):
        return tf.multiply(op(x), y, name="product")

    specs = [tf.TensorSpec((None,), tf.float32)] * 2
    graph = from_tf_graph(tf.function(function).get_concrete_function(*specs).graph)
    kernel = lower_kernel(
        graph, ["product"], [TensorId("product")], Shapes(graph, [[(TensorId("x"), 0), (TensorId("y"), 0)]])
    )
    assert kernel.inputs == (TensorId("y"),)
    y = values(4)
    np.testing.assert_array_equal(reference.run(kernel.program, [y])[0], op(y) * y)


@pytest.mark.parametrize("axis", [1, -1, 0])
def test_the_gradient_of_a_concatenation_of_any_batch(axis: int) -> None:
    """Slices whose bounds TensorFlow computes of the parts' shapes; along the batch itself they stay TensorFlow's."""
    rows, columns = ([None, 3], [None, 5]) if axis else ([None, 3], [None, 3])

    def run(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            joined = tf.concat([tf.tanh(x), y * 2, x], axis)
            loss = tf.reduce_sum(joined * tf.sin(joined), 1)
        return loss, *tape.gradient(loss, [x, y])

    signature = [tf.TensorSpec(rows), tf.TensorSpec(columns)]
    plain, step = (tf.function(run, input_signature=signature) for _ in range(2))
    step = optimized(step)
    for batch in (4, 1, 9):
        given = [np.random.default_rng(batch).normal(size=(batch, shape[1])).astype("f") for shape in (rows, columns)]
        for found, expected in zip(step(*given), plain(*given), strict=True):
            np.testing.assert_allclose(found, expected, 1e-5, 1e-6)
    kernels = [
        op for region in tfmem.report(step).regions for s in region.steps if s.kind == "kernel" for _, op in s.ops
    ]
    assert (kernels.count("Slice") == 3) == (axis != 0)
