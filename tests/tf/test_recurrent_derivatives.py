"""The derivative of every elementwise op of a cell at zeros, infinities, NaN, denormals and the edges of its domain,
with such upstream gradients: NumPy's definition and the op on a CPU against TensorFlow's own gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.expr.table import FLOAT_OPS, TABLE
from custom_ops.load import Library
from custom_ops.recurrent.differentiate import differentiate
from custom_ops.recurrent.reference import run
from graph_passes.passes.recurrent.lower.elementwise_ops import CELL_OPS
from tests.elementwise_edges import SMALLEST, cell_of, different, points
from tests.gradient_reference import gradients
from tests.tf.raw_ops import raw_op
from tests.tf.recurrent_calls import recurrent

raw = tf.raw_ops

# Booleans have no gradient; a bias is added.
WITHOUT = {name for op in TABLE.values() if op.comparison for name in (*op.tf_ops, *op.reversed_tf_ops)}
WITHOUT |= {name for op in TABLE.values() if op.name not in FLOAT_OPS for name in op.tf_ops}
WITHOUT |= {"NotEqual", "LogicalXor", "BiasAdd", "BiasAddV1"}
OPS: dict[str, tuple[int, Callable[..., Any]]] = {
    name: (op.arity, raw_op(name, op.arity)) for op in FLOAT_OPS.values() for name in op.tf_ops if name not in WITHOUT
}
OPS |= {
    "StopGradient": (1, tf.stop_gradient),
    "FloorDiv": (2, lambda x, y: raw.FloorDiv(x=x, y=y)),
    "AddN": (2, lambda x, y: raw.AddN(inputs=[x, y])),
    "LeakyRelu": (1, lambda x: raw.LeakyRelu(features=x, alpha=0.3)),
    "ClipByValue": (3, lambda x, low, high: raw.ClipByValue(t=x, clip_value_min=low, clip_value_max=high)),
}
ATTRS = {"LeakyRelu": {"alpha": 0.3}}


def test_every_op_is_here() -> None:
    assert OPS.keys() | WITHOUT == CELL_OPS


def theirs(op: str, arguments: list[Any], upstream: Any) -> tuple[Any, list[Any]]:
    """The result, and the gradients of the arguments, zeros where there is none."""
    tensors = [tf.constant(argument) for argument in arguments]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        result = OPS[op][1](*tensors)
    found = tape.gradient(result, tensors, tf.constant(upstream))
    return result.numpy(), [
        np.zeros_like(upstream) if each is None else each.numpy() for each in found
    ]  # fmt: skip


# TensorFlow computes exp(x) - 1 here, and loses digits.
ROUNDED = {"Elu": 1e-7, "Selu": 2e-7}


@pytest.fixture(name="vector_bytes", params=[64, 16])
def fixture_vector_bytes(request: pytest.FixtureRequest, library: Library) -> Iterator[int]:
    library.limit_vector_bytes(request.param)
    yield request.param
    library.limit_vector_bytes(64)


def require_same(op: str, found: Any, parts: Any, arguments: list[Any], upstream: Any) -> None:
    expected, expected_parts = theirs(op, arguments, upstream)
    compared = [("the value", found, expected, ROUNDED.get(op, SMALLEST))]
    compared += [
        (f"derivative {place}", *pair, SMALLEST) for place, pair in enumerate(zip(parts, expected_parts, strict=True))
    ]
    for what, ours, tensorflows, atol in compared:
        wrong = different(ours, tensorflows, 1e-4, atol)
        lines = [
            f"{what} of {op}{tuple(float(argument[i]) for argument in arguments)}, upstream {upstream[i]}: "
            f"{ours[i]}, TensorFlow's {tensorflows[i]}"
            for i in wrong[:8]
        ]
        assert not len(wrong), f"{len(wrong)} of {len(upstream)}\n" + "\n".join(lines)


@pytest.mark.parametrize("op", OPS)
def test_the_definition(op: str) -> None:
    count = OPS[op][0]
    arguments, upstream = points(op, count, "float64")
    units = len(upstream)
    cell = cell_of(op, count, ATTRS.get(op, {}))
    sequence, state = np.concatenate(arguments)[None, None], np.zeros([1, units])
    (result,), _ = run(cell, units, [sequence], [], [], [], [state])
    given = [upstream[None, None]], [np.zeros_like(state)]
    found = gradients(differentiate(cell), units, [sequence], [], [], [], [state], *given)
    require_same(op, result.reshape(-1), found.sequences[0].reshape(count, units), arguments, upstream)


@pytest.mark.usefixtures("vector_bytes")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_the_op(library: Library, op: str, training: bool, dtype: str) -> None:
    """With `training` from what was stored, else from a second forward sweep."""
    count = OPS[op][0]
    arguments, upstream = points(op, count, dtype)
    units = len(upstream)
    cell = cell_of(op, count, ATTRS.get(op, {}))
    columns = [tf.constant(argument) for argument in arguments]
    state = tf.zeros([1, units], dtype)
    with tf.GradientTape() as tape:
        tape.watch(columns)
        sequence = tf.concat(columns, 0)[None, None]
        (result,), _ = recurrent(library.ops, cell, units, [sequence], [], [], [], [state], training=training)
        flat = tf.reshape(result, [-1])
    parts = tape.gradient(flat, columns, tf.constant(upstream), unconnected_gradients="zero")
    require_same(op, flat.numpy(), [part.numpy() for part in parts], arguments, upstream)


def twice(z: Any, root: Any) -> Any:
    return tf.where(z > 0, root, 0.0) - tf.where(z > 1, root, 0.0)


STEPS: dict[str, Callable[[Any], Any]] = {
    "sqrt where positive": lambda z: tf.where(z > 0, tf.sqrt(z), 0.0),
    "division by relu": lambda z: tf.math.divide_no_nan(z, tf.nn.relu(z)),
    "sqrt of relu": lambda z: tf.sqrt(tf.nn.relu(z)),
    "rsqrt where positive": lambda z: tf.where(z > 0, tf.math.rsqrt(z), z),
    "reciprocal far from zero": lambda z: tf.where(tf.abs(z) > 0.5, 0.1 * tf.math.reciprocal(z), z),
    "reciprocal_no_nan": lambda z: 0.01 * tf.math.reciprocal_no_nan(z),
    "multiply_no_nan": lambda z: tf.math.multiply_no_nan(z, tf.nn.relu(z)),
    "xdivy": lambda z: 0.1 * tf.math.xdivy(tf.nn.relu(z), 1.0 + z * z),
    "norm": lambda z: 0.3 * z + 0.1 * tf.norm(z, axis=-1, keepdims=True),
    "normalised": lambda z: z * tf.math.rsqrt(tf.reduce_sum(z * z, -1, keepdims=True) + 1e-6),
    "l2_normalize": lambda z: tf.math.l2_normalize(z, axis=-1),
    "power of relu": lambda z: tf.pow(tf.nn.relu(z), 0.5),
    "power with a state above": lambda z: tf.pow(tf.abs(z) + 0.1, tf.tanh(z)),
    "log where positive": lambda z: tf.where(z > 0, 0.1 * tf.math.log(z), z),
    "softsign, relu6, selu": lambda z: tf.nn.softsign(z) + tf.nn.relu6(z) + 0.1 * tf.nn.selu(z),
    "one root, used twice": lambda z: twice(z, tf.sqrt(z)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STEPS)
def test_training(name: str) -> None:
    """Six steps, each of weights, loss and gradients, over inputs some of which are zeros."""
    random = np.random.default_rng(3)
    x = random.normal(size=[6, 4, 5]).astype("float32")
    x[:, 0] = x[2] = 0.0
    first = [(random.normal(size=shape) * 0.4).astype("float32") for shape in ([5, 7], [7, 7])]

    def trained(optimize: bool) -> tuple[list[Any], Any]:
        weights = [tf.Variable(array) for array in first]

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                h = tf.scan(lambda h, item: STEPS[name](item @ weights[0] + h @ weights[1]), x, tf.zeros([4, 7]))
                loss = tf.reduce_mean((h - 0.2) ** 2)
            gradients = tape.gradient(loss, weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss, gradients

        run = tfmem.optimize(step) if optimize else step
        found = [array.numpy() for _ in range(6) for array in tf.nest.flatten(run(tf.constant(x)))]
        return [*found, *(weight.numpy() for weight in weights)], tfmem.report(run) if optimize else None

    (plain, _), (replaced, report) = trained(False), trained(True)
    assert len(report.replaced) == 1, report
    for before, after in zip(plain, replaced, strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-5)  # NaN is equal to NaN
