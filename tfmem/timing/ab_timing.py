"""Which of two ways to run a step is the faster one, found in slices of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

ROUNDS = 15
BLOCK = 5e-3  # seconds of one of them in a round: short steps run several times in a row, as they do in training
MOST = 20  # runs in a row
FEW = 4  # rounds after which a large difference is believed
LARGE = 1.5

Run = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds of a step.

    Attributes:
        given: as it was.
        stitched: with its regions as one op each.
    """

    given: float
    stitched: float

    @property
    def is_faster(self) -> bool:
        """Whether stitching pays."""
        return self.stitched <= self.given


@dataclass
class Contest:
    """Runs both in turn. What else a machine does only ever adds time, so the least time of each counts.

    Attributes:
        clock: seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    _rounds: list[tuple[float, float]] = field(default_factory=list)
    _runs: int = 0  # in a row; 0 before the first round, in which kernels are made

    def go_on(self, given: Run, stitched: Run, limit: float) -> Times | None:
        """Time for about `limit` seconds; the result, once it is clear.

        Args:
            given: runs the step as it was.
            stitched: runs it with its regions.
            limit: but for the first, no round begins that would end later, by what the last one took.
        """
        began = self.clock()
        took = 0.0  # seconds of the latest round: a step longer than `limit` has one in each slice
        while not self._is_clear:
            now = self.clock()
            if now - began + took > limit:
                return None
            if self._runs:
                self._rounds.append(self._round(given, stitched))
            else:
                self._round(given, stitched)
                least = sum(self._round(given, stitched)) / 2
                self._runs = max(1, min(MOST, int(BLOCK / least)))
            took = self.clock() - now
        return self._times

    @property
    def _times(self) -> Times:
        return Times(min(row[0] for row in self._rounds), min(row[1] for row in self._rounds))

    @property
    def _is_clear(self) -> bool:
        if not FEW <= len(self._rounds) < ROUNDS:
            return len(self._rounds) >= ROUNDS
        less, more = sorted((self._times.given, self._times.stitched))
        return more > LARGE * less

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
    """The same for a step that cannot be run on copies: its own calls run one of the two in turn, and are timed.

    Attributes:
        seconds: of the calls so far, as the step was and stitched.
    """

    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    @property
    def stitched(self) -> bool:
        """What the next call runs: in pairs, every other one backwards, since a call may slow down the next."""
        calls = len(self.seconds[0]) + len(self.seconds[1])
        return calls % 4 in (1, 2)

    def add(self, seconds: float) -> Times | None:
        """What that call took; the result after the last. The first of each makes kernels and does not count."""
        self.seconds[self.stitched].append(seconds)
        if min(map(len, self.seconds)) <= ROUNDS:
            return None
        given, stitched = (min(each[1:]) for each in self.seconds)
        return Times(given, stitched)
