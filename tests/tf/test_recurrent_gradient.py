"""The gradient of TfmemRecurrent: against its definition, finite differences and Keras."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from custom_ops.load import Library, load
from custom_ops.recurrent import cells
from custom_ops.recurrent.differentiate import differentiate
from tests.gradient_reference import gradients
from tests.recurrent_cells import library as cells_of
from tests.tf.recurrent_calls import recurrent
from tests.tf.recurrent_tensors import distance, tensors_of

CELLS = tuple(cells_of(1))


@pytest.fixture(name="library", scope="module")
def fixture_library() -> Library:
    return load()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_are_those_of_the_definition(library: Library, name: str, training: bool) -> None:
    random = np.random.default_rng(2)
    for units, time, batch in ((7, 5, 3), (70, 3, 2), (9, 0, 2), (9, 2, 0)):
        cell = cells_of(units)[name]
        given = tensors_of(cell, units, time, batch)
        constants = given.map(tf.constant)
        with tf.GradientTape() as tape:
            tape.watch(constants)
            results = [tensor for kind in recurrent(library.ops, cell, units, *constants, training=training)
                       for tensor in kind]  # fmt: skip
            weights = [random.normal(size=tensor.shape) for tensor in results]
            loss = tf.add_n([tf.reduce_sum(tensor * weight) for tensor, weight in zip(results, weights, strict=True)])
        found = tape.gradient(loss, constants, unconnected_gradients="zero")
        count = len(cell.outputs)
        expected = gradients(differentiate(cell), units, *given, weights[:count], weights[count:])
        for kind, wanted in zip(found, expected, strict=True):
            for tensor, array in zip(kind, wanted, strict=True):
                assert distance(tensor, array) < 1e-12, (units, time, batch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["lstm", "gru canonical", "layer_norm_simple_rnn"])
def test_gradients_are_what_finite_differences_say(library: Library, name: str) -> None:
    cell = cells_of(3)[name]
    given = tensors_of(cell, 3, 4, 2, seed=3, directions=2)
    sizes = [len(kind) for kind in given]

    def results(*flat: tf.Tensor) -> tf.Tensor:
        ends = np.cumsum(sizes)
        kinds = [list(flat[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        outputs, finals = recurrent(library.ops, cell, 3, *kinds, reverse=[True, False], training=True)
        return tf.concat([tf.reshape(tf.sin(tensor), [-1]) for tensor in [*outputs, *finals]], 0)

    flat = [tensor for kind in given for tensor in kind]
    analytic, numeric = tf.test.compute_gradient(results, flat, delta=1e-4)
    for a, n in zip(analytic, numeric, strict=True):
        np.testing.assert_allclose(a, n, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_gradients_are_keras(library: Library, layer: str) -> None:
    import keras

    built = getattr(keras.layers, layer)(37, return_sequences=True, dtype="float64", go_backwards=True)
    x = tf.constant(np.random.default_rng(4).normal(size=(3, 6, 20)))
    built(x)
    kernel, recurrent_kernel, bias = [tf.constant(weight.numpy() + 0.01) for weight in built.weights]
    built.set_weights([kernel, recurrent_kernel, bias])
    cell = cells.lstm() if layer == "LSTM" else cells.gru()
    with tf.GradientTape() as tape:
        tape.watch(x)
        expected = built(x)
        loss = tf.reduce_sum(tf.sin(expected))
    wanted = tape.gradient(loss, [x, *(weight.value for weight in built.weights)])
    watched = [x, kernel, recurrent_kernel, bias]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        of_input, of_state = (bias, []) if layer == "LSTM" else (bias[0], [bias[1]])
        gates = tf.transpose(x, [1, 0, 2]) @ kernel + of_input
        states = [tf.zeros([3, 37], tf.float64)] * len(cell.states)
        outputs, _ = recurrent(
            library.ops, cell, 37, [gates], [], of_state, [recurrent_kernel], states, reverse=[True], training=True
        )
        found = tf.transpose(outputs[0][::-1], [1, 0, 2])
        loss = tf.reduce_sum(tf.sin(found))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    for tensor, array in zip(tape.gradient(loss, watched), wanted, strict=True):
        assert distance(tensor, array) < 1e-12


def test_the_gradient_has_a_gradient_unless_values_were_saved(library: Library) -> None:
    cell = cells.gru()
    given = tensors_of(cell, 4, 3, 2)

    def first(state: tf.Tensor, training: bool = False) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(state)
            outputs, _ = recurrent(library.ops, cell, 4, *given[:4], [state], training=training)
            loss = tf.reduce_sum(outputs[0] ** 2)
        return tape.gradient(loss, state)

    (analytic,), (numeric,) = tf.test.compute_gradient(first, [given.states[0]], delta=1e-4)
    np.testing.assert_allclose(analytic, numeric, atol=1e-7)
    with tf.GradientTape() as tape:
        state = tf.constant(given.states[0])
        tape.watch(state)
        gradient = first(state, training=True)
    with pytest.raises(LookupError, match="training=False"):
        tape.gradient(gradient, state)
