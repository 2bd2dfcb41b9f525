"""Bad input gives one clear error before anything runs; a failing copy fails one step; nothing leaks."""

import functools
import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from custom_ops import load as loading
from tests.tf.conftest import IMAGES, LABELS, Flow, make_net, smallest_budget
from tests.tf.memop_trips import settled
from tests.tf.optimized_runs import in_a_process
from tfmem.runtime import host_memory as host
from tfmem.runtime.measured_call import Meter

KIB = 1 << 10
SPARE = 256 * KIB
OOM = "Detected at node 'Conv2D' defined at (most recent call last):\n\nOOM when allocating tensor with shape[8,8]"


class Training:
    """A step with what it would change: its variables, the spill directory, the counters."""

    def __init__(self, net, batch, flow, directory=None):
        self.net, self.batch, self.flow, self.directory = net, batch, flow, directory
        self.start = [variable.numpy() for variable in net.variables]

    def within(self, budget, **changes):
        options = tfmem.OffloadOptions(spill_directory=str(self.directory or ""), **changes)
        return tfmem.optimize(tf.function(self.net.step), memory_budget=budget, offload=options)

    def restart(self):
        for variable, value in zip(self.net.variables, self.start, strict=True):
            variable.assign(value)

    def check_untouched(self):
        for variable, value in zip(self.net.variables, self.start, strict=True):
            assert np.array_equal(variable, value)
        assert self.flow.moved == 0
        if self.directory and self.directory.is_dir():
            assert not list(self.directory.iterdir())


@pytest.fixture(name="training")
def fixture_training(new_net, batch, flow, tmp_path):
    return Training(new_net(), batch, flow, tmp_path)


@pytest.fixture(name="budget")
def fixture_budget(training, smallest):
    return SPARE + smallest(lambda size: training.within(size)(*training.batch))


# --- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, -5, 0.0, 1.5, "lots", "0GiB", 1 << 60, True])
def test_unusable_budgets(budget, training):
    with pytest.raises(tfmem.InvalidBudgetError, match="memory_budget="):
        training.within(budget)
    training.check_untouched()


def test_unknown_names(training):
    with pytest.raises(tfmem.OptionsError, match="policy='magic': expected one of optimal"):
        tfmem.optimize(tf.function(training.net.step), memory_budget="1GiB", policy="magic")
    with pytest.raises(tfmem.OptionsError, match="no option magic"):
        tfmem.optimize(tf.function(training.net.step), memory_budget="1GiB", magic=1)
    with pytest.raises(tfmem.OptionsError, match="device='GPU:7': there is no such device"):
        tfmem.optimize(tf.function(training.net.step), memory_budget="1GiB", device="GPU:7")
    training.check_untouched()


def test_smallest_budget_is_feasible(training, smallest, new_net):
    expected = tf.function(new_net().step)
    least = smallest(lambda size: training.within(size)(*training.batch))
    with pytest.raises(tfmem.InfeasibleBudgetError, match="give a budget of at least") as caught:
        training.within(least - 1, split="never")(*training.batch)
    assert caught.value.op in str(caught.value)
    training.check_untouched()
    budget = caught.value.smallest_budget
    assert budget > least
    function = training.within(budget, split="never")
    for _ in range(6):
        assert float(function(*training.batch)) == float(expected(*training.batch))
    report = tfmem.report(function)
    assert report.peak_measured <= budget
    assert "OVER BUDGET" not in str(report)


def test_no_gradient(training):
    function = tfmem.optimize(tf.function(training.net.loss), memory_budget=300 * KIB)
    with pytest.raises(tfmem.NoGradientError, match="no gradient in the graph"):
        function(*training.batch)
    training.check_untouched()


