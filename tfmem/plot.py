"""Draws a `Report`: memory over one step before and after, the tensors that are offloaded, and the fused regions.

matplotlib is an extra (`pip install 'tfmem[plot]'`), so it is imported only when something is drawn. Figures are made
without pyplot: no display, no global state."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from custom_ops.errors import TfmemError
from graph_passes.device_report import size
from graph_passes.passes.fuse.picture import regions_svg
from graph_passes.plan_file import Plan
from graph_passes.report import MemoryCurve, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEFORE, AFTER, BUDGET, AWAY = "#b0563c", "#2b6ca3", "#3a3a3a", "#7ba7cc"
POSITION = "position in the step (% of its ops)"


class PlotError(TfmemError):
    """A report cannot be drawn: matplotlib is missing, or the report holds no curve."""


def plot_report(report: Report, path: str | Path) -> Path:
    """Draw memory over one step before and after, with the budget, to an image file.

    Args:
        report: a report with at least one memory curve.
        path: the file to write; its suffix sets the format.

    Returns:
        The path written.

    Raises:
        PlotError: matplotlib is missing, or the report has no memory curve.
    """
    figure = new_figure(9.0, 5.0 if report.transfers else 3.8)
    if report.transfers:
        memory, away = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
        draw_away(away, report)
    else:
        memory = figure.subplots()
    draw_memory(memory, report)
    if report.transfers:
        memory.set_xlabel("")
    memory.set_title(f"{report.graph}: device memory over one step", loc="left", fontsize=11)
    figure.savefig(path)
    return Path(path)


def plot_regions(report: Report, path: str | Path) -> Path:
    """Draw the fused regions of a step, with their kernels and data flow, to an SVG file. Needs no matplotlib.

    Args:
        report: the report of a step over which the fusion pass ran.
        path: the file to write.

    Returns:
        The path written.

    Raises:
        PlotError: no ops were fused.
    """
    if not any(each.regions for each in (report, *report.others)):
        why = report.fusion or "pass passes=('recurrent', 'fusion', 'offload') to tfmem.optimize"
        raise PlotError(f"the report of '{report.graph}' holds no regions; {why}")
    Path(path).write_text(regions_svg(report))
    return Path(path)


def plot_plan(plan: Plan, path: str | Path) -> Path:
    """Draw the predicted time of a step over its memory budget to an image file.

    Args:
        plan: a plan with a curve.
        path: the file to write; its suffix sets the format.

    Raises:
        PlotError: matplotlib is missing, or the plan has no curve.
    """
    points = [(point.budget, point.seconds) for point in plan.curve if point.seconds is not None]
    if not points:
        raise PlotError(f"the plan of '{plan.subject}' has no curve; make it with curve=True and a budget that fits")
    figure = new_figure(7.0, 3.8)
    axes = figure.subplots()
    unit, scale = ("GiB", 1 << 30) if points[-1][0] >= 1 << 30 else ("MiB", 1 << 20)
    budgets, times = [budget / scale for budget, _ in points], [1e3 * seconds for _, seconds in points]
    axes.plot(budgets, times, color=AFTER, marker="o", label="predicted")
    split = [(point.budget / scale, 1e3 * point.seconds) for point in plan.curve if point.split and point.seconds]
    if split:
        label = "with parts split along the batch"
        axes.plot(*zip(*split, strict=True), "o", color=AFTER, markerfacecolor="white", zorder=3, label=label)
    if plan.budget is not None:
        axes.axvline(plan.budget / scale, color=BUDGET, dashes=(5, 3), label=f"budget: {size(plan.budget)}")
    axes.set_ylim(0, 1.15 * max(times))
    axes.set_xlabel(f"memory budget ({unit})")
    axes.set_ylabel("step (ms)")
    axes.set_title(f"{plan.subject} on {plan.device}: time over budget", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9)
    _plain(axes)
    figure.savefig(path)
    return Path(path)


def require_matplotlib() -> None:
    """
    Raises:
        PlotError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("drawing needs matplotlib, which is not installed: pip install 'tfmem[plot]'")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that renders to files only.

    Raises:
        PlotError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_memory(axes: Axes, report: Report) -> None:
    """Memory before and after, and the budget, on the caller's axes; peaks are labelled."""
    if not report.curve_before and not report.curve_after:
        raise PlotError(f"the report of '{report.graph}' holds no memory curve; run one step first")
    curves = [
        (report.curve_before, BEFORE, unmoved(report), 0.12),
        (report.curve_after, AFTER, "with tfmem", 0.30),
    ]
    top = max(count for curve, *_ in curves for _, count in curve)
    unit, scale = ("GiB", 1 << 30) if top >= 1 << 30 else ("MiB", 1 << 20)
    for curve, colour, name, opacity in curves:
        if not curve:
            continue
        positions, amounts = _series(curve, scale)
        axes.fill_between(positions, amounts, step="post", color=colour, alpha=opacity, linewidth=0)
        peak = max(count for _, count in curve)
        label = f"{name}: peak {size(peak)}"
        axes.step(positions, amounts, where="post", color=colour, linewidth=1.4, label=label)
    if report.budget is not None:
        label = f"budget: {size(report.budget)}"
        axes.axhline(report.budget / scale, color=BUDGET, linewidth=1.1, dashes=(5, 3), label=label)
        top = max(top, report.budget)
    axes.set_xlim(0, flat_from(report))
    axes.set_ylim(0, 1.30 * top / scale)
    axes.set_ylabel(f"memory in use ({unit})")
    axes.set_xlabel(POSITION)
    axes.legend(loc="upper center", ncols=3, frameon=False, fontsize=9, columnspacing=1.4)
    _plain(axes)


