"""Steps that train and kernels that tfmem times meanwhile take turns, so that neither slows the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

PATIENCE = 1.0  # seconds that either waits: a step may wait for another one, which waits for a measurement

CALL, MEASUREMENT = "call", "measurement"


class Alternation:
    """Calls of steps, of which several may run at once, and measurements, one after the other.

    A measurement begins when no call runs. Where both wait, they go in turn: training goes on while much is measured,
    and measurements get on while steps follow each other without a pause.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = {CALL: 0, MEASUREMENT: 0}
        self._waiting = {CALL: 0, MEASUREMENT: 0}
        self._last = MEASUREMENT  # which began

    def call(self) -> AbstractContextManager[None]:
        """A call of a step runs in this block, at least until the step is enqueued."""
        return self._turn(CALL, self._may_call)

    def measurement(self) -> AbstractContextManager[None]:
        """A measurement runs in this block. The device may still run what earlier calls enqueued."""
        return self._turn(MEASUREMENT, self._may_measure)

    @contextmanager
    def _turn(self, kind: str, may_begin: Callable[[], bool]) -> Iterator[None]:
        with self._changed:
            self._waiting[kind] += 1
            self._changed.wait_for(may_begin, PATIENCE)
            self._waiting[kind] -= 1
            self._running[kind] += 1
            self._last = kind
        try:
            yield
        finally:
            with self._changed:
                self._running[kind] -= 1
                self._changed.notify_all()

    def _may_call(self) -> bool:
        return not self._running[MEASUREMENT] and not (self._last == CALL and self._waiting[MEASUREMENT])

    def _may_measure(self) -> bool:
        return not any(self._running.values()) and (self._last == CALL or not self._waiting[CALL])
