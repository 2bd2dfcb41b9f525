"""A report as a page of text: the verdict, what was asked, what was done, what was not and why, then details."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graph_passes.device_report import deviation, duration, many, size
from graph_passes.headline import headline
from graph_passes.names import plain

if TYPE_CHECKING:
    from graph_passes.report import Report, SplitRecord, TransferRecord

MOST_REASONS = 8  # that a table shows
MOST_SPLITS = 4
WIDTH = 100


def report_text(report: Report, rows: int = 10) -> str:
    """The page.

    Args:
        report: what was done to a step.
        rows: how many offloaded tensors to list.
    """
    parts = [
        textwrap.wrap(headline(report), WIDTH, subsequent_indent="  ", break_on_hyphens=False),
        _section("asked", _asked(report)),
        _section("done", _done(report)),
        _section("not done", _not_done(report)),
        _section("details", [*_details(report), *_tables(report, rows)]),
        _section("notes", [f"  note: {note}" for note in report.notes]),
    ]
    page = "\n".join(line for part in parts for line in part)
    return "\n\n".join([page, *(report_text(other, rows) for other in report.others)])


def unenforced(report: Report) -> str:
    """The lists that the budget is not enforced for, and why."""
    count = len(report.not_enforced)
    lists = f"the list '{report.not_enforced[0]}'" if count == 1 else f"{count} lists ('{report.not_enforced[0]}', ...)"
    return f"the budget is not enforced for {lists} of loops: what they hold is not known before they run"


def named_splits(report: Report) -> list[SplitRecord]:
    """The splits, whose ops have layers as the user named them."""
    return [
        dataclasses.replace(
            split, first=plain(split.first, report.scope_suffix), last=plain(split.last, report.scope_suffix)
        )
        for split in report.splits
    ]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _asked(report: Report) -> list[str]:
    lines = [f"  device      {report.device}"]
    if report.budget is not None:
        threshold = "" if not report.size_threshold else f", tensors from {size(report.size_threshold)}"
        lines.append(f"  budget      {size(report.budget)}; policy {report.policy}{threshold}")
    if report.passes:
        lines.append(f"  passes      {', '.join(report.passes)}")
    return lines


def _done(report: Report) -> list[str]:
    moved = f" ({many(len(report.transfers), 'tensor')})" if report.transfers else ""
    lines = [f"  decision    {report.decision}{moved}"]
    lines += [f"  on          {found}" for found in report.devices]
    lines += [row for found in named_splits(report)[:MOST_SPLITS] for row in _wrapped(f"  split       {found}")]
    if len(report.splits) > MOST_SPLITS:
        lines.append(f"  split       and {len(report.splits) - MOST_SPLITS} more parts")
    lines += [row for line in _of_layers(report, report.replaced) for row in _wrapped(f"  replaced    {line}")]
    if report.fusion:
        more = "; its kernels are timed while it runs" if report.tuning else ""
        lines.append(f"  fusion      {report.fusion}{more}")
    lines += [f"  fused       {region}" for region in report.running]
    if report.jit_compile:
        lines.append(f"  XLA         {report.jit_compile}")
    return lines


def _not_done(report: Report) -> list[str]:
    lines = [row for line in _of_layers(report, report.not_replaced) for row in _wrapped(f"  not replaced {line}")]
    if report.regions and not report.running:
        ops = sum(len(step.ops) for region in report.regions for step in region.steps)
        lines.append(f"  planned     {many(len(report.regions), 'region')} of {many(ops, 'op')}: none runs")
    if report.not_enforced:
        lines.append(f"  budget      {unenforced(report)}")
    return [*lines, *_not_moved(report), *_outside(report.not_stitched)]


def _of_layers(report: Report, lines: Sequence[str]) -> list[str]:
    """Lines that begin with a layer's name, which becomes the one that the user gave."""
    named = [line.partition(" ") for line in lines]
    return [f"{plain(name, report.scope_suffix)}{blank}{rest}" for name, blank, rest in named]


