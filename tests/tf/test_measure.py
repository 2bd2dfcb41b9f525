"""Profiles that are measured have the form of those that are there."""

from __future__ import annotations

import json

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


@pytest.mark.parametrize("name", device_costs.profiles())
def test_every_profile_says_what_kernels_need(name: str) -> None:
    assert device_costs.product_sizes(name).least_size > 1
    assert device_costs.l2_bytes(name) > 1
    assert device_costs.load(name).flops > 0
