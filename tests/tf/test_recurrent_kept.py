"""Every recurrence that stays has a line in the report, with the reason; graphs without any have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from tests.tf.recurrent_training import INPUTS, STEPS, UNITS, numbers

L, T = keras.layers, tf_keras.layers
BATCH = 4
WITH_GRADIENT = "with their gradient"


def sequential(*layers: Any) -> Any:
    return keras.Sequential([keras.Input([STEPS, INPUTS]), *layers])


def training(network: Any, x: Any, penalty: bool = False) -> Any:
    """A step that gives the loss and the gradients of the trainable weights, of a gradient penalty too."""
    network(x)
    weights = [getattr(weight, "value", weight) if network_is_keras(network) else weight
               for weight in network.trainable_weights]  # fmt: skip

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            if penalty:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    score = network(x)
                loss = tf.reduce_mean(score) + tf.reduce_mean((tf.norm(inner.gradient(score, x), axis=-1) - 1) ** 2)
            else:
                loss = tf.reduce_mean(network(x, training=True) ** 2)
        return loss, tape.gradient(loss, weights)

    return step


def network_is_keras(network: Any) -> bool:
    return isinstance(network, keras.Model)


def reported(function: Any, *arguments: Any) -> tfmem.Report:
    plain = tf.nest.flatten(function(*arguments))
    optimized = tfmem.optimize(function)
    for before, after in zip(plain, tf.nest.flatten(optimized(*arguments)), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
    return tfmem.report(optimized)


def weights() -> tuple[Any, Any]:
    return tf.Variable(numbers(INPUTS, UNITS) * 0.5), tf.Variable(numbers(UNITS, UNITS, seed=1) * 0.5)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_python_loop_over_some_slices(backwards: bool) -> None:
    w, r = weights()

    @tf.function
    def inference(x: Any) -> Any:
        h = tf.zeros([BATCH, UNITS])
        for step in range(STEPS - 1)[:: -1 if backwards else 1]:
            h = tf.tanh(x[:, step] @ w + h @ r)
        return h

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(inference(x) ** 2)
        return tape.gradient(loss, [w, r])

    x = tf.constant(numbers(BATCH, STEPS, INPUTS))
    (line,) = reported(inference, x).not_replaced
    assert "tf.unstack" in line
    (line,) = reported(step, x).not_replaced
    assert WITH_GRADIENT in line


def test_a_cell_that_is_a_function_of_its_own() -> None:
    w, r = weights()

    @tf.function
    def cell(x: Any, h: Any) -> Any:
        return tf.tanh(x @ w + h @ r)

    @tf.function
    def inference(x: Any) -> Any:
        h = tf.zeros([BATCH, UNITS])
        for step in range(STEPS - 1):
            h = cell(x[:, step], h)
        return h

    (line,) = reported(inference, tf.constant(numbers(BATCH, STEPS, INPUTS))).not_replaced
    assert f"{STEPS - 1} steps" in line


def test_items_in_an_order_that_data_says() -> None:
    w, r = weights()

    @tf.function
    def inference(x: Any) -> Any:
        x, order = tf.transpose(x, [1, 0, 2]), tf.constant([2, 0, 1, 4, 3])

        def step(i: Any, h: Any) -> Any:
            return i + 1, tf.tanh(x[order[i]] @ w + h @ r)

        return tf.while_loop(lambda i, h: i < STEPS, step, [0, tf.zeros([BATCH, UNITS])])[1]

    (line,) = reported(inference, tf.constant(numbers(BATCH, STEPS, INPUTS))).not_replaced
    assert "(StridedSlice) reads" in line
    assert "does not count the steps" in line


def test_convolutions() -> None:
    network = keras.Sequential([keras.Input([STEPS, 6, INPUTS]), L.ConvLSTM1D(2, 2, unroll=True)])
    x = tf.constant(numbers(BATCH, STEPS, 6, INPUTS))
    (line,) = reported(training(network, x), x).not_replaced
    assert "not matrices" in line


class Cell:
    """As TensorFlow 1 asks for."""

    state_size = output_size = UNITS

    def get_initial_state(self, inputs: Any = None, batch_size: Any = None, dtype: Any = None) -> Any:
        return tf.zeros([batch_size, UNITS], dtype)

    def __call__(self, x: Any, h: Any, scope: Any = None) -> Any:
        with tf.compat.v1.variable_scope("cell", reuse=tf.compat.v1.AUTO_REUSE):
            weight = tf.compat.v1.get_variable("weight", [INPUTS + UNITS, UNITS])
        new = tf.tanh(tf.concat([x, h], 1) @ weight)
        return new, new


@pytest.mark.parametrize("trained", [False, True])
def test_static_rnn(trained: bool) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [BATCH, STEPS, INPUTS])
        outputs, _ = tf.compat.v1.nn.static_rnn(Cell(), tf.unstack(x, axis=1), dtype=tf.float32)
        fetched = [tf.reduce_sum(outputs[-1] ** 2)]
        if trained:
            fetched += tf.gradients(fetched[0], tf.compat.v1.trainable_variables())
    tfmem.optimize(graph, fetches=[tensor.name for tensor in fetched])
    (line,) = tfmem.report(graph).not_replaced
    assert (WITH_GRADIENT if trained else "not in a tf.Graph") in line


# ---- graphs without a recurrence ----


def transformer() -> Any:
    inputs = keras.Input([6, 8])
    h = inputs
    for _ in range(3):
        normal = L.LayerNormalization()(h)
        h = h + L.MultiHeadAttention(2, 4)(normal, normal)
        h = h + L.Dense(8)(L.Dense(16, activation="gelu")(L.LayerNormalization()(h)))
    return keras.Model(inputs, L.Dense(3)(h))


def convolutional() -> Any:
    inputs = keras.Input([8, 8, 3])
    h = inputs
    for _ in range(3):
        h = L.ReLU()(L.BatchNormalization()(L.Conv2D(4, 3, padding="same")(h))) + L.DepthwiseConv2D(1)(
            L.Conv2D(4, 1)(h)
        )
    return keras.Model(inputs, L.Dense(3)(L.Flatten()(h)))


def siamese() -> Any:
    inputs = keras.Input([8])
    twin = keras.Sequential([L.Dense(8, activation="relu"), L.Dense(4)])
    return keras.Model(inputs, twin(inputs) - twin(inputs * 2.0))


def neighbours() -> Any:
    """A graph network: all layers multiply with the same matrix of neighbours."""
    adjacency = tf.constant(np.random.default_rng(0).random([10, 10], "float32"))
    inputs = keras.Input([8], batch_size=10)
    h = inputs
    for _ in range(3):
        h = L.Lambda(lambda x: tf.matmul(adjacency, x))(L.Dense(8, activation="relu")(h))
    return keras.Model(inputs, h)


def shared() -> Any:
    inputs = keras.Input([8])
    dense = L.Dense(8)
    return keras.Model(inputs, L.Dense(1)(dense(dense(inputs))))


def heads() -> Any:
    inputs = keras.Input([8])
    one, two, three = (L.Dense(8)(inputs) for _ in range(3))
    return keras.Model(inputs, one * two + three)


def critic() -> Any:
    return keras.Sequential([keras.Input([8]), *(L.Dense(8, activation="tanh") for _ in range(3)), L.Dense(1)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [transformer, convolutional, siamese, neighbours, shared, heads, critic])
def test_no_recurrence_no_line(make: Callable[[], Any]) -> None:
    network = make()
    x = tf.constant(numbers(*[size or BATCH for size in network.inputs[0].shape]))
    for function in (training(network, x, penalty=make is critic), tf.function(lambda x: network(x))):  # noqa: PLW0108
        report = reported(function, x)
        assert not report.replaced
        assert not report.not_replaced, report


@pytest.mark.parametrize("checked", ["item", "state", "result", "nothing"])
def test_a_shape_that_a_step_refuses_is_refused(checked: str) -> None:
    """What is known to be so is no reason to stay."""
    weights = tf.Variable(tf.random.stateless_normal([UNITS, UNITS], [1, 2]) * 0.3)

    def check(place: str, x: Any) -> Any:
        return tf.ensure_shape(x, [BATCH if checked == place else None, UNITS])

    @tf.function(input_signature=[tf.TensorSpec([STEPS, None, UNITS])], autograph=False)
    def function(x: Any) -> Any:
        def step(time: Any, state: Any) -> Any:
            state = check("result", tf.tanh(check("item", x[time]) + check("state", state) @ weights))
            return time + 1, tf.ensure_shape(state, [None, UNITS])

        invariants = [tf.TensorShape([]), tf.TensorShape([None, UNITS])]
        start = [0, tf.zeros([tf.shape(x)[1], UNITS])]
        return tf.while_loop(lambda time, _: time < STEPS, step, start, shape_invariants=invariants)[1]

    optimized = tfmem.optimize(function)
    good, bad = (tf.random.stateless_normal([STEPS, rows, UNITS], [3, 4]) for rows in (BATCH, BATCH + 2))
    np.testing.assert_allclose(optimized(good), function(good), rtol=1e-5, atol=1e-6)
    report = tfmem.report(optimized)
    if checked == "nothing":
        assert report.replaced
        np.testing.assert_allclose(optimized(bad), function(bad), rtol=1e-5, atol=1e-6)
        return
    assert "refuses shapes" in report.not_replaced[0]
    for call in (function, optimized):
        with pytest.raises(tf.errors.InvalidArgumentError):
            call(bad)
