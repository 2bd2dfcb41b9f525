"""Which of two ways to run a step is the faster one, found in slices of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from custom_ops.timing.rounds import Rounds

ROUNDS = 15
BLOCK = 5e-3  # seconds of one of them in a round: short steps run several times in a row, as they do in training
LEAST = 2  # runs in a row: one behind the other step finds its memory elsewhere, and captures library calls again
MOST = 20
FEW = 4  # rounds after which a large difference is believed
LARGE = 1.5

Run = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds of a step.

    Attributes:
        given: without regions.
        stitched: with its regions as one op each.
        tuned: whether the kernels of these regions were tuned before, so that nothing is left to tune.
        noise: by how much either time may be off (`Rounds.noise`).
    """

    given: float
    stitched: float
    tuned: bool = False
    noise: float = field(default=0.0, compare=False)

    @property
    def is_faster(self) -> bool:
        """Whether stitching pays by more than the noise: of two that take as long, the given one runs."""
        return self.stitched + self.noise < self.given


def _pair(**how: Any) -> Rounds:
    return Rounds(2, ROUNDS, **how)


def _found(rounds: Rounds) -> Times | None:
    if not rounds.clear:
        return None
    given, stitched = rounds.times
    return Times(given, stitched, noise=rounds.noise)


@dataclass
class Slices:
    """Runs both in turn, a slice of time in each call of a step.

    Attributes:
        clock: seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    _rounds: Rounds = field(default_factory=partial(_pair, few=FEW, large=LARGE))
    _runs: int = 0  # in a row; 0 before the first round, in which kernels are made

    def go_on(self, given: Run, stitched: Run, limit: float) -> Times | None:
        """Time for about `limit` seconds; the result, once it is clear.

        Args:
            given: runs the step without regions.
            stitched: runs it with its regions.
            limit: but for the first, no round begins that would end later, by what the last one took.
        """
        began = self.clock()
        took = 0.0  # seconds of the latest round: a step longer than `limit` has one in each slice
        while not self._rounds.clear:
            now = self.clock()
            if now - began + took > limit:
                return None
            if self._runs:
                for seconds in self._round(given, stitched):
                    self._rounds.add(seconds)
            else:
                self._round(given, stitched)
                least = sum(self._round(given, stitched)) / 2
                fewest = LEAST if 2 * LEAST * least <= limit else 1
                self._runs = max(fewest, min(MOST, int(BLOCK / least)))
            took = self.clock() - now
        return _found(self._rounds)

    def _round(self, given: Run, stitched: Run) -> tuple[float, float]:
        return self._least(given), self._least(stitched)

    def _least(self, run: Run) -> float:
        return min(self._timed(run) for _ in range(max(1, self._runs)))

    def _timed(self, run: Run) -> float:
        began = self.clock()
        run()
        return self.clock() - began


@dataclass
class Turns:
    """Times a step that cannot be run on copies: its own calls run one of the two in turn.

    The first of each makes kernels and does not count.
    """

    _rounds: Rounds = field(default_factory=partial(_pair, skipped=1, mirrored=True))

    @property
    def stitched(self) -> bool:
        """Whether the next call runs the stitched step."""
        return bool(self._rounds.turn)

    def add(self, seconds: float) -> Times | None:
        """Add the time of that call; returns the result after the last."""
        self._rounds.add(seconds)
        return _found(self._rounds)
