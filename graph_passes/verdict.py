"""What a plan promises for a step under a budget, beside what no plan can. It prints as text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_passes.device_report import size

AHEAD = 1.05  # of the unlimited rate: a step with regions may be faster than what was given


@dataclass(frozen=True)
class Verdict:
    """A step under a memory budget.

    Attributes:
        fits: whether the step fits with nothing moved.
        seconds_unlimited: what the given step takes without a budget, neither split nor stitched.
        seconds: what it takes under the plan, as predicted.
        least: seconds that no plan of copies and known chains goes below; None where no program was solved.
        smallest_budget: bytes that no plan of copies and known chains goes below.
        op: the op that sets the smallest budget.
        note: what kept the solver from its work, if anything did.
        how: by what the step fits, where it does not fit unchanged.
    """

    fits: bool
    seconds_unlimited: float
    seconds: float
    least: float | None = None
    smallest_budget: int = 0
    op: str = ""
    note: str = ""
    how: str = "with moves"

    @property
    def rate(self) -> float:
        """The predicted share of the unlimited rate."""
        return self.seconds_unlimited / self.seconds if self.seconds else 1.0

    @property
    def best_rate(self) -> float | None:
        """The share of the unlimited rate that no plan exceeds."""
        if self.least is None:
            return None
        return self.seconds_unlimited / max(self.least, self.seconds_unlimited) if self.least else 1.0

    def under(self, before: float, after: float) -> Verdict:
        """This by other op times, under which the step takes `before` unchanged and `after` under the plan.

        What no plan goes below changes as the unchanged step does.
        """
        least = self.least
        if least is not None and self.seconds_unlimited:
            least = min(least * before / self.seconds_unlimited, after)
        return replace(self, seconds_unlimited=before, seconds=after, least=least)

    def __str__(self) -> str:
        smallest = f"the smallest budget is {size(self.smallest_budget)}, at op '{self.op}'"
        if self.fits:
            return f"fits unchanged; {smallest}"
        if self.rate >= AHEAD:
            return f"fits {self.how}; predicted {self.rate:.2f} times the unlimited rate; {smallest}"
        best = "" if self.best_rate is None else f", at most {self.best_rate:.3f} possible"
        return f"fits {self.how}; predicted {min(1.0, self.rate):.3f} of the unlimited rate{best}; {smallest}"


def rated_by(verdict: Verdict | None, given: Verdict | None) -> Verdict | None:
    """`verdict` of a changed step, whose rate is of what the step of `given` takes, if both are known."""
    if verdict is None or given is None:
        return verdict
    return replace(verdict, seconds_unlimited=given.seconds_unlimited)
