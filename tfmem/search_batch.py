"""The largest batch for which a plan meets a budget. Pure: it asks a function for plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

MOST = 1 << 20  # a batch that is never exceeded
TRIES = 48  # plans that a search makes at most
GUESSES = 4  # of these, along the line before it halves the interval every other time
NEAR = 0.125  # of a batch whose step is divided: each of these plans takes many times as long


class Planned(Protocol):
    """What a search reads of a plan."""

    @property
    def feasible(self) -> bool: ...

    @property
    def budget(self) -> int | None: ...

    @property
    def smallest_budget(self) -> int: ...


def largest_batch(planned: Callable[[int], Planned], start: int) -> int:
    """The largest batch that fits; 0 if no batch does.

    What a step needs grows with its batch along a line, nearly. So the next batch to try is read off the line through
    the last two, and the interval between the largest that fits and the smallest that does not is halved otherwise.

    Args:
        planned: makes a plan for a batch.
        start: the first batch to try.
    """
    fits, misses = 0, MOST + 1
    needs: dict[int, int] = {}
    batch = max(1, start)
    for tried in range(TRIES):
        found = planned(batch)
        needs[batch] = found.smallest_budget
        if found.feasible:
            fits = max(fits, batch)
        else:
            misses = min(misses, batch)
        if misses - fits <= 1:
            break
        along = tried < GUESSES or tried % 2
        batch = _next(needs, found.budget or 0, fits, misses) if along else _middle(fits, misses)
    return fits


def largest_divided_batch(planned: Callable[[int], Planned], fits: int) -> int:
    """A batch that fits where parts of the step may be split along the batch; one that is an eighth larger does not.

    What such a step needs grows along no line. So the batch is doubled until it misses, and the interval is halved.

    Args:
        planned: makes a plan for a batch, which may split.
        fits: the largest batch that fits with nothing split; 0 if none does, and then none does with splits.
    """
    misses = MOST + 1
    while fits and misses - fits > max(1, NEAR * fits) and fits < MOST:
        batch = min(_middle(fits, misses), MOST)
        if planned(batch).feasible:
            fits = batch
        else:
            misses = batch
    return fits


def _middle(fits: int, misses: int) -> int:
    return 2 * fits if misses > MOST else (fits + misses) // 2


def _next(needs: dict[int, int], budget: int, fits: int, misses: int) -> int:
    """A batch strictly between one that fits and one that does not."""
    if len(needs) < 2:
        return _middle(fits, misses)
    (b0, n0), (b1, n1) = sorted(needs.items())[-2:]
    guess = b0 + (budget - n0) * (b1 - b0) // (n1 - n0) if n1 != n0 else _middle(fits, misses)
    if guess in needs:
        guess += 1 if guess <= fits else -1
    return min(max(guess, fits + 1), misses - 1)
