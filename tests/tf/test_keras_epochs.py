"""Epochs that end where the data do: what Keras runs before it finds no further batch is run here, too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem

EPOCHS, BATCHES, ROWS, WIDTH = 3, 4, 16, 8
X = np.random.default_rng(0).normal(size=(BATCHES * ROWS, WIDTH)).astype(np.float32)
Y = X[:, :1] * 2


def filtered() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: True).batch(ROWS)


def generated() -> tf.data.Dataset:
    def batches() -> Iterator[Any]:
        for start in range(0, len(X), ROWS):
            yield X[start : start + ROWS], Y[start : start + ROWS]

    specs = tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(batches, output_signature=specs)


def partial() -> tf.data.Dataset:
    """The last batch is smaller than the others."""
    return tf.data.Dataset.from_tensor_slices((X[:-3], Y[:-3])).filter(lambda x, y: True).batch(ROWS)


def make(library: Any, steps: int) -> Any:
    """A schedule reads how many steps there were, and dropout of Keras 3 counts its draws."""
    library.utils.set_random_seed(1)
    layers = [library.layers.Dense(16, "tanh"), library.layers.Dropout(0.5, seed=2), library.layers.Dense(1)]
    model = library.Sequential([library.Input((WIDTH,)), *layers])
    rate = library.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model.compile(library.optimizers.Adam(rate), "mse", steps_per_execution=steps, jit_compile=False)
    return model


def fit(model: Any, data: tf.data.Dataset, **options: Any) -> tuple[list[Any], list[Any]]:
    options = {"epochs": EPOCHS, "validation_data": data, "verbose": 0, **options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        history = model.fit(data, **options).history
    state = [*model.weights, *(v for v in model.optimizer.variables if v is not model.optimizer.iterations)]
    return [int(model.optimizer.iterations.numpy()), history], [variable.numpy() for variable in state]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("library", "steps", "data"),
    [(keras, 1, filtered), (keras, 1, generated), (keras, 1, partial), (keras, 3, filtered), (tf_keras, 1, partial)],
)
def test_data_of_unknown_length(library: Any, steps: int, data: Callable[[], tf.data.Dataset]) -> None:
    check(library, steps, data())


def check(library: Any, steps: int, data: tf.data.Dataset, **options: Any) -> None:
    """Counts, losses and weights are plain Keras's."""
    expected, state = fit(make(library, steps), data, **options)
    model = tfmem.optimize(make(library, steps), memory_budget="1GiB", cache_directory="")
    found, ours = fit(model, data, **options)
    assert found == expected
    for new, old in zip(ours, state, strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.long
def test_data_of_a_service() -> None:
    """A dispatcher and its one worker, which sends batches in order and does not tell how many there are."""
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address, heartbeat_interval_ms=100))
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(ROWS)
    data = data.apply(service.distribute(service.ShardingPolicy.OFF, dispatcher.target))
    assert data.cardinality() == tf.data.UNKNOWN_CARDINALITY
    check(keras, 1, data, epochs=2, validation_data=None)
    del worker  # it serves until here


def test_plain_keras_counts_the_step_that_finds_no_batch() -> None:
    """What the test above is about; where this fails, Keras has changed."""
    (count, _), _ = fit(make(keras, 1), filtered())
    assert count == EPOCHS * (BATCHES + 1)


@pytest.mark.long
def test_predictions_of_data_of_unknown_length() -> None:
    data = filtered().map(lambda x, y: x)
    model = tf_keras.Sequential([tf_keras.Input((WIDTH,)), tf_keras.layers.Reshape((2, 4)), tf_keras.layers.LSTM(3)])
    expected = model.predict(data, verbose=0)
    tfmem.optimize(model)
    np.testing.assert_allclose(model.predict(data, verbose=0), expected, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("package", [keras, tf_keras], ids=lambda package: package.__name__)
def test_a_report_says_that_steps_of_an_execution_run_one_by_one(package: Any) -> None:
    found = {}
    for steps in (1, 4):
        package.utils.set_random_seed(3)
        model = package.Sequential([package.layers.Dense(8, activation="tanh"), package.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps)
        tfmem.optimize(model, memory_budget="1GiB", cache_directory="")
        x = np.arange(96, dtype=np.float32).reshape(24, 4) / 96
        model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
        told = [note for note in tfmem.report(model).notes if "one by one" in note]
        assert told == ["the 4 steps of an execution run one by one, with the results of one step per execution"] * (
            steps > 1
        )
        found[steps] = [np.asarray(each) for each in model.get_weights()]
    for one, four in zip(found[1], found[4], strict=True):
        np.testing.assert_array_equal(one, four)
