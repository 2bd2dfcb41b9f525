"""The warnings of an optimised object, one for each cause."""

from __future__ import annotations

from dataclasses import dataclass, field

from custom_ops.background import has_ended
from custom_ops.errors import warn
from graph_passes.decision import Missed
from graph_passes.passes.recurrent.match import RecurrentPlan
from graph_passes.report import Report, unenforced

SEE = "see tfmem.report(...)"
REPORT_IT = "this is a bug in tfmem: please report it, with the traceback that tfmem.report(...) shows"
KEEP_IT = "to keep it without this warning, leave 'recurrent' out of passes; docs/refusals.md has all reasons"
SPLIT_IT = ", set offload=tfmem.OffloadOptions(split='faster') to run parts on pieces of the batch,"
_BUDGET, _NOT_ENFORCED, _XLA = _LOSSES = ("budget", "not enforced", "XLA")  # causes of `warn_of_losses`


@dataclass(frozen=True, eq=False)
class Notices:
    """The warnings of one optimised object, for all of its steps.

    Attributes:
        asked: whether the user asked for the recurrent pass: then a recurrence that stays is worth a warning.
        warned: the causes of which the user was warned.
    """

    asked: bool = False
    warned: set[str] = field(default_factory=set)

    def warn(self, cause: str, message: str, cure: str) -> None:
        """Show a `TfmemWarning`, unless there was one of this cause, or the program has ended: then a thread in the
        background fails because it can start no others, which is no error of the step.

        Args:
            cause: why; an object is warned of each cause once.
            message: what happened, to which object.
            cure: what the user can do.
        """
        if cause not in self.warned and not has_ended():
            self.warned.add(cause)
            warn(f"tfmem: {message}; {cure}")

    def of_variant(self) -> Notices:
        """The warnings of a variant that is tried: what it loses matters only if it stays, and is told then."""
        return Notices(self.asked, set(_LOSSES))

    def warn_of_kept(self, name: str, replacements: RecurrentPlan) -> None:
        """Warn of recurrences that were not replaced, because of a bug in tfmem or although the user asked for it."""
        faults = [loop for loop in replacements.unmatched if loop.traceback]
        others = [loop for loop in replacements.unmatched if self.asked and not loop.traceback]
        for cause, kept, cure in (("fault", faults, REPORT_IT), ("kept", others, KEEP_IT)):
            if kept:
                more = f"; and {len(kept) - 1} more" if len(kept) > 1 else ""
                what = f"{kept[0].name} ({kept[0].carrier}) is not replaced: {kept[0].why}{more}"
                self.warn(cause, f"{name}: {what}", cure)

    def warn_of_losses(self, report: Report, may_split: bool = False) -> None:
        """Warn of a missed budget, of lists that it is not enforced for, and of lost XLA.

        Args:
            report: of the step.
            may_split: whether the step may meet the budget in pieces of the batch, if the user allows more of them.
        """
        missed = [note for note in report.notes if isinstance(note, Missed)]
        if missed:
            cure = f"raise memory_budget{SPLIT_IT if may_split else ''} or use a smaller batch; {SEE}"
            self.warn(_BUDGET, f"{report.graph}: {missed[0]}", cure)
        if report.not_enforced:
            self.warn(
                _NOT_ENFORCED, f"{report.graph}: {unenforced(report)}", f"leave room for them in the budget; {SEE}"
            )
        if report.jit_compile.cure:
            self.warn(_XLA, f"{report.graph}: XLA is {report.jit_compile}", f"{report.jit_compile.cure}; {SEE}")
