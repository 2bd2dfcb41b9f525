"""Random graphs of memory-intensive ops: as one program they have TensorFlow's values."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graph_passes.lower.lower_nodes import LoweringError
from graph_passes.refusals import Reason
from tests.tf.fusion_lowering import Lowered
from tests.tiers import examples

SIZES = st.sampled_from([1, 2, 3, 4, 6])


def unary(draw, x):
    function = draw(st.sampled_from([tf.tanh, tf.nn.relu, tf.square, tf.abs, tf.sigmoid, tf.negative, tf.floor]))
    return tf.tanh(function(x))


def binary(draw, x, y):
    """An op of two tensors that can be broadcast, else of one and its reduction."""
    try:
        tf.broadcast_static_shape(x.shape, y.shape)
    except ValueError:
        y = tf.reduce_mean(x, draw(st.integers(0, x.shape.rank - 1)), keepdims=True) if x.shape.rank else x
    if prod(tf.broadcast_static_shape(x.shape, y.shape)) > 2000:
        return x
    return draw(st.sampled_from([tf.add, tf.subtract, tf.multiply, tf.maximum]))(x, y)


def reduction(draw, x):
    axes = draw(st.sets(st.integers(0, x.shape.rank - 1))) if x.shape.rank else set()
    function = draw(st.sampled_from([tf.reduce_sum, tf.reduce_max, tf.reduce_mean, tf.reduce_min]))
    return function(x, sorted(axes), keepdims=draw(st.booleans()))


def transpose(draw, x):
    return tf.transpose(x, draw(st.permutations(range(x.shape.rank))))


def reshape(draw, x):
    count = prod(x.shape)
    first = draw(st.sampled_from([size for size in range(1, count + 1) if count % size == 0]))
    rest = count // first
    second = draw(st.sampled_from([size for size in range(1, rest + 1) if rest % size == 0]))
    return tf.reshape(x, [first, second, rest // second])


def part(draw, x):
    bounds = []
    for size in x.shape:
        first = draw(st.integers(0, size - 1))
        bounds.append(slice(first, draw(st.integers(first + 1, size)), draw(st.integers(1, 2))))
    return x[tuple(bounds)]


def joined(draw, x):
    if not x.shape.rank or prod(x.shape) > 500:
        return x
    return tf.concat([x, -x, part(draw, x)[..., :1] if x.shape.rank == 1 else 2.0 * x], 0)


def padded(draw, x):
    return tf.pad(x, [[draw(st.integers(0, 1)), draw(st.integers(0, 2))] for _ in x.shape]) if x.shape.rank else x


def tiled(draw, x):
    return tf.tile(x, [draw(st.integers(1, 2)) for _ in x.shape]) if prod(x.shape) < 300 and x.shape.rank else x


def gathered(draw, x):
    if not x.shape.rank:
        return x
    axis = draw(st.integers(0, x.shape.rank - 1))
    indices = draw(st.lists(st.integers(0, x.shape[axis] - 1), min_size=1, max_size=3))
    return tf.gather(x, tf.constant(indices), axis=axis)


def normalized(draw, x):
    return draw(st.sampled_from([tf.nn.softmax, tf.nn.log_softmax]))(x) if x.shape.rank else x


def chosen(draw, x):
    return tf.where(x > 0.1, x, draw(st.sampled_from([0.0, -0.5])) * x)


OPS = (unary, reduction, transpose, reshape, part, joined, padded, tiled, gathered, normalized, chosen)


@settings(max_examples=examples(80), suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_random_graphs(data):
    """Or the error says why they are no program."""
    draw = data.draw
    shapes = [tuple(draw(st.lists(SIZES, min_size=1, max_size=3))) for _ in range(2)]
    values = [np.random.default_rng(seed).normal(size=shape).astype("float32") for seed, shape in enumerate(shapes)]

    def function(*tensors):
        made = list(tensors)
        for _ in range(draw(st.integers(2, 7))):
            op = draw(st.sampled_from((*OPS, binary, binary)))
            chosen_ones = [made[draw(st.integers(0, len(made) - 1))] for _ in range(2)]
            made.append(op(draw, *chosen_ones) if op is binary else op(draw, chosen_ones[0]))
        outputs = made[-1:] + [each for each in made[2:-1] if draw(st.booleans())]
        return [tf.identity(each) for each in outputs]

    try:
        lowered = Lowered(function, *values)
    except LoweringError as error:
        if error.refusal.reason not in (Reason.RESHAPED, Reason.REPEATED):  # no form of an access holds these
            raise
        return
    for found, expected in zip(lowered.run(), lowered.expected(), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_how_deep_a_graph_is_does_not_matter():
    def deep(x):
        for _ in range(600):
            x = x * 0.999 + 0.001
        return x

    lowered = Lowered(deep, np.ones((3, 4), "float32"))
    assert len(lowered.kernel.program.nodes) == 1203
    np.testing.assert_array_equal(lowered.run()[0], lowered.expected()[0])


def test_what_computes_too_much_is_refused():
    def wide(x):
        for _ in range(16):
            x = tf.concat([x[:, 1:] * 2.0, x[:, :1]], 1) + tf.transpose(x)
        return x

    with pytest.raises(LoweringError, match="too many values are recomputed"):
        Lowered(wide, np.ones((7, 7), "float32"))
