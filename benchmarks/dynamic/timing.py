"""How a system is timed, the same for all. Imports the standard library only."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

WARM = 2  # batches before


def measure(batches: Sequence[Any], train: Callable[[Any], Any], wait: Callable[[Any], object], seconds: float) -> dict:
    """Trains on the batches in turn for `seconds`, on all of them once if `seconds` is 0.

    Args:
        batches: pairs of what `train` takes and how many sentences it has.
        train: starts a step, and may return before it is over.
        wait: for what the last step returned.

    Returns:
        Sentences, wall time and processor time.
    """
    began = time.perf_counter()
    for batch, _ in batches[:WARM]:
        wait(train(batch))
        if seconds and time.perf_counter() - began > seconds:
            break
    wall, processor, sentences, steps, last = time.perf_counter(), time.process_time(), 0, 0, None
    while True:
        batch, count = batches[steps % len(batches)]
        last = train(batch)
        sentences, steps = sentences + count, steps + 1
        if seconds == 0:
            if steps == len(batches):
                break
        elif steps % 8 == 0 or time.perf_counter() - wall >= seconds:
            wait(last)  # so that time is seen to pass on a device
            if time.perf_counter() - wall >= seconds:
                break
    wait(last)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {"sentences": sentences, "steps": steps, "wall": wall, "processor": processor}


def show(**row: Any) -> None:
    """A row of results, as the benchmark reads it."""
    print(json.dumps(row), flush=True)


def words_of(tree: list) -> list[int]:
    """The numbers of a tree's words."""
    return [tree[1]] if len(tree) == 2 else words_of(tree[1]) + words_of(tree[2])


def parts_of(given: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Batches of `size`."""
    return [given[first : first + size] for first in range(0, len(given), size)]
