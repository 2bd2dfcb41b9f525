"""What tests compile is made once for each content, by whichever process comes first, and is bounded."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.compiled import kept, prune


class Maker:
    """Writes a file, and counts how often."""

    def __init__(self, text: str = "made") -> None:
        self.times, self._text = 0, text

    def __call__(self, target: Path) -> None:
        self.times += 1
        target.write_text(self._text)


def test_it_is_made_once_for_each_content(tmp_path: Path) -> None:
    source, make = tmp_path / "source.cc", Maker()
    source.write_text("int f();")
    first = kept("f.o", ["g++", source], make, tmp_path / "kept")
    assert first.name == "f.o"
    assert first.read_text() == "made"
    assert kept("f.o", ["g++", source], make, tmp_path / "kept") == first
    assert make.times == 1
    source.write_text("int g();")
    others = [("f.o", ["g++", source]), ("f.o", ["clang++", source]), ("g.o", ["g++", source]), ("f.o", ["g+", "+"])]
    assert len({first, *(kept(name, key, make, tmp_path / "kept") for name, key in others)}) == 5
    assert make.times == 5


def test_a_second_thread_waits_for_the_first(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    found: list[Path] = []

    def slow(target: Path) -> None:
        begun.set()
        assert go_on.wait(20)
        target.write_text("made")

    never = Maker()
    threads = [
        threading.Thread(target=lambda make=make: found.append(kept("f", ["key"], make, tmp_path)))
        for make in (slow, never)
    ]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert never.times == 0
    assert len(found) == 2


def test_what_fails_is_not_kept(tmp_path: Path) -> None:
    def fails(target: Path) -> None:
        target.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        kept("f", ["key"], fails, tmp_path)
    assert kept("f", ["key"], Maker("whole"), tmp_path).read_text() == "whole"


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    places = [kept("f", [str(number)], Maker("x" * 100), tmp_path) for number in range(4)]
    for place, age in zip(places, (30, 10, 20, 40), strict=True):
        os.utime(place.parent, (1000 - age, 1000 - age))
    prune(limit=250, folder=tmp_path)
    assert [place.exists() for place in places] == [False, True, True, False]
