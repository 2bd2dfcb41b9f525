"""Draws the regions of a step as SVG: a box for each kernel and each call, with its ops, and arrows between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from graph_passes.report import RegionRecord, Report

_LINE, _CHAR = 14, 6.7  # pixels of a line, and of a character, of the font below
_MARGIN, _GAP, _BETWEEN = 16, 18, 54  # around a region, between boxes of a column, between columns
_ROWS, _WIDTH = 12, 44  # ops in a box, and characters of their names
_WIDEST = 2000  # pixels, after which columns go on below
_COLOURS = {"kernel": ("#dce9f5", "#2b6ca3"), "call": ("#f3e3dc", "#b0563c")}
_STYLE = "text { font: 11px ui-monospace, monospace; fill: #222 } .title { font-weight: bold }"


@dataclass(frozen=True)
class _Box:
    kind: str
    lines: tuple[str, ...]
    x: float
    y: float

    @property
    def width(self) -> float:
        return 12 + _CHAR * max(map(len, self.lines))

    @property
    def height(self) -> float:
        return 10 + _LINE * len(self.lines)


def regions_svg(report: Report) -> str:
    """The regions of a report, one below the other, as the text of an SVG file; those of its others follow.

    Time goes from left to right, and on below where that is too wide: a box stands right of all those whose results it
    reads, or lower.
    """
    parts: list[str] = []
    top = wide = float(_MARGIN)
    for each in (report, *report.others):
        title = f"{each.function}{each.function and ': '}{each.graph}: {each.fusion or 'the fusion pass did not run'}"
        parts.append(_text(_MARGIN, top + _LINE, title, "title"))
        wide = max(wide, 2 * _MARGIN + _CHAR * len(title))
        top += 2 * _LINE
        for region in each.regions:
            drawn, width, height = _region(region, top)
            parts += drawn
            top, wide = top + height + _GAP, max(wide, width + 2 * _MARGIN)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:.0f}" height="{top:.0f}">'
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#777"/></marker></defs>'
    )
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", arrow, ground, *parts, "</svg>", ""])


def _region(region: RegionRecord, top: float) -> tuple[list[str], float, float]:
    """What draws a region, its width and its height."""
    sources = _sources(region)
    columns: dict[int, list[int]] = {}
    depth: dict[int, int] = {}
    for number, read in sources.items():
        depth[number] = 1 + max((depth[other] for other in read), default=-1)
        columns.setdefault(depth[number], []).append(number)
    boxes: dict[int, _Box] = {}
    scope = region.name.rpartition("/")[0] + "/"  # of a function: the region's name says it
    x, y, right, low = 2.0 * _MARGIN, top + 2 * _LINE, 0.0, top + 2 * _LINE
    for column in sorted(columns):
        steps = [region.steps[number] for number in columns[column]]
        lines = [tuple(_lines(step.kind, step.ops, scope)) for step in steps]
        wide = max(_Box(step.kind, texts, 0, 0).width for step, texts in zip(steps, lines, strict=True))
        if x + wide > _WIDEST and x > 2 * _MARGIN:
            x, y = 2.0 * _MARGIN, low + 2 * _GAP
        below = y
        for number, step, texts in zip(columns[column], steps, lines, strict=True):
            boxes[number] = _Box(step.kind, texts, x, below)
            below += boxes[number].height + _GAP
        low, right = max(low, below - _GAP), max(right, x + wide)
        x += wide + _BETWEEN
    width, height = max(right, 2 * _MARGIN + _CHAR * len(str(region))), low - top + _MARGIN
    place = f'x="{_MARGIN}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}"'
    frame = f'<rect {place} rx="6" fill="#fafafa" stroke="#999"/>'
    drawn = [frame, _text(2 * _MARGIN, top + _LINE + 4, str(region), "title")]
    drawn += [_arrow(boxes[other], box) for number, box in boxes.items() for other in sorted(sources[number])]
    drawn += [line for box in boxes.values() for line in _drawn(box)]
    return drawn, width, height


def _sources(region: RegionRecord) -> dict[int, set[int]]:
    """For each kernel and call those that it reads, directly or by way of views."""
    found: dict[int, set[int]] = {}
    through: dict[int, set[int]] = {}
    for number, step in enumerate(region.steps):
        read = set().union(*(through.get(other, set()) for other in step.after)) if step.after else set()
        if step.kind in _COLOURS:
            found[number], through[number] = read, {number}
        else:
            through[number] = read
    return found


def _lines(kind: str, ops: Sequence[tuple[str, str]], scope: str) -> Iterator[str]:
    yield f"{kind}, {len(ops)} ops" if len(ops) > 1 else kind
    for full, op in ops[:_ROWS]:
        name = full.removeprefix(scope)
        shown = name if len(name) <= _WIDTH else "..." + name[3 - _WIDTH :]
        yield f"{shown} ({op})" if not name.endswith(op) else shown
    if len(ops) > _ROWS:
        yield f"and {len(ops) - _ROWS} more"


def _drawn(box: _Box) -> Iterator[str]:
    fill, line = _COLOURS[box.kind]
    place = f'x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}"'
    yield f'<rect {place} rx="3" fill="{fill}" stroke="{line}"/>'
    for row, text in enumerate(box.lines):
        yield _text(box.x + 6, box.y + 4 + _LINE * (row + 0.8), text, "title" if row == 0 else "")


def _arrow(start: _Box, end: _Box) -> str:
    x, y = start.x + start.width, start.y + start.height / 2
    to_x, to_y = end.x, end.y + end.height / 2
    bend = f"C{x + _BETWEEN / 2:.1f} {y:.1f} {to_x - _BETWEEN / 2:.1f} {to_y:.1f}"
    path = f"M{x:.1f} {y:.1f} {bend} {to_x:.1f} {to_y:.1f}"
    return f'<path d="{path}" fill="none" stroke="#777" marker-end="url(#arrow)"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of_kind}>{escape(text)}</text>'
