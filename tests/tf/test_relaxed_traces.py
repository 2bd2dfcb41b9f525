"""Budgets of functions whose shapes TensorFlow relaxes (`reduce_retracing`): batches of several sizes, one trace."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import tfmem
from tests.tf.memory_in_use import in_use
from tests.tf.two_layers import TwoLayers

MIB = 1 << 20


@pytest.fixture(name="x")
def fixture_x() -> Any:
    return tf.random.stateless_normal([64, 4], [3, 4])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("budget", [64 * MIB, 3 * MIB])
@pytest.mark.parametrize("keyword", [False, True])
def test_relaxed_traces_train_on_with_a_plan_for_each_size(budget: int, keyword: bool, flow: Any) -> None:
    """Epochs of three full batches and a partial one. The second epoch meets the relaxed trace."""

    def run(function: Any) -> list[float]:
        losses = []
        for _ in range(2):
            for rows in (40000, 40000, 40000, 10000):
                x = tf.random.stateless_normal([rows, 4], [rows, 1])
                losses.append(float(function(x=x) if keyword else function(x)))
        return losses

    def step() -> Any:
        return tf.function(TwoLayers().train, reduce_retracing=True)

    budget += in_use()
    function = tfmem.optimize(step(), memory_budget=budget, passes=("offload",))
    assert run(function) == run(step())
    assert tfmem.report(function).budget == budget


def test_arrays_and_ragged_tensors_of_relaxed_traces(x: Any, flow: Any) -> None:
    def step(net: TwoLayers) -> Any:
        return tf.function(lambda x, rows: net.train(x) + tf.cast(rows.nrows(), tf.float32), reduce_retracing=True)

    function, plain = tfmem.optimize(step(TwoLayers()), memory_budget="1GiB"), step(TwoLayers())
    for count in (9, 20, 30, 9):
        ragged = tf.RaggedTensor.from_row_lengths(x, [count, 64 - count])
        assert function(x[:count].numpy(), ragged).numpy() == plain(x[:count].numpy(), ragged).numpy()
