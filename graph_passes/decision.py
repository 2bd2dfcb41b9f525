"""What was decided about a graph, as data that a report holds; their values are the words that it prints.

Code compares these values and never their words.
"""

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


class FusionWhy(StrEnum):
    """Why a step runs stitched, or does not; where times or an error say it, the report has a sentence of its own."""

    UNDECIDED = "not decided yet: it runs as it was"
    MEANWHILE = "not decided yet: it runs as it was, while it is planned and kernels for its recurrent layers are made"
    BY_MODEL = "stitched, as the model has it: nothing was timed"
    UNTUNED = "stitched, as the model has it: tune='off'"
    DETERMINISTIC = "stitched, as the model has it: op determinism is on"
    NOTHING = "nothing to stitch"
    PLANNED = "left as it was: a plan for the memory budget runs in its place"
    TRACED = "not stitched: more of the function is still to be traced"
    DISTRIBUTED = "left as it was: it runs under a distribution strategy"
    FAILED = "left as it was: stitching failed"
    XLA_ASKED = "left to XLA, which the function asks for"
    XLA_UNTIMED = "left to XLA: nothing can be timed"

    @property
    def state(self) -> Fusion:
        """Whether the step runs stitched."""
        if self in (FusionWhy.UNDECIDED, FusionWhy.MEANWHILE):
            return Fusion.UNDECIDED
        stitched = self in (FusionWhy.BY_MODEL, FusionWhy.UNTUNED, FusionWhy.DETERMINISTIC)
        return Fusion.STITCHED if stitched else Fusion.LEFT

    @property
    def cure(self) -> str:
        """What the user can do to have the step stitched, in words; "" if nothing."""
        if self is FusionWhy.PLANNED:
            return "give a memory_budget under which nothing has to move"
        return "pass the tf.function itself to tfmem.optimize" if self is FusionWhy.TRACED else ""


class Xla(StrEnum):
    """What became of XLA for a step that it would run."""

    NO_PART = ""
    LEFT_ON = "left on"
    RECURRENT = "off: recurrent kernels cannot live inside XLA"
    MOVED = "off: memory ops cannot live inside XLA"
    ORDERED = "off: the planned order cannot be held inside XLA"
    STITCHED = "off: stitched it is faster"

    @property
    def is_lost(self) -> bool:
        """Whether XLA would have run the step, and does not."""
        return self not in (Xla.NO_PART, Xla.LEFT_ON)


class Missed(str):
    """A note of a report: by how much the budget is missed. It is told by its type, not by its words.

    Attributes:
        how: what follows "OVER BUDGET" in it.
    """

    how: str

    @classmethod
    def of(cls, how: str) -> Missed:
        """The note that the budget was missed: `how` follows "OVER BUDGET"."""
        note = cls(f"OVER BUDGET{how}")
        note.how = how
        return note

    @property
    def once(self) -> str:
        """What is said of it when it holds no more."""
        return f"over budget (while plans were tried, not since){self.how}"
