"""Persistent recurrent kernels beside other streams' work: blocks that wait for each other need all of them to run.
Needs a GPU and NVRTC, no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from custom_ops.jit.device import DeviceContext
from custom_ops.recurrent import cells
from custom_ops.recurrent.gpu_program import build
from custom_ops.recurrent.launch import Launcher
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from tests.gpu_kernels import CLUSTER, GRID, SLICED, Sweep, check, expected, inputs
from tests.gpu_neighbour import WHOLE_PROCESSOR, Neighbour

pytest_plugins = ("tests.gpu_device",)

UNITS, TIME, BATCH, SWEEPS = 50, 100, 6, 8
KERNELS: dict[str, dict[str, Any]] = {
    "single": {"rows": 2},
    "cluster": {"rows": 2, **CLUSTER},
    "cluster, sums in registers": {"rows": 2, "threads": 64, "lanes": 8, **CLUSTER},
    "grid": {"rows": 2, **GRID},
    "grid, sums in registers": {"rows": 2, "threads": 64, "lanes": 16, **GRID},
    "sliced": {"rows": 2, **SLICED},
}
# Blocks of these may run wherever there is room; those of a cluster have to lie side by side.
ALONE = ("single", "grid", "grid, sums in registers")

# What lies on the device, by its number of multiprocessors: (blocks, shared memory, microseconds, launches). Each takes
# longer than all sweeps.
NEIGHBOURS: dict[str, Callable[[int], tuple[int, int, int, int]]] = {
    "half of the processors for long": lambda processors: (processors // 2, WHOLE_PROCESSOR, 60_000, 1),
    "all processors, one after the other": lambda processors: (processors, WHOLE_PROCESSOR, 100, 400),
    "many short blocks everywhere": lambda processors: (20 * processors, 0, 20, 400),
    "tiny launches": lambda processors: (7, WHOLE_PROCESSOR, 20, 2000),  # faster, and the host falls behind
}


@pytest.fixture(name="neighbour")
def fixture_neighbour(device: DeviceContext) -> Iterator[Neighbour]:
    with Neighbour(device) as found:
        yield found


def sweeps(device: DeviceContext, spec: RecurrentSpec, launcher: Launcher, count: int) -> list[Sweep]:
    arrays = inputs(spec.cell, spec.units, TIME, BATCH)
    return [Sweep(device, launcher, spec, [arrays]) for _ in range(count)]


def check_all(spec: RecurrentSpec, done: list[Sweep]) -> None:
    """All are right, none took the fallback, and all have the same bits."""
    (first,), _ = done[0].results()
    check(first, expected(spec.cell, spec.units, inputs(spec.cell, spec.units, TIME, BATCH)), 1e-5)
    for sweep in done:
        (found,), status = sweep.results()
        assert status == 0
        for a, b in zip(found, first, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("other", NEIGHBOURS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_beside_another_streams_work(device: DeviceContext, neighbour: Neighbour, kernel: str, other: str) -> None:
    """Sweeps are enqueued, and end, while the other stream is at work; clusters may have to wait for neighbours."""
    spec = RecurrentSpec(cells.gru(reset_after=False), UNITS)
    launcher = Launcher(build(spec, Configuration(**KERNELS[kernel]), device.arch))
    made = sweeps(device, spec, launcher, SWEEPS + 1)
    made[0].enqueue(device.stream)  # alone, and loaded
    made[0].results()
    neighbour.enqueue(*NEIGHBOURS[other](device.processors))
    for sweep in made[1:]:
        sweep.enqueue(device.stream)
    assert neighbour.busy
    made[-1].results()
    if other.startswith("half") and kernel in ALONE:
        assert neighbour.busy, "the sweeps waited for the other stream's end, though half of the processors were free"
    check_all(spec, made)


@pytest.mark.parametrize("slices", [1, 3])
def test_two_grids_that_do_not_fit_together(device: DeviceContext, neighbour: Neighbour, slices: int) -> None:
    """If each got a part of the processors, both would wait for blocks that never start."""
    ctas = 3 * (device.processors // 4)
    spec = RecurrentSpec(cells.lstm(), 2 * ctas)
    options: dict[str, Any] = {"threads": 1024, "lanes": 32, "register_weights": 4, "exchange": "grid"}
    configuration = Configuration(rows=BATCH, ctas=ctas, slices=slices, **options)
    launcher = Launcher(build(spec, configuration, device.arch))
    assert launcher.resident < 2 * ctas
    made = sweeps(device, spec, launcher, 4 * SWEEPS)
    for one, two in zip(made[::2], made[1::2], strict=True):
        one.enqueue(device.stream)
        two.enqueue(neighbour.stream)
    neighbour.synchronize()
    check_all(spec, made)
