"""Nets of float64 and bfloat16: values, gradients and steps are those of TensorFlow, eager."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.tf.user_nets import NETS, Net
from tfmem import dynamic
from tfmem.dynamic.dtypes import is_updated_outside

TOLERANCE = {tf.float32: 2e-5, tf.float64: 1e-13, tf.bfloat16: 0.05}  # of the largest number
RATE = 2.0**-7  # Keras keeps rates in float32


def close(found: Any, expected: Any, dtype: tf.DType, what: str) -> None:
    given, wanted = (np.asarray(tf.cast(tf.convert_to_tensor(each), tf.float64)) for each in (found, expected))
    assert given.shape == wanted.shape, what
    np.testing.assert_allclose(
        given, wanted, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(wanted).max()), err_msg=what
    )


def trained(net: Net) -> list[tf.Variable]:
    return [variable for variable in net.parameters if variable.shape[0] is not None]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.name)
def test_losses_and_gradients_are_tensorflows(dtype: tf.DType) -> None:
    net = NETS["child_sum_tree_lstm"](dtype)
    losses, gradients = net.eager()
    handle = net.specialize()
    outcome = handle.forward_backward(net.batch(handle), inputs=net.rows)
    assert outcome.losses.dtype == dtype
    close(outcome.losses, losses, dtype, "losses")
    for number, expected in enumerate(gradients):
        assert outcome.gradients[number].dtype == dtype
        close(outcome.gradients[number], expected, dtype, net.parameters[number].name)
    with tf.GradientTape() as tape:
        again = handle.forward(net.batch(handle), inputs=net.rows, training=True, states=True)
    for number, gradient in enumerate(tape.gradient(again.losses, trained(net))):
        close(gradient, gradients[number], dtype, net.parameters[number].name)
    assert again.states[0].dtype == dtype


SGD, MOMENTUM = {"learning_rate": RATE}, {"learning_rate": RATE, "momentum": 0.5}
ADAM = {"learning_rate": RATE, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 2.0**-20}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "name", "settings"),
    [
        (tf.float64, "SGD", SGD),
        (tf.float64, "SGD", MOMENTUM),
        (tf.float64, "Adam", ADAM),
        (tf.bfloat16, "SGD", MOMENTUM),
        (tf.bfloat16, "Adam", ADAM),
    ],
)
def test_steps_are_those_of_keras(dtype: tf.DType, name: str, settings: dict[str, float]) -> None:
    net, other = NETS["child_sum_tree_lstm"](dtype), NETS["child_sum_tree_lstm"](dtype)
    handle = net.specialize(optimizer=getattr(dynamic, name)(**settings))
    batch, in_graph = net.batch(handle), tf.function(lambda batch, rows: handle.step(batch, inputs=rows).losses)
    like = getattr(keras.optimizers, name)(**settings)
    for step in range(3):
        losses = handle.step(batch, inputs=net.rows).losses if step < 2 else in_graph(batch, net.rows)
        expected, gradients = other.eager()
        close(losses, expected, dtype, f"step {step}")
        like.apply_gradients(zip(gradients, trained(other), strict=True))
    assert handle.slots.steps.numpy() == 3
    for own, reference in zip(trained(net), trained(other), strict=True):
        assert own.dtype == dtype
        close(own, reference, dtype, own.name)


def test_a_layer_computes_in_its_own_type() -> None:
    def kinds(weights: Any) -> Any:
        def leaf(children: Any, row: Any) -> Any:
            return tf.tanh(tf.linalg.matvec(weights["kernel"], tf.gather(weights["given"], row)))

        return {"leaf": dynamic.trace(leaf)}

    layer = dynamic.Layer({"kernel": (3, 2), "given": (None, 2)}, kinds, state=3, dtype="float64")
    batch = {"kinds": [[0, 0]], "children": tf.zeros([1, 0], tf.int32), "arguments": [[0, 1]]}
    rows = np.random.default_rng(0).normal(size=[1, 2, 2])
    given = {**{name: tf.constant(each) for name, each in batch.items()}, "given": tf.constant(rows)}
    found = layer(given)
    again = dynamic.Layer.from_config(layer.get_config())
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(again(given), found)
    assert found.dtype == tf.float64
    close(found[0], np.tanh(layer.weights[0].numpy() @ rows[0, 1]), tf.float64, "state")


def test_types_do_not_mix() -> None:
    kernel, bias = tf.Variable(tf.zeros([2, 2])), tf.Variable(tf.zeros([2], tf.float64), name="bias")
    with pytest.raises(dynamic.DynamicError, match=r"is float32, and parameter 'bias:0' is float64; expected one type"):
        dynamic.specialize([kernel, bias], {"leaf": dynamic.node(lambda children: dynamic.vector(bias))})
    half = tf.Variable(tf.zeros([2], tf.float16), name="half")
    with pytest.raises(dynamic.DynamicError, match=r"'half:0' is float16 .*expected float32, float64 or bfloat16"):
        dynamic.specialize([half], {"leaf": dynamic.node(lambda children: dynamic.vector(half))})
    table = tf.Variable(tf.zeros([4, 2]))
    kind = dynamic.trace(lambda children, row: tf.cast(tf.cast(tf.gather(table, row), tf.float64), tf.float32))
    with pytest.raises(dynamic.DynamicError, match=r"makes float64 of float32; nodes of this net compute in float32"):
        dynamic.specialize([table], {"leaf": kind})


def test_parameters_of_float64_on_a_gpu_are_updated_outside_of_the_op() -> None:
    class OnGpu:
        device = "/job:localhost/replica:0/task:0/device:GPU:0"

    assert is_updated_outside(tf.float64, [OnGpu()])
    assert not is_updated_outside(tf.float64, [tf.Variable(0.0)])
    assert not is_updated_outside(tf.float32, [OnGpu()])
    assert is_updated_outside(tf.bfloat16, [tf.Variable(0.0)])
