"""The table of the benchmark of dynamic nets on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.dynamic import gpu
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


def test_without_a_time_every_batch_is_measured_once() -> None:
    ran: list[int] = []
    found = measure([(1, 4), (2, 4), (3, 2)], ran.append, lambda last: last, 0)
    assert ran == [1, 2, 1, 2, 3]  # two before
    assert (found["sentences"], found["steps"]) == (10, 3)


def test_batches_and_words() -> None:
    assert parts_of([1, 2, 3], 2) == [[1, 2], [3]]
    assert words_of([1, [0, 7], [1, [0, 3], [1, 4]]]) == [7, 3, 4]
