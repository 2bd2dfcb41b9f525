"""Keras models of both packages train, evaluate and predict by regions; batches of open sizes among them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

import tfmem
from tests.tf.stitched_steps import BY_MODEL, PASSES, close, require_stitched

OPTIONS: dict[str, Any] = {"passes": PASSES, "fusion": BY_MODEL, "cache_directory": ""}


def net(library: Any) -> Any:
    layers = library.layers
    library.utils.set_random_seed(3)
    parts = [layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.3)]
    model = library.Sequential([library.Input([12]), *parts, layers.Dense(5, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_a_keras_model(library: Any) -> None:
    x = np.random.default_rng(0).normal(size=(70, 12)).astype(np.float32)
    y = np.arange(70) % 5
    how: dict[str, Any] = {"batch_size": 32, "epochs": 2, "verbose": 0, "shuffle": False, "validation_data": (x, y)}
    plain = net(library)
    expected = plain.fit(x, y, **how).history
    model = tfmem.optimize(net(library), **OPTIONS)
    found = model.fit(x, y, **how).history
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], 1e-5, 1e-6)
    close(model.predict(x, verbose=0), plain.predict(x, verbose=0))
    report = require_stitched(model, "MatMul")
    assert not report.notes
    assert [report.function, *(other.function for other in report.others)] == ["train", "test", "predict"]
    assert all(other.regions for other in report.others)
