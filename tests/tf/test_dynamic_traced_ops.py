"""Functions of nodes in TensorFlow's ops: values and gradients are those of TensorFlow, at odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmem import dynamic

WIDTH, ROWS = 21, 5
RANDOM = np.random.default_rng(3)
TABLE = RANDOM.normal(size=[ROWS, WIDTH]).astype(np.float32)
SQUARE = RANDOM.normal(size=[WIDTH, 7]).astype(np.float32)
SCALE = RANDOM.uniform(0.5, 1.5, 7).astype(np.float32)
NORM = keras.layers.LayerNormalization()
NORM.build([1, WIDTH])


def three(x: Any) -> Any:
    return tf.reshape(x, [3, 7])


def attention(x: Any) -> Any:
    """A query over three vectors."""
    keys = three(x)
    weights = tf.nn.softmax(tf.linalg.matvec(keys, keys[0]))
    return tf.linalg.matvec(keys, weights, transpose_a=True)


CASES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "stack": lambda x, w, b: tf.reduce_sum(tf.stack([x, x * x, -x]) ** 3, 0),
    "stack of columns": lambda x, w, b: tf.reshape(tf.stack([x[:7], x[7:14]], 1), [14]) * x[:14],
    "sum of rows": lambda x, w, b: tf.reduce_sum(three(x), 0) * b,
    "mean of rows": lambda x, w, b: tf.square(tf.reduce_mean(three(x), 0)),
    "sum of columns": lambda x, w, b: tf.exp(tf.reduce_sum(three(x), 1)),
    "max of rows": lambda x, w, b: tf.reduce_max(three(x), 0) * b,
    "max of equal rows": lambda x, w, b: tf.reduce_max(tf.nn.relu(three(x)), 0) * b,
    "min": lambda x, w, b: tf.reduce_min(x) * x,
    "min of rows": lambda x, w, b: tf.reduce_min(three(x), 0) * b,
    "max of columns": lambda x, w, b: tf.reduce_max(three(x), 1, keepdims=True) * three(x),
    "log_softmax": lambda x, w, b: tf.nn.log_softmax(x) * x,
    "softmax of rows": lambda x, w, b: tf.nn.softmax(three(x)) * three(x),
    "cross-entropy of a distribution": lambda x, w, b: tf.nn.softmax_cross_entropy_with_logits(
        tf.nn.softmax(tf.stop_gradient(x) * 0.1), x
    ),
    "silu": lambda x, w, b: tf.nn.silu(x) * 2.0,
    "gelu": lambda x, w, b: tf.nn.gelu(x, approximate=True),
    "gather": lambda x, w, b: tf.gather(x, [2, 5, 5, 20]) ** 2,
    "every other number": lambda x, w, b: x[::2] ** 2,
    "reversed": lambda x, w, b: tf.reverse(x, [0]) * x,
    "transpose": lambda x, w, b: tf.transpose(three(x)) * tf.reshape(x, [7, 3]),
    "broadcast rows": lambda x, w, b: three(x) * b,
    "broadcast columns": lambda x, w, b: three(x) * three(x)[:, :1],
    "constant vector": lambda x, w, b: three(x) * tf.constant([[1.0], [2.0], [-0.5]]),
    "concat of columns": lambda x, w, b: tf.concat([three(x), three(x)[:, 2:4] ** 2], 1) ** 2,
    "product of states": lambda x, w, b: tf.linalg.matmul(three(x), three(x), transpose_b=True),
    "dot": lambda x, w, b: tf.tensordot(x[:7], x[7:14], 1) * x,
    "outer": lambda x, w, b: tf.einsum("i,j->ij", x[:3], x[3:8]) ** 2,
    "einsum with a variable": lambda x, w, b: tf.einsum("ij,i->j", w, x) * b,
    "einsum of rows": lambda x, w, b: tf.einsum("ij,kj->ik", three(x), w) ** 2,
    "matrix of rows": lambda x, w, b: tf.linalg.matmul(three(x), w, transpose_b=True),
    "attention": lambda x, w, b: attention(x),
    "moments": lambda x, w, b: (x - tf.nn.moments(x, [0])[0]) * tf.math.rsqrt(tf.nn.moments(x, [0])[1] + 1e-3),
    "LayerNormalization": lambda x, w, b: NORM(x[None])[0] ** 2,
    "zeros": lambda x, w, b: tf.where(x > 0, x * x, tf.zeros_like(x)),
    "leaky_relu": lambda x, w, b: tf.nn.leaky_relu(x, 0.3) * x,
    "clip": lambda x, w, b: tf.clip_by_value(x, -0.5, 0.7) * x,
    "conditions": lambda x, w, b: tf.where((x > 0.1) & ~(x > 1.0) | (x < -1.0), x * x, -x),
    "not equal": lambda x, w, b: tf.where(tf.not_equal(tf.round(x), 1.0), x * x, -x),
    "conditions of rows": lambda x, w, b: tf.where((three(x) > 0) & (three(x)[:1] < 1), three(x) ** 2, b),
    "any and all": lambda x, w, b: tf.where(
        tf.reduce_any(three(x) > 1.5, 1) | tf.reduce_all(three(x) > -1, 1), x[:3], 1.0
    ),
    "not a number": lambda x, w, b: tf.where(tf.math.is_nan(x - 1), 0.0, x * x),
    "finite": lambda x, w, b: tf.where(tf.math.is_finite(x / tf.nn.relu(x - 0.5)), x * x, -x),
    "one of two": lambda x, w, b: tf.where(tf.math.logical_xor(x > 0, x > 1), x * x, -x),
    "triangle": lambda x, w, b: tf.linalg.band_part(three(x), -1, 1) ** 2,
    "pad": lambda x, w, b: tf.pad(three(x), [[1, 0], [0, 2]], constant_values=2.0) ** 2,
    "pad with zeros": lambda x, w, b: tf.exp(tf.pad(x, [[2, 1]])),
    "fill": lambda x, w, b: tf.fill([2, 3], x[4]) * x[:3],
    "gather_nd": lambda x, w, b: tf.gather_nd(three(x), [[0, 1], [2, 6]]) ** 2,
    "l2_loss": lambda x, w, b: tf.nn.l2_loss(x),
    "prod": lambda x, w, b: tf.reduce_prod(three(x), 0) * b,
    "prod of columns": lambda x, w, b: tf.reduce_prod(three(x), 1),
    "cumsum": lambda x, w, b: tf.cumsum(x) ** 2,
    "cumsum of rows": lambda x, w, b: tf.cumsum(three(x), 1, exclusive=True, reverse=True) * b,
    "cumsum of columns": lambda x, w, b: tf.cumsum(three(x), 0, exclusive=True) * b,
    "cast of a condition": lambda x, w, b: tf.cast(x > 0, tf.float32) * x,
}


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_tensorflows(name: str) -> None:
    function = CASES[name]
    table, w, b = map(tf.Variable, (TABLE, SQUARE, SCALE))
    parameters = [table, w, b, *(weight.value for weight in NORM.trainable_weights)]

    def node(children: Any, row: Any) -> dynamic.Result:
        found = function(tf.gather(table, row), w, b)
        return dynamic.Result(state=tf.reshape(found, [-1])[:1], loss=tf.reduce_sum(found))

    handle = dynamic.specialize(parameters, {"row": dynamic.trace(node)})
    outcome = handle.forward_backward([handle.node("row", row) for row in range(ROWS)])
    with tf.GradientTape() as tape:
        losses = tf.stack([tf.reduce_sum(function(tf.gather(table, row), w, b)) for row in range(ROWS)])
    expected = tape.gradient(losses, parameters, unconnected_gradients="zero")
    np.testing.assert_allclose(outcome.losses, losses, rtol=2e-5, atol=2e-5)
    for found, gradient in zip(outcome.gradients, expected, strict=True):
        given, wanted = tf.convert_to_tensor(found), tf.convert_to_tensor(gradient)
        np.testing.assert_allclose(given, wanted, rtol=2e-4, atol=2e-4)


def test_a_gradient_that_is_not_the_derivative_is_refused() -> None:
    @tf.custom_gradient
    def straight_through(x: Any) -> Any:
        return tf.round(x), lambda upstream: upstream

    table = tf.Variable(TABLE)
    kind = dynamic.trace(lambda children, row: tf.nn.relu(straight_through(tf.gather(table, row))))
    with pytest.raises(dynamic.DynamicError, match=r"'row': op .*IdentityN.*custom gradient"):
        dynamic.specialize([table], {"row": kind})


def test_a_state_is_read_at_an_argument() -> None:
    table = tf.Variable(TABLE)

    def node(children: Any, row: Any, place: Any) -> dynamic.Result:
        return dynamic.Result(loss=tf.gather(tf.nn.log_softmax(tf.gather(table, row)), place))

    handle = dynamic.specialize([table], {"row": dynamic.trace(node)})
    found = handle.forward_backward([handle.node("row", row, (5 * row) % WIDTH) for row in range(ROWS)]).losses
    expected = [tf.nn.log_softmax(TABLE[row])[(5 * row) % WIDTH] for row in range(ROWS)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_an_argument_becomes_one_hot() -> None:
    table = tf.Variable(TABLE)

    def node(children: Any, row: Any, place: Any) -> dynamic.Result:
        x = tf.gather(table, row)
        return dynamic.Result(loss=tf.reduce_sum(x * (tf.one_hot(place, WIDTH) + tf.one_hot(row, WIDTH, 2.0, -1.0))))

    handle = dynamic.specialize([table], {"row": dynamic.trace(node)})
    found = handle.forward_backward([handle.node("row", row, (5 * row) % WIDTH) for row in range(ROWS)]).losses
    np.testing.assert_allclose(found, [node((), row, (5 * row) % WIDTH).loss for row in range(ROWS)], rtol=1e-5)


def test_what_consists_of_too_many_parts_is_refused() -> None:
    table = tf.Variable(tf.zeros([3, 2000]))
    kind = dynamic.trace(lambda children, row: tf.gather(table, row)[::2])
    with pytest.raises(dynamic.DynamicError, match=r"StridedSlice.*from 1000 parts.*at most 256.*test_dynamic_traced"):
        dynamic.specialize([table], {"row": kind})
