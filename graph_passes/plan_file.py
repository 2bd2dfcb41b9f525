"""A plan that was made before anything ran: what it promises, as text and as a file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graph_passes.device_report import duration, many, size, sizes
from graph_passes.errors import StalePlanError
from graph_passes.graph.ir import Graph
from graph_passes.headline import slower
from graph_passes.names import plain
from graph_passes.plan_diff import OpsDiff, wrapped
from graph_passes.report import Report
from graph_passes.report_text import named_splits

FORMAT = 1
BAR = 30  # characters of the longest bar of the curve

Inputs = tuple[tuple[str, tuple[int | None, ...] | None], ...]


@dataclass(frozen=True)
class PlannedMove:
    """One tensor that leaves device memory and comes back; names of ops stand for the moments of a `Move`.

    Attributes:
        tensor: its name.
        last, copy_after, release, prefetch, next: see `graph_passes.analysis.memory.simulate.Move`.
        recomputed: whether it is recomputed instead of copied.
    """

    tensor: str
    last: str
    copy_after: str
    release: str
    prefetch: str
    next: str
    recomputed: bool = False


@dataclass(frozen=True)
class CurvePoint:
    """A budget, and what the step takes under it.

    Attributes:
        budget: bytes.
        seconds: predicted; None where no plan meets the budget.
        split: whether parts of the step run on pieces of the batch.
    """

    budget: int
    seconds: float | None
    split: bool = False


@dataclass(frozen=True)
class Plan:
    """A plan for one step, made before the step ran.

    Attributes:
        subject: the step, as the user calls it.
        device: where it would run.
        budget: bytes; None for no limit.
        feasible: whether a plan meets the budget.
        fits: whether the step fits with nothing moved.
        peak_before: bytes that the unmodified step needs.
        peak: bytes that it needs under the plan.
        seconds_before: predicted seconds of the unmodified step.
        seconds: predicted seconds under the plan.
        least: seconds that no plan goes below; None where no program was solved.
        smallest_budget: bytes that no plan goes below: with nothing split, or with the parts of this plan.
        op: the op that sets the smallest budget.
        timed: whether an earlier run measured op times; else they are estimates.
        moves: what leaves memory, in the order of release.
        curve: predicted time over budget.
        inputs: dtype and shape of each input.
        ops: (name, digest) of each op of the step, in the order in which they run.
        report: the plan as a report, whose pictures can be drawn.
        notes: what else the user should know.
        version: of tfmem.
        split: whether parts of the step run on pieces of the batch; `report` says which.
        max_batch: the largest batch that a plan fits into the budget; None if it was not asked for.
        max_batch_whole: the largest one with nothing split along the batch.
        memory: bytes that the device has; None if that is not known.
    """

    subject: str
    device: str
    budget: int | None
    feasible: bool
    fits: bool
    peak_before: int
    peak: int
    seconds_before: float
    seconds: float
    least: float | None
    smallest_budget: int
    op: str
    timed: bool = False
    moves: tuple[PlannedMove, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    inputs: Inputs = ()
    ops: tuple[tuple[str, str], ...] = ()
    report: Report | None = None
    notes: tuple[str, ...] = ()
    version: str = ""
    max_batch: int | None = None
    split: bool = False
    max_batch_whole: int | None = None
    memory: int | None = None

    @property
    def headline(self) -> str:
        """One sentence: whether the step fits, its peak and what that costs."""
        if self.budget is None:
            return f"`{self.subject}`: {self._needs()}"
        if not self.feasible:
            least = size(self.smallest_budget)
            return f"`{self.subject}`: does not fit {size(self.budget)}: with nothing split it needs at least {least}"
        if self.fits:
            return f"`{self.subject}`: fits {size(self.budget)} unchanged: peak {size(self.peak_before)}"
        again = sum(move.recomputed for move in self.moves)
        out = len(self.moves) - again
        changes = (
            out and f"{many(out, 'tensor')} offloaded",
            again and f"{many(again, 'tensor')} recomputed",
            self.split and "parts split along the batch",
        )
        done = ", ".join(each for each in changes if each)
        peaks = " instead of ".join(sizes(self.peak, self.peak_before))
        rate = self.seconds_before / self.seconds if self.seconds else 1.0
        return f"`{self.subject}`: fits {size(self.budget)}: peak {peaks}{slower(rate)}; {done}"

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The plan as a page for people."""
        how = "measured by an earlier run" if self.timed else "estimated from the device's profile; nothing ran"
        how_split = "in these pieces" if self.split else "with nothing split"
        lines = [
            *textwrap.wrap(self.headline, 100, subsequent_indent="  ", break_on_hyphens=False),
            "",
            f"  device      {self.device}",
            f"  peak        {size(self.peak_before)} unmodified"
            + (f", {size(self.peak)} planned" if self.moves or self.split else ""),
            f"  step        {_time(self.seconds_before)} unmodified{self._predicted()}",
            f"  smallest    {size(self.smallest_budget)} {how_split}, at op '{self._plain(self.op)}'",
            f"  times       {how}",
        ]
        for record in () if self.report is None else named_splits(self.report):
            line = f"  split       {record}"
            lines += wrapped(line)
        if self.max_batch is not None:
            more = self.max_batch_whole is not None and self.max_batch > self.max_batch_whole
            split = f" with parts split along the batch, {self.max_batch_whole} with nothing split" if more else ""
            lines.append(f"  max batch   {self.max_batch}{split}")
        for note in self.notes:
            line = f"  note        {note}"
            lines += wrapped(line)
        if self.curve:
            lines += ["", "  budget        step", *map(self._bar, self.curve)]
        return "\n".join(lines)

    def _needs(self) -> str:
        """What the step needs of the device's memory, where no budget was given."""
        if self.memory is None:
            return f"needs {size(self.peak_before)}; no budget was given"
        if self.peak_before > self.memory:
            return (
                f"does not fit the device's {size(self.memory)} unchanged: it needs {size(self.peak_before)}; give a "
                "budget to plan for"
            )
        return f"needs {size(self.peak_before)} of the device's {size(self.memory)}; no budget was given"

    def _plain(self, name: str) -> str:
        return plain(name, self.report.scope_suffix) if self.report is not None else name

    def _predicted(self) -> str:
        if not self.moves and not self.split:
            return ""
        bound = "" if self.least is None else f"; no plan of copies and recomputation is under {_time(self.least)}"
        return f", {_time(self.seconds)} planned{bound}"

    def _bar(self, point: CurvePoint) -> str:
        if point.seconds is None:
            return f"  {size(point.budget):>12}  does not fit"
        longest = max(each.seconds for each in self.curve if each.seconds is not None)
        bar = "#" * max(1, round(BAR * point.seconds / longest)) if longest else ""
        how = ", split" if point.split else ""
        here = "  <- the budget" if point.budget == self.budget else ""
        return f"  {size(point.budget):>12}  {bar} {_time(point.seconds)}{how}{here}"

    def to_json(self) -> str:
        """The plan as JSON; `from_json` reads it back to an equal plan."""
        report = None if self.report is None else json.loads(self.report.to_json())
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        records = {name: [dataclasses.asdict(each) for each in fields[name]] for name in ("moves", "curve")}
        return json.dumps({"plan_format": FORMAT, **fields, **records, "report": report}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is not JSON, is of another format, or lacks or adds a field.
        """
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError("not a tfmem plan: too deep") from error
        found = data.pop("plan_format", None) if isinstance(data, dict) else None
        if found != FORMAT:
            made = "no plan" if found is None else f"a plan of format {found}"
            raise ValueError(f"this is {made}; expected format {FORMAT}: make it again with `tfmem plan --output`")
        try:
            return cls(**{name: _restored(name, value) for name, value in data.items()})
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"not a tfmem plan: {error}") from error

    def renamed(self, ops: Sequence[tuple[str, str]]) -> dict[str, str]:
        """The name that each op of the plan has in a step whose graph is equal: Keras numbers layers of equal names.

        Raises:
            StalePlanError: an op is new, gone or changed; the message names some.
        """
        if [digest for _, digest in self.ops] == [digest for _, digest in ops]:
            return {old: new for (old, _), (new, _) in zip(self.ops, ops, strict=True)}
        reason = str(OpsDiff.between(self.ops, ops)) or "its ops run in another order"
        raise StalePlanError(
            f"the plan of `{self.subject}` does not fit this graph: {reason}; make the plan again (tfmem.plan, or "
            "`tfmem plan --output`) with this model, batch and TensorFlow"
        )


def digests(graph: Graph, order: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(name, digest of type, inputs and shapes) of the ops of a step, in their order; positions stand for inputs."""
    place = {name: index for index, name in enumerate(order)}
    found = []
    for name in order:
        node = graph[name]
        inputs = [(place.get(tensor.node, -1), tensor.index) for tensor in node.inputs]
        specs = [graph.specs.get(tensor) for tensor in graph.tensors(node)]
        text = f"{node.op}|{inputs}|{specs}"
        found.append((name, hashlib.sha256(text.encode()).hexdigest()[:8]))
    return tuple(found)


def _time(seconds: float) -> str:
    return duration(round(seconds * 1e9))


def _restored(name: str, value: Any) -> Any:
    """The value of a field; JSON has lists for tuples and dicts for records."""
    if name == "report":
        return None if value is None else Report.from_json(json.dumps(value))
    if name in ("moves", "curve"):
        record: Any = PlannedMove if name == "moves" else CurvePoint
        return tuple(record(**each) for each in value)
    if name == "inputs":
        return tuple((dtype, None if shape is None else tuple(shape)) for dtype, shape in value)
    if name == "ops":
        return tuple((op, digest) for op, digest in value)
    return tuple(value) if isinstance(value, list) else value
