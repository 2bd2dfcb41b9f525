"""A progress line on stderr for work that takes long."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

PATIENCE = 2.0  # seconds before the line appears


@contextmanager
def shown(enabled: bool, text: Callable[[], str], expected: float = 0.0) -> Iterator[None]:
    """Show `text()` while what is inside takes longer than `PATIENCE`.

    On a terminal the line is rewritten every second and cleared at the end; elsewhere it is written once.

    Args:
        enabled: whether to show the line.
        text: says what is going on.
        expected: seconds that the work should take, from earlier runs; 0 if unknown.
    """
    if not enabled:
        yield
        return
    done = threading.Event()
    line = threading.Thread(target=_show, args=(text, expected, done), name="tfmem progress", daemon=True)
    line.start()
    try:
        yield
    finally:
        done.set()
        line.join()


def _show(text: Callable[[], str], expected: float, done: threading.Event) -> None:
    began = time.monotonic()
    if done.wait(PATIENCE):
        return

    def now() -> str:
        left = round(expected - (time.monotonic() - began))
        return f"tfmem: {text()}" + (f", about {left} s more" if left > 0 else "")

    if not sys.stderr.isatty():
        print(now(), file=sys.stderr, flush=True)
        return
    with tqdm(desc=now(), bar_format="{desc}", leave=False, file=sys.stderr) as bar:
        while not done.wait(1.0):
            bar.set_description_str(now())
