"""Python's cycle collector, held off while tfmem makes graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_off() -> Iterator[None]:
    """No collection of cycles begins meanwhile, in any thread.

    A graph is tens of thousands of objects that stay, and each few thousands of new ones make the collector look at all
    that the process holds. Where several threads hold it off, the first of those that found it on turns it on again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
