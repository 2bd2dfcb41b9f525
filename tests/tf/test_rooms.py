"""What lies in a device's memory before a step."""

from __future__ import annotations

from collections.abc import Sequence

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
