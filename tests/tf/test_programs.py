"""Programs over tensors against the same in TensorFlow: the NumPy definition is what TensorFlow computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.expr.program import REDUCTIONS
from custom_ops.expr.reference import numpy_dtype, run
from custom_ops.expr.table import TABLE
from custom_ops.expr.text import from_text
from tests.elementwise_edges import FEW, different
from tests.programs import sigmoid_step, softmax_step
from tests.tf.raw_ops import raw_op


def test_softmax_regression() -> None:
    program, tensors = softmax_step(7, 5, 6)
    product, bias, labels, weights, gradient, rate = map(tf.constant, tensors)
    with tf.GradientTape() as tape:
        tape.watch([product, bias])
        logits = product + bias
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    d_logits, d_bias = tape.gradient(loss, [product, bias])
    expected = [loss, d_logits, bias - rate * d_bias, weights - rate * gradient]
    for found, theirs in zip(run(program, tensors), expected, strict=True):
        np.testing.assert_allclose(found, theirs, rtol=1e-5, atol=1e-7)


def test_sigmoid_regression() -> None:
    """Ten steps of training: the same loss and weights after each."""
    program, (x, weights, bias, labels) = sigmoid_step(32, 4)
    theirs = [tf.Variable(weights), tf.Variable(bias)]
    for _ in range(10):
        with tf.GradientTape() as tape:
            logits = tf.linalg.matvec(x, theirs[0]) + theirs[1]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(labels, tf.float32), logits)
            expected = tf.reduce_mean(losses)
        for variable, gradient in zip(theirs, tape.gradient(expected, theirs), strict=True):
            variable.assign_sub(0.5 * gradient)
        loss, weights, new_bias = run(program, [x, weights, bias, labels])
        bias = new_bias.reshape(1)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(weights, theirs[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(bias, theirs[1], rtol=1e-5, atol=1e-6)


def values(dtype: str, *shape: int) -> Any:
    random = np.random.default_rng(3)
    if dtype == "bool":
        return random.random(shape) < 0.6
    if dtype.startswith("int"):
        return random.integers(-9, 9, shape).astype(dtype)
    return random.normal(size=shape).astype(numpy_dtype(dtype))


ON_DTYPES = [(kind, dtype) for kind, dtypes in REDUCTIONS.items() for dtype in dtypes]


@pytest.mark.parametrize(("kind", "dtype"), ON_DTYPES)
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_reductions(kind: str, dtype: str, axes: tuple[int, ...]) -> None:
    rest = [axis for axis in range(3) if axis not in axes]
    words = ["reduce", kind, 0, *axes, "\noutput", 1, *rest]
    program = from_text(f"program 1\naxes 0 0 0\ntensor {dtype} 3\ninput 0 a0 a1 a2\n" + " ".join(map(str, words)))
    tensor = values(dtype, 4, 5, 6)
    (found,) = run(program, [tensor])
    expected = getattr(tf, "reduce_" + {"product": "prod", "dot": "sum"}.get(kind, kind))(tensor, axes).numpy()
    assert found.dtype == expected.dtype
    if dtype in ("bool", "int32", "int64") or kind in ("max", "min"):
        np.testing.assert_array_equal(found, expected)
    else:
        bound = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}[dtype]
        np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", ["sum", "max", "min", "mean", "product"])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_reductions_of_what_is_not_finite(kind: str, special: float) -> None:
    program = from_text(f"program 1\naxes 0\ntensor float32 1\ninput 0 a0\nreduce {kind} 0 0\noutput 1")
    tensor = np.array([1.0, special, -2.0, 0.5], np.float32)
    expected = getattr(tf, "reduce_" + {"product": "prod", "dot": "sum"}.get(kind, kind))(tensor).numpy()
    np.testing.assert_array_equal(run(program, [tensor])[0], expected)


@pytest.mark.parametrize("kind", [kind for kind in REDUCTIONS if kind not in ("any", "all")])
def test_reductions_of_nothing(kind: str) -> None:
    program = from_text(f"program 1\naxes 0\ntensor float32 1\ninput 0 a0\nreduce {kind} 0 0\noutput 1")
    expected = getattr(tf, "reduce_" + {"product": "prod", "dot": "sum"}.get(kind, kind))(
        np.zeros(0, np.float32)
    ).numpy()
    np.testing.assert_array_equal(run(program, [np.zeros(0, np.float32)])[0], expected)


DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "bool"]


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_casts(source: str, to: str) -> None:
    program = from_text(f"program 1\naxes 0\ntensor {source} 1\ninput 0 a0\ncast {to} 0\noutput 1 0")
    tensor = values(source, 50)
    (found,) = run(program, [tensor])
    np.testing.assert_array_equal(found, tf.cast(tensor, to).numpy())


ACCESSES = {
    "transpose": ("axes 0 0", "input 0 a1 a0", "output 0 1 0", lambda x: x),
    "transposed output": ("axes 0 0", "input 0 a0 a1", "output 0 1 0", tf.transpose),
    "slice": ("axes 2 0", "input 0 2*a0+1 a1", "output 0 0 1", lambda x: x[1:5:2]),
    "reversed": ("axes 6 0", "input 0 -1*a0+5 a1", "output 0 0 1", lambda x: tf.reverse(x, [0])),
    "one row, broadcast": ("axes 3 0", "input 0 2 a1", "output 0 0 1", lambda x: tf.broadcast_to(x[2], [3, 4])),
    "flattened": ("axes 24", "input 0 a0/4 a0%4", "output 0 0", lambda x: tf.reshape(x, [24])),
    "reshaped": ("axes 8 3", "input 0 3*a0+a1", "output 0 0 1", lambda x: tf.reshape(x, [8, 3])),
    "diagonal": ("axes 4", "input 0 a0 a0", "output 0 0", lambda x: tf.linalg.diag_part(x[:4])),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCESSES)
def test_accesses(name: str) -> None:
    axes, read, output, function = ACCESSES[name]
    tensor = values("float32", 24) if name == "reshaped" else values("float32", 6, 4)
    program = from_text(f"program 1\n{axes}\ntensor float32 {tensor.ndim}\n{read}\n{output}\n")
    np.testing.assert_array_equal(run(program, [tensor])[0], function(tensor))


def test_a_gather() -> None:
    """Embeddings of words, `[rows, words, size]`, and their mean."""
    text = """program 1
