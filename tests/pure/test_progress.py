"""A line says what is going on where it takes long, and nothing else."""

import io
import sys
import time

import pytest

from tfmem.runtime import progress


@pytest.fixture(name="patience", autouse=True)
def fixture_patience(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def waiting(seconds=1.0):
    time.sleep(seconds)


def test_what_takes_long_is_said_once(capsys):
    with progress.shown(True, lambda: "planning ResNet50 (24,000 ops)"):
        waiting()
    assert capsys.readouterr() == ("", "tfmem: planning ResNet50 (24,000 ops)\n")


def test_what_is_quick_is_not(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    with progress.shown(True, lambda: "planning"):
        pass
    assert capsys.readouterr() == ("", "")


def test_nothing_if_it_is_off(capsys):
    with progress.shown(False, lambda: "planning"):
        waiting(0.3)
    assert capsys.readouterr() == ("", "")


def test_what_is_left_is_told_from_what_took_as_long(capsys):
    with progress.shown(True, lambda: "trial 2 of at most 3", expected=100.0):
        waiting()
    said = capsys.readouterr().err
    assert said.startswith("tfmem: trial 2 of at most 3, about ")
    assert said.endswith(" s more\n")


def test_a_terminals_line_is_rewritten_and_cleared(monkeypatch):
    stages = iter(f"stage {count}" for count in range(1000))
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.shown(True, lambda: next(stages)):
        waiting(2.5)
    said = sys.stderr.getvalue()
    assert "tfmem: stage 0" in said
    assert "tfmem: stage 1" in said
    assert "\n" not in said
    assert said.endswith("\r")
    assert not said.rstrip("\r").rpartition("\r")[2].strip()  # what was last written is blanks


def test_it_ends_with_an_error_too(capsys):
    def fail():
        with progress.shown(True, lambda: "planning"):
            waiting()
            raise KeyError(1)

    with pytest.raises(KeyError):
        fail()
    assert capsys.readouterr().err == "tfmem: planning\n"
