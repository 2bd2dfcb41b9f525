"""The number that a refused budget gives is one that works: trained with it, the measured peak stays within it."""

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.passes.offload.selection import CHUNKS
from tests.tf.optimized_runs import in_a_process

keras = tf.keras


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


def alike() -> keras.Model:
    layers = [keras.layers.Conv2D(8, 3, padding="same", activation="relu") for _ in range(4)]
    return keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])


def products() -> keras.Model:
    dense = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.layers.GlobalAveragePooling2D(), *dense, keras.layers.Dense(10)])


def small() -> keras.Model:
    """Nothing that waits for its gradient is large enough to move."""
    dense = [keras.layers.Dense(units, activation="relu") for units in (128, 32, 128)]
    return keras.Sequential([keras.layers.Flatten(), *dense, keras.layers.Dense(10)])


def optimised(build, optimizer: str, budget: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = build()
    model.build((None, 49, 49, 3))
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return tfmem.optimize(model, memory_budget=budget)


def batch_of(size: int) -> tuple:
    return np.random.RandomState(0).rand(size, 49, 49, 3).astype("float32"), np.arange(size) % 10


def refused(build, optimizer: str, size: int) -> tuple[int, int, str]:
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        optimised(build, optimizer, 1000).train_on_batch(*batch_of(size))
    return caught.value.least, caught.value.smallest_budget, str(caught.value)


def trained(build, optimizer: str, size: int, budget: int) -> tuple[int | None, str]:
    model = optimised(build, optimizer, budget)
    for _ in range(14):
        model.train_on_batch(*batch_of(size))
    report = tfmem.report(model)
    return report.peak_measured, str(report)


CASES = [(convolutions, "sgd", 32), (normalised, "sgd", 32)]
CASES += [(alike, "adam", 3)]  # no tensor is large enough to be counted
CASES += [(products, "adam", 8)]  # the step's peak, and that of what is counted, are at different ops
CASES += [(small, "sgd", 64)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("build", "optimizer", "size"), CASES)
def test_the_number_of_an_error_works(build, optimizer, size, monkeypatch):
    monkeypatch.setenv("TFMEM_CACHE_DIR", "")
    least, budget, message = in_a_process(refused, build, optimizer, size)
    assert least <= budget <= (1 + CHUNKS) * least  # not absurdly high
    assert "are in use before the step" in message
    measured, report = in_a_process(trained, build, optimizer, size, budget)
    assert measured is not None
    assert 0.5 * budget < measured <= budget
    assert "OVER BUDGET" not in report
