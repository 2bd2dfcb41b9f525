"""Which of the two runs: the unmodified step until it is timed, then the faster one. Timing has no visible effects."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.jit.cache import Cache
from custom_ops.load import HostMemory, Library
from graph_passes.decision import Fusion
from graph_passes.errors import OptionsError
from graph_passes.report import STITCHED, UNDECIDED
from tests.tf.memory_in_use import in_use
from tests.tf.stitched_steps import BY_MODEL, Softmax, batch, close, optimized, run, values
from tfmem.kernels.fusion_times import product_times
from tfmem.steps import comparing, on_copies
from tfmem.steps.states import Comparing
from tfmem.steps.variable_copies import Copies
from tfmem.steps.variants import TimedChoice
from tfmem.timing.ab_timing import ROUNDS, Times
from tfmem.timing.choices import choices

FAST, FULL = tfmem.FusionOptions(tune="fast", xla=False), tfmem.FusionOptions(tune="full", xla=False)


class Found:
    """Times that are found, in place of measured ones."""

    def __init__(self, *found: Times | None) -> None:
        self.left = list(found)
        self.slices = 0

    def __call__(self) -> Found:
        return self

    def go_on(self, given: Any, stitched: Any, limit: float) -> Times | None:
        given(), stitched()
        self.slices += 1
        return self.left.pop(0)


def test_copies_take_no_memory_that_the_control_group_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "host_memory", lambda *_: HostMemory(8, 1 << 40))
    plain, step = Softmax(), optimized(Softmax().step, fusion=FULL)
    close(run(step, 4), run(plain.step, 4))
    assert step_in(step)._state.turns is not None  # not on copies


def test_a_step_that_meets_its_budget_is_stitched() -> None:
    """What it draws goes on as before, though it is stitched only after the calls in which it is watched."""

    def trained(tune: Any, **options: Any) -> tuple[list[Any], Any]:
        tf.random.set_seed(3)
        model = Softmax()

        @tf.function
        def step(x: Any, y: Any) -> Any:
            return model.run(x + 0.1 * tf.random.normal(tf.shape(x)), y)

        managed = optimized(step, fusion=tune, **options) if options else step
        return run(managed, 8), managed

    expected, _ = trained(None)
    for tune in (BY_MODEL, FULL):
        found, step = trained(tune, passes=("recurrent", "fusion", "offload"), memory_budget=1 << 30)
        close(found, expected)
        report = tfmem.report(step)
        assert report.regions
        assert report.budget == 1 << 30
        assert "stitched" in report.fusion


def test_a_planned_step_says_why_it_is_not_stitched() -> None:
    weights = [tf.Variable(tf.random.stateless_normal([256, 256], [1, place], stddev=0.05)) for place in range(6)]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.relu(x @ weight)
            loss = tf.reduce_mean(x**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    step = optimized(step, passes=("recurrent", "fusion", "offload"), memory_budget=in_use() + (30 << 20))
    for _ in range(40):
        step(tf.ones([4096, 256]))
        step_in(step).wait()
        if not tfmem.report(step).fusion.startswith(UNDECIDED):
            break
    report = tfmem.report(step)
    assert report.fusion_state is not Fusion.UNDECIDED
    assert bool(report.running) != report.fusion.startswith("left unchanged: ")


def step_in(step: Any) -> Any:
    (known,) = step._steps.values()
    return known[()]


def test_a_difference_within_the_noise_is_said_to_be_so() -> None:
    assert str(TimedChoice(Times(4e-3, 2e-3), ", on copies")) == "stitched: 2 ms a step against 4 ms, on copies"
    unclear = str(TimedChoice(Times(4e-3, 2e-3, noise=2.5e-3), ", on copies"))
    assert unclear.startswith("left unchanged: stitched it took 2 ms a step against 4 ms")
    assert unclear.endswith("; times are off by up to 2.5 ms")
    assert str(TimedChoice(Times(2e-3, 4e-3, noise=1e-3), "")).endswith("4 ms a step against 2 ms")


def test_the_faster_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for times, faster in ((Times(0.002, 0.001), True), (Times(0.001, 0.002), False)):
        monkeypatch.setattr(on_copies, "Slices", Found(times))
        plain, model = Softmax(), Softmax()
        step = optimized(model.step, fusion=FULL)
        found, expected = run(step), run(plain.step)
        close(found, expected)
        report = tfmem.report(step)
        assert (report.decision == STITCHED) == faster
        assert report.fusion == (
            "stitched: 1 ms a step against 2 ms, on copies"
            if faster
            else "left unchanged: stitched it took 2 ms a step against 1 ms, on copies"
        )
        assert report.regions
        if not faster:
            np.testing.assert_array_equal(found, expected)


def test_first_calls_run_as_it_was_and_timing_comes_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found(None, None, Times(0.002, 0.001))
    monkeypatch.setattr(on_copies, "Slices", found)
    plain, model = Softmax(), Softmax()
    step = optimized(model.step, fusion=FAST)
    np.testing.assert_array_equal(run(step, 1), run(plain.step, 1))
    step_in(step).wait()
    for slices in (1, 2):
        np.testing.assert_array_equal(run(step, 1), run(plain.step, 1))
        assert found.slices == slices
        assert tfmem.report(step).fusion == "not decided yet: the unmodified step runs"
    close(run(step, 3), run(plain.step, 3))
    assert found.slices == 3
    assert tfmem.report(step).decision == STITCHED


@pytest.mark.parametrize("large", [True, False])
def test_no_call_waits_for_the_first_runs_of_a_large_step(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make kernels, in a thread; then calls time both."""
    threads: list[str] = []
    run_on_copies = Copies.run

    def counted(copies: Copies, function: Any) -> Any:
        threads.append(threading.current_thread().name)
        return run_on_copies(copies, function)

    monkeypatch.setattr(Copies, "run", counted)
    monkeypatch.setattr(on_copies, "LARGE", 1 if large else 10_000)
    plain, model = Softmax(), Softmax()
    step = optimized(model.step, fusion=FAST)
    close(run(step, 1), run(plain.step, 1))
    step_in(step).wait()
    close(run(step, 1), run(plain.step, 1))
    step_in(step).wait()
    assert threads[:2] == (["tfmem first runs"] * 2 if large else ["MainThread"] * 2)
    assert ("MainThread" in threads) != large
    close(run(step, 8), run(plain.step, 8))
    assert "on copies" in tfmem.report(step).fusion
    close(values(model.variables), values(plain.variables))


