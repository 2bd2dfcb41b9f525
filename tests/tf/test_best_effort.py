"""Steps that no plan fits in the device's memory, where the user gave no budget: they run, and the user is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.errors import HostMemoryError
from tests.tf.stitched_steps import Softmax, batch, run
from tests.tf.stitched_steps import values as numbers
from tfmem.runtime import settings
from tfmem.runtime.device_memory import DeviceMemory

TOO_LITTLE = 1000  # bytes


@pytest.fixture(name="little_memory")
def fixture_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "budget_of", lambda *_: (TOO_LITTLE, False))


@pytest.mark.usefixtures("little_memory")
def test_a_function_runs_unplanned() -> None:
    plain, ours = Softmax(), Softmax()
    step = tfmem.optimize(ours.step, passes=("offload",), cache_directory="")
    with pytest.warns(tfmem.TfmemWarning, match="its memory was not planned"):
        found = run(step)
    np.testing.assert_array_equal(found, run(plain.step))
    np.testing.assert_array_equal(numbers(ours.variables)[0], numbers(plain.variables)[0])
    assert any("memory was not planned" in note for note in tfmem.report(step).notes)


def test_a_host_that_cannot_hold_what_has_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise HostMemoryError("the host is full")

    def step() -> Any:
        weights = tf.Variable(tf.eye(256))

        def run(x: Any) -> Any:
            with tf.GradientTape() as tape:
                for _ in range(6):
                    x = tf.tanh(x @ weights)
                loss = tf.reduce_mean(x)
            weights.assign_sub(tape.gradient(loss, weights))
            return loss

        return tf.function(run)

    x = tf.random.stateless_normal([1024, 256], (1, 2))
    usual = tfmem.optimize(step(), passes=("offload",), memory_budget=1 << 34, cache_directory="")
    expected = [float(usual(x)) for _ in range(4)]
    budget = tfmem.report(usual).peak_predicted * 3 // 4
    monkeypatch.setattr(DeviceMemory, "require_host_room", refuse)
    with pytest.raises(HostMemoryError):
        tfmem.optimize(step(), passes=("offload",), memory_budget=budget, cache_directory="")(x)
    monkeypatch.setattr(settings, "budget_of", lambda *_: (budget, False))
    ours = tfmem.optimize(step(), passes=("offload",), cache_directory="")
    with pytest.warns(tfmem.TfmemWarning, match="its memory was not planned: the host is full"):
        assert [float(ours(x)) for _ in range(4)] == expected


@pytest.mark.usefixtures("little_memory")
def test_a_saved_model_stays(tmp_path: Path) -> None:
    model = tf.Module()
    model.layer = Softmax()
    model.variables_of_layer = model.layer.variables
    model.step = tf.function(model.layer.run, input_signature=[tf.TensorSpec([32, 12]), tf.TensorSpec([32, 5])])
    tf.saved_model.save(model, str(tmp_path / "given"))
    with pytest.warns(tfmem.TfmemWarning, match="its memory was not planned"):
        tfmem.optimize(str(tmp_path / "given"), output=str(tmp_path / "made"), passes=("offload",), cache_directory="")
    given, made = (tf.saved_model.load(str(tmp_path / each)) for each in ("given", "made"))
    np.testing.assert_array_equal(given.step(*batch()), made.step(*batch()))


@pytest.mark.usefixtures("little_memory")
def test_a_live_graph_stays() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [32, 12])
        weights = tf.compat.v1.get_variable("w", [12, 12])
        loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ weights) @ weights))
        train = tf.compat.v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        ops = [op.name for op in graph.get_operations()]
        with pytest.warns(tfmem.TfmemWarning, match="its memory was not planned"):
            tfmem.optimize(graph, fetches=[train.name], passes=("offload",), cache_directory="")
        assert [op.name for op in graph.get_operations()] == ops


def test_a_budget_that_the_user_gave_is_kept() -> None:
    step = tfmem.optimize(Softmax().step, passes=("offload",), memory_budget=TOO_LITTLE, cache_directory="")
    with pytest.raises(tfmem.InfeasibleBudgetError, match=f"memory_budget is {TOO_LITTLE:,} bytes"):
        step(*batch())
