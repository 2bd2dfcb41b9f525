"""Profiles that are measured have the form of those that are there."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from custom_ops.expr.cpp import CPU, cpu_costs
from custom_ops.load import load
from graph_passes.analysis.cost import device_costs
from graph_passes.analysis.memory.simulate import Link
from tfmem import measure
from tfmem.devices import find_target


def test_a_cpu_is_measured_as_its_profile_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REPEATS", 1)
    monkeypatch.setattr(measure, "ROUNDS", 10)
    found = measure.profile(find_target("/device:CPU:0", load()), Link(1e9, 2e9), "")
    assert {*found} == {name for name in json.loads(CPU.read_text()) if not name.startswith("_")}
    note = found["kernels"].pop("_note")
    assert "multiplications_per_ns and numbers_per_ns are measured, the others scaled from cpu.json" in note
    assert {*found["kernels"]} == {*cpu_costs()}
    assert all(value > 0 for value in found["kernels"].values())
    assert {*cpu_costs()} > measure.OF_THREADS
    regions = found["regions"]
    assert regions.pop("_note").startswith("launch, dispatch, region are measured")
    assert {*regions} == {*device_costs.region_costs(device_costs.load("cpu"))}
    assert regions["dispatch"] == pytest.approx(found["launch"], rel=0.1)
    assert min(regions["launch"], regions["region"]) >= 0


def test_a_profile_without_costs_of_regions_takes_those_of_another_gpu_at_its_own_bandwidth() -> None:
    own, other = device_costs.load("v100"), device_costs.load("h200")
    found, expected = (device_costs.kernel_device(profile, "") for profile in (own, other))
    assert own.bandwidth < other.bandwidth
    assert found.seconds(1e9) == pytest.approx(1e-6 + 1e9 / own.bandwidth)
    assert replace(found, copies=()) == replace(expected, copies=())


def test_a_cpu_lists_its_copies() -> None:
    found = device_costs.kernel_device(device_costs.load("cpu"), "a CPU")
    assert found.seconds(1e8) == 2e-2
    assert found.most is None


@pytest.mark.parametrize("name", device_costs.profiles())
def test_every_profile_says_what_kernels_need(name: str) -> None:
    assert device_costs.product_sizes(name).least_size > 1
    assert device_costs.l2_bytes(name) > 1
    assert device_costs.load(name).flops > 0
