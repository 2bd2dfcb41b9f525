"""Whether tfmem has decided how a step runs. Benchmarks time it only then."""

from __future__ import annotations

from graph_passes.decision import Fusion
from graph_passes.report import Report
from tfmem.steps import dividing, improving, solving

MEANWHILE = (improving.MEANWHILE, solving.MEANWHILE, dividing.MEANWHILE)


def is_decided(report: Report) -> bool:
    """Whether no thread looks for a faster way to run the step any more."""
    return report.fusion_state is not Fusion.UNDECIDED and not any(note in report.notes for note in MEANWHILE)
