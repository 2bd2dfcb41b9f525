"""A `Report` as one web page that needs nothing else: no network, no files beside it.

The pictures are SVG, drawn here; a script of the page shows numbers under the pointer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from math import ceil
from pathlib import Path

from graph_passes.device_report import duration, many, size
from graph_passes.headline import RECOMPUTED
from graph_passes.names import plain
from graph_passes.passes.fuse.picture import regions_svg
from graph_passes.report import MemoryCurve, Report, Span
from tfmem.html_style import SCRIPT, STYLE
from tfmem.plot import flat_from, unmoved

WIDTH, HEIGHT, LEFT, LANE = 1000, 280, 64, 26
LANES = {"compute": "compute", "wait": "waits", "out": "copies out", "in": "copies in"}
MOST_ROWS = 400  # of a table
SECTION = "\n\n"  # between parts of a report's text


def write_html(report: Report, path: str | Path) -> Path:
    """Write a report as one HTML page with all pictures; the page loads nothing from the network.

    Args:
        report: the report of a step; those of the model's other functions follow on the same page.
        path: the file to write.

    Returns:
        The path written.
    """
    Path(path).write_text(page(report), encoding="utf-8")
    return Path(path)


def page(report: Report) -> str:
    """The page as text."""
    parts = [_Part(each, number) for number, each in enumerate((report, *report.others))]
    body = "\n".join(part.html() for part in parts)
    data = json.dumps([part.data() for part in parts]).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(report.graph)}: tfmem</title>\n"
        f'<meta name="viewport" content="width=device-width">\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n'
        f'<div id="tip" hidden></div>\n<script>const DATA = {data};\n{SCRIPT}</script>\n</body>\n</html>\n'
    )


@dataclass(frozen=True)
class _Part:
    """One function of the report.

    Attributes:
        report: of the function.
        number: its place on the page.
    """

    report: Report
    number: int

    def html(self) -> str:
        report = self.report
        found = [f"<h1>{_code(report.headline)}</h1>", self._facts()]
        if report.curve_before or report.curve_after:
            found += ["<h2>Memory over one step</h2>", self._memory(), self._alive()]
        if report.spans:
            found += [
                "<h2>When ops and copies run</h2>",
                _lanes(report),
                _note("by plan; only the longest ops are shown"),
            ]
        if report.transfers:
            found += ["<h2>Tensors that leave</h2>", self._transfers()]
        if report.regions:
            pictures = regions_svg(report)
            drawn = pictures[pictures.index("<svg") :]
            found += ["<h2>Fused regions</h2>", f'<div class="wide">{drawn}</div>']
        if report.not_stitched:
            rows = [(self._plain(op), why) for op, why in report.not_stitched]
            found += ["<h2>Ops that are not fused</h2>", _table(("op", "why"), rows)]
        text = replace(report, others=()).to_text(0)
        found += ["<h2>The report as text</h2>", f"<pre>{escape(text[text.index(SECTION) :].strip())}</pre>"]
        return f'<section id="part{self.number}">\n' + "\n".join(found) + "\n</section>"

    def data(self) -> dict[str, object]:
        """What the page's script shows under the pointer."""
        report = self.report
        curves = {"before": report.curve_before, "after": report.curve_after}
        return {
            name: [[self._plain(op), size(count)] for op, count in self._shown(curve)] for name, curve in curves.items()
        }

    def _shown(self, curve: MemoryCurve) -> MemoryCurve:
        """A curve without the flat tail of updates."""
        return curve[: ceil(len(curve) * flat_from(self.report) / 100)]

    def _plain(self, name: str) -> str:
        return plain(name, self.report.scope_suffix)

    def _facts(self) -> str:
        report = self.report
        facts = [("device", report.device)]
        if report.budget is not None:
            facts += [
                ("budget", size(report.budget)),
                ("peak without tfmem", size(report.peak_before)),
                ("peak planned", size(report.peak_predicted)),
                ("peak measured", size(report.peak_measured)),
                ("step planned", duration(report.step_predicted_ns)),
                ("stall planned", duration(report.stall_predicted_ns)),
                ("stall measured", duration(report.stall_measured_ns)),
            ]
        facts += [("passes", ", ".join(report.passes))] if report.passes else []
        return "<dl>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts) + "</dl>"

    def _memory(self) -> str:
        report = self.report
        before, after = self._shown(report.curve_before), self._shown(report.curve_after)
        curves = [(before, "before", unmoved(self.report)), (after, "after", "with tfmem")]
        top = max([count for curve, *_ in curves for _, count in curve] + [report.budget or 0])
        lines = [_grid(top)]
        legend = []
        for curve, css, words in curves:
            if curve:
                lines.append(f'<path class="{css}" d="{_steps(curve, top)}"/>')
                legend.append(f'<span class="{css}">{words}: peak {size(max(count for _, count in curve))}</span>')
        if report.budget is not None and report.budget <= 3 * top:
            y = _y(report.budget, top)
            lines.append(f'<line class="budget" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
            legend.append(f'<span class="budget">budget: {size(report.budget)}</span>')
        lines.append(f'<line class="cursor" y1="0" y2="{HEIGHT}" visibility="hidden"/>')
        drawn = "".join(lines)
        return (
            f'<p class="legend">{" ".join(legend)}</p><svg class="memory" data-part="{self.number}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT + 22}">{drawn}<text x="{LEFT}" y="{HEIGHT + 17}">ops in the order in which '
            f"they run; point at the picture for names and sizes</text></svg>"
        )

    def _alive(self) -> str:
        """What is in memory at both peaks, folded away."""
        columns = []
        for title, alive in ((unmoved(self.report), self.report.alive_before), ("with tfmem", self.report.alive_after)):
            if alive:
                rows = [(self._plain(tensor), size(nbytes)) for tensor, nbytes in alive]
                columns.append(f"<div><h3>{title}</h3>{_table(('tensor', 'size'), rows)}</div>")
        if not columns:
            return ""
        both = f'<div class="two">{"".join(columns)}</div>'
        return f"<details open><summary>Largest tensors at the peak</summary>{both}</details>"

    def _transfers(self) -> str:
        waits = dict(self.report.stalls)
        rows = [
            (
                self._plain(record.tensor),
                size(record.bytes),
                "recomputed" if record.offload_after == RECOMPUTED else "offloaded",
                self._plain(record.release_before),
                self._plain(record.first_use),
                duration(waits[record.tensor]) if record.tensor in waits else "",
            )
            for record in sorted(self.report.transfers, key=lambda r: (-waits.get(r.tensor, 0), -r.bytes))
        ]
        return _table(("tensor", "size", "how", "released before", "back for", "the step waits"), rows, "moves")


def _steps(curve: MemoryCurve, top: int) -> str:
    """A staircase: each op is as wide as the others."""
    wide = (WIDTH - LEFT) / len(curve)
    found = [f"M{LEFT} {_y(0, top):.1f}"]
    for index, (_, count) in enumerate(curve):
        y = _y(count, top)
        found.append(f"L{LEFT + index * wide:.1f} {y:.1f}H{LEFT + (index + 1) * wide:.1f}")
    return "".join([*found, f"V{_y(0, top):.1f}Z"])


def _y(count: float, top: int) -> float:
    return HEIGHT - (HEIGHT - 12) * count / top if top else HEIGHT


def _grid(top: int) -> str:
    found = []
    for part in range(5):
        y = _y(top * part / 4, top)
        label = f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}">{size(round(top * part / 4))}</text>'
        found.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>{label}')
    return "".join(found)


