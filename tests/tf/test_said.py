"""What a user should not have to find out: what became of an optimizer's step, that a copy changes nothing, and what to
do where nothing can be observed."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from graph_passes.decision import Decision
from tests.tf.python_server import run_python
from tfmem.steps import managed_step
from tfmem.steps.managed_step import ManagedStep
from tfmem.steps.phases import Event, StepMachine, Transition
from tfmem.steps.states import Placed, Trying

ROOT = Path(__file__).parents[2]

WITHOUT_ONEDNN = """
import json, warnings
import numpy as np
import tensorflow as tf
import tfmem

VALUE = np.ones((3, 3, 8, 8), np.float32) / 72
x = tf.ones([16, 64, 64, 8])

def loss_of(x, weights):
    for weight in weights:
        x = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, weight, 1, "SAME")), 2, 1, "SAME")
    return tf.reduce_mean(x**2)

def function(**options):
    weights = [tf.Variable(VALUE) for _ in range(4)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, weights)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    optimized = tfmem.optimize(step, cache_directory="", **options)
    optimized(x)
    return tfmem.report(optimized)

def graph(gradients):
    with tf.Graph().as_default() as made:
        weights = [tf.compat.v1.get_variable(str(place), initializer=VALUE, use_resource=True) for place in range(4)]
        loss = loss_of(tf.compat.v1.placeholder(tf.float32, x.shape), weights)
        pairs = zip(gradients(loss, weights), weights, strict=True)
        tf.compat.v1.train.GradientDescentOptimizer(0.1).apply_gradients(pairs, name="train")
    return made

def live(**options):
    options = tfmem.Options(cache_directory="", **options)
    return tfmem.report(graph(lambda loss, weights: tfmem.avm_gradients(loss, weights, options=options)))

def serialised(**options):
    graph_def = graph(tf.gradients).as_graph_def()
    return tfmem.report(tfmem.optimize(graph_def, fetches=["train"], cache_directory="", **options))

def run(way, **options):
    try:
        way(memory_budget=1 << 20)
    except tfmem.InfeasibleBudgetError as error:
        budget = error.smallest_budget + (4 << 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = way(memory_budget=budget, **options)
    told = [str(each.message) for each in caught if issubclass(each.category, tfmem.TfmemWarning)]
    return {"told": told, "report": report.to_json()}

ways = [run(way) for way in (function, live, serialised)]
print(json.dumps({"ways": ways, "unasked": run(function, observe=False)["told"]}))
"""


@pytest.mark.long
def test_where_onednn_is_off_the_cure_is_told_and_it_is_no_reason() -> None:
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = run_python(["-c", WITHOUT_ONEDNN], environment, ROOT)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    for way in found["ways"]:
        report = tfmem.Report.from_json(way["report"])
        assert report.transfers
        assert not [note for note in report.notes if "oneDNN's gradient" in note]
    (told,) = found["ways"][0]["told"]
    assert "set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported, or pass observe=False" in told
    assert not found["unasked"]


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["apply", "apply_gradients"])
def test_a_wrapped_optimizer_has_the_report_of_its_step(library: Any) -> None:
    """Keras 3 calls `apply` for gradients of either kind; `tf_keras` has `apply_gradients` alone."""
    variables = [tf.Variable(tf.ones([8, 8])), tf.Variable(tf.ones([8, 8]))]
    given = library.optimizers.SGD(0.1)
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
    """A product that is stitched with the ops behind it, and a choice that stays unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.ones([4, 4]))

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def run(self, x: Any) -> Any:
        return tf.tanh(x @ self.weight) * 2.0

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def largest(self, x: Any) -> Any:
        return tf.math.top_k(x, 2).values


def told_of_copies(path: Path, output: Path, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tfmem.TfmemWarning)
        tfmem.optimize(path, output=output, **options)
    return [str(each.message) for each in caught if "is a copy of" in str(each.message)]


def test_a_saved_model_in_which_nothing_changed_is_said_to_be_a_copy(tmp_path: Path) -> None:
    module, given = Product(), tmp_path / "given"
    signatures = {name: getattr(module, name).get_concrete_function() for name in ("run", "largest")}
    tf.saved_model.save(module, str(given), signatures=signatures)
    (told,) = told_of_copies(given, tmp_path / "copy")
    note = f"no function of it was changed (unchanged: no budget): '{tmp_path / 'copy'}' is a copy of '{given}'"
    assert note in told
    assert note in tfmem.report(tmp_path / "copy").notes
    fusion = {"passes": ("fusion",), "fusion": tfmem.FusionOptions(tune="off")}
    assert not told_of_copies(given, tmp_path / "once", **fusion)
    with pytest.raises(tfmem.AlreadyOptimizedError, match="once' was optimised before"):
        tfmem.optimize(tmp_path / "once", output=tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
    (told,) = told_of_copies(tmp_path / "copy", tmp_path / "another")  # of a copy nothing was changed
    assert "(unchanged: no budget)" in told


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
        search = SimpleNamespace(trials=range(count), dry_run=True, stays=None)
        return Trying(function=settled, report=report, search=search, plan=None)

    class Step(ManagedStep):
        """Two trials, and then it is settled."""

        def __init__(self) -> None:
            options = SimpleNamespace(progress=True)
            self._job: Any = SimpleNamespace(
                engine=SimpleNamespace(settings=SimpleNamespace(options=options)), is_gpu=False
            )
            self._machine: Any = StepMachine("step", trial(0))
            self._took = 0.0

        def _probed(self, state: Any, *_: Any) -> tuple[bool, Any]:
            following = Transition(Event.NEXT, trial(1))
            if len(state.search.trials) == 1:
                following = Transition(Event.UNWATCHED, Placed(function=settled, report=report, unchanged=True))
            self._take(following)
            return False, None

        def _go_on(self) -> None:
            pass

    monkeypatch.setattr(managed_step, "shown", line)
    assert Step()._alone((), {}).numpy() == b"settled"
    assert shown == ["step: trial 1 of at most 4", "step: trial 2 of at most 4"]
