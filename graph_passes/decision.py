"""What was decided about a graph, as data that a report holds. The value of a member is the text that a report prints.

Code compares members and never their texts.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    SPLIT = "split along the batch"
    REPLACED = "replaced"
    STITCHED = "stitched"
    XLA = "run by XLA"

    @property
    def is_unchanged(self) -> bool:
        """Whether the unmodified step runs."""
        return self in (Decision.NO_BUDGET, Decision.FITS, Decision.OVER, Decision.FAILED)


class Fusion(StrEnum):
    """Whether a step runs stitched."""

    NOT_ASKED = ""
    UNDECIDED = "undecided"
    STITCHED = "stitched"
    LEFT = "left"


class FusionWhy(StrEnum):
    """Why a step runs stitched or not. If the reason is a time or an error, the report holds another text instead."""

    UNDECIDED = "not decided yet: the unmodified step runs"
    MEANWHILE = "not decided yet: the unmodified step runs while tfmem plans it and compiles its recurrent kernels"
    BY_MODEL = "stitched, as the cost model chose: nothing was timed"
    UNTUNED = "stitched, as the cost model chose: tune='off'"
    DETERMINISTIC = "stitched, as the cost model chose: op determinism is on"
    NOTHING = "nothing to stitch"
    PLANNED = "left unchanged: a plan for the memory budget runs in its place"
    NO_ROOM = "left unchanged: no plan for the memory budget has room for its regions"
    SLOWER = "left unchanged: stitched it would be slower within the memory budget, as the cost model says"
    TRACED = "not stitched: more of the function is still to be traced"
    DISTRIBUTED = "left unchanged: steps of several replicas are stitched where passes names fusion"
    OTHER_WORKERS = "left unchanged: replicas of other workers take part in the step"
    REPLICAS = "stitched on all replicas, as the cost model chose"
    FAILED = "left unchanged: stitching failed"
    XLA_ASKED = "left to XLA, which the function asks for"
    XLA_UNTIMED = "left to XLA: nothing can be timed"

    @property
    def state(self) -> Fusion:
        """Whether the step runs stitched."""
        if self in (FusionWhy.UNDECIDED, FusionWhy.MEANWHILE):
            return Fusion.UNDECIDED
        stitched = self in (FusionWhy.BY_MODEL, FusionWhy.UNTUNED, FusionWhy.DETERMINISTIC, FusionWhy.REPLICAS)
        return Fusion.STITCHED if stitched else Fusion.LEFT

    @property
    def cure(self) -> str:
        """What the user can do to have the step stitched, in words; "" if nothing."""
        if self is FusionWhy.PLANNED:
            return "give a memory_budget under which nothing has to move"
        if self is FusionWhy.NO_ROOM:
            return "give a larger memory_budget"
        if self is FusionWhy.DISTRIBUTED:
            return "pass passes=('recurrent', 'fusion', 'offload') to tfmem.optimize"
        if self is FusionWhy.XLA_ASKED:
            return "leave jit_compile=True out of tf.function"
        return "pass the tf.function itself to tfmem.optimize" if self is FusionWhy.TRACED else ""


class Xla(StrEnum):
    """What became of XLA for a step that it would run."""

    NO_PART = ""
    LEFT_ON = "left on"
    RECURRENT = "off: XLA cannot compile recurrent kernels"
    MOVED = "off: XLA cannot compile memory ops"
    ORDERED = "off: XLA would not keep the planned order"
    STITCHED = "off: stitched it is faster"
    EXECUTOR = "off: TensorFlow's executor is faster"
    RUNS = "on: it is faster than what tfmem and TensorFlow's executor run"

    @property
    def is_lost(self) -> bool:
        """Whether XLA would have run the step, and does not."""
        return self not in (Xla.NO_PART, Xla.LEFT_ON, Xla.RUNS)

    @property
    def cure(self) -> str:
        """What the user can do to keep XLA, in words; "" where XLA was not lost, or what runs is faster."""
        if self is Xla.RECURRENT:
            return "to keep it, leave 'recurrent' out of passes"
        return "to keep it, raise memory_budget until nothing has to move" if self in (Xla.MOVED, Xla.ORDERED) else ""


class Missed(str):
    """A note of a report: by how much a step exceeds the budget. Code recognises its type, not its text.

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
        """The text for a step that has met its budget since."""
        return f"over budget (while plans were tried, not since){self.how}"


def met_since(notes: Iterable[str]) -> tuple[str, ...]:
    """The notes of a step that has met its budget since they were written."""
    return tuple(note.once if isinstance(note, Missed) else note for note in notes)
