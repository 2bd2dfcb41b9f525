"""Work that a separate thread does beside the program, and leaves undone once the program has ended.

Python waits for the thread, since one that is cut off inside of TensorFlow's C++ may take the process down with it. So
the work asks often whether it shall go on: planning does between passes, regions and patterns, and code that waits for
kernels does while it waits. What is left to wait for is a call of C++, of which Grappler's are the longest.

The work is Python, as is what the program does between two calls of C++. By default a thread that needs the interpreter
waits up to 5 ms for it, each time it comes back from C++: 120 calls of 20 us took 0.9 s beside one such thread instead
of 12 ms. While there is any of this work, threads take turns every `TURN` seconds: then they took 38 ms.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TURN = 1e-4  # seconds after which a thread hands on the interpreter if another one waits for it
PAUSE = 1.0  # seconds before the work begins: a program that ends meanwhile waits for none of it
NEXT = 0.1  # the same before work that follows on other work: such a program has not ended at once
POLL = 0.05


class Ended(BaseException):
    """The program has ended. This is no fault of what it interrupts, so it is no `Exception`."""


def has_ended() -> bool:
    """Whether the program's main thread has ended, so that Python waits for its other threads and then exits.

    Relies on a private name of `threading`: Python first waits for the threads of `concurrent.futures`, and only then
    (3.11 to 3.13) says that its main thread is not alive.
    """
    return getattr(threading, "_SHUTTING_DOWN", False) or not threading.main_thread().is_alive()


def go_on() -> None:
    """Asked by work that takes long, wherever it can be left undone.

    Raises:
        Ended: the program has ended, and this thread is a `Background`'s. Threads of the user's may go on.
    """
    if isinstance(threading.current_thread(), _Thread) and has_ended():
        raise Ended


class _Thread(threading.Thread):
    """Tells `go_on` where it is.

    Attributes:
        interval: the program's own seconds between turns of threads, while these are shorter; None before and after.
    """

    interval: float | None = None


_CHANGING = threading.Lock()  # the interpreter's interval, of which there is one for all threads


@contextmanager
def short_turns(thread: _Thread) -> Iterator[None]:
    """A block in which threads wait less long for the interpreter; the program's own interval comes back with the end
    of the last such block."""
    with _CHANGING:
        others = [interval for interval in map(_interval, threading.enumerate()) if interval is not None]
        thread.interval = others[0] if others else sys.getswitchinterval()
        sys.setswitchinterval(min(TURN, thread.interval))
    try:
        yield
    finally:
        with _CHANGING:
            own, thread.interval = thread.interval, None
            if all(interval is None for interval in map(_interval, threading.enumerate())):
                sys.setswitchinterval(own)


def _interval(thread: threading.Thread) -> float | None:
    return thread.interval if isinstance(thread, _Thread) else None


class Background:
    """Begins after `begin` is first called: the first call of a step does not share its processor with planning.

    Attributes:
        done: whether the work has ended; it never does if the program ended first.
    """

    def __init__(self, work: Callable[[], None], name: str, pause: float = PAUSE) -> None:
        """
        Args:
            work: raises nothing, but for what `go_on` raises within it.
            name: of the thread.
            pause: seconds before the work begins.
        """
        self._work, self._pause = work, pause
        self._thread = _Thread(target=self._run, name=name)
        self._lock = threading.Lock()
        self._wanted = threading.Event()
        self.done = False

    def begin(self) -> None:
        """Begin the work once; later calls, and calls after the program has ended, do nothing."""
        with self._lock:
            if self._thread.ident is None and not has_ended():
                self._thread.start()

    def wait(self) -> None:
        """Wait until the work is done, without the pause before it; begins the work if necessary."""
        self._wanted.set()
        self.begin()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            for _ in range(round(self._pause / POLL)):
                go_on()
                if self._wanted.wait(POLL):
                    break
            with short_turns(self._thread):
                self._work()
        except Ended:
            return
        self.done = True
