"""While graphs are made, no collection of cycles begins; afterwards the collector is what it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tfmem.runtime.collector import held_off


@pytest.fixture(autouse=True)
def fixture_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_meanwhile_and_on_after_an_error() -> None:
    seen = []

    def fails() -> None:
        with held_off():
            seen.append(gc.isenabled())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert [*seen, gc.isenabled()] == [False, True]


def test_it_stays_off_if_the_program_turned_it_off() -> None:
    gc.disable()
    with held_off():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_it_is_on_after_two_threads_held_it_off(first_ends_first: bool) -> None:
    """Two contexts that overlap, as those of two threads do."""
    first, second = held_off(), held_off()
    first.__enter__()
    second.__enter__()
    for each in (first, second) if first_ends_first else (second, first):
        each.__exit__(None, None, None)
    assert gc.isenabled()
