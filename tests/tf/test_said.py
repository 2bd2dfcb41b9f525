"""What a user should not have to find out: what became of an optimizer's step, that a copy changes nothing, and what to
do where nothing can be observed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import Decision
from tfmem.steps import managed_step
from tfmem.steps.managed_step import ManagedStep
from tfmem.steps.phases import Event, Machine, Move
from tfmem.steps.states import Placed, Trying

ROOT = Path(__file__).parents[2]

WITHOUT_ONEDNN = """
import json, warnings
import numpy as np
import tensorflow as tf
import tfmem

weights = [tf.Variable(np.ones((3, 3, 8, 8), np.float32) / 72) for _ in range(4)]

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        for weight in weights:
            x = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, weight, 1, "SAME")), 2, 1, "SAME")
        loss = tf.reduce_mean(x**2)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.1 * gradient)
    return loss

x = tf.ones([16, 64, 64, 8])
try:
    tfmem.optimize(step, memory_budget=1 << 20)(x)
except tfmem.InfeasibleBudgetError as error:
    budget = error.smallest_budget + (4 << 20)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimized = tfmem.optimize(step, memory_budget=budget, cache_directory="")
    optimized(x)
    told = [str(each.message) for each in caught if issubclass(each.category, tfmem.TfmemWarning)]
print(json.dumps({"told": told, "report": tfmem.report(optimized).to_json()}))
"""


def test_where_onednn_is_off_the_cure_is_told_and_it_is_no_reason() -> None:
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ONEDNN],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    report = tfmem.Report.from_json(found["report"])
    assert report.transfers
    assert not [note for note in report.notes if "oneDNN's gradient" in note]
    (told,) = found["told"]
    assert "set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported, or pass observe=False" in told


def test_a_wrapped_optimizer_has_the_report_of_its_step() -> None:
    variables = [tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8, 8]))]
    given = keras.optimizers.SGD(0.1)
    wrapped = tfmem.wrap_optimizer(given, memory_budget="8GiB")
    with pytest.raises(tfmem.GraphError, match="no report"):
        tfmem.report(wrapped)

    @tf.function
    def step(x: Any) -> Any:
        loss = tf.reduce_mean(tf.tanh(x @ variables[0]) @ variables[1])
        wrapped.apply_gradients(zip(tf.gradients(loss, variables), variables, strict=True))
        return loss

    step(tf.ones([4, 8]))
    small = tfmem.report(wrapped)
    assert small.decision == "unchanged: fits"
    step(tf.ones([4096, 8]))
    large = tfmem.report(wrapped)
    assert large.peak_before > small.peak_before
    step(tf.ones([2, 8]))
    assert tfmem.report(wrapped) == large
    for other in (given, tfmem.wrap_optimizer(given)):
        with pytest.raises(tfmem.GraphError, match="no report"):
            tfmem.report(other)


class Product(tf.Module):  # type: ignore[misc]
    """One product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.ones([4, 4]))

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def run(self, x: Any) -> Any:
        return tf.tanh(x @ self.weight) * 2.0


def told_of_copies(path: Path, output: Path, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tfmem.TfmemWarning)
        tfmem.optimize(path, output=output, **options)
    return [str(each.message) for each in caught if "is a copy of" in str(each.message)]


def test_a_saved_model_in_which_nothing_changed_is_said_to_be_a_copy(tmp_path: Path) -> None:
    module, given = Product(), tmp_path / "given"
    tf.saved_model.save(module, str(given), signatures=module.run.get_concrete_function())
    (told,) = told_of_copies(given, tmp_path / "copy")
    note = f"no function of it was changed (unchanged: no budget): '{tmp_path / 'copy'}' is a copy of '{given}'"
    assert note in told
    assert note in tfmem.report(tmp_path / "copy").notes
    fusion = {"passes": ("fusion",), "fusion": tfmem.FusionOptions(tune="off")}
    assert not told_of_copies(given, tmp_path / "once", **fusion)
    (told,) = told_of_copies(tmp_path / "once", tmp_path / "twice")
    assert "no function of it was changed (it was optimised before)" in told


def test_what_is_shown_of_a_trial_is_true_until_it_has_been_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning goes on after the call of the last of four: the line said "trial 5 of at most 4"."""
    shown = []

    @contextmanager
    def line(_: bool, text: Any, __: float = 0.0) -> Any:
        yield
        shown.append(text())

    settled = tf.function(lambda: tf.constant("settled")).get_concrete_function()
    report = tfmem.Report("step", "CPU", "hybrid", Decision.MOVED, 0, 0)

    def trial(count: int) -> Any:
        search = SimpleNamespace(trials=range(count), dry_run=True)
        return Trying(function=settled, report=report, search=search, plan=None)

    class Step(ManagedStep):
        """Two trials, and then it is settled."""

        def __init__(self) -> None:
            options = SimpleNamespace(progress=True)
            self._job: Any = SimpleNamespace(engine=SimpleNamespace(options=options), is_gpu=False)
            self._machine: Any = Machine("step", trial(0))
            self._took = 0.0

        def _probed(self, state: Any, *_: Any) -> tuple[bool, Any]:
            following = Move(Event.NEXT, trial(1))
            if len(state.search.trials) == 1:
                following = Move(Event.UNWATCHED, Placed(function=settled, report=report, unchanged=True))
            self._move(following)
            return False, None

        def _go_on(self) -> None:
            pass

    monkeypatch.setattr(managed_step, "shown", line)
    assert Step()._alone((), {}).numpy() == b"settled"
    assert shown == ["step: trial 1 of at most 4", "step: trial 2 of at most 4"]
