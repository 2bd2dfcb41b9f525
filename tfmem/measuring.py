"""What is measured of the whole process, its allocator's numbers above all, is measured by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 60.0  # seconds to wait for another measured call; it may itself wait for this one (a tf.py_function)

_measuring = threading.Lock()


@contextmanager
def alone() -> Iterator[None]:
    """No other measured call runs meanwhile; steps that have settled do."""
    held = _measuring.acquire(timeout=PATIENCE)
    try:
        yield
    finally:
        if held:
            _measuring.release()
