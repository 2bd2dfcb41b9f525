"""A step is planned, and its recurrent layers are replaced, in the background; until then it runs unmodified."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis.cost import device_costs as profiles
from graph_passes.decision import FusionWhy
from graph_passes.passes.recurrent.match import RecurrentPlan
from tests.tf.stitched_steps import close, values
from tfmem.api import make_engine
from tfmem.devices import Target
from tfmem.kernels import replace_recurrent as recurrent
from tfmem.runtime.engine import Engine
from tfmem.runtime.settings import Settings
from tfmem.steps import planning
from tfmem.steps.planning import can_wait
from tfmem.steps.trace import Trace

FAST = tfmem.FusionOptions(tune="fast")
OPTIONS: dict[str, Any] = {"passes": ("recurrent", "fusion"), "fusion": FAST, "cache_directory": ""}
GPU = Target("/device:GPU:0", "NVIDIA H200", 1 << 30, profiles.load("h200"))
X = np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)


class Net:
    """Six steps of a recurrent cell that are written out, trained by gradient descent."""

    def __init__(self, noise: float = 0.0) -> None:
        rng = np.random.default_rng(1)
        self.noise = noise
        self.variables = [tf.Variable(rng.normal(size=(11, 8)).astype(np.float32) / 3)]
        self.step = tf.function(self.run)

    def run(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            if self.noise:
                x += self.noise * tf.random.normal(tf.shape(x), seed=1)
            kernel, state = self.variables[0].read_value(), tf.zeros([x.shape[0], 8])
            for row in tf.unstack(x, axis=1):
                state = tf.tanh(tf.concat([row, state], 1) @ kernel)
            loss = tf.reduce_mean((state - 0.5) ** 2)
        for variable, gradient in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
            variable.assign_sub(0.3 * gradient)
        return loss


@pytest.fixture(name="asked")
def fixture_asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, threading.Event]:
    """Kernels are begun, and made once that is allowed; as for a GPU, though none is asked for."""
    events = {"begun": threading.Event(), "allowed": threading.Event()}
    with_kernels = recurrent.with_kernels

    def made(plan: RecurrentPlan, *given: Any) -> RecurrentPlan:
        events["begun"].set()
        assert events["allowed"].wait(60)
        return with_kernels(plan, *given)

    monkeypatch.setattr(recurrent, "with_kernels", made)
    monkeypatch.setattr(planning, "can_wait", lambda engine, trace: True)
    return events


def step_in(function: Any) -> Any:
    """The `ManagedStep` of an optimised function's one trace."""
    ((known,),) = [list(found.values()) for found in function._steps.values()]
    return known


def test_the_step_runs_as_it_was_until_there_are_kernels(asked: dict[str, threading.Event]) -> None:
    plain, net = Net(), Net()
    step = tfmem.optimize(net.step, **OPTIONS)
    x = tf.constant(X)
    np.testing.assert_array_equal(step(x), plain.step(x))
    assert asked["begun"].wait(60)
    for _ in range(3):  # they are being made
        np.testing.assert_array_equal(step(x), plain.step(x))
    report = tfmem.report(step)
    assert report.fusion == FusionWhy.MEANWHILE
    assert not report.replaced
    asked["allowed"].set()
    step_in(step).wait()
    for _ in range(4):
        close(step(x), plain.step(x))
    close(values(net.variables), values(plain.variables))
    report = tfmem.report(step)
    assert len(report.replaced) == 1, report
    assert report.fusion != FusionWhy.MEANWHILE


def test_while_a_step_is_observed_the_report_says_so(asked: dict[str, threading.Event]) -> None:
    """Under a budget, a step is observed between its planning and that of fusion."""
    passes = ("recurrent", "fusion", "offload")
    step = tfmem.optimize(Net().step, memory_budget="8GiB", **{**OPTIONS, "passes": passes})
    asked["allowed"].set()
    step(tf.constant(X))
    step_in(step).wait()
    for _ in range(6):
        step(tf.constant(X))
        assert tfmem.report(step).fusion


