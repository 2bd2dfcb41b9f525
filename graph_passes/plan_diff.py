"""What differs between two plans, or between the graphs that they are of: as data, and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graph_passes.device_report import duration, many, size

if TYPE_CHECKING:
    from graph_passes.plan_file import Plan

SHOWN = 5  # names in a sentence
_LABELS = {  # of the fields of `Plan` that are compared
    "subject": "step",
    "device": "device",
    "budget": "budget",
    "peak": "peak",
    "peak_before": "unmodified",
    "seconds": "step time",
    "smallest_budget": "smallest",
}
_SIZES = ("budget", "peak", "peak_before", "smallest_budget")


@dataclass(frozen=True)
class OpsDiff:
    """How the ops of two graphs differ, by their names.

    Attributes:
        new, gone: ops of one graph only.
        changed: ops whose type, inputs or shapes differ.
    """

    new: tuple[str, ...]
    gone: tuple[str, ...]
    changed: tuple[str, ...]

    @classmethod
    def between(cls, old: Iterable[tuple[str, str]], new: Iterable[tuple[str, str]]) -> OpsDiff:
        """Compare (name, digest) of each op."""
        before, after = dict(old), dict(new)
        return cls(
            tuple(name for name in after if name not in before),
            tuple(name for name in before if name not in after),
            tuple(name for name, digest in after.items() if before.get(name, digest) != digest),
        )

    def __str__(self) -> str:
        """In words; "" if nothing differs."""
        found = {"new": self.new, "gone": self.gone, "changed": self.changed}
        return "; ".join(
            f"{many(len(names), 'op')} {'are' if len(names) > 1 else 'is'} {what} ({_some(names)})"
            for what, names in found.items()
            if names
        )


@dataclass(frozen=True)
class PlanDiff:
    """What differs between two plans.

    Attributes:
        fields: (field of `Plan`, its old value, its new value): sizes in bytes, times in seconds.
        ops: of the graphs.
        moves_too, stays_now: tensors that only the new plan moves, and only the old one.
        differs: tensors that both move, but at other ops, or in another way.
    """

    fields: tuple[tuple[str, Any, Any], ...]
    ops: OpsDiff
    moves_too: tuple[str, ...]
    stays_now: tuple[str, ...]
    differs: tuple[str, ...]

    @classmethod
    def between(cls, old: Plan, new: Plan) -> PlanDiff:
        """Compare two plans."""
        values = ((name, getattr(old, name), getattr(new, name)) for name in _LABELS)
        before, after = ({move.tensor: move for move in plan.moves} for plan in (old, new))
        return cls(
            tuple((name, was, now) for name, was, now in values if was != now),
            OpsDiff.between(old.ops, new.ops),
            tuple(name for name in after if name not in before),
            tuple(name for name in before if name not in after),
            tuple(name for name, move in before.items() if after.get(name, move) != move),
        )

    def __str__(self) -> str:
        """A line for each difference; "the plans are equal" if there is none."""
        lines = [f"  {_LABELS[name]:<12}{_shown(name, was)} -> {_shown(name, now)}" for name, was, now in self.fields]
        if reason := str(self.ops):
            lines.append(f"  graph       {reason}")
        moves = (("moves too", self.moves_too), ("stays now", self.stays_now), ("differs", self.differs))
        lines += [f"  {label:<12}{many(len(names), 'tensor')} ({_some(names)})" for label, names in moves if names]
        return "\n".join(row for line in lines for row in wrapped(line)) or "the plans are equal"


def _shown(name: str, value: Any) -> str:
    if name == "seconds":
        return duration(round(value * 1e9))
    return size(value) if name in _SIZES else str(value)


def wrapped(line: str) -> list[str]:
    """The rows of a line of a plan's text, of 100 characters at most."""
    return textwrap.wrap(line, 100, subsequent_indent=" " * 14, break_on_hyphens=False)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
