"""Budgets of steps whose large ops are all within branches, or that name one device in several ways."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from tests.tf.memory_in_use import in_use

MIB = 1 << 20
CALLS = 12


def smallest(run: Callable[[int], Any]) -> int:
    """The budget that is said to be enough."""
    gc.collect()
    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        run(1000)
    found = int(caught.value.smallest_budget)
    del caught
    gc.collect()
    return found


class Branches:
    """A training step of which each branch trains in another way."""

    def __init__(self) -> None:
        self.weights = tf.Variable(np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32) / 16)
        self.step = tf.function(self.run)

    def run(self, x: Any, flag: Any) -> Any:
        return tf.cond(flag, lambda: self.train(x, 1.0), lambda: self.train(x[::-1], 2.0))

    def train(self, x: Any, factor: float) -> Any:
        with tf.GradientTape() as tape:
            for _ in range(6):
                x = tf.tanh(x @ self.weights)
            loss = factor * tf.reduce_mean(x**2)
        self.weights.assign_sub(0.01 * tape.gradient(loss, self.weights))
        return loss


@pytest.mark.filterwarnings("ignore:.*OVER BUDGET")  # what a branch takes is an estimate
@pytest.mark.filterwarnings("error:.*bug in tfmem")
def test_a_step_whose_large_ops_are_in_branches_is_planned_by_estimates() -> None:
    x = tf.constant(np.random.default_rng(1).normal(size=(256, 256)).astype(np.float32))
    budget = smallest(lambda size: tfmem.optimize(Branches().step, memory_budget=size)(x, tf.constant(True)))
    plain, ours = Branches(), Branches()
    step = tfmem.optimize(ours.step, memory_budget=budget, cache_directory="")
    for call in range(CALLS):
        flag = tf.constant(call % 3 == 0)
        assert float(step(x, flag)) == float(plain.step(x, flag))
    report = tfmem.report(step)
    assert report.decided, report
    assert not [note for note in report.notes if "bug in tfmem" in note]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("python", [tf.py_function, tf.numpy_function])
def test_python_code_in_a_step_is_on_no_other_device(python: Callable[..., Any]) -> None:
    weights = tf.Variable(np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32) / 16)
    told: list[float] = []

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for _ in range(6):
                x = tf.nn.relu(x @ weights)
            loss = tf.reduce_mean(x)
        python(lambda value: told.append(float(value)), [loss], [])
        with tf.device("CPU:0"):
            weights.assign_sub(1e-3 * tape.gradient(loss, weights))
        return loss

    x = tf.constant(np.random.default_rng(1).normal(size=(4096, 256)).astype(np.float32))  # 4 MiB, as all activations
    gc.collect()
    ours = tfmem.optimize(step, memory_budget=in_use() + 11 * MIB, cache_directory="")
    losses = [float(ours(x)) for _ in range(3)]
    assert told == losses
    assert tfmem.report(ours).splits
