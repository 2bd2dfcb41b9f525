"""Steps that train and kernels that are timed meanwhile take turns, so that no time is one of both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 1.0  # seconds that either waits: a step may wait for another one, which waits for a measurement


class Alternation:
    """Calls of steps, of which several may run at once, and measurements, one after the other.

    A measurement begins when no call runs. Where both wait, they go in turn: training goes on while much is measured,
    and measurements get on while steps follow each other without a pause.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls = self._measurements = 0  # that run
        self._calls_wait = self._measurements_wait = 0
        self._called_last = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Of a step: until it is enqueued, at least."""
        with self._changed:
            self._calls_wait += 1
            self._changed.wait_for(self._may_call, PATIENCE)
            self._calls_wait -= 1
            self._calls += 1
            self._called_last = True
        try:
            yield
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextmanager
    def measurement(self) -> Iterator[None]:
        """What calls enqueued may still run when it begins."""
        with self._changed:
            self._measurements_wait += 1
            self._changed.wait_for(self._may_measure, PATIENCE)
            self._measurements_wait -= 1
            self._measurements += 1
            self._called_last = False
        try:
            yield
        finally:
            with self._changed:
                self._measurements -= 1
                self._changed.notify_all()

    def _may_call(self) -> bool:
        return not self._measurements and not (self._called_last and self._measurements_wait)

    def _may_measure(self) -> bool:
        return not self._calls and not self._measurements and (self._called_last or not self._calls_wait)
