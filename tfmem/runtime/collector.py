"""Python's cycle collector, held off while tfmem makes graphs, or kept from what was there before."""

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


@contextmanager
def set_aside() -> Iterator[None]:
    """The collector does not look at what the process holds by now; cycles that are made meanwhile it collects.

    For work beside the program's steps, whose cycles of tensors must not pile up. A plan is hundreds of thousands of
    objects, so that the collector looks at all that TensorFlow and the program hold several times: a fifth of the time
    of planning. What the program has frozen itself stays so. Where several threads set objects aside, those come back
    with the end of the first.
    """
    own = not gc.get_freeze_count()
    if own:
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()
