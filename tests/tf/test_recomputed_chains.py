"""Training steps that recompute chains of ops: equal to the bit, and within their budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfmem
from graph_passes.report import RECOMPUTED
from tests.tf.optimized_runs import in_a_process
from tfmem.devices import memory

DEVICE = "/device:CPU:0"
CALLS = 24  # until the plan is final, after up to 16 trials, and some more


def residual() -> tuple[Any, Any]:
    inputs = hidden = keras.Input((48, 48, 16))
    for _ in range(4):
        inner = hidden
        for activation in ("relu", None):
            inner = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(inner)
            inner = keras.layers.BatchNormalization()(inner)
            inner = keras.layers.ReLU()(inner) if activation else inner
        hidden = keras.layers.ReLU()(keras.layers.Add()([hidden, inner]))
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(hidden))
    return keras.Model(inputs, outputs), np.random.default_rng(0).random((16, 48, 48, 16), np.float32)


def transformer() -> tuple[Any, Any]:
    inputs = hidden = keras.Input((64, 64))
    for _ in range(3):
        seen = keras.layers.MultiHeadAttention(4, 16, dropout=0.1)(hidden, hidden)
        hidden = keras.layers.LayerNormalization()(keras.layers.Add()([hidden, seen]))
        inner = keras.layers.Dense(256, activation="gelu")(hidden)
        inner = keras.layers.Dropout(0.1)(keras.layers.Dense(64)(inner))
        hidden = keras.layers.LayerNormalization()(keras.layers.Add()([hidden, inner]))
    outputs = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(inputs, outputs), np.random.default_rng(0).random((64, 64, 64), np.float32)


def trained(build: Callable[[], tuple[Any, Any]], share: float | None, needed: int = 0) -> tuple[Any, ...]:
    """Losses and weights; the bytes that a step takes; the budget; the report of a step in `share` of `needed`."""
    keras.utils.set_random_seed(0)
    model, x = build()
    y = np.arange(len(x)) % 10
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    library, losses, report = tfmem.load_ops(), [], None
    budget = memory(library, DEVICE).bytes_in_use + int((share or 1.0) * needed)
    if share:
        model = tfmem.optimize(model, memory_budget=budget, options=tfmem.Options(cache_directory=""))
    for _ in range(CALLS):
        model.reset_metrics()
        before = memory(library, DEVICE, reset=True).bytes_in_use
        losses.append(float(model.train_on_batch(x, y)))
    taken = memory(library, DEVICE).peak_bytes - before
    if share:
        report = tfmem.report(model)
    return losses, [weight.tobytes() for weight in model.get_weights()], taken, budget, report


@pytest.mark.parametrize(("build", "share"), [(residual, 0.6), (residual, 0.5), (transformer, 0.6), (transformer, 0.5)])
def test_recomputed_chains_are_equal_to_the_bit(build: Any, share: float) -> None:
    losses, weights, needed, *_ = in_a_process(trained, build, None)
    found, same, taken, budget, report = in_a_process(trained, build, share, needed)
    assert found == losses
    assert same == weights
    assert any(transfer.offload_after == RECOMPUTED for transfer in report.transfers)
    assert taken < 0.85 * needed
    assert report.peak_measured <= budget
