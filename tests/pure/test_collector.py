"""While graphs are made, no collection of cycles begins; afterwards the collector is what it was."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tfmem.runtime.collector import held_off, set_aside


@pytest.fixture(autouse=True)
def fixture_on() -> Iterator[None]:
    gc.enable()
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


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


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_of_before_wait_and_cycles_made_meanwhile_do_not() -> None:
    before = weakref.ref(_Cycle())
    with set_aside():
        meanwhile = weakref.ref(_Cycle())
        gc.collect()
        assert before() is not None
        assert meanwhile() is None
    gc.collect()
    assert before() is None


def test_what_was_set_aside_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError), set_aside():
        raise KeyError
    assert not gc.get_freeze_count()


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    with set_aside():
        pass
    assert gc.get_freeze_count()
