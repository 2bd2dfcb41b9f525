"""The warnings of an optimised object, one for each cause."""

from __future__ import annotations

from dataclasses import dataclass, field

from custom_ops.background import has_ended
from custom_ops.errors import warn
from graph_passes.decision import Missed
from graph_passes.passes.recurrent.match import RecurrentPlan
from graph_passes.report import Report, unenforced


@dataclass(frozen=True, eq=False)
class Notices:
    """The warnings of one optimised object, for all of its steps.

    Attributes:
        asked: whether the user asked for the recurrent pass: then a recurrence that stays is worth a warning.
        warned: the causes of which the user was warned.
    """

    asked: bool = False
    warned: set[str] = field(default_factory=set)

    def warn(self, cause: str, message: str) -> None:
        """Show a `TfmemWarning`, unless there was one of this cause, or the program has ended: then a thread in the
        background fails because it can start no others, which is no error of the step."""
        if cause not in self.warned and not has_ended():
            self.warned.add(cause)
            warn(message)

    def warn_of_kept(self, name: str, replacements: RecurrentPlan) -> None:
        """Warn of recurrences that were not replaced, because of a bug in tfmem or although the user asked for it."""
        faults = [loop for loop in replacements.unmatched if loop.traceback]
        others = [loop for loop in replacements.unmatched if self.asked and not loop.traceback]
        for cause, kept in (("fault", faults), ("kept", others)):
            if kept:
                more = f"; and {len(kept) - 1} more" if len(kept) > 1 else ""
                what = f"{kept[0].name} ({kept[0].carrier}) stays as it is: {kept[0].reason}{more}"
                self.warn(cause, f"tfmem: {name}: {what}; see tfmem.report(...)")

    def warn_of_losses(self, report: Report) -> None:
        """Warn of a missed budget, of lists that it is not enforced for, and of lost XLA."""
        missed = [note for note in report.notes if isinstance(note, Missed)]
        if missed:
            self.warn("budget", f"tfmem: {report.graph}: {missed[0]}; see tfmem.report(...)")
        if report.not_enforced:
            self.warn("not enforced", f"tfmem: {report.graph}: {unenforced(report)}; see tfmem.report(...)")
        if report.xla_lost:
            self.warn("XLA", f"tfmem: {report.graph}: XLA is {report.jit_compile}; see tfmem.report(...)")
