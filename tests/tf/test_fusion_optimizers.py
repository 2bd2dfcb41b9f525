"""Updates of many variables are packed: Keras writes each as up to fifteen small ops, a region runs few kernels."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tfmem
from tests.tf.stitched_steps import BY_MODEL, PASSES, close, require_stitched

OPTIONS: dict[str, Any] = {"passes": PASSES, "fusion": BY_MODEL, "cache_directory": ""}
LAYERS = 6
NO_WORK = frozenset({"Const", "ReadVariableOp", "Identity", "NoOp", "Placeholder", "Reshape"})


def net(optimizer: Any) -> Any:
    keras.utils.set_random_seed(3)
    hidden = [keras.layers.Dense(8 + place, activation="tanh") for place in range(LAYERS - 1)]
    model = keras.Sequential([keras.Input([12]), *hidden, keras.layers.Dense(5, activation="softmax")])
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    return model


def updating(report: tfmem.Report) -> tuple[int, int]:
    """The ops that assign variables, with all others of their kernels, and the kernels."""
    steps = [
        step
        for region in report.regions
        for step in region.steps
        if step.kind == "kernel" and any(op.startswith(("Assign", "ResourceApply")) for _, op in step.ops)
    ]
    return sum(op not in NO_WORK for step in steps for _, op in step.ops), len(steps)


OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda: keras.optimizers.Adam(1e-2),
    "AdamW": lambda: keras.optimizers.AdamW(1e-2, clipnorm=1.0),
    "SGD": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
    "Adamax": lambda: keras.optimizers.Adamax(1e-2),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.5, centered=True),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_packed(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(64, 12)).astype(np.float32)
    y = np.arange(64) % 5
    how: dict[str, Any] = {"batch_size": 16, "epochs": 5, "verbose": 0, "shuffle": False}
    plain, stitched = net(OPTIMIZERS[name]()), tfmem.optimize(net(OPTIMIZERS[name]()), **OPTIONS)
    expected = plain.fit(x, y, **how).history["loss"]
    np.testing.assert_allclose(stitched.fit(x, y, **how).history["loss"], expected, 1e-4)
    close(stitched.get_weights(), plain.get_weights(), 1e-4)
    report = require_stitched(stitched)
    assert not report.notes
    ops, kernels = updating(report)
    variables = len(plain.trainable_variables)
    assert ops >= 8 * variables
    # The gradients of a layer's weights are there only when those behind it are: a kernel of each, and few more.
    assert kernels <= LAYERS + 4 < variables, f"{ops} ops of {variables} variables in {kernels} kernels"