def _not_moved(report: Report) -> list[str]:
    """Lines with the tensors that stay in memory although they are large, together where the reason is the same."""
    tensors: dict[str, list[str]] = {}
    for tensor, why in report.not_moved:
        tensors.setdefault(why, []).append(plain(tensor, report.scope_suffix))
    lines = []
    for why, (first, *others) in tensors.items():
        more = f" and {len(others)} more" if others else ""
        lines += _wrapped(f"  not moved   '{first}'{more}: {why}")
    return lines


def _details(report: Report) -> list[str]:
    if report.budget is None:
        return []
    planned = f"{size(report.peak_before)} before, {size(report.peak_predicted)} planned"
    return [
        f"  peak        {planned}, {size(report.peak_measured)} measured{deviation(report)}",
        *_uncounted(report),
        f"  moved out   {_pair(report.bytes_out_predicted, report.bytes_out_achieved, size)}",
        f"  moved in    {_pair(report.bytes_in_predicted, report.bytes_in_achieved, size)}",
        f"  stall       {_pair(report.stall_predicted_ns, report.stall_measured_ns, duration)}",
        f"  step        {_pair(report.step_predicted_ns, report.step_measured_ns, duration)}",
        *(_wrapped(f"  verdict     {_verdict(report)}") if report.verdict else []),
    ]


def _verdict(report: Report) -> str:
    found = report.verdict
    return "" if found is None else str(dataclasses.replace(found, op=plain(found.op, report.scope_suffix)))


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * 14, break_on_hyphens=False, break_long_words=False)


def _pair(planned: int | None, achieved: int | None, words: Callable[[int | None], str]) -> str:
    return f"{words(planned)} planned, {words(achieved)} measured"


def _uncounted(report: Report) -> list[str]:
    """How much of the measured peak is planned and not measured, if that is over 1%."""
    if report.peak_measured is None or 100 * report.peak_uncounted < report.peak_measured:
        return []
    small = size(report.peak_uncounted)
    return [f"              {small} of it in small tensors, which the allocator does not count: as planned"]


def _outside(ops: Sequence[tuple[str, str]]) -> list[str]:
    """Lines with the number of ops that are in no region, for each of the most frequent reasons."""
    counted = Counter(why for _, why in ops)
    lines = [f"  not fused   {many(count, 'op')}: {why}" for why, count in counted.most_common(MOST_REASONS)]
    rest = len(ops) - sum(count for _, count in counted.most_common(MOST_REASONS))
    return [*lines, f"  not fused   {many(rest, 'op')} for other reasons; see tfmem.explain"] if rest else lines


def _tables(report: Report, rows: int) -> list[str]:
    lines: list[str] = []
    if not rows:
        return lines
    if report.transfers:
        lines += ["", *_transfer_table(report.transfers, rows, report.scope_suffix)]
    if report.stalls:
        waits = [(plain(tensor, report.scope_suffix), duration(ns)) for tensor, ns in report.stalls[:rows]]
        more = len(report.stalls) - len(waits)
        lines += ["", *_table([("tensor", "the step waits for it"), *waits])]
        lines += [f"  and {more} more"] if more else []
    return lines


def _transfer_table(transfers: Sequence[TransferRecord], rows: int, suffix: str) -> list[str]:
    largest = sorted(transfers, key=lambda record: -record.bytes)[:rows]
    header = ("tensor", "size", "offload after", "release before", "prefetch before", "first use")
    lines = _table([header, *(_cells(record, suffix) for record in largest)])
    if len(transfers) > len(largest):
        rest = sum(record.bytes for record in transfers) - sum(record.bytes for record in largest)
        lines.append(f"  and {len(transfers) - len(largest)} more, {size(rest)}")
    return lines


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [tuple(map(_shortened, row)) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _cells(record: TransferRecord, suffix: str) -> tuple[str, ...]:
    tensor, nbytes, *ops = dataclasses.astuple(record)
    return plain(tensor, suffix), size(nbytes), *(plain(op, suffix) for op in ops)


def _shortened(name: str, width: int = 40) -> str:
    """Op names end in what tells them apart, so the front goes."""
    return name if len(name) <= width else "..." + name[3 - width :]
