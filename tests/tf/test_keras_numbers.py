"""What Keras tells its users is to the bit what it tells them without tfmem, with a budget and without."""

from __future__ import annotations

import functools
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
UNTOUCHED = {
    "keras": list(keras_runs.RUNS),
    "tf_keras": ["two_outputs_weighted", "several_steps_per_execution", "data_set", "custom_step", "dropout"],
}
TIGHT = {  # each trains with a budget that it just meets
    "keras": ["two_outputs", "several_steps_per_execution", "data_set", "dropout"],
    "tf_keras": ["two_outputs_weighted", "several_steps_per_execution", "dropout"],
}


def pairs(runs: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(library, run) for library in runs for run in runs[library]]


def numbers(library: str, run: str, optimize: Any) -> list[np.ndarray[Any, Any]]:
    LIBRARIES[library].utils.set_random_seed(3)
    found = keras_runs.RUNS[run](LIBRARIES[library], optimize)
    return [np.asarray(value) for value in tf.nest.flatten(found)]


@functools.cache
def plain(library: str, run: str) -> list[np.ndarray[Any, Any]]:
    return numbers(library, run, lambda model: model)


def check(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("library", "run"), pairs(UNTOUCHED))
def test_without_a_budget(library: str, run: str, flow: Any) -> None:
    models = []

    def optimize(model: Any) -> Any:
        models.append(tfmem.optimize(model, passes=("recurrent", "offload")))
        return model

    check(numbers(library, run, optimize), plain(library, run))
    report = tfmem.report(models[0])
    assert {part.decision for part in (report, *report.others)} == {"unchanged: no budget"}
    assert "tfmem" not in models[0].train_function.__module__  # Keras's own
    assert flow.moved == 0


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("library", "run"), pairs(TIGHT))
def test_with_a_budget(library: str, run: str, flow: Any, smallest: Any) -> None:
    def within(budget: int) -> list[Any]:
        return numbers(library, run, lambda model: tfmem.optimize(model, memory_budget=budget))

    check(within(SPARE // 2 + smallest(within)), plain(library, run))
