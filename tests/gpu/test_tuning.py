"""The micro-benchmark and the tuner on a real GPU. Needs NVRTC, no framework."""

from __future__ import annotations

import time

import pytest

from custom_ops.jit.cache import Cache
from custom_ops.machine import read
from custom_ops.recurrent import cells
from custom_ops.recurrent.search import microbenchmark
from custom_ops.recurrent.search.bench import DeviceBench
from custom_ops.recurrent.search.ranking import rank
from custom_ops.recurrent.search.tune import tune
from custom_ops.recurrent.spec import RecurrentSpec

pytest_plugins = ("tests.gpu_device",)

SELECTION_SECONDS = 10  # cold, all batch sizes
MEASURING_SECONDS = 5  # with the compiler's start


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("kernels"))


def test_a_gpu_is_measured_once_and_makes_sense(device, cache):
    began = time.perf_counter()
    machine = microbenchmark.measure(device, cache)
    assert time.perf_counter() - began < MEASURING_SECONDS
    began = time.perf_counter()
    assert microbenchmark.measure(device, cache) == machine
    assert time.perf_counter() - began < 0.1
    assert "\0" not in machine.name
    assert 1 < machine.fma < 10  # nanoseconds; 4 cycles and what loads are not hidden
    for curve in (machine.warps_speedup, machine.columns_speedup, machine.shuffle_speedup):
        assert read(curve, 1) == pytest.approx(1, rel=0.25)
        assert read(curve, 4) > 1.5
    assert machine.peak_speedup >= read(machine.warps_speedup, 8) > 1.5
    assert read(machine.shared_load, 32) > read(machine.shared_load, 1) > 0
    assert machine.block_barrier < read(machine.grid_handoff, machine.multiprocessors)
    assert 200 < read(machine.grid_handoff, machine.multiprocessors) < 10_000
    if machine.arch >= 90:
        assert machine.clusters[-1][0] == 16
        assert machine.tensor_rate < machine.tensor_chain


@pytest.mark.parametrize("units", [64, 256])
def test_kernels_are_chosen_in_seconds_and_then_at_once(device, cache, units):
    machine = microbenchmark.measure(device, cache)
    spec = RecurrentSpec(cells.lstm(), units)

    def candidates(batch):
        return [(each.configuration, each.nanoseconds(100)) for each in rank(machine, spec, batch)]

    began = time.perf_counter()
    tuned = tune(DeviceBench(spec, device, cache), candidates, cache, progress=False)
    assert time.perf_counter() - began < SELECTION_SECONDS
    assert [trial.error for trial in tuned.trials if trial.error] == []
    for trial in tuned.trials:  # the model is of the right size
        assert 0.4 < trial.predicted / trial.measured < 2.5
    began = time.perf_counter()
    again = tune(DeviceBench(spec, device, cache), candidates, cache, progress=False)
    assert time.perf_counter() - began < 0.5
    assert again == tuned