def draw_away(axes: Axes, report: Report) -> None:
    """One bar for each moved tensor, from its release to its prefetch."""
    positions = {op: index for index, (op, _) in enumerate(report.curve_after)}
    count = len(report.curve_after)
    spans = sorted(
        (positions[record.release_before], positions[record.prefetch_before])
        for record in report.transfers
        if record.release_before in positions and record.prefetch_before in positions
    )
    for row, (start, end) in enumerate(spans):
        left, width = 100 * start / count, 100 * (end - start) / count
        axes.barh(row, width, left=left, height=0.75, color=AWAY)
    axes.set_yticks([])
    axes.set_ylim(-0.8, max(len(spans), 1) + 0.6)
    axes.set_ylabel("off the device", fontsize=9)
    axes.set_xlabel(POSITION)
    total = size(sum(record.bytes for record in report.transfers))
    label = f"{len(report.transfers)} tensors, {total}"
    axes.text(0.995, 0.93, label, transform=axes.transAxes, ha="right", va="top", fontsize=8.5)
    _plain(axes)


def _series(curve: MemoryCurve, scale: int) -> tuple[list[float], list[float]]:
    """Positions in percent of the step (two graphs have two lengths) and amounts in `scale` bytes.

    The last amount is repeated at 100 %, so that the last op is as wide as the others.
    """
    positions = [100 * index / len(curve) for index in range(len(curve) + 1)]
    amounts = [count / scale for _, count in (*curve, curve[-1])]
    return positions, amounts


def unmoved(report: Report) -> str:
    """What the curve of a step in which nothing moves is called: of a step in pieces it is that of the pieces."""
    return "in pieces, with nothing moved" if report.splits else "without tfmem"


def flat_from(report: Report) -> float:
    """The end of the picture, in percent of the step: a flat tail of updates is cut."""
    end = 0.0
    for curve in filter(None, (report.curve_before, report.curve_after)):
        amounts = [count for _, count in curve]
        low, peak = min(amounts), max(amounts)
        busy = [at for at, count in enumerate(amounts, 1) if count > low + 0.1 * (peak - low)]
        end = max(end, 100 * max(busy, default=len(amounts)) / len(amounts))
    return min(100.0, end + 3)


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color="#000000", alpha=0.08, linewidth=0.8)
    axes.tick_params(labelsize=9)
