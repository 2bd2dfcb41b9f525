"""Batches that a model is planned for by their number, and batches whose shapes contradict the step."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem


def two_outputs(library: Any, named: bool, losses_named: bool) -> Any:
    layers = library.layers
    given = library.Input((64,))
    hidden = layers.Dense(32)(given)
    outputs = {"cls": layers.Dense(10, name="cls")(hidden), "reg": layers.Dense(1, name="reg")(hidden)}
    losses = {"cls": library.losses.SparseCategoricalCrossentropy(from_logits=True), "reg": "mse"}
    model = library.Model(given, outputs if named else list(outputs.values()))
    model.compile("adam", losses if losses_named else list(losses.values()))
    return model


@pytest.mark.parametrize("library", [keras, tf_keras], ids=lambda library: library.__name__)
@pytest.mark.parametrize(("named", "losses_named"), [(True, True), (False, False), (False, True)])
def test_outputs_and_losses_in_dicts_and_lists(library, named, losses_named):
    by_number = tfmem.plan(two_outputs(library, named, losses_named), 32)
    labels, values = np.zeros(32, np.int32), np.zeros((32, 1), np.float32)
    targets = {"cls": labels, "reg": values} if named else [labels, values]
    by_example = tfmem.plan(two_outputs(library, named, losses_named), (np.zeros((32, 64), np.float32), targets))
    assert by_number.peak_before == by_example.peak_before


@pytest.mark.parametrize("how", [{}, {"memory_budget": "1GiB"}], ids=["default", "budget"])
def test_targets_of_another_width_raise_what_keras_raises_and_training_goes_on(how):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    tfmem.optimize(model, cache_directory="", progress=False, **how)
    x, y = np.ones((64, 4), np.float32), np.ones((64, 2), np.float32)
    model.fit(x, y, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.fit(x, np.ones((64, 3), np.float32), verbose=0)
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, verbose=0)
    assert model.evaluate(x, y, verbose=0) < before


def test_shapes_that_a_relaxed_trace_allows_and_its_ops_do_not():
    weights = tf.Variable(tf.ones([4]))

    @tf.function(reduce_retracing=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x * weights - y) ** 2)
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    made = tfmem.optimize(step, memory_budget="1GiB", cache_directory="", progress=False)
    for rows in (2, 3, 5):
        made(tf.ones([rows, 4]), tf.ones([rows, 4]))
    before = weights.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError):
        made(tf.ones([7, 4]), tf.ones([6, 4]))
    np.testing.assert_array_equal(weights, before)
    made(tf.ones([7, 4]), tf.zeros([7, 4]))
    assert (weights.numpy() != before).all()
