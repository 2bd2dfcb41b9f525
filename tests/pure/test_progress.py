"""A line says what is going on where it takes long, and nothing else."""

import io
import sys
import threading
import time

import pytest

from tfmem.runtime import progress


@pytest.fixture(name="patience", autouse=True)
def fixture_patience(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Text:
    """What is said, each time something else; work that takes long waits until it was asked for often enough."""

    def __init__(self, *texts):
        self.texts = iter(texts)
        self.asked = threading.Semaphore(0)

    def __call__(self):
        self.asked.release()
        return next(self.texts)

    def wait(self, times=1):
        for _ in range(times):
            assert self.asked.acquire(timeout=60)


def test_what_takes_long_is_said_once(capsys):
    text = Text("planning ResNet50 (24,000 ops)")
    with progress.shown(True, text):
        text.wait()
    assert capsys.readouterr() == ("", "tfmem: planning ResNet50 (24,000 ops)\n")


def test_what_is_quick_is_not(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    with progress.shown(True, lambda: "planning"):
        pass
    assert capsys.readouterr() == ("", "")


def test_nothing_if_it_is_off(capsys):
    with progress.shown(False, lambda: "planning"):
        time.sleep(0.3)
    assert capsys.readouterr() == ("", "")


def test_what_is_left_is_told_from_what_took_as_long(capsys):
    text = Text("trial 2 of at most 3")
    with progress.shown(True, text, expected=10_000.0):
        text.wait()
    said = capsys.readouterr().err
    assert said.startswith("tfmem: trial 2 of at most 3, about ")
    assert said.endswith(" s more\n")


def test_a_terminals_line_is_rewritten_and_cleared(monkeypatch):
    stages = Text(*(f"stage {count}" for count in range(1000)))
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.shown(True, stages):
        stages.wait(3)
    said = sys.stderr.getvalue()
    assert "tfmem: stage 0" in said
    assert "tfmem: stage 1" in said
    assert "\n" not in said
    assert said.endswith("\r")
    assert not said.rstrip("\r").rpartition("\r")[2].strip()  # what was last written is blanks


def test_it_ends_with_an_error_too(capsys):
    text = Text("planning")

    def fail():
        with progress.shown(True, text):
            text.wait()
            raise KeyError(1)

    with pytest.raises(KeyError):
        fail()
    assert capsys.readouterr().err == "tfmem: planning\n"
