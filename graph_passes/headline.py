"""The first line of a report: what became of a step, in the user's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graph_passes.decision import Decision
from graph_passes.device_report import duration, many, size, sizes
from graph_passes.verdict import AHEAD

if TYPE_CHECKING:
    from graph_passes.report import Report

RECOMPUTED = "(recomputed)"
UNPLANNED = 1.5  # of a step's planned time: what takes longer says little about what the plan costs


def headline(report: Report) -> str:
    """One sentence: whether the step fits, its peak, what that costs, and what was changed."""
    changes = "; ".join(filter(None, (_memory(report), _changes(report))))
    return f"`{report.graph}`: {changes}"


def _memory(report: Report) -> str:
    budget, measured = report.budget, report.peak_measured
    if report.decision is Decision.FAILED:
        return "planning failed; the unmodified step runs"
    if budget is None:
        return "no memory budget"
    peak = report.peak_predicted if measured is None else measured
    if peak > budget or report.decision in (Decision.OVER, Decision.ORDERED_OVER):
        return f"OVER BUDGET: peak {size(peak)}, the budget is {size(budget)}"
    if report.transfers or report.splits:
        return f"fits {size(budget)}: peak {' instead of '.join(sizes(peak, report.peak_before))}{_slower(report)}"
    how = "in the planned order" if report.decision is Decision.ORDERED else "unchanged"
    return f"fits {size(budget)} {how}: peak {size(peak)}"


def _slower(report: Report) -> str:
    """How much longer the step takes: as measured, if it was, over what its ops take without copies.

    A step that takes much longer than planned shares its machine, or the plan is wrong: then both times are told.
    """
    verdict = report.verdict
    if verdict is None:
        return ""
    planned, measured = report.step_predicted_ns, report.step_measured_ns
    if measured and planned and measured > UNPLANNED * planned:
        return f"{slower(verdict.rate)} ({duration(planned)} a step, {duration(measured)} measured)"
    if report.step_measured_ns and verdict.seconds_unlimited:
        return slower(verdict.seconds_unlimited / (report.step_measured_ns / 1e9), "")
    return slower(verdict.rate)


def slower(rate: float, how: str = " by prediction") -> str:
    """A share of the unlimited rate in words.

    Args:
        rate: the share.
        how: by what it is known.
    """
    more = 1 / rate - 1 if rate > 0 else 0.0
    if more >= 1:
        return f", {1 + more:.1f} times as long{how}"
    if rate >= AHEAD:
        return f", {rate:.2f} times as fast{how}"
    return f", as fast{how}" if more < 0.005 else f", {more:.0%} slower{how}"


def _changes(report: Report) -> str:
    again = sum(record.offload_after == RECOMPUTED for record in report.transfers)
    moved, regions = len(report.transfers) - again, len(report.running)
    found = (
        moved and f"{many(moved, 'tensor')} offloaded",
        again and f"{again if moved else many(again, 'tensor')} recomputed",
        report.splits and f"{many(len(report.splits), 'part')} split along the batch",
        report.replaced and f"{many(len(report.replaced), 'recurrent layer')} replaced",
        regions and f"{many(regions, 'region')} fused",
    )
    words = ", ".join(each for each in found if each)
    return words or ("nothing was changed" if report.budget is None and report.decision.is_unchanged else "")
