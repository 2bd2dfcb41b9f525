"""The table of the benchmark of dynamic nets on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.dynamic import distances, gpu, phases
from benchmarks.dynamic.gpu import table
from benchmarks.dynamic.timing import measure, parts_of, words_of


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


def test_a_system_without_rows_is_left_out() -> None:
    assert table([row("torch eager", 10, 1.0)])[2] == "| 128 | 4 | - | - | 10 | - | - | - | - | - | - |"


def test_rows_are_kept_as_they_come_and_a_worker_that_takes_too_long_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = (
        "import json, sys, time\n"
        "show = lambda batch: print(json.dumps({'system': sys.argv[1], 'hidden': 7, 'batch': batch, 'sentences': 2, "
        "'wall': 1.0}), flush=True)\n"
        "show(1)\n"
        "if sys.argv[1] == 'tfmem': sys.exit('no GPU')\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "worker.py").write_text(worker)
    monkeypatch.setattr(gpu, "WORKERS", (("ours", (), 8), ("peer", (), 8), ("slow", (), 0)))
    monkeypatch.setattr(gpu, "START", 0.0)
    names = {"ours": "tfmem", "peer": "torch levels"}
    monkeypatch.setattr(
        gpu, "command", lambda python, name, *_: [python, str(tmp_path / "worker.py"), names.get(name, "")]
    )
    rows = gpu.compare(tmp_path, [7], [1], 2.0, tmp_path / "out.json")
    assert [row["system"] for row in rows] == ["tfmem", "torch levels"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"] == rows
    assert [failure.splitlines()[0] for failure in written["failures"]] == [
        "ours  at hidden 7: failed: no GPU",
        "peer  at hidden 7: stopped, its time was over",
    ]
    assert "| 7 | 1 | 2 | 2 | - | - | 1.0 | - | - | - | - |" in capsys.readouterr().out


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


def test_phases_of_both_kernels_are_beside_each_other() -> None:
    row = {"hidden": 512, "batch": 2, "rate": 1500.4, "host": 190.2, "tiles": 99.6, "rows": 120.0, "difference": 3e-7}
    row |= {"tiles phases": {"level": (2, 10.0)}, "rows phases": {"level": (2, 30.0), "other": (1, 5.0)}}
    lines = phases.tables([row])
    assert lines[1].split() == ["level", "2", "10.0", ";", "2", "30.0"]
    assert lines[2].split() == ["other", "-", ";", "1", "5.0"]
    assert lines[-1] == "| 512 | 2 | 1500 | 190 | 100 | 120 | 3.0e-07 |"


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


def test_the_furthest_result_is_in_the_summary() -> None:
    near = distances.Distance("losses", 2.0, 2.0, 1e-7, 2e-7, 1e-7, 0.0)
    far = distances.Distance("gradient of pair", 1.0, 1.0, 2e-2, 1e-7, 2e-2, 0.0)
    about = {"hidden": 16, "batch": 2, "kernel": "rows"}
    lines = distances.tables([about | {"weights": "first", "distances": [near]},
                              about | {"weights": "learnt", "distances": [near, far]}])  # fmt: skip
    assert [line.split()[-1] for line in lines if line.startswith("  ")] == ["0.0e+00", "0.0e+00", "FAR"]
    assert lines[-2:] == [
        "| 16 | first | 2 | rows | 1.0e-07 | 2.0e-07 | 1.0e-07 | 0.0e+00 | losses |",
        "| 16 | learnt | 2 | rows | 2.0e-02 | 2.0e-07 | 2.0e-02 | 0.0e+00 | gradient of pair FAR |",
    ]


def test_without_a_time_every_batch_is_measured_once() -> None:
    ran: list[int] = []
    found = measure([(1, 4), (2, 4), (3, 2)], ran.append, lambda last: last, 0)
    assert ran == [1, 2, 1, 2, 3]  # two before
    assert (found["sentences"], found["steps"]) == (10, 3)


def test_batches_and_words() -> None:
    assert parts_of([1, 2, 3], 2) == [[1, 2], [3]]
    assert words_of([1, [0, 7], [1, [0, 3], [1, 4]]]) == [7, 3, 4]