def test_first_runs_that_fail_leave_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(copies: Copies, function: Any) -> Any:
        raise tf.errors.ResourceExhaustedError(None, None, "no room")

    monkeypatch.setattr(Copies, "run", fails)
    monkeypatch.setattr(on_copies, "LARGE", 1)
    plain, model = Softmax(), Softmax()
    step = optimized(model.step, fusion=FAST)
    for _ in range(4):
        np.testing.assert_array_equal(run(step, 1), run(plain.step, 1))
        step_in(step).wait()
    assert "timing failed with ResourceExhaustedError" in tfmem.report(step).fusion


def test_timing_updates_nothing_and_draws_nothing() -> None:
    def made() -> tuple[Any, Any, Any]:
        tf.random.set_seed(3)
        count, total = tf.Variable(0, dtype=tf.int64), tf.Variable(tf.zeros([32, 12]))

        @tf.function
        def step(x: Any) -> Any:
            noise = tf.random.normal([32, 12])
            count.assign_add(1)
            total.assign(total * 0.9 + tf.tanh(noise * x) * 2.0)
            return tf.reduce_sum(tf.sigmoid(noise) * x)

        return step, count, total

    x, _ = batch()
    plain, _, plain_total = made()
    expected = run(plain, 6, x)
    step, count, total = made()
    step = optimized(step, fusion=FULL)
    close(run(step, 6, x), expected)
    assert count.numpy() == 6
    close(total, plain_total)
    assert "on copies" in tfmem.report(step).fusion


def test_a_choice_is_kept_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = Found(Times(0.002, 0.001), Times(0.001, 0.002))
    monkeypatch.setattr(on_copies, "Slices", found)

    @tf.function
    def function(x: Any) -> Any:
        return tf.reduce_sum(tf.tanh(x) * 2.0 + 1.0)

    x, _ = batch()
    said = []
    for slices in (1, 1, 2):
        step = optimized(function, fusion=FULL, cache_directory=str(tmp_path))
        step(x)
        assert found.slices == slices
        said.append(tfmem.report(step).fusion)
        if len(said) == 2:  # what another program made of the file is found out, and timed again
            (file,) = (tmp_path / "choices").glob("*/*")
            file.write_bytes(file.read_bytes()[:-3])
    assert said == [
        "stitched: 1 ms a step against 2 ms, on copies",
        "stitched: 1 ms a step against 2 ms; known from the cache",
        "left unchanged: stitched it took 2 ms a step against 1 ms, on copies",
    ]


