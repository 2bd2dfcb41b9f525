"""Which tests a run takes: the short ones, the long ones, or a fifth of the long ones.

A test is long by its mark, `long`; `sampled(n)` makes all but one in n of a test's cases long. A test by hypothesis is
both short and long: it tries a quarter of its examples among the short ones, and all of them among the long ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import settings

FIFTHS = 5
SHORT_EXAMPLES, ALL_EXAMPLES = 25, 100  # of each hundred that a test names


@dataclass(frozen=True)
class Tier:
    """What `--long` says.

    Attributes:
        short: whether the short tests run.
        fifths: of which fifths the long tests run; numbered from 1.
    """

    short: bool
    fifths: frozenset[int]

    @staticmethod
    def parse(text: str) -> Tier:
        """Reads "none", "all", "only" (the long ones, without the short ones) or a fifth of those, such as "2/5".

        Raises:
            ValueError: it is none of these.
        """
        fifths = {f"{number}/{FIFTHS}": Tier(False, frozenset([number])) for number in range(1, FIFTHS + 1)}
        every = frozenset(range(1, FIFTHS + 1))
        tiers = {"none": Tier(True, frozenset()), "all": Tier(True, every), "only": Tier(False, every), **fifths}
        if text not in tiers:
            raise ValueError(f"--long={text!r}: expected one of {', '.join(tiers)}")
        return tiers[text]

    @property
    def examples(self) -> int:
        """How many examples a test by hypothesis tries, of each hundred that it names."""
        return ALL_EXAMPLES if self.fifths else SHORT_EXAMPLES

    def takes(self, test: str, is_long: bool, by_hypothesis: bool) -> bool:
        """Whether a test of this id runs."""
        if self.short and not is_long:
            return True
        return (is_long or by_hypothesis) and fifth_of(test) in self.fifths


def is_sampled(indices: Iterable[int], one_in: int) -> bool:
    """Whether a case is one of those that stay short: each value of each parameter is in some that do.

    Args:
        indices: the places of the case's values among those of its parameters.
        one_in: how many cases there are for each that stays short.
    """
    return sum(indices) % one_in == 0


def fifth_of(test: str) -> int:
    """The fifth that a test belongs to: the same on all machines, whatever other tests there are."""
    return int(hashlib.sha256(test.encode()).hexdigest(), 16) % FIFTHS + 1


def examples(count: int) -> int:
    """How many of a test's `count` examples are tried: what the profile of the run has of each hundred."""
    return max(1, count * settings().max_examples // ALL_EXAMPLES)
