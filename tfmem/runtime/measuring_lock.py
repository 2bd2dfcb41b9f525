"""What is measured of the whole process, its allocator's numbers above all, is measured by one thread at a time.

A call that waits for other processes makes no thread wait: theirs might wait for one of ours, which it would hold up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PATIENCE = 60.0  # seconds to wait for another measured call; it may itself wait for this one (a tf.py_function)

_measuring = threading.Lock()
_entering = threading.Lock()
_running: list[Turn] = []


@dataclass
class Turn:
    """One measured call.

    Attributes:
        held: whether no other ran when it began; if one did, it must set nothing back that this one measures by.
        alone: whether no other has run meanwhile so far. If one has, the measurement is void.
    """

    held: bool
    alone: bool = True


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
def beside() -> Iterator[Turn]:
    """A measured call that waits for other processes: it waits for no measured call of this one, and none waits for it.

    If another runs meanwhile, neither is alone.
    """
    turn = Turn(_measuring.acquire(blocking=False))
    if turn.held:
        _measuring.release()
    with _running_as(turn):
        yield turn


@contextmanager
def _running_as(turn: Turn, reads: bool = False) -> Iterator[None]:
    """The call of `turn` runs in this block."""
    with _entering:
        turn.alone = turn.held and not _running
        if not reads:
            for other in _running:
                other.alone = False
            _running.append(turn)
    try:
        yield
    finally:
        with _entering:
            if not reads:
                _running[:] = [other for other in _running if other is not turn]
