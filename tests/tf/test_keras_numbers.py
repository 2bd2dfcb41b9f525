"""What Keras tells its users is to the bit what it tells them without tfmem, with a budget and without."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from tests.tf import keras_runs
from tests.tf.optimized_runs import SPARE

LIBRARIES = {"keras": keras, "tf_keras": tf_keras}
TIGHT = {  # each trains with a budget that it just meets
    "keras": ["two_outputs", "sample_weights", "several_steps_per_execution", "data_set", "single_batches", "dropout"],
    "tf_keras": ["two_outputs_weighted", "several_steps_per_execution", "data_set", "custom_step"],
}


def numbers(library: str, run: str, optimize: Any) -> list[np.ndarray[Any, Any]]:
    LIBRARIES[library].utils.set_random_seed(3)
    found = keras_runs.RUNS[run](LIBRARIES[library], optimize)
    return [np.asarray(value) for value in tf.nest.flatten(found)]


def check(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("run", keras_runs.RUNS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_without_a_budget(library: str, run: str, flow: Any) -> None:
    models = []

    def optimize(model: Any) -> Any:
        models.append(tfmem.optimize(model))
        return model

    check(numbers(library, run, optimize), numbers(library, run, lambda model: model))
    report = tfmem.report(models[0])
    assert {part.decision for part in (report, *report.others)} == {"unchanged: no budget"}
    assert "tfmem" not in models[0].train_function.__module__  # Keras's own
    assert flow.moved == 0


@pytest.mark.parametrize(("library", "run"), [(library, run) for library in TIGHT for run in TIGHT[library]])
def test_with_a_budget(library: str, run: str, flow: Any, smallest: Any) -> None:
    def within(budget: int) -> list[Any]:
        return numbers(library, run, lambda model: tfmem.optimize(model, memory_budget=budget))

    check(within(SPARE // 2 + smallest(within)), numbers(library, run, lambda model: model))