def test_a_step_that_is_small_beside_what_is_in_memory(training):
    """Its error says whose memory that is: of what the step needs, hardly anything is the step's."""
    held = tf.zeros([1 << 20])
    function = tfmem.optimize(tf.function(training.net.loss), memory_budget=300 * KIB)
    with pytest.raises(tfmem.NoGradientError) as caught:
        function(*training.batch)
    found = re.search(r"([\d,]+) of these are in use before the step", str(caught.value))
    assert found
    assert int(found[1].replace(",", "")) > held.shape.num_elements() * 4


def test_optimised_already(training, budget):
    function = training.within(budget)
    with pytest.raises(tfmem.AlreadyOptimizedError, match="pass the original function"):
        tfmem.optimize(function, memory_budget=budget)
    concrete = function.get_concrete_function(*training.batch)
    with pytest.raises(tfmem.AlreadyOptimizedError, match="holds tfmem's op"):
        tfmem.optimize(concrete, memory_budget=budget)
    training.check_untouched()


def test_unusable_spill_directory(training, budget, monkeypatch):
    training.directory = training.directory / "missing"
    with pytest.raises(tfmem.SpillDirectoryError, match="missing' is not a directory; create it, or name another"):
        training.within(budget)(*training.batch)
    training.check_untouched()
    read_only = Path("/proc/self")  # for every user, root too
    training.directory = read_only
    with pytest.raises(tfmem.SpillDirectoryError, match=r"cannot be written to .*; name another"):
        training.within(budget)(*training.batch)
    training.directory = None
    training.check_untouched()


def test_full_spill_directory(training, budget, monkeypatch):
    usage = type("Usage", (), {"free": 100 * KIB})
    monkeypatch.setattr("tfmem.runtime.host_memory.shutil.disk_usage", lambda path: usage)
    with pytest.raises(tfmem.SpillDirectoryError, match="has 102,400 free; name one with more space"):
        training.within(budget)(*training.batch)
    training.check_untouched()


def test_exhausted_host(training, budget):
    with pytest.raises(tfmem.HostMemoryError, match="spill_budget is 102,400; raise spill_budget"):
        training.within(budget, spill_budget=100 * KIB)(*training.batch)
    training.check_untouched()


class Host:
    """An op library that knows this much of the host's memory."""

    def __init__(self, available):
        self.available = available

    def host_memory(self):
        return loading.HostMemory(self.available, self.available)


def test_exhausted_host_memory_of_a_gpu():
    with pytest.raises(tfmem.HostMemoryError, match="host_budget is 10; raise host_budget"):
        host.require_room(11, tfmem.OffloadOptions(host_budget=10), True, Host(1000))
    host.require_room(1000, tfmem.OffloadOptions(), True, Host(1000))
    with pytest.raises(tfmem.HostMemoryError, match="which has 1,000 free for this process"):
        host.require_room(1001, tfmem.OffloadOptions(), True, Host(1000))


@pytest.mark.parametrize("content", [None, b"not a library"], ids=["missing", "broken"])
def test_unusable_op_library(content, training, tmp_path, monkeypatch):
    found = loading.find_library(tf.__version__)
    if content is not None:
        (tmp_path / found.name).write_bytes(content)
    monkeypatch.setattr(loading, "find_library", functools.partial(loading.find_library, directory=tmp_path))
    monkeypatch.setattr("tfmem.api.load", loading.load.__wrapped__)
    training.directory = None
    with pytest.raises(tfmem.OpLibraryError, match=f"TensorFlow {tf.__version__}.*Build one: `pip install") as caught:
        training.within("1GiB")
    assert found.name in str(caught.value)
    training.check_untouched()


def test_errors_keep_their_type_while_a_function_is_traced(training, batch):
    """AutoGraph wraps errors of types that it does not know."""

    @tf.function
    def step(x, y):
        loss = training.net.loss(x, y)
        return tfmem.avm_gradients(loss, training.net.variables, memory_budget=1000)

    with pytest.raises(tfmem.InfeasibleBudgetError) as caught:
        step(*batch)
    assert caught.value.smallest_budget > 1000


