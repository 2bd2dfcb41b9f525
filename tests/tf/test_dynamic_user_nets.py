"""Five nets as users write them: losses and gradients are those of the same functions in eager TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.tf.user_nets import NETS
from tfmem import dynamic

TOLERANCE = {tf.float32: 2e-5, tf.float64: 1e-13, tf.bfloat16: 0.05}  # of the largest number


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.name)
def test_a_net_is_what_eager_tensorflow_computes(name: str, dtype: tf.DType) -> None:
    net = NETS[name](dtype)
    losses, gradients = net.eager()
    handle = net.specialize()
    outcome = handle.forward_backward(net.batch(handle), inputs=net.rows or None)
    found = [g for g, variable in zip(outcome.gradients, net.parameters, strict=True) if variable.shape[0] is not None]
    for given, expected in zip((outcome.losses, *found), (losses, *gradients), strict=True):
        a, b = (np.asarray(tf.cast(tf.convert_to_tensor(each), tf.float64)) for each in (given, expected))
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * max(0.1, np.abs(b).max()))


def test_a_step_updates_parameters_of_rank_three() -> None:
    net, other = NETS["graph_attention"](tf.float32), NETS["graph_attention"](tf.float32)
    handle = net.specialize(optimizer=dynamic.SGD(0.1, momentum=0.5))
    like = tf.keras.optimizers.SGD(0.1, 0.5)
    for _ in range(3):
        found = handle.step(net.batch(handle), inputs=net.rows).losses
        expected, gradients = other.eager()
        like.apply_gradients(zip(gradients, other.parameters[: len(gradients)], strict=True))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with tf.GradientTape() as tape:
        losses = handle.forward(net.batch(handle), inputs=net.rows, training=True).losses
    gradient = tape.gradient(losses, net.parameters[2])
    np.testing.assert_allclose(gradient, other.eager()[1][2], rtol=1e-4, atol=1e-6)


# ---- how a function uses a parameter ----

SHAPES = {
    "cube": [3, 4, 5],
    "other": [4, 3, 5],
    "square": [4, 5],
    "row": [4],
    "one": [1, 4],
    "column": [4, 1],
    "number": [],
}
USES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {  # of a vector of 4
    "heads": lambda x, w: tf.einsum("d,hdk->hk", x, w["cube"]),
    "heads, transposed": lambda x, w: tf.einsum("d,dhk->hk", x, w["other"]),
    "last dimension": lambda x, w: tf.einsum("ad,dka->k", tf.reshape(x, [1, 4]), tf.reshape(w["square"], [4, 5, 1])),
    "a batch of products": lambda x, w: tf.linalg.matmul(tf.stack([x[None], x[None] * 2, -x[None]]), w["cube"]),
    "one matrix of three": lambda x, w: tf.linalg.matvec(w["cube"][1], x, transpose_a=True),
    "a slice of rows": lambda x, w: tf.linalg.matvec(w["square"][1:3], x[:2], transpose_a=True),
    "a slice of columns": lambda x, w: tf.linalg.matvec(w["square"][:, 1:4], x, transpose_a=True),
    "parts": lambda x, w: tf.linalg.matvec(tf.split(w["square"], 5, 1)[3], x, transpose_a=True),
    "unstacked": lambda x, w: tf.linalg.matvec(tf.unstack(w["cube"])[2], x, transpose_a=True),
    "transposed": lambda x, w: tf.linalg.matvec(tf.transpose(w["square"]), x),
    "reshaped": lambda x, w: tf.einsum("d,dab->ab", x, tf.reshape(w["other"], [4, 5, 3])),
    "a vector": lambda x, w: tf.linalg.matvec(tf.reshape(x, [2, 2]), w["row"][:2]),
    "dot": lambda x, w: tf.tensordot(x, w["row"], 1),
    "one row": lambda x, w: tf.linalg.matvec(w["one"], x),
    "one column": lambda x, w: tf.linalg.matvec(w["column"], x, transpose_a=True),
    "outer": lambda x, w: tf.einsum("ab,b->ab", tf.reshape(x, [4, 1]), tf.einsum("a,ab->b", x[:1], w["one"])[:1]),
    "number by number": lambda x, w: x[:, None] * w["square"],
    "a number": lambda x, w: tf.exp(w["number"]) * x + w["number"],
    "two numbers": lambda x, w: x[0] * w["cube"][1, 2] + w["row"][3],
    "sum over a parameter": lambda x, w: x * tf.reduce_sum(w["square"], 1),
}


@pytest.mark.parametrize("name", USES)
def test_a_parameter_may_have_any_rank(name: str) -> None:
    draw = np.random.default_rng(0).normal
    weights = {key: tf.Variable(draw(size=shape).astype(np.float32), name=key) for key, shape in SHAPES.items()}
    table = tf.Variable(draw(size=[6, 4]).astype(np.float32))
    parameters = [table, *weights.values()]

    def node(children: Any, row: Any) -> dynamic.Result:
        return dynamic.Result(loss=tf.reduce_sum(tf.sin(USES[name](table[row], weights))))

    handle = dynamic.specialize(parameters, {"row": dynamic.trace(node)})
    outcome = handle.forward_backward([handle.node("row", row) for row in range(6)])
    with tf.GradientTape() as tape:
        losses = tf.stack([node((), row).loss for row in range(6)])
    np.testing.assert_allclose(outcome.losses, losses, rtol=2e-5, atol=2e-5)
    for found, expected in zip(
        outcome.gradients, tape.gradient(losses, parameters, unconnected_gradients="zero"), strict=True
    ):
        np.testing.assert_allclose(tf.convert_to_tensor(found), tf.convert_to_tensor(expected), rtol=2e-4, atol=2e-5)


def test_a_table_may_have_any_rank() -> None:
    draw = np.random.default_rng(0).normal
    cube, row = (tf.Variable(draw(size=shape).astype(np.float32)) for shape in ([5, 2, 3], [5]))

    def node(children: Any, number: Any, place: Any) -> dynamic.Result:
        found = tf.gather(cube, number)
        return dynamic.Result(
            loss=tf.reduce_sum(found @ tf.transpose(found)) * tf.gather(row, number) + cube[place, 1, 2]
        )

    handle = dynamic.specialize([cube, row], {"row": dynamic.trace(node)})
    outcome = handle.forward_backward([handle.node("row", at, (3 * at) % 5) for at in range(5)])
    with tf.GradientTape() as tape:
        losses = tf.stack([node((), at, (3 * at) % 5).loss for at in range(5)])
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-5)
    for found, expected in zip(outcome.gradients, tape.gradient(losses, [cube, row]), strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(found), tf.convert_to_tensor(expected), rtol=1e-4, atol=1e-5)


def test_one_parameter_has_one_form() -> None:
    cube = tf.Variable(tf.zeros([4, 4, 4]), name="cube")
    table = tf.Variable(tf.zeros([6, 4]))

    def two(children: Any, row: Any) -> Any:
        x = tf.gather(table, row)
        return tf.reshape(tf.einsum("d,hdk->hk", x, cube) + tf.einsum("d,dhk->hk", x, cube), [-1])

    with pytest.raises(
        dynamic.DynamicError,
        match=r"'row': op .*'cube:0' of shape \(4, 4, 4\) as a matrix of \d+ columns; it is a matrix of \d+ columns "
        r"elsewhere.*test_dynamic_user_nets",
    ):
        dynamic.specialize([table, cube], {"row": dynamic.trace(two)})


# ---- errors ----


def test_errors_name_the_kind_and_the_line() -> None:
    table, short = tf.Variable(tf.zeros([6, 4])), tf.Variable(tf.zeros([3]))

    def adds(children: Any, row: Any) -> Any:
        x = dynamic.embedding_lookup(table, row)
        return x + dynamic.vector(short)  # 4 and 3

    def returns(children: Any, row: Any) -> Any:
        return dynamic.Result(loss=dynamic.embedding_lookup(table, row))

    def unused(children: Any, row: Any) -> Any:
        return tf.gather(table, 1) if False else tf.zeros([2])

    def fails(children: Any, row: Any) -> Any:
        return tf.gather(table, row) + short

    for kind, words in (
        (
            dynamic.node(adds),
            r"^kind 'odd': add got vectors of 4 and 3 numbers; .* \[.*nets\.py:\d+: return x \+ dynamic",
        ),
        (dynamic.node(returns), r"^kind 'odd': the loss .* 4 numbers.*\[.*nets\.py:\d+: def returns"),
        (dynamic.trace(unused), r"^kind 'odd' never uses its integer argument 0.*\[.*nets\.py:\d+: def unused"),
    ):
        with pytest.raises(dynamic.DynamicError, match=words):
            dynamic.specialize([table, short], {"odd": kind})
    with pytest.raises(ValueError, match="Dimensions must be equal") as found:
        dynamic.specialize([table, short], {"odd": dynamic.trace(fails)})
    assert "node kind 'odd'" in found.value.__notes__[-1]
