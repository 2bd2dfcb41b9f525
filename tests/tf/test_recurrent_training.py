"""Keras models whose recurrences were replaced with their gradients train as they trained before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

import tfmem
from tests.tf.recurrent_training import INPUTS, STEPS, TOLERANCE, UNITS, numbers

L = keras.layers


def batch(model: Any, step: int, masked: bool = False) -> tuple[Any, Any]:
    size, time = 3 + step % 2, model.input_shape[1] or STEPS + step % 2
    x = numbers(size, time, INPUTS, seed=step)
    if masked:
        x[0, time - 2 :] = 0
        x[1, :1] = 0
    shape = (size, time, 2) if len(model.output_shape) == 3 else (size, 2)
    return x, numbers(*shape, seed=100 + step)


def sequential(library: Any, *layers: Any, time: int | None = None, masked: bool = False) -> Any:
    library.utils.set_random_seed(7)
    masking = [library.layers.Masking()] if masked else []
    made = [layer() for layer in layers]
    return library.Sequential(
        [library.layers.Input((time, INPUTS)), *masking, *made, library.layers.Dense(2, dtype="float32")]
    )


def trained(model: Any, steps: int = 10, masked: bool = False) -> tuple[list[float], list[Any]]:
    losses = [float(np.ravel(model.train_on_batch(*batch(model, step, masked)))[0]) for step in range(steps)]
    return losses, [np.asarray(weight) for weight in model.get_weights()]


def compare(make: Callable[[], Any], replaced: int, masked: bool = False, tolerance: float = TOLERANCE) -> Any:
    """Trains the model as it is and optimised; gives the report."""
    plain, optimized = make(), tfmem.optimize(make())
    for one, other in zip(trained(plain, masked=masked), trained(optimized, masked=masked), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    report = tfmem.report(optimized)
    assert len(report.replaced) == replaced, str(report)
    assert not report.not_replaced
    return report


def compiled(library: Any, *layers: Any, optimizer: Any = None, **how: Any) -> Callable[[], Any]:
    def make() -> Any:
        model = sequential(library, *layers, **how)
        model.compile(optimizer() if optimizer else library.optimizers.SGD(0.1), "mse")
        return model

    return make


MODELS: dict[str, tuple[int, Sequence[Callable[[], Any]]]] = {
    "lstm": (1, [lambda: L.LSTM(UNITS, return_sequences=True)]),
    "lstm, last step": (1, [lambda: L.LSTM(UNITS)]),
    "gru": (1, [lambda: L.GRU(UNITS, return_sequences=True)]),
    "gru, reset before": (1, [lambda: L.GRU(UNITS, reset_after=False)]),
    "simple": (1, [lambda: L.SimpleRNN(UNITS, activation="elu")]),
    "stacked": (2, [lambda: L.LSTM(UNITS, return_sequences=True), lambda: L.GRU(4)]),
    "bidirectional": (1, [lambda: L.Bidirectional(L.LSTM(UNITS, return_sequences=True))]),
    "bidirectional above a layer": (1, [lambda: L.Dense(4), lambda: L.Bidirectional(L.GRU(UNITS))]),
    "backwards": (1, [lambda: L.LSTM(UNITS, go_backwards=True, return_sequences=True)]),
    "backwards above a layer": (1, [lambda: L.Dense(4), lambda: L.LSTM(UNITS, go_backwards=True)]),
    "dropout": (1, [lambda: L.LSTM(UNITS, dropout=0.2, recurrent_dropout=0.2, seed=1)]),
    "other activations": (1, [lambda: L.LSTM(UNITS, activation="relu", recurrent_activation="hard_sigmoid")]),
    "no bias": (1, [lambda: L.GRU(UNITS, use_bias=False)]),
    "stacked cells": (1, [lambda: L.RNN([L.LSTMCell(UNITS), L.LSTMCell(UNITS)])]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_keras_trains_the_same(name: str) -> None:
    replaced, layers = MODELS[name]
    compare(compiled(keras, *layers), replaced)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layer", [L.LSTM, L.GRU, L.SimpleRNN])
def test_masked_steps_are_skipped(layer: Any) -> None:
    compare(compiled(keras, lambda: layer(UNITS, return_sequences=True), masked=True), 1, masked=True)


@pytest.mark.long
def test_a_static_length_and_adam_with_clipping() -> None:
    adam = compiled(keras, lambda: L.LSTM(UNITS), time=4, optimizer=lambda: keras.optimizers.Adam(0.01, clipnorm=0.1))
    compare(adam, 1, tolerance=1e-4)


@pytest.mark.parametrize(("policy", "tolerance"), [("mixed_float16", 1e-2), ("mixed_bfloat16", 5e-2)])
def test_mixed_precision(policy: str, tolerance: float) -> None:
    report = compare(compiled(keras, lambda: L.LSTM(UNITS, dtype=policy)), 1, tolerance=tolerance)
    assert policy.removeprefix("mixed_") in report.replaced[0]


LEGACY = {
    "lstm": (1, [lambda: tf_keras.layers.LSTM(UNITS, return_sequences=True)]),
    "gru": (1, [lambda: tf_keras.layers.GRU(UNITS)]),
    "bidirectional": (1, [lambda: tf_keras.layers.Bidirectional(tf_keras.layers.LSTM(UNITS))]),
    "gru, reset before": (1, [lambda: tf_keras.layers.GRU(UNITS, reset_after=False)]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LEGACY)
def test_tf_keras_trains_the_same(name: str) -> None:
    replaced, layers = LEGACY[name]
    compare(compiled(tf_keras, *layers), replaced)


@pytest.mark.long
def test_fit() -> None:
    """Batches of two sizes, validation, metrics and a callback."""
    x, y = numbers(22, STEPS, INPUTS), numbers(22, 2, seed=1)
    histories, weights = [], []
    for optimized in (False, True):
        model = sequential(keras, lambda: L.LSTM(UNITS))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        if optimized:
            model = tfmem.optimize(model)
        seen = model.fit(
            x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, validation_data=(x[:8], y[:8]),
            callbacks=[keras.callbacks.TerminateOnNaN()],
        )  # fmt: skip
        histories.append(seen.history)
        weights.append(model.get_weights())
    assert histories[0].keys() == histories[1].keys()
    for key, values in histories[0].items():
        np.testing.assert_allclose(values, histories[1][key], rtol=1e-4, err_msg=key)
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE)
    assert len(tfmem.report(model).replaced) == 1