# --- faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["copy_out", "copy_in", "allocate"])
def test_a_fault_fails_one_step(kind, training, budget, new_net):
    net = new_net()
    reference = tf.function(net.step)
    expected = [float(reference(*training.batch)) for _ in range(8)]
    function = training.within(budget)
    library = training.flow.library
    function(*training.batch)  # the link to spill files is measured, once, and allocates, too
    for failing in (0, 2, 6):  # while it is observed, tried, and settled
        training.restart()
        found = [float(function(*training.batch)) for _ in range(failing)]
        before = [variable.numpy() for variable in training.net.variables]
        library.trim()  # spill files are used again; without, each step has to allocate
        library.inject_fault(kind, times=1)
        with pytest.raises(tf.errors.InternalError, match=f"injected fault: {kind} of '"):
            function(*training.batch)
        for variable, value in zip(training.net.variables, before, strict=True):
            variable.assign(value)  # as with any error in a step, some may have been updated
        found += [float(function(*training.batch)) for _ in range(failing, 8)]
        assert found == expected
    function(*training.batch)
    assert settled(library).live_tickets == 0
    assert not list(training.directory.iterdir())


def test_a_plan_that_runs_out_of_memory_is_replaced(training, budget, new_net, monkeypatch):
    net = new_net()
    reference = tf.function(net.step)
    expected = [float(reference(*training.batch)) for _ in range(6)]
    sampled, calls = Meter.sampled, []

    def fail_third(*given):
        calls.append(given)
        if len(calls) == 3:  # the first trial of a plan
            raise tf.errors.ResourceExhaustedError(None, None, OOM)
        return sampled(*given)

    monkeypatch.setattr(Meter, "sampled", fail_third)
    function = training.within(budget)
    assert [float(function(*training.batch)) for _ in range(6)] == expected
    assert len(calls) >= 3
    assert any("ran out of memory at 'Conv2D'" in note for note in tfmem.report(function).notes)


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.long
def test_nothing_leaks_over_1000_steps(flow, tmp_path):
    """In a separate process: what other tests left running here opens files and allocates at any time."""
    in_a_process(a_thousand_steps, tmp_path)


def a_thousand_steps(folder):
    library = loading.load()
    training = Training(make_net(), (tf.constant(IMAGES), tf.constant(LABELS)), Flow(library), folder)
    budget = SPARE + smallest_budget(lambda size: training.within(size)(*training.batch))
    function = training.within(budget)

    def state():
        gc.collect()
        counters = library.counters()
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "tickets": counters.live_tickets,
            "spill files": counters.open_spill_files,
            "spilled": counters.spill_bytes_allocated,
            "in use": int(library.stats()[0]),
        }

    for _ in range(100):
        function(*training.batch)
    before, host = state(), resident()
    for _ in range(1000):
        function(*training.batch)
    assert state() == before
    assert before["tickets"] == 0
    assert resident() - host < 32 << 20  # a leak of one tensor a step would be 512 MiB
    assert not list(training.directory.iterdir())
    assert training.flow.moved >= 1000 * tfmem.report(function).bytes_out_predicted > 0


def test_the_first_plan_from_a_profile_may_run_out_of_memory(training, budget, new_net, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("TFMEM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    observed = training.within(budget)
    for _ in range(3):
        observed(*training.batch)
    training.restart()
    net = new_net()
    reference = tf.function(net.step)
    expected = [float(reference(*training.batch)) for _ in range(4)]
    sampled, calls = Meter.sampled, []

    def fail_first(*given):
        calls.append(given)
        if len(calls) == 1:
            raise tf.errors.ResourceExhaustedError(None, None, OOM)
        return sampled(*given)

    monkeypatch.setattr(Meter, "sampled", fail_first)
    function = training.within(budget)
    assert [float(function(*training.batch)) for _ in range(4)] == expected
    notes = tfmem.report(function).notes
    assert any("measured by an earlier process" in note for note in notes)
    assert any("ran out of memory at 'Conv2D'" in note for note in notes)
