"""Every op of `tfmem.dynamic`, with its gradient, against definitions and TensorFlow."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr.table import FLOAT_OPS
from tfmem import dynamic

WIDTH = 19


def run(function, rows, *more):
    """Losses and gradients of a node for each row of a table: the loss is the sum of `function` of the row."""
    table = tf.Variable(np.asarray(rows, np.float32))
    kind = dynamic.node(
        lambda children, row: dynamic.Result(loss=dynamic.reduce_sum(function(dynamic.embedding_lookup(table, row))))
    )
    handle = dynamic.specialize([table, *more], {"row": kind})
    outcome = handle.forward_backward([handle.node("row", row) for row in range(len(rows))])
    return outcome.losses.numpy(), [tf.convert_to_tensor(gradient).numpy() for gradient in outcome.gradients]


@pytest.mark.parametrize("name", FLOAT_OPS)
def test_an_elementwise_op_is_its_definition(name):
    op = FLOAT_OPS[name]
    random = np.random.default_rng(0)
    rows = random.uniform(0.3, 0.9, [5, op.arity * WIDTH])

    def function(x):
        return getattr(dynamic, name)(*dynamic.split(x, op.arity))

    def defined(values):
        given = np.split(np.asarray(values, np.float64), op.arity, axis=-1)
        return np.asarray(op.numpy(*given), np.float64).sum(-1)

    losses, (gradient,) = run(function, rows)
    np.testing.assert_allclose(losses, defined(rows), rtol=1e-5)
    step = 1e-6
    for column in range(rows.shape[1]):
        moved = np.eye(rows.shape[1])[column] * step
        slope = (defined(rows + moved) - defined(rows - moved)) / (2 * step) * (name != "stop_gradient")
        np.testing.assert_allclose(gradient[:, column], slope, rtol=2e-4, atol=2e-5)


MATRIX = np.random.default_rng(1).normal(size=[WIDTH, 7]).astype(np.float32)

CASES = {
    "softmax": (lambda x, w: x * dynamic.softmax(x), lambda x, w: x * tf.nn.softmax(x)),
    "reduce_max": (lambda x, w: x * dynamic.reduce_max(x), lambda x, w: x * tf.reduce_max(x)),
    "overlapping parts": (
        lambda x, w: dynamic.split(dynamic.tanh(x), [10, 9])[0] * dynamic.split(dynamic.tanh(x), [5, 10, 4])[1],
        lambda x, w: tf.tanh(x)[:10] * tf.tanh(x)[5:15],
    ),
    "parts of a part": (
        lambda x, w: dynamic.split(dynamic.split(x / 2, [9, 10])[1], 2)[0] * 3,
        lambda x, w: x[9:14] * 1.5,
    ),
    "gaps": (lambda x, w: dynamic.exp(dynamic.split(x, [3, 4, 12])[1]), lambda x, w: tf.exp(x[3:7])),
    "concat": (
        lambda x, w: dynamic.square(dynamic.concat([x, dynamic.reduce_sum(x), x])),
        lambda x, w: tf.square(tf.concat([x, [tf.reduce_sum(x)], x], 0)),
    ),
    "product": (lambda x, w: dynamic.tanh(dynamic.matmul(x, w)), lambda x, w: tf.tanh(tf.linalg.matvec(w, x, True))),
    "products of one matrix": (
        lambda x, w: dynamic.matvec(w, dynamic.tanh(dynamic.matmul(x, w))),
        lambda x, w: tf.linalg.matvec(w, tf.tanh(tf.linalg.matvec(w, x, transpose_a=True))),
    ),
    "add_n": (lambda x, w: dynamic.add_n([x, x * x, -x]), lambda x, w: tf.add_n([x, x * x, -x])),
    "numbers": (lambda x, w: 1 - 2 / (x + 3) + (0.5 - x) * 4, lambda x, w: 1 - 2 / (x + 3) + (0.5 - x) * 4),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [3, 70])
def test_an_op_is_tensorflows(name, count):
    ours, theirs = CASES[name]
    rows = np.random.default_rng(2).normal(size=[count, WIDTH]).astype(np.float32)
    weights = tf.Variable(MATRIX)
    losses, (gradient, of_weights) = run(lambda x: ours(x, weights), rows, weights)
    table = tf.Variable(rows)
    with tf.GradientTape() as tape:
        expected = [tf.reduce_sum(theirs(row, weights)) for row in tf.unstack(table)]
        total = tf.add_n(expected)
    found = tape.gradient(total, [table, weights], unconnected_gradients="zero")
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gradient, found[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(of_weights, found[1], rtol=1e-4, atol=1e-4)


def test_a_table_may_be_multiplied_and_looked_up():
    table = tf.Variable(np.random.default_rng(3).normal(size=[6, 6]).astype(np.float32))
    kind = dynamic.node(
        lambda children, row: dynamic.Result(
            loss=dynamic.reduce_sum(dynamic.tanh(dynamic.matvec(table, dynamic.embedding_lookup(table, row))))
        )
    )
    handle = dynamic.specialize([table], {"row": kind})
    outcome = handle.forward_backward([handle.node("row", row) for row in (1, 4, 1)])
    with tf.GradientTape() as tape:
        total = sum(tf.reduce_sum(tf.tanh(tf.linalg.matvec(table, table[row]))) for row in (1, 4, 1))
    expected = tf.convert_to_tensor(tape.gradient(total, table))
    np.testing.assert_allclose(outcome.gradients[0], expected, rtol=1e-4, atol=1e-5)


TF_OPS = [(op, name) for op in FLOAT_OPS.values() for name in (*op.tf_ops, *op.reversed_tf_ops)]


def raw(name, parts):
    """A TensorFlow op of vectors; truth values are numbers."""
    if name.startswith("Select"):
        parts = [parts[0] > 0.5, *parts[1:]]
    if name.startswith("BiasAdd"):
        parts = [parts[0][None], parts[1]]
    call = getattr(tf.raw_ops, name)
    result = call(**dict(zip(inspect.signature(call).parameters, parts, strict=False)))
    result = tf.where(result, 1.0, 0.0) if result.dtype == tf.bool else result
    return result[0] if name.startswith("BiasAdd") else result


@pytest.mark.parametrize(("op", "name"), TF_OPS, ids=[name for _, name in TF_OPS])
def test_an_op_of_tensorflow_is_read_with_its_gradient(op, name):
    rows = np.random.default_rng(4).uniform(0.3, 0.9, [5, op.arity * WIDTH]).astype(np.float32)
    table = tf.Variable(rows)

    def cell(children, row):
        x = tf.split(tf.nn.embedding_lookup(table, row), op.arity)
        return dynamic.Result(loss=tf.reduce_sum(raw(name, x) * 0.5))

    handle = dynamic.specialize([table], {"row": dynamic.trace(cell)})
    outcome = handle.forward_backward([handle.node("row", row) for row in range(len(rows))])
    with tf.GradientTape() as tape:
        losses = [0.5 * tf.reduce_sum(raw(name, tf.split(row, op.arity))) for row in tf.unstack(table)]
        total = tf.add_n(losses)
    expected = tape.gradient(total, table, unconnected_gradients="zero")
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tf.convert_to_tensor(outcome.gradients[0]), expected, rtol=2e-5, atol=1e-6)


PARTS = {
    "x[2:5]": lambda x: x[2:5],
    "x[-3]": lambda x: x[-3],
    "x[None, :4]": lambda x: x[None, :4],
    "x[:, 3:][0]": lambda x: x[tf.newaxis][:, 3:][0],
    "x[..., 1:]": lambda x: x[..., 1:],
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_vector_is_read(name):
    rows = np.random.default_rng(5).normal(size=[4, WIDTH]).astype(np.float32)
    table = tf.Variable(rows)

    def cell(children, row):
        part = PARTS[name](tf.nn.embedding_lookup(table, row))
        return dynamic.Result(loss=tf.reduce_sum(tf.square(tf.reshape(part, [-1]))))

    handle = dynamic.specialize([table], {"row": dynamic.trace(cell)})
    outcome = handle.forward_backward([handle.node("row", row) for row in range(len(rows))])
    with tf.GradientTape() as tape:
        losses = [tf.reduce_sum(tf.square(PARTS[name](row))) for row in tf.unstack(table)]
        total = tf.add_n(losses)
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-5)
    gradient = tf.convert_to_tensor(outcome.gradients[0])
    np.testing.assert_allclose(gradient, tape.gradient(total, table), rtol=1e-5)
