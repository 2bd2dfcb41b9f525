"""Steps that train and kernels that tfmem times meanwhile take turns, so that neither slows the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from custom_ops.background import go_on

PATIENCE = 1.0  # seconds that either waits: a step may wait for another one, which waits for a measurement
SHARE = 0.1  # of the time, at most, is for measurements while steps follow each other
SAVED = 20.0  # seconds without measurements, at most, that later ones make up for: planning takes about that long
IDLE = 0.2  # seconds without a call after which measurements may take all of the time
ASKS = 0.05  # seconds between two looks at whether that is so

CALL, MEASUREMENT = "call", "measurement"


class Alternation:
    """Calls of steps, of which several may run at once, and measurements, one after the other.

    A measurement begins when no call runs. Where both wait, they go in turn: training goes on while much is measured,
    and measurements get on while steps follow each other without a pause. Measurements take `SHARE` of the time; what
    they leave unused for `SAVED` seconds, they may take later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: seconds.
        """
        self._clock = clock
        self._changed = threading.Condition()
        self._running = {CALL: 0, MEASUREMENT: 0}
        self._waiting = {CALL: 0, MEASUREMENT: 0}
        self._last = MEASUREMENT  # which began
        self._called = -IDLE  # when a call ended last
        self._next = clock()  # when the next measurement may begin

    def call(self) -> AbstractContextManager[None]:
        """A call of a step runs in this block, at least until the step is enqueued."""
        return self._turn(CALL, self._may_call)

    @contextmanager
    def measurement(self, finish: Callable[[], None] = lambda: None) -> Iterator[None]:
        """A measurement runs in this block.

        Args:
            finish: waits until the device has run what earlier calls enqueued. That takes nothing from the steps, so it
                is not counted.
        """
        self._wait_for_share()
        with self._turn(MEASUREMENT, self._may_measure):
            finish()
            began = self._clock()
            try:
                yield
            finally:
                self._next = max(self._next, began - SAVED) + (self._clock() - began) / SHARE

    def _wait_for_share(self) -> None:
        while (now := self._clock()) < self._next and self._is_busy(now):
            go_on()
            time.sleep(min(ASKS, self._next - now))

    def _is_busy(self, now: float) -> bool:
        return bool(self._running[CALL] or self._waiting[CALL]) or now - self._called < IDLE

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
                if kind == CALL:
                    self._called = self._clock()
                self._changed.notify_all()

    def _may_call(self) -> bool:
        return not self._running[MEASUREMENT] and not (self._last == CALL and self._waiting[MEASUREMENT])

    def _may_measure(self) -> bool:
        return not any(self._running.values()) and (self._last == CALL or not self._waiting[CALL])