def test_what_would_be_noticed_is_timed_as_it_runs() -> None:
    """Its calls run the one and the other in turn: nothing happens twice, and the random numbers go on."""
    seen: list[float] = []

    def make() -> Any:
        @tf.function
        def step(x: Any) -> Any:
            tf.py_function(lambda value: seen.append(float(value)), [tf.reduce_mean(x)], [])
            return tf.reduce_sum(tf.tanh(x) * 2.0 + 1.0) + tf.random.normal([], seed=3)

        return step

    x, _ = batch()
    count = 2 * (ROUNDS + 1) + 3
    fused = optimized(make(), fusion=FULL)
    close(run(fused, count, x), run(make(), count, x))
    assert len(seen) == 2 * count
    assert ", in turn" in tfmem.report(fused).fusion


def test_a_turn_lasts_until_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a call returns before the step has run."""

    @tf.function
    def step(x: Any) -> Any:
        tf.py_function(lambda value: None, [tf.reduce_mean(x)], [])  # would be noticed, so it is not run on copies
        return tf.reduce_sum(tf.tanh(x) * 2.0 + 1.0)

    x, _ = batch()
    busy = False
    call = comparing.call_traced

    def called(function: Any, *arguments: Any) -> Any:
        nonlocal busy
        state = step_in(fused)._state
        busy = isinstance(state, Comparing) and function is state.variants.function
        return call(function, *arguments)

    now = 0.0

    def synced() -> None:
        nonlocal busy, now
        now += 0.051 if busy else 0.001
        busy = False

    monkeypatch.setattr(comparing, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(comparing, "call_traced", called)
    monkeypatch.setattr(comparing, "wait_for_devices", synced)
    fused = optimized(step, fusion=FULL)
    run(fused, 2 * (ROUNDS + 1) + 1, x)
    assert tfmem.report(fused).fusion.startswith("left unchanged: stitched it took 51 ms a step against 1 ms")


def test_a_variable_without_a_value_is_the_callers_error_while_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Softmax()
    step = optimized(model.step, fusion=FULL)
    before = values(model.variables)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        step(tf.zeros([3, 7]), tf.zeros([3, 5]))
    np.testing.assert_array_equal(values(model.variables)[0], before[0])


def test_determinism_plans_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "is_deterministic", lambda: True)
    monkeypatch.setattr(on_copies, "Slices", Found())
    step = optimized(Softmax().step, fusion=FULL)
    run(step, 2)
    assert tfmem.report(step).fusion == "stitched, as the cost model chose: op determinism is on"


@pytest.mark.parametrize("fusion", [FAST, FULL], ids=["fast", "full"])
def test_what_asks_for_xla_is_left_to_it(fusion: tfmem.FusionOptions) -> None:
    plain, found = Softmax(), Softmax()
    step = optimized(tf.function(found.step.python_function, jit_compile=True), fusion=fusion)
    expected = run(tf.function(plain.step.python_function, jit_compile=True), 3)
    np.testing.assert_array_equal(run(step, 3), expected)
    assert tfmem.report(step).fusion == "left to XLA, which the function asks for"


def test_there_is_no_other_way_to_tune() -> None:
    with pytest.raises(OptionsError, match="tune='slow': expected one of off, fast, full"):
        tfmem.FusionOptions(tune="slow")  # type: ignore[arg-type]


HUGE = 10**400  # no float holds it


@pytest.mark.parametrize("content", [HUGE, None, "x", [], {}, [HUGE], {"given": HUGE, "stitched": 1.0}, {"given": [1]}])
def test_sealed_files_of_any_content_count_as_not_there(content: Any, tmp_path: Path) -> None:
    known, cache = choices(str(tmp_path)), Cache(tmp_path / "choices")
    cache.keep("key", json.dumps(content).encode())
    assert known.find("key") is None
    assert product_times(cache).find("key") is None
    known.keep("key", Times(1.0, 2.0))
    assert known.find("key") == Times(1.0, 2.0)
