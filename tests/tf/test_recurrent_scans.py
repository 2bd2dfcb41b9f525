"""Keras's `ops.scan` in a layer: replaced under a budget as well, also where the last batch is smaller."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tfmem


class Scan(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(12, 12))

    def call(self, x: Any) -> Any:
        def step(state, item):
            state = keras.ops.tanh(keras.ops.matmul(state, self.kernel) + item)
            return state, 2.0 * state

        items = keras.ops.transpose(x, (1, 0, 2))
        state, states = keras.ops.scan(step, keras.ops.zeros_like(items[0]), items)
        return keras.ops.concatenate([state, keras.ops.mean(states, 0)], -1)


def losses(rows: int, **how: Any) -> tuple[list[float], Any]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((9, 12)), Scan(), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    if how:
        tfmem.optimize(model, cache_directory="", progress=False, **how)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(rows, 9, 12)).astype(np.float32), draw.normal(size=(rows, 2)).astype(np.float32)
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"], tfmem.report(model) if how else None


@pytest.mark.parametrize("rows", [48, 43], ids=["whole batches", "a smaller last batch"])
def test_a_layer_is_replaced_under_a_budget(rows):
    expected, _ = losses(rows)
    found, report = losses(rows, memory_budget="4GiB")
    assert len(report.replaced) == 1, report.not_replaced
    np.testing.assert_allclose(found, expected, rtol=1e-5)