def _lanes(report: Report) -> str:
    """A row for computation and one for each direction of the copies, over time."""
    end = max(span.end for span in report.spans)
    rows = [lane for lane in LANES if any(span.lane == lane for span in report.spans)]
    scale = (WIDTH - LEFT - 20) / end
    found = []
    for row, lane in enumerate(rows):
        y = row * LANE
        found.append(f'<text class="axis" x="{LEFT + 14}" y="{y + 17}">{LANES[lane]}</text>')
        found += [_bar(report, span, scale, y) for span in report.spans if span.lane == lane]
    foot = len(rows) * LANE + 16
    found.append(f'<text x="{LEFT + 20}" y="{foot}">0</text>')
    found.append(f'<text class="axis" x="{WIDTH}" y="{foot}">{duration(end)}</text>')
    return f'<svg class="lanes" viewBox="0 0 {WIDTH} {foot + 4}">{"".join(found)}</svg>'


def _bar(report: Report, span: Span, scale: float, y: int) -> str:
    name = escape(f"{plain(span.name, report.scope_suffix)}: {duration(span.end - span.begin)}", quote=True)
    x, wide = LEFT + 20 + span.begin * scale, max(0.4, (span.end - span.begin) * scale)
    return (
        f'<rect class="{span.lane}" x="{x:.2f}" y="{y + 4}" width="{wide:.2f}" height="{LANE - 6}" '
        f'data-tip="{name}"><title>{name}</title></rect>'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], css: str = "") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[:MOST_ROWS])
    more = f"<p>and {many(len(rows) - MOST_ROWS, 'more row')}</p>" if len(rows) > MOST_ROWS else ""
    table = f'<table class="{css}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide">{table}</div>{more}'


def _note(words: str) -> str:
    return f'<p class="note">{escape(words)}</p>'


def _code(text: str) -> str:
    """A sentence whose first backquoted name is set as code."""
    before, _, rest = text.partition("`")
    name, _, after = rest.partition("`")
    return f"{escape(before)}<code>{escape(name)}</code>{escape(after)}"
