"""A step that could not be measured alone runs and trains, and nothing of what was measured is used or kept."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops.load import Library, load
from tests.tf.optimized_runs import in_a_process
from tfmem.api import make_engine
from tfmem.runtime import measuring_lock
from tfmem.runtime.measuring_lock import WaitsFor
from tfmem.steps.known_profiles import BatchProfiles, KnownProfiles

SPARE = 256 << 10


class Training:
    """Losses of the net in TensorFlow, and within a budget that moves something."""

    def __init__(self, new_net, batch, smallest):
        self.new_net, self.batch = new_net, batch
        plain = tf.function(new_net().step)
        self.expected = [float(plain(*batch)) for _ in range(12)]
        self.budget = SPARE + smallest(lambda size: self.within(size)(*batch))

    def within(self, budget):
        return tfmem.optimize(tf.function(self.new_net().step), memory_budget=budget)

    def losses(self, function, count):
        return [float(function(*self.batch)) for _ in range(count)]


@pytest.fixture(name="training")
def fixture_training(new_net, batch, flow, smallest, monkeypatch, tmp_path):
    training = Training(new_net, batch, smallest)
    monkeypatch.setenv("TFMEM_CACHE_DIR", str(tmp_path))
    training.folder = tmp_path
    return training


def kept(training):
    """The profiles on disk."""
    return [path for path in (training.folder / "profiles").rglob("*") if path.is_file()]


def test_what_another_step_ran_beside_is_not_used(training, monkeypatch):
    monkeypatch.setattr(measuring_lock, "PATIENCE", 0.01)
    with measuring_lock.alone() as turn:
        function = training.within(training.budget)
        losses = training.losses(function, 8)
        assert turn.held
        assert not turn.alone  # nor is what the other measured
    report = tfmem.report(function)
    assert any(note.startswith("not measured: ") for note in report.notes)
    assert report.peak_measured is None
    assert report.decision == "moved"
    assert not kept(training)
    assert losses + training.losses(function, 4) == training.expected


@pytest.mark.parametrize("waited", [1, 2])
def test_it_is_measured_as_soon_as_it_can_be(training, monkeypatch, waited):
    monkeypatch.setattr(measuring_lock, "PATIENCE", 0.01)
    function = training.within(training.budget)
    losses = training.losses(function, 1)
    with measuring_lock.alone():
        losses += training.losses(function, waited)
    losses += training.losses(function, 11 - waited)
    assert losses == training.expected
    report = tfmem.report(function)
    assert report.peak_measured <= training.budget
    assert not any("not measured" in note for note in report.notes)
    assert len(kept(training)) == 1


def test_a_peak_that_was_not_watched_alone_is_none(training, monkeypatch):
    monkeypatch.setattr(measuring_lock, "PATIENCE", 0.01)
    function = training.within(training.budget)
    losses = training.losses(function, 4)  # the final plan runs
    assert tfmem.report(function).peak_measured is not None
    with measuring_lock.alone():
        losses += training.losses(function, 4)
    assert any("not measured" in note for note in tfmem.report(function).notes)
    assert losses + training.losses(function, 4) == training.expected


def test_calls_that_overlap_disturb_each_other(monkeypatch):
    monkeypatch.setattr(measuring_lock, "PATIENCE", 0.01)
    engine = make_engine(tfmem.Options(memory_budget="1GiB"))

    def within():
        assert engine.memory.in_use >= 0
        assert engine.memory.in_use_alone is None
        return 7

    result, peak = engine.meter.watched(within)
    assert result == 7
    assert peak is not None  # reading disturbs no call
    (inner, no_peak), outer = engine.meter.watched(lambda: engine.meter.watched(within))
    assert inner == 7
    assert no_peak is None
    assert outer is None
    _, samples, _ = engine.meter.sampled(10**6, lambda: None)
    assert samples == []
    with measuring_lock.alone():
        assert engine.meter.sampled(10**6, lambda: None)[1] is None
    assert engine.memory.in_use_alone is not None


def test_a_call_that_waits_for_other_processes_makes_none_wait(monkeypatch):
    """Neither it nor one that is measured meanwhile knows what it took."""
    engine = make_engine(tfmem.Options(memory_budget="1GiB"))
    device = [engine.settings.target.name]
    assert engine.meter.watched_on(device, lambda: 7, waits=WaitsFor.PROCESSES)[1] is not None
    assert engine.meter.watched(lambda: 7)[1] is not None
    with measuring_lock.alone() as turn:
        assert engine.meter.watched_on(device, lambda: 7, waits=WaitsFor.PROCESSES) == (7, None)
        assert not turn.alone
    (_, inner), outer = engine.meter.watched(lambda: engine.meter.watched(lambda: 7), WaitsFor.PROCESSES)
    assert inner is None
    assert outer is None
    assert engine.memory.in_use_alone is not None
    monkeypatch.setattr(measuring_lock, "PATIENCE", 0.0)
    with measuring_lock.beside(), measuring_lock.alone() as turn:
        assert turn.held


def test_a_call_that_runs_python_code_makes_none_wait(monkeypatch):
    """What it calls is measured in its stead, at once."""
    monkeypatch.setattr(measuring_lock, "PATIENCE", 300.0)
    engine = make_engine(tfmem.Options(memory_budget="1GiB"))
    (_, inner), outer = engine.meter.watched(lambda: engine.meter.watched(lambda: 7), WaitsFor.PYTHON)
    assert inner is not None
    assert outer is None
    (_, inner), outer = engine.meter.watched(lambda: engine.meter.watched(lambda: 7, WaitsFor.PYTHON), WaitsFor.PYTHON)
    assert inner is None  # to set the peak back would make that of the other one too low
    assert outer is not None
    with measuring_lock.alone() as turn:
        assert engine.meter.watched(lambda: 7, WaitsFor.PYTHON) == (7, None)
        assert turn.alone


def calls_another():
    """The results of a step that calls another one, what plain TensorFlow gives, seconds, both measured peaks."""

    def gradient(x, factor):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(12):
                y = tf.tanh(y) * factor
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    def made(optimize):
        within = optimize(tf.function(lambda x: gradient(x, 0.9)))

        def outer(x):
            y = tf.numpy_function(lambda value: within(tf.constant(value)).numpy(), [x], tf.float32)
            return gradient(x, tf.ensure_shape(y, x.shape))

        return optimize(tf.function(outer)), within

    x = tf.random.stateless_normal([1 << 18], [1, 2])
    outer, within = made(lambda function: tfmem.optimize(function, memory_budget="16MiB", cache_directory=""))
    expected, _ = made(lambda function: function)
    began = time.monotonic()
    found = [outer(x).numpy() for _ in range(40)]
    took = time.monotonic() - began
    return found, expected(x).numpy(), took, [tfmem.report(step).peak_measured for step in (outer, within)]


def test_a_step_that_calls_another_one_is_measured_once_that_is():
    """In a separate process, so that its tensors count towards no budget here."""
    found, expected, took, peaks = in_a_process(calls_another)
    assert took < measuring_lock.PATIENCE
    np.testing.assert_array_equal(found, np.broadcast_to(expected, np.shape(found)))
    assert all(peaks), peaks


def test_one_that_is_held_up_sets_nothing_back():
    """The peak is everyone's: to set it back would make another's too low. In a separate process, for the same reason:
    what other tests left running here allocates at any time."""
    before, after = in_a_process(peaks_beside_another)
    assert before == after


def peaks_beside_another():
    with pytest.MonkeyPatch.context() as patch, tf.device("CPU:0"):
        patch.setattr(measuring_lock, "PATIENCE", 0.01)
        engine = make_engine(tfmem.Options(memory_budget="1GiB"))
        load().stats(reset=True)
        large = tf.zeros([1 << 20])
        with measuring_lock.alone():
            peak = int(load().stats()[1])
            del large
            engine.meter.watched(lambda: None)
            return peak, int(load().stats()[1])


def test_a_profile_beside_unknown_memory_is_neither_kept_nor_found(tmp_path):
    options = tfmem.Options(cache_directory=str(tmp_path))
    target = SimpleNamespace(is_gpu=False, memory=1 << 30)
    memory = SimpleNamespace(in_use_alone=None)
    settings = SimpleNamespace(options=options, observes=True, target=target)
    engine = SimpleNamespace(settings=settings, memory=memory)
    known = KnownProfiles(engine, SimpleNamespace(fingerprint=lambda: "key"), BatchProfiles())
    known.keep(None)
    assert not list(tmp_path.rglob("*"))
    assert known.find() is None


def test_what_trials_locked_stays_until_the_chosen_plan_has_run(training, monkeypatch):
    """Locking host memory takes long, so settling frees none of it; what the plan has not taken then goes."""
    calls = []
    trim, trim_unused = Library.trim, Library.trim_unused
    monkeypatch.setattr(
        Library, "trim", lambda self, keep_pinned=False: (calls.append(keep_pinned), trim(self, keep_pinned))
    )
    monkeypatch.setattr(Library, "trim_unused", lambda self: (calls.append("unused"), trim_unused(self)))
    assert training.losses(training.within(training.budget), 12) == training.expected
    assert calls[0] is True
    assert set(calls[1:]) == {"unused"}