def test_calls_from_two_threads_meanwhile(asked: dict[str, threading.Event]) -> None:
    net = Net()
    step = tfmem.optimize(net.step, **OPTIONS)
    x = tf.constant(X)
    step(x)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for place in range(20):
                if place == 5:
                    asked["allowed"].set()
                assert np.isfinite(step(x))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    step_in(step).wait()
    step(x)
    assert tfmem.report(step).replaced


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("where", ["replaced_layers", "start"])
def test_a_failure_leaves_the_step_as_it_was(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(*((Trace, where) if where == "replaced_layers" else (planning, where)), broken)
    plain, net = Net(), Net()
    step = tfmem.optimize(net.step, **OPTIONS)
    x = tf.constant(X)

    def calls() -> None:
        for _ in range(3):
            close(step(x), plain.step(x))
            step_in(step).wait()

    with pytest.warns(tfmem.TfmemWarning, match="failed with RuntimeError: out of luck"):
        calls()
    report = tfmem.report(step)
    assert not report.replaced
    assert any("out of luck" in note for note in report.notes)


def on(target: Target, options: tfmem.Options) -> Engine:
    engine = make_engine(options)
    return engine.under(replace(engine.settings, target=target))


def test_whether_it_can_wait() -> None:
    def asked(noise: float = 0.0, target: Target = GPU, **changes: Any) -> bool:
        engine = on(target, tfmem.Options(**{**OPTIONS, **changes}))
        return can_wait(engine, Trace(Net(noise).step.get_concrete_function(tf.constant(X)), engine))

    assert asked()
    assert not asked(noise=0.1), "another graph would not go on with its random numbers"
    assert not asked(target=replace(GPU, name="/device:CPU:0")), "a CPU's kernel is there"
    assert not asked(fusion=tfmem.FusionOptions(tune="off"))
    assert not asked(fusion=tfmem.FusionOptions(tune="full"))
    assert not asked(observe=False), "a graph that is exported is final"
    assert not asked(passes=("recurrent",))
    assert not asked(passes=("fusion",)), "there is nothing to wait for"


def test_a_budget_that_it_may_not_meet_is_planned_at_once() -> None:
    function = Net().step
    trace = function.get_concrete_function(tf.constant(X))
    for budget, expected in ((1 << 40, True), (1 << 10, False)):
        engine = make_engine(tfmem.Options(**OPTIONS))
        assert Trace(trace, engine).surely_fits(budget) == expected
    with_budget = {**OPTIONS, "passes": ("recurrent", "fusion", "offload"), "memory_budget": 1 << 29}
    engine = on(GPU, tfmem.Options(**with_budget))
    assert not can_wait(engine, Trace(trace, engine)), "the user's own budget"


def test_replicas_are_planned_at_once() -> None:
    """They are never fused, so that to wait would only slow their steps down while a thread plans."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        net = Net()
    engine = on(GPU, tfmem.Options(**OPTIONS))
    assert can_wait(engine, Trace(Net().step.get_concrete_function(tf.constant(X)), engine))
    assert not can_wait(engine, Trace(net.step.get_concrete_function(tf.constant(X)), engine))


def test_which_passes_run_by_default() -> None:
    """Fusion does on a GPU, if this process calls the step, so that it is timed; and if no option says otherwise."""
    options = tfmem.Options(cache_directory="")
    called, not_called = (Settings.of(options, GPU, called=called) for called in (True, False))
    assert called.passes == ("recurrent", "fusion", "offload")
    assert called.unlimited().passes == ("recurrent", "fusion")
    others = [not_called, called.unobserved(), make_engine(options, called=True).settings]
    assert {settings.passes for settings in others} == {("recurrent", "offload")}
    assert called.unlimited().unobserved().passes == ("recurrent",)
    asked = make_engine(tfmem.Options(passes=("offload",)))
    assert asked.settings.passes == ("offload",)
    assert asked.notices.asked
    assert not make_engine(options).notices.asked
