"""Recurrent layers on a GPU before and after they are swapped, both against the same layer in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.framework import config as tf_config

import tfmem

INPUTS, STEPS, BATCH = 24, 40, 6
LAYERS: dict[str, Callable[[Any, int], Any]] = {
    "lstm": lambda library, units: library.LSTM(units, return_sequences=True),
    "gru": lambda library, units: library.GRU(units, return_sequences=True),
    "gru, reset before": lambda library, units: library.GRU(units, return_sequences=True, reset_after=False),
    "simple": lambda library, units: library.SimpleRNN(units, return_sequences=True),
    "recurrent dropout's loop": lambda library, units: library.LSTM(
        units, return_sequences=True, recurrent_dropout=0.2
    ),
    "bidirectional": lambda library, units: library.Bidirectional(library.LSTM(units, return_sequences=True)),
    "backwards": lambda library, units: library.GRU(units, return_sequences=True, go_backwards=True),
    "last step": lambda library, units: library.LSTM(units),
}
ON_CUDNN = {"lstm", "gru", "bidirectional", "backwards", "last step"}
FORWARD, TRAINED = 1e-4, 5e-4  # relative to the largest number


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMEM_RECURRENT_ON_GPU", "1")


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def network(library: Any, name: str, units: int, dtype: str, masked: bool = False) -> Any:
    library.utils.set_random_seed(5)
    set_precision(library, dtype)
    try:
        layers = library.layers
        masking = [layers.Masking()] if masked else []
        made = [layers.Input((None, INPUTS)), *masking, LAYERS[name](layers, units), layers.Dense(3)]
        return library.Sequential(made)
    finally:
        set_precision(library, "float32")


def set_precision(library: Any, dtype: str) -> None:
    """Of inputs and of layers: Keras reads the first only until it has made a policy of it."""
    library.backend.set_floatx(dtype)
    if library is tf_keras:
        library.mixed_precision.set_global_policy(dtype)
    else:
        library.config.set_dtype_policy(dtype)


def batch(masked: bool = False, seed: int = 0) -> Any:
    x = numbers(BATCH, STEPS, INPUTS, seed=seed)
    if masked:
        for row in range(BATCH):
            x[row, STEPS - 5 * row :] = 0  # the first row is whole
    return x


def distance(found: Any, wanted: Any) -> float:
    wanted = np.asarray(wanted, np.float64)
    return float(np.max(np.abs(np.asarray(found, np.float64) - wanted)) / max(np.max(np.abs(wanted)), 1e-30))


def without_cudnn(model: Any) -> Any:
    """Float64 runs the loop of plain ops, in whatever order of gates."""
    for layer in model.layers:
        for inner in (layer, getattr(layer, "forward_layer", None), getattr(layer, "backward_layer", None)):
            if hasattr(inner, "use_cudnn"):
                inner.use_cudnn = False
    return model


@pytest.mark.parametrize("units", [1, 33, 64, 256])
@pytest.mark.parametrize("name", LAYERS)
def test_inference(name: str, units: int) -> None:
    model = network(keras, name, units, "float32")
    truth = without_cudnn(network(keras, name, units, "float64"))
    truth.set_weights(model.get_weights())
    x = batch()

    @tf.function(input_signature=[tf.TensorSpec([None, None, INPUTS])])
    def run(x: Any) -> Any:
        return model(x, training=False)

    wanted = truth(x, training=False)
    optimized = tfmem.optimize(run)
    single = tf.constant(x, tf.float32)
    assert distance(run(single), wanted) < 10 * FORWARD  # cuDNN may use tf32
    assert distance(optimized(single), wanted) < FORWARD
    report = tfmem.report(optimized)
    assert report.swapped, str(report)
    assert ("CudnnRNNV3" in report.swapped[0]) == (name in ON_CUDNN), str(report)
    assert distance(optimized(single[:, :1]), truth(x[:, :1], training=False)) < FORWARD
    if name != "last step":
        assert optimized(single[:, :0]).shape == (BATCH, 0, 3)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("name", sorted(set(LAYERS) - {"recurrent dropout's loop"}))
def test_training(name: str, masked: bool) -> None:
    """Losses and weights of five steps."""
    units = 48
    models = [network(keras, name, units, dtype, masked) for dtype in ("float64", "float32", "float32")]
    without_cudnn(models[0])
    weights = models[1].get_weights()
    for model in models:
        model.set_weights(weights)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    tfmem.optimize(models[2])
    losses: list[list[float]] = [[], [], []]
    for step in range(5):
        x = batch(masked, seed=step)
        wide = [BATCH, 3] if name == "last step" else [BATCH, STEPS, 3]
        y = numbers(*wide, seed=50 + step)
        for place, model in enumerate(models):
            losses[place].append(float(np.ravel(model.train_on_batch(x, y))[0]))
    truth, _, found = losses
    np.testing.assert_allclose(found, truth, rtol=TRAINED)
    for a, b, before in zip(models[2].get_weights(), models[0].get_weights(), weights, strict=True):
        assert distance(a - before, b - before) < 20 * TRAINED  # what training changed
    report = tfmem.report(models[2])
    assert report.swapped, str(report)
    assert "gradient" in report.swapped[0]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_training(policy: str) -> None:
    bound = {"mixed_float16": 0.02, "mixed_bfloat16": 0.1}[policy]
    losses = []
    for optimized in (False, True):
        keras.utils.set_random_seed(3)
        layers = [
            keras.layers.Input((None, INPUTS)),
            keras.layers.LSTM(64, dtype=policy),
            keras.layers.Dense(1, dtype="float32"),
        ]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        if optimized:
            tfmem.optimize(model)
        steps = [(batch(seed=step), numbers(BATCH, 1, seed=step)) for step in range(5)]
        losses.append([float(np.ravel(model.train_on_batch(x, y))[0]) for x, y in steps])
        if optimized:
            assert tfmem.report(model).swapped
    np.testing.assert_allclose(losses[1], losses[0], rtol=bound)


@pytest.mark.parametrize("name", ["lstm", "gru", "bidirectional"])
def test_tf_keras(name: str) -> None:
    """The layer is a function with an implementation for GPUs; its loop for CPUs is what is read and swapped."""
    model = network(tf_keras, name, 64, "float32")
    truth = network(tf_keras, name, 64, "float64")
    truth.set_weights(model.get_weights())

    @tf.function(input_signature=[tf.TensorSpec([None, None, INPUTS])])
    def run(x: Any) -> Any:
        return model(x, training=False)

    x = batch()
    optimized = tfmem.optimize(run)
    assert distance(optimized(tf.constant(x, tf.float32)), truth(x, training=False)) < FORWARD
    assert tfmem.report(optimized).swapped


@pytest.fixture(name="determinism")
def fixture_determinism() -> Iterator[None]:
    """TensorFlow's own sums over a batch are in no fixed order otherwise."""
    tf.config.experimental.enable_op_determinism()
    yield
    tf_config.disable_op_determinism()


@pytest.mark.usefixtures("determinism")
def test_two_runs_are_equal_to_the_bit() -> None:
    """Gradients too: large GEMMs and sums in one order."""
    results = []
    for _ in range(2):
        model = network(keras, "lstm", 64, "float32")
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        tfmem.optimize(model)
        for step in range(3):
            model.train_on_batch(batch(seed=step), numbers(BATCH, STEPS, 3, seed=step))
        results.append(model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
