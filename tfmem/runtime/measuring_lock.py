"""What is measured of the whole process, its allocator's numbers above all, is measured by one thread at a time.

A call that waits for other processes makes no thread wait: theirs might wait for one of ours, which it would hold up.
Nor does one that runs Python code, which may call another measured step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum

PATIENCE = 60.0  # seconds to wait for another measured call; it may itself wait for this one (a data set's generator)

_measuring = threading.Lock()
_entering = threading.Lock()
_running: list[Turn] = []


@dataclass
class Turn:
    """One measured call.

    Attributes:
        held: whether no other ran when it began; if one did, it must set nothing back that this one measures by.
        alone: whether no other has run meanwhile so far. If one has, the measurement is void.
        disturbs: whether others that run meanwhile are not alone.
    """

    held: bool
    alone: bool = True
    disturbs: bool = True


class WaitsFor(Enum):
    """What a measured call may wait for.

    Attributes:
        NOTHING: it ends by itself.
        PROCESSES: other processes.
        PYTHON: Python code that it runs, which may call another measured step. What that measures counts: the call
            around it is at rest meanwhile, as one whose step has settled.
    """

    NOTHING = "nothing"
    PROCESSES = "processes"
    PYTHON = "Python code"


@contextmanager
def alone(reads: bool = False) -> Iterator[Turn]:
    """No other measured call runs meanwhile, unless one has waited in vain; steps that have settled do.

    Args:
        reads: the call disturbs no other.
    """
    turn = Turn(_measuring.acquire(timeout=PATIENCE))
    try:
        with _running_as(turn, reads):
            yield turn
    finally:
        if turn.held:
            _measuring.release()


@contextmanager
def beside(disturbs: bool = True) -> Iterator[Turn]:
    """A measured call that waits for no other of this process, and none waits for it.

    If another runs meanwhile, it is not alone; nor is the other, which it disturbs.
    """
    turn = Turn(_measuring.acquire(blocking=False), disturbs=disturbs)
    if turn.held:
        _measuring.release()
    with _running_as(turn):
        yield turn


def measured(waits: WaitsFor) -> AbstractContextManager[Turn]:
    """A measured call that may wait for others meanwhile."""
    return alone() if waits is WaitsFor.NOTHING else beside(disturbs=waits is WaitsFor.PROCESSES)


@contextmanager
def _running_as(turn: Turn, reads: bool = False) -> Iterator[None]:
    """The call of `turn` runs in this block."""
    with _entering:
        turn.held = turn.held and (turn.disturbs or not _running)
        turn.alone = turn.held and not any(other.disturbs for other in _running)
        if not reads:
            for other in _running if turn.disturbs else ():
                other.alone = False
            _running.append(turn)
    try:
        yield
    finally:
        with _entering:
            if not reads:
                _running[:] = [other for other in _running if other is not turn]
