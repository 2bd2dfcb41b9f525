"""Threads that work beside the program let it have the interpreter."""

from __future__ import annotations

import sys
import threading

import pytest

from custom_ops import background
from custom_ops.background import NEXT, PAUSE, POLL, TURN, Background


def test_turns_are_short_while_any_thread_works() -> None:
    before = sys.getswitchinterval()
    began, ends = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

    def work(number: int) -> None:
        began[number].set()
        assert ends[number].wait(10)

    threads = [Background(lambda number=number: work(number), f"work {number}") for number in range(2)]
    for thread, event in zip(threads, began, strict=True):
        waiting = threading.Thread(target=thread.wait)
        waiting.start()
        assert event.wait(10)
        assert sys.getswitchinterval() == pytest.approx(TURN)
    ends[0].set()
    threads[0].wait()
    assert sys.getswitchinterval() == pytest.approx(TURN)
    ends[1].set()
    threads[1].wait()
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("pause", [PAUSE, NEXT])
def test_work_that_follows_on_other_work_begins_soon(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it pauses, it asks every `POLL` seconds whether the program has ended."""
    asked, done = [], threading.Event()
    monkeypatch.setattr(background, "go_on", lambda: asked.append(None))
    Background(done.set, "work", pause).begin()
    assert done.wait(60)
    assert len(asked) == round(pause / POLL)
    assert NEXT < PAUSE
