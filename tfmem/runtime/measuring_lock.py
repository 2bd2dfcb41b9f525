"""What is measured of the whole process, its allocator's numbers above all, is measured by one thread at a time."""

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
        held: whether it waited for all others; if not, it must set nothing back that they measure by.
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
    with _entering:
        turn.alone = turn.held and not _running
        if not reads:
            for other in _running:
                other.alone = False
            _running.append(turn)
    try:
        yield turn
    finally:
        with _entering:
            if not reads:
                _running[:] = [other for other in _running if other is not turn]
        if turn.held:
            _measuring.release()