axes 0 0 0
tensor int64 2
tensor float32 2
input 0 a0 a1
input 1 n0 a2
reduce mean 1 1
output 1 0 1 2
output 2 0 2
"""
    words, table = np.array([[3, 0, 3], [1, 2, 4]]), values("float32", 5, 6)
    found = run(from_text(text), [words, table])
    expected = tf.nn.embedding_lookup(table, words)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_allclose(found[1], tf.reduce_mean(expected, 1), rtol=1e-6)


TF_OPS = [
    (name, op.name, dtype)
    for op in TABLE.values()
    for names in (op.tf_ops, op.reversed_tf_ops)
    for name in names
    for dtype in op.dtypes
    if not (name == "Rint" and dtype in ("float16", "bfloat16"))  # TensorFlow has no kernel for these on a CPU
]
SPECIAL = {"bool": [False, True], "int32": [0, 1, -1, 7, -46341, 2**31 - 1, -(2**31)]}
SPECIAL["int64"] = [*SPECIAL["int32"], 2**63 - 1, -(2**63)]


@pytest.mark.parametrize(("name", "op", "dtype"), TF_OPS)
def test_every_op(name: str, op: str, dtype: str) -> None:
    """The definition against TensorFlow's op: integers and booleans to the bit, integers wrap around."""
    special = np.array(SPECIAL.get(dtype, [*FEW, 0.5, -3.25, 6.0, 20.0, -20.0, 90.0]))
    if (name, dtype) == ("Erf", "float64"):  # TensorFlow's is NaN at infinity, in float64 alone
        special = special[~np.isinf(special)]
    arity = TABLE[op].arity
    columns = [column.reshape(1, -1).astype(numpy_dtype(dtype)) for column in np.meshgrid(*[special] * arity)]
    if name.startswith("BiasAdd"):
        columns[1] = columns[1][0]
    theirs = raw_op(name, arity)(*map(tf.constant, columns)).numpy()
    if name in TABLE[op].reversed_tf_ops:
        columns.reverse()
    condition = "cast bool 0" if op == "select" and dtype != "bool" else "input 0 a0"
    text = "program 1\naxes 0\n" + f"tensor {dtype} 1\n" * 3 + "input 0 a0\ninput 1 a0\ninput 2 a0\n" + condition
    arguments = "3 1 2" if op == "select" else "0 1 2"[: 2 * arity - 1]
    tensors = [column.reshape(-1) for column in (*columns, columns[0], columns[0])[:3]]
    (found,) = run(from_text(f"{text}\n{op} {arguments}\noutput 4 0\n"), tensors)
    assert found.dtype == theirs.dtype
    bound = {"float64": 1e-13, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 0.0)
    if (name, dtype) == ("Softplus", "bfloat16"):  # TensorFlow rounds on the way
        bound = 2.5e-2
    wrong = different(found, theirs.reshape(-1), bound, 1e-7 if dtype == "float16" else 1e-37)
    assert not len(wrong), (
        f"{name}{[x[wrong][:6] for x in tensors[:arity]]}: {found[wrong][:6]}, {theirs[0, wrong][:6]}"
    )
