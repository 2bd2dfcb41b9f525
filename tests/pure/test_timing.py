"""The one service that times candidates, and what it keeps on disk."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from custom_ops.jit.cache import Cache, UnusableError, digest
from custom_ops.timing.remembered import Remembered
from custom_ops.timing.rounds import Rounds, fastest
from tests.pure.test_layers import found, sources


def turns(rounds: Rounds, count: int) -> list[int]:
    """Which candidates run next, each in a second."""
    found = []
    for _ in range(count):
        found.append(rounds.turn)
        rounds.add(1.0)
    return found


def test_candidates_run_in_turn() -> None:
    assert turns(Rounds(3, 9), 7) == [0, 1, 2, 0, 1, 2, 0]
    assert turns(Rounds(2, 9, mirrored=True), 8) == [0, 1, 1, 0, 0, 1, 1, 0]


def test_the_least_time_of_each_counts_but_for_the_first() -> None:
    rounds = Rounds(2, 2, skipped=1)
    for seconds in (0.1, 0.1, 3.0, 5.0, 4.0):
        assert not rounds.clear
        assert rounds.times == (min(rounds.taken[0][1:], default=inf), min(rounds.taken[1][1:], default=inf))
        rounds.add(seconds)
    rounds.add(2.0)
    assert rounds.clear
    assert rounds.times == (3.0, 2.0)
    assert fastest(rounds.times) == 1


def test_a_large_difference_is_believed_early() -> None:
    near, far = (Rounds(2, 9, few=2, large=1.5) for _ in range(2))
    for _ in range(2):
        for rounds, other in ((near, 1.4), (far, 1.6)):
            assert not rounds.clear
            rounds.add(1.0)
            rounds.add(other)
    assert far.clear
    assert not near.clear


@pytest.mark.parametrize(
    ("seconds", "number"), [([], None), ([inf, inf], None), ([inf, 2.0, 1.0, 1.0], 2)], ids=["none", "failed", "first"]
)
def test_the_fastest(seconds: list[float], number: int | None) -> None:
    assert fastest(seconds) == number


def positive(found: Any) -> float:
    if not float(found) > 0:
        raise ValueError("not positive")
    return float(found)


def test_keys_are_those_that_files_were_written_under() -> None:
    known = Remembered("tuned 5", None, float, positive)
    assert known.key("bench", "[1]", "5", "") == digest("tuned 5", "bench", "[1]", "5", "")
    facts = {"b": 1, "a": "x"}
    assert known.key(facts, b"graph") == digest("tuned 5", json.dumps(facts, sort_keys=True), b"graph")
    assert known.key(facts) != Remembered("tuned 6", None, float, positive).key(facts)


@pytest.mark.parametrize("content", [b"", b"{", b"-1", b'"x"', b"[1]", b"1" + b"0" * 400, b"null"])
def test_a_file_of_any_other_content_counts_as_not_there(content: bytes, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    known = Remembered("seconds 1", cache, float, positive)
    key = known.key("device", "what")
    cache.keep(key, content)
    assert known.find(key) is None
    with pytest.raises(UnusableError):
        known.parse(content)
    assert known.get(key, lambda: 0.5) == 0.5
    assert known.find(key) == 0.5


def test_without_a_cache_nothing_is_kept() -> None:
    known = Remembered("seconds 1", None, float, positive)
    known.keep("key", 0.5)
    assert known.find("key") is None
    assert known.get("key", lambda: 0.25) == 0.25


def test_what_compiles_and_launches_knows_of_no_timing_and_timing_of_no_system() -> None:
    assert found(sources("custom_ops/jit"), "custom_ops.timing") == []
    for system in ("dynamic", "fusion", "matmul", "recurrent"):
        assert found(sources("custom_ops/timing"), f"custom_ops.{system}") == []
