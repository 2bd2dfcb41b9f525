"""The table of the benchmark of dynamic nets on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.dynamic import distances, phases
from benchmarks.dynamic.gpu import table
from benchmarks.dynamic.timing import measure


def row(system: str, sentences: int, wall: float, **more: object) -> dict:
    return {"system": system, "hidden": 128, "batch": 4, "sentences": sentences, "wall": wall, **more}


def test_the_ratio_is_to_the_fastest_peer() -> None:
    lines = table(
        [
            row("tfmem", 600, 2.0, weight_bytes=2_000_000, weight_bytes_by_node=8_000_000),
            row("torch levels", 50, 1.0),
            row("torch eager", 10, 1.0),
            row("torch graphs", 200, 1.0),
        ]
    )
    assert lines[2] == "| 128 | 4 | 300 | 50 | 10 | - | 6.0 | 200 | 1.5 | 2.0 | 8.0 |"


def test_what_timed_kernels_print_is_read_and_grouped() -> None:
    lines = [
        "dynamic 2000 1000",
        "phase 1 0 0 100",
        "phase 9 0 50 150",
        "phase 2 3 100 400",
        "noise",
        "",
        "dynamic 9 9",
    ]
    first, second = phases.parsed(lines)
    assert (len(first.phases), second.phases) == (3, ())
    names = {0: "level: product"}
    assert phases.groups(first, names) == {
        "weights to the chip, and the end": (1, pytest.approx(0.4)),
        "level: product": (1, pytest.approx(0.2)),
        "level: product in tiles": (1, pytest.approx(0.4)),
        "gradients and updates": (1, pytest.approx(1.0)),
    }
    assert phases.middle([second, first, second]) == second


def test_distances_are_of_the_largest_number_and_beside_the_cpus() -> None:
    exact = {"losses": np.array([4.0, -8.0]), "none": np.zeros(0), "lost": np.ones(2)}
    gpu = {"losses": np.array([4.0, -7.0], np.float32), "none": np.zeros(0), "lost": np.array([1, np.nan])}
    again = gpu | {"losses": np.array([4.0, -7.5])}
    cpu = exact | {"losses": np.array([4.5, -8.0])}
    losses, none, lost = distances.compared(exact, gpu, again, cpu)
    assert losses == distances.Distance("losses", 8.0, 8.0, 0.125, 0.0625, 0.125, 0.0625)
    assert none == distances.Distance("none", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert np.isnan(lost.gpu)
    assert (losses.far, none.far, lost.far) == (True, False, True)


@pytest.mark.parametrize(
    ("first", "gpu", "cpu", "moved", "far"),
    [
        (1.0, 1e-2, 2e-2, 0.0, False),  # ill-conditioned for both
        (1.0, 1e-2, 1e-4, 0.0, True),
        (1.0, 1e-6, 0.0, 0.0, False),
        (10.0, 1e-5, 0.0, 0.0, False),  # of a loss that was 10
        (10.0, 1e-4, 0.0, 0.0, True),
        (1.0, 1e-7, 1e-7, 1e-9, True),
        (1.0, float("nan"), float("nan"), 0.0, True),
    ],
)
def test_what_is_far_is_so_beside_the_cpu(first: float, gpu: float, cpu: float, moved: float, far: bool) -> None:
    assert distances.Distance("losses", 1.0, first, gpu, cpu, gpu, moved).far is far


def test_without_a_time_every_batch_is_measured_once() -> None:
    ran: list[int] = []
    found = measure([(1, 4), (2, 4), (3, 2)], ran.append, lambda last: last, 0)
    assert ran == [1, 2, 1, 2, 3]  # two before
    assert (found["sentences"], found["steps"]) == (10, 3)
