"""The table of the benchmark of dynamic nets on a GPU."""

from __future__ import annotations

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
        ]
    )
    assert lines[2] == "| 128 | 4 | 300 | 50 | 10 | - | 6.0 | 2.0 | 8.0 |"


def test_a_system_without_rows_is_left_out() -> None:
    assert table([row("torch eager", 10, 1.0)])[2] == "| 128 | 4 | - | - | 10 | - | - | - | - |"


def test_without_a_time_every_batch_is_measured_once() -> None:
    ran: list[int] = []
    found = measure([(1, 4), (2, 4), (3, 2)], ran.append, lambda last: last, 0)
    assert ran == [1, 2, 1, 2, 3]  # two before
    assert (found["sentences"], found["steps"]) == (10, 3)


def test_batches_and_words() -> None:
    assert parts_of([1, 2, 3], 2) == [[1, 2], [3]]
    assert words_of([1, [0, 7], [1, [0, 3], [1, 4]]]) == [7, 3, 4]
