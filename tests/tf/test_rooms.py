"""What lies in a device's memory before a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.load import load
from tfmem import step
from tfmem.api import make_engine
from tfmem.config import Options
from tfmem.devices import memory
from tfmem.engine import Engine
from tfmem.rooms import separate

ROWS = 1 << 20


@pytest.fixture(autouse=True)
def fixture_leave_no_tensors() -> Iterator[None]:
    """Other tests count what is in use."""
    yield
    keras.backend.clear_session()
    gc.collect()


def addresses(*variables: tf.Variable) -> list[int]:
    return [int(address) for address in load().addresses([variable.read_value() for variable in variables]).numpy()]


def test_variables_that_began_as_one_tensor_get_memory_of_their_own() -> None:
    begin = tf.random.normal((ROWS,))
    one, two, other = tf.Variable(begin), tf.Variable(begin), tf.Variable(tf.ones((4,)))
    counter = tf.Variable(tf.constant(7, tf.int64))
    before = addresses(one, two, other)
    assert before[0] == before[1] != before[2]
    separate(make_engine(Options()), [one, two, counter, other])
    after = addresses(one, two, other)
    assert len(set(after)) == 3
    assert (after[0], after[2]) == (before[0], before[2])  # what need not move stays
    np.testing.assert_array_equal(one, begin)
    np.testing.assert_array_equal(two, begin)
    two.assign_add(tf.ones((ROWS,)))
    np.testing.assert_array_equal(one, begin)


def test_an_optimizer_that_the_first_step_builds_takes_its_memory_before(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def watched(engine: Engine, variables: Sequence[tf.Variable]) -> None:
        held.append(memory(load(), "/device:CPU:0").bytes_in_use)
        separate(engine, variables)
        held.append(memory(load(), "/device:CPU:0").bytes_in_use)

    monkeypatch.setattr(step, "separate", watched)
    model = keras.Sequential([keras.layers.Dense(1 << 10) for _ in range(4)])
    model.compile(optimizer="adam", loss="mse")
    model = tfmem.optimize(model, memory_budget="80MiB", cache_directory="")
    images = np.ones((512, 1 << 10), np.float32)
    for _ in range(3):
        model.train_on_batch(images, images)
        held.append(memory(load(), "/device:CPU:0").bytes_in_use)
    weights = sum(variable.numpy().nbytes for variable in model.trainable_variables)
    before, after, *steps = held
    assert after - before > weights  # all moments of one shape were one tensor of zeros
    assert max(steps) - after < weights * 0.1


def test_a_cached_profile_counts_what_lies_beside_the_step_now(
    new_net: Callable[[], Any], batch: Any, tmp_path: Path
) -> None:
    def report(budget: int) -> tfmem.Report:
        optimized = tfmem.optimize(tf.function(new_net().step), memory_budget=budget, cache_directory=str(tmp_path))
        for _ in range(8):
            optimized(*batch)
        return tfmem.report(optimized)

    gc.collect()
    held = tf.ones((16 << 18,))  # so that the budget is not ample either way
    budget = int(1.15 * (report(1 << 30).peak_before + (2 << 20)))
    ballast = tf.ones((2 << 18,))
    with_ballast = report(budget)
    assert not any("earlier process" in note for note in with_ballast.notes)
    del ballast
    gc.collect()
    without = report(budget)
    assert any("earlier process" in note for note in without.notes)
    assert with_ballast.peak_before - without.peak_before == pytest.approx(2 << 20, rel=0.1)
    del held
