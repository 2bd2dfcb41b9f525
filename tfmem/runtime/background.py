"""Work that a thread of its own does, once it is told to begin."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Begins when `begin` is first called: the first call of a step does not share its processor with planning."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        """
        Args:
            work: raises nothing.
            name: of the thread.
        """
        self._thread = threading.Thread(target=work, name=name)
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether it began and ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def begin(self) -> None:
        """Once; later calls do nothing."""
        with self._lock:
            if self._thread.ident is None:
                self._thread.start()

    def wait(self) -> None:
        """Until it is done, and begin it if nobody did."""
        self.begin()
        self._thread.join()
