"""What lies in a device's memory before a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.load import load
from graph_passes.analysis.memory.fragmentation import SMALL, Room
from tfmem.api import make_engine
from tfmem.options import Options
from tfmem.runtime.device_memory import DeviceMemory
from tfmem.runtime.measured_call import Meter

ROWS = 1 << 20


def owners(*tensors: tf.Variable | tf.Tensor) -> list[int]:
    """For each the first one that has its memory."""
    values = [tensor.read_value() if isinstance(tensor, tf.Variable) else tensor for tensor in tensors]
    return [int(first) for first in load().sharing(values).numpy()]


def test_variables_that_began_as_one_tensor_get_memory_of_their_own() -> None:
    begin = tf.random.normal((ROWS,))
    one, two, other = tf.Variable(begin), tf.Variable(begin), tf.Variable(tf.ones((4,)))
    counter = tf.Variable(tf.constant(7, tf.int64))
    assert owners(one, two, other) == [0, 0, 2]
    before = [one.read_value(), other.read_value()]
    make_engine(Options()).memory.separate([one, two, counter, other])
    assert owners(one, two, other) == [0, 1, 2]
    assert owners(*before, one, other) == [0, 1, 0, 1]  # what need not move stays
    del before
    np.testing.assert_array_equal(one, begin)
    np.testing.assert_array_equal(two, begin)
    two.assign_add(tf.ones((ROWS,)))
    np.testing.assert_array_equal(one, begin)


def test_they_get_it_before_a_step_is_measured(
    smallest: Callable[[Callable[[int], Any]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = tf.random.normal((256, 256), stddev=0.05)
    one, two = tf.Variable(begin), tf.Variable(begin)
    x = tf.random.normal((4096, 256))

    @tf.function
    def train() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softplus(tf.nn.softplus(x @ one) @ two))
        for weight, gradient in zip((one, two), tape.gradient(loss, (one, two)), strict=True):
            weight.assign_sub(gradient)
        return loss

    found: list[int] = []
    sampled = Meter.sampled

    def looked_at(*arguments: Any) -> Any:
        found.extend(owners(one, two))
        return sampled(*arguments)

    monkeypatch.setattr(Meter, "sampled", looked_at)
    budget = (1 << 20) + smallest(lambda size: tfmem.optimize(train, memory_budget=size, cache_directory="")())
    assert owners(one, two) == [0, 0]  # an error changes nothing
    tfmem.optimize(train, memory_budget=budget, cache_directory="")()
    assert found == [0, 1]


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


def room_of(rows: list[tuple[int, int, int]], growth: int) -> Room:
    library = SimpleNamespace(chunks=lambda: (tf.constant(rows, tf.int64), tf.constant(growth, tf.int64)))
    target = SimpleNamespace(name="/device:CPU:0")
    return DeviceMemory(library, target).room(None, 7)  # type: ignore[arg-type]


def test_small_chunks_are_no_room_but_for_the_last() -> None:
    rows = [(512, 1 << 30, 1), (1 << 40, 4096, 0), (2 << 40, 1 << 20, 0), (3 << 40, 64, 1), (4 << 40, 256, 0)]
    room = room_of(rows, 0)
    assert room == Room((((2 << 40) - 512, 1 << 20), ((4 << 40) - 512, 256)), limit=7)
    assert room.grown(1 << 20).chunks[-1] == ((4 << 40) - 512, 256 + (1 << 20))


def test_where_the_allocator_may_grow_there_is_room_apart() -> None:
    """The free chunk before it, too small now, is the last no more; nothing lies in two regions."""
    rows = [(512, 1 << 30, 1), (512 + (1 << 30), 256, 0)]
    (only,) = room_of(rows, 1 << 40).chunks
    assert only == ((1 << 30) + 256 + SMALL, 1 << 40)
    rows[1] = (512 + (1 << 30), 1 << 21, 0)
    with tf.Graph().as_default():  # whatever the caller is at
        first, second = room_of(rows, 1 << 40).chunks
    assert first == (1 << 30, 1 << 21)
    assert sum(first) < second[0]
