"""Which of several candidates is the fastest: they run in turn, and the least time of each counts.

    turn    0 1 1 0 0 1 1 0 ...     mirrored: every other round backwards, since a run may slow down the next
    counts  - - - 2 3 ...           `skipped` first times of each make kernels

What else a machine does meets all candidates alike, and only ever adds time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf


def fastest(seconds: Sequence[float]) -> int | None:
    """The number of the candidate that took least; None if none ran."""
    best = min(range(len(seconds)), key=lambda number: seconds[number], default=None)
    return None if best is None or seconds[best] == inf else best


@dataclass
class Rounds:
    """Seconds of candidates by now, one of each a round.

    Attributes:
        count: candidates.
        needed: rounds after which the times are clear.
        skipped: first rounds that do not count.
        mirrored: whether every other round goes backwards.
        few, large: after so many rounds a difference by this factor is believed; 0 for never.
        taken: the seconds that were added.
    """

    count: int
    needed: int
    skipped: int = 0
    mirrored: bool = False
    few: int = 0
    large: float = inf
    taken: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.taken = [[] for _ in range(self.count)]

    @property
    def turn(self) -> int:
        """The candidate that runs next."""
        rounds, place = divmod(sum(map(len, self.taken)), self.count)
        return self.count - 1 - place if self.mirrored and rounds % 2 else place

    def add(self, seconds: float) -> None:
        """What the candidate whose turn it is took."""
        self.taken[self.turn].append(seconds)

    @property
    def times(self) -> tuple[float, ...]:
        """The least time of each, infinite before there is one that counts."""
        return tuple(min(seconds[self.skipped :], default=inf) for seconds in self.taken)

    @property
    def noise(self) -> float:
        """The seconds by which the least time of a candidate may be off: the most of all candidates, infinite before
        two rounds count. For each it is the difference between its least times in even and in odd rounds."""
        return max(map(self._off, self.taken), default=0.0)

    def _off(self, seconds: Sequence[float]) -> float:
        counted = seconds[self.skipped :]
        return abs(min(counted[::2]) - min(counted[1::2])) if len(counted) > 1 else inf

    @property
    def clear(self) -> bool:
        """Whether no more rounds are needed."""
        rounds = min(map(len, self.taken)) - self.skipped
        if rounds >= self.needed:
            return True
        return 0 < self.few <= rounds and max(self.times) > self.large * min(self.times)
