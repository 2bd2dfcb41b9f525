"""What was decided about a graph, as data that a report holds; their values are the words that it prints."""

from __future__ import annotations

from enum import StrEnum


class Decision(StrEnum):
    """What was done to a step."""

    NO_BUDGET = "unchanged: no budget"
    FITS = "unchanged: fits"
    OVER = "unchanged: over budget"
    FAILED = "unchanged: planning failed"
    ORDERED = "ordered: fits in the planned order"
    ORDERED_OVER = "ordered: over budget"
    MOVED = "moved"
    REPLACED = "replaced"
    STITCHED = "stitched"

    @property
    def is_unchanged(self) -> bool:
        """Whether the step runs as it was given."""
        return self in (Decision.NO_BUDGET, Decision.FITS, Decision.OVER, Decision.FAILED)


class Fusion(StrEnum):
    """Whether a step runs stitched."""

    NOT_ASKED = ""
    UNDECIDED = "undecided"
    STITCHED = "stitched"
    LEFT = "left"


class Missed(str):
    """A note of a report: by how much the budget is missed. It is told by its type, not by its words."""

    __slots__ = ()

    @classmethod
    def of(cls, how: str) -> Missed:
        """`how` begins with what comes behind "OVER BUDGET"."""
        return cls(f"OVER BUDGET{how}")

    @property
    def once(self) -> str:
        """What is said of it when it holds no more."""
        return f"over budget (while plans were tried, not since){self.removeprefix('OVER BUDGET')}"
