"""The number that a refused budget gives is one that works: trained with it, the measured peak stays within it."""

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.offload.plan import CHUNKS

keras = tf.keras
BATCH = 32


def convolutions() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(24, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(40, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def normalised() -> keras.Model:
    layers = []
    for filters in (12, 20, 28):  # sizes that leave chunks unfilled
        layers += [keras.layers.Conv2D(filters, 3, padding="same"), keras.layers.BatchNormalization()]
        layers += [keras.layers.ReLU(), keras.layers.MaxPooling2D(padding="same")]
    return keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])


def optimised(build, budget: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = build()
    model.build((None, 49, 49, 3))
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return tfmem.optimize(model, memory_budget=budget)


@pytest.mark.parametrize("build", [convolutions, normalised])
def test_the_number_of_an_error_works(build):
    batch = np.random.RandomState(0).rand(BATCH, 49, 49, 3).astype("float32"), np.arange(BATCH) % 10
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        optimised(build, 1000).train_on_batch(*batch)
    error = caught.value
    assert error.least < error.smallest_budget <= (1 + CHUNKS) * error.least  # not absurdly high
    assert "are in use before the step" in str(error)
    # the refused model may still be in memory when the next one is planned, or no longer
    variables = sum(variable.numpy().nbytes for variable in optimised(build, 1000).variables)
    budget = error.smallest_budget + variables
    model = optimised(build, budget)
    for _ in range(14):
        model.train_on_batch(*batch)
    report = tfmem.report(model)
    assert report.peak_measured is not None
    assert 0.5 * budget < report.peak_measured <= budget
    assert "OVER BUDGET" not in str(report)
