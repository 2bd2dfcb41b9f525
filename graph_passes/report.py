"""What a pipeline did to one graph, planned and measured. A report prints as text and is stored as JSON; `tfmem.plot`
draws it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graph_passes.decision import Decision, Fusion, Xla

FORMAT = 1
UNCHANGED_FITS, UNCHANGED_OVER = Decision.FITS, Decision.OVER
ORDERED, ORDERED_OVER = Decision.ORDERED, Decision.ORDERED_OVER
MOVED, REPLACED, STITCHED = Decision.MOVED, Decision.REPLACED, Decision.STITCHED
RECOMPUTED = "(recomputed)"
UNDECIDED = "not decided yet"  # what `Report.fusion` begins with until then
REPORT_FILE = "assets.extra/tfmem_report.json"  # in a SavedModel, whose assets.extra TensorFlow leaves to its users
MOST_REASONS = 8  # that a table shows

MemoryCurve = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class TransferRecord:
    """One tensor that leaves device memory and comes back, and the ops that say when.

    Attributes:
        tensor: the tensor's name, `node:0`.
        bytes: size of its buffer; it crosses the link once in each direction a step.
        offload_after: the copy out starts when this op has run; `RECOMPUTED` if the tensor is not copied at all, but
            recomputed.
        release_before: the buffer may be freed before this op runs.
        prefetch_before: the copy in starts, into a new buffer, before this op runs.
        first_use: the first op that reads the returned tensor.
    """

    tensor: str
    bytes: int
    offload_after: str
    release_before: str
    prefetch_before: str
    first_use: str


@dataclass(frozen=True)
class StepRecord:
    """What a region runs at once.

    Attributes:
        kind: "kernel", or "call" of TensorFlow's own kernel or a library's; "view" and "read" take no time.
        ops: (name, type) of the ops that it stands for.
        after: numbers of the steps of its region whose results it reads.
    """

    kind: str
    ops: tuple[tuple[str, str], ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class RegionRecord:
    """Ops that run as one.

    Attributes:
        name: of the op.
        steps: what it runs, in order.
    """

    name: str
    steps: tuple[StepRecord, ...]

    def count(self, kind: str) -> int:
        """How many steps of a kind there are."""
        return sum(step.kind == kind for step in self.steps)

    def within(self, caller: str) -> RegionRecord:
        """This in a function that `caller` calls: "while/body"."""
        named = [tuple((f"{caller}/{name}", op) for name, op in step.ops) for step in self.steps]
        steps = (dataclasses.replace(step, ops=ops) for step, ops in zip(self.steps, named, strict=True))
        return RegionRecord(f"{caller}/{self.name}", tuple(steps))

    def __str__(self) -> str:
        ops = sum(len(step.ops) for step in self.steps)
        kernels, calls = self.count("kernel"), self.count("call")
        return f"{self.name}: {_many(ops, 'op')} in {_many(kernels, 'kernel')} and {_many(calls, 'call')}"


@dataclass(frozen=True)
class Report:
    """What was done to a graph, what that should cost, and what it cost when it ran.

    Sizes are bytes, times nanoseconds; flows and times are of one step. A `measured` or `achieved`
    field is None until a step has run.

    Attributes:
        graph: name of the optimised function or graph.
        device: the device whose memory was planned.
        policy: the policy that chose the tensors.
        decision: `unchanged: fits`, `unchanged: <why>`, `ordered: ...` (nothing moves, but the order is held),
            `moved`, `replaced` (recurrent layers were, and nothing moves), or `stitched` (regions are, and nothing
            else changed). `... over budget`: nothing moves, as the step was expected to fit, and it took more. A
            `Decision`, or its value.
        budget: the memory budget, None where no limit was asked for.
        passes: the passes that ran, in order.
        peak_before: peak memory of the unmodified graph.
        peak_predicted: the plan's peak.
        peak_measured: the allocator's peak during the last observed step, and `peak_uncounted`.
        peak_uncounted: bytes of the predicted peak in tensors that the device's allocator does not count: on a CPU
            with oneDNN those under 256 KiB. They are taken from the plan, and part of `peak_measured`.
        size_threshold: tensors smaller than this were not candidates.
        transfers: the tensors that move.
        curve_before: (op, bytes in use while it runs) in execution order, as given.
        curve_after: the same for the optimised graph: measured where it ran, else planned.
        notes: what was left unchanged and why, replans, and anything else the user should know.
        jit_compile: what became of XLA, and why; an `Xla`, or its value, empty where it played no part.
        replaced: recurrent layers that now run as one kernel, a line for each.
        not_replaced: loops that stay unchanged, and why.
        regions: ops that run as one where the step runs stitched, and would elsewhere.
        not_stitched: (op, why) for the ops that are in no region, in one sentence.
        fusion: whether the step runs stitched, and why; empty where the pass did not run.
        fusion_state: whether the step runs stitched, as data.
        function: which of a model's functions this is about: "train", "test" or "predict".
        others: reports of the model's other functions.
        not_enforced: lists of loops that the budget does not count: what they hold is not known before they run.
    """

    graph: str
    device: str
    policy: str
    decision: Decision
    peak_before: int
    peak_predicted: int
    peak_measured: int | None = None
    peak_uncounted: int = 0
    budget: int | None = None
    passes: tuple[str, ...] = ()
    bytes_out_predicted: int = 0
    bytes_out_achieved: int | None = None
    bytes_in_predicted: int = 0
    bytes_in_achieved: int | None = None
    stall_predicted_ns: int | None = None
    stall_measured_ns: int | None = None
    step_predicted_ns: int | None = None
    step_measured_ns: int | None = None
    size_threshold: int | None = None
    transfers: tuple[TransferRecord, ...] = ()
    curve_before: MemoryCurve = ()
    curve_after: MemoryCurve = ()
    notes: tuple[str, ...] = ()
    jit_compile: Xla = Xla.NO_PART
    replaced: tuple[str, ...] = ()
    not_replaced: tuple[str, ...] = ()
    regions: tuple[RegionRecord, ...] = ()
    not_stitched: tuple[tuple[str, str], ...] = ()
    fusion: str = ""
    fusion_state: Fusion = Fusion.NOT_ASKED
    function: str = ""
    others: tuple[Report, ...] = ()
    not_enforced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "decision", Decision(self.decision))
        object.__setattr__(self, "fusion_state", Fusion(self.fusion_state))
        object.__setattr__(self, "jit_compile", Xla(self.jit_compile))

    def __str__(self) -> str:
        return self.to_text()

    @property
    def xla_lost(self) -> bool:
        """Whether XLA would have run the step, and does not."""
        return self.jit_compile.is_lost

    @property
    def running(self) -> tuple[RegionRecord, ...]:
        """The regions of a step that runs stitched; none of another."""
        return self.regions if self.fusion_state is Fusion.STITCHED else ()

    def to_text(self, rows: int = 10) -> str:
        """A table for people: the figures, then the `rows` largest transfers, then the notes; then the others.

        Without a budget no memory was planned, and there are no figures.
        """
        lines = [f"tfmem report: {self.function}{self.function and ': '}{self.graph} on {self.device}"]
        if self.budget is None:
            lines.append(f"  decision    {self.decision}")
        else:
            lines += self._figures()
        if self.passes:
            lines.append(f"  passes      {', '.join(self.passes)}")
        if self.jit_compile:
            lines.append(f"  XLA         {self.jit_compile}")
        lines += [f"  replaced    {line}" for line in self.replaced]
        lines += [f"  kept        {line}" for line in self.not_replaced]
        if self.fusion:
            lines.append(f"  fusion      {self.fusion}")
        lines += [f"  stitched    {region}" for region in self.running]
        if self.regions and not self.running:
            ops = sum(len(step.ops) for region in self.regions for step in region.steps)
            lines.append(f"  planned     {_many(len(self.regions), 'region')} of {_many(ops, 'op')}: none runs")
        lines += _outside(self.not_stitched)
        if self.transfers:
            lines += ["", *_transfer_table(self.transfers, rows)]
        if self.notes:
            lines += ["", *(f"  note: {note}" for note in self.notes)]
        return "\n\n".join(["\n".join(lines), *(other.to_text(rows) for other in self.others)])

    def _figures(self) -> list[str]:
        threshold = "" if self.size_threshold is None else f", tensors from {size(self.size_threshold)}"
        chosen = f"{len(self.transfers)} tensors; policy {self.policy}{threshold}"
        planned = f"{size(self.peak_before)} before, {size(self.peak_predicted)} planned"
        return [
            f"  decision    {self.decision} ({chosen})",
            f"  budget      {size(self.budget)}",
            f"  peak        {planned}, {size(self.peak_measured)} measured{_deviation(self)}",
            *_uncounted(self),
            *([f"              {unenforced(self)}"] if self.not_enforced else []),
            f"  moved out   {_pair(self.bytes_out_predicted, self.bytes_out_achieved, size)}",
            f"  moved in    {_pair(self.bytes_in_predicted, self.bytes_in_achieved, size)}",
            f"  stall       {_pair(self.stall_predicted_ns, self.stall_measured_ns, duration)}",
            f"  step        {_pair(self.step_predicted_ns, self.step_measured_ns, duration)}",
        ]

    def to_json(self) -> str:
        """The whole report as JSON; `from_json` reads it back to an equal report."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is not JSON, is of another format, or lacks or adds a field.
        """
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError("not a tfmem report: too deep") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"not a tfmem report of format {FORMAT}; write it with Report.to_json")
        try:
            return _report(data)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a tfmem report: {error}") from error


def measured(report: Report, peak: int) -> Report:
    """`report` of a step that ran and took `peak` bytes: a decision says that it fits only if it did."""
    over = {UNCHANGED_FITS: UNCHANGED_OVER, ORDERED: ORDERED_OVER}
    if report.budget is None or peak <= report.budget:
        over = {missed: met for met, missed in over.items()}
    return dataclasses.replace(report, peak_measured=peak, decision=over.get(report.decision, report.decision))


def unenforced(report: Report) -> str:
    """The lists that the budget is not enforced for, and why."""
    count = len(report.not_enforced)
    lists = f"the list '{report.not_enforced[0]}'" if count == 1 else f"{count} lists ('{report.not_enforced[0]}', ...)"
    return f"the budget is not enforced for {lists} of loops: what they hold is not known before they run"


def size(count: int | None) -> str:
    """Bytes in words, with the largest binary unit that leaves at least 1; `-` for None."""
    if count is None:
        return "-"
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def duration(nanoseconds: int | None) -> str:
    """Nanoseconds in words; `-` for None."""
    if nanoseconds is None:
        return "-"
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(nanoseconds) >= scale:
            return f"{nanoseconds / scale:.3g} {unit}"
    return f"{nanoseconds} ns"


def _pair(planned: int | None, achieved: int | None, words: Callable[[int | None], str]) -> str:
    return f"{words(planned)} planned, {words(achieved)} measured"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _deviation(report: Report) -> str:
    """How far the measured peak is from the plan, and whether it broke the budget."""
    if report.peak_measured is None or not report.peak_predicted:
        return ""
    off = f" ({report.peak_measured / report.peak_predicted - 1:+.1%} vs. plan)"
    over = report.budget is not None and report.peak_measured > report.budget
    return off + (" OVER BUDGET" if over else "")


def _uncounted(report: Report) -> list[str]:
    """How much of the measured peak is planned and not measured, if that is over 1%."""
    if report.peak_measured is None or 100 * report.peak_uncounted < report.peak_measured:
        return []
    small = size(report.peak_uncounted)
    return [f"              {small} of it in small tensors, which the allocator does not count: as planned"]


def _outside(ops: Sequence[tuple[str, str]]) -> list[str]:
    """Lines with the number of ops that are in no region, for each of the most frequent reasons."""
    counted = Counter(why for _, why in ops)
    lines = [f"  not fused   {count}: {why}" for why, count in counted.most_common(MOST_REASONS)]
    rest = len(ops) - sum(count for _, count in counted.most_common(MOST_REASONS))
    return [*lines, f"  not fused   {rest} for other reasons; see tfmem.explain"] if rest else lines


def _transfer_table(transfers: Sequence[TransferRecord], rows: int) -> list[str]:
    largest = sorted(transfers, key=lambda record: -record.bytes)[:rows]
    header = ("tensor", "size", "offload after", "release before", "prefetch before", "first use")
    cells = [tuple(map(_shortened, row)) for row in (header, *map(_cells, largest))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    if len(transfers) > len(largest):
        rest = sum(record.bytes for record in transfers) - sum(record.bytes for record in largest)
        lines.append(f"  and {len(transfers) - len(largest)} more, {size(rest)}")
    return lines


def _cells(record: TransferRecord) -> tuple[str, ...]:
    tensor, nbytes, *ops = dataclasses.astuple(record)
    return tensor, size(nbytes), *ops


def _shortened(name: str, width: int = 40) -> str:
    """Op names end in what tells them apart, so the front goes."""
    return name if len(name) <= width else "..." + name[3 - width :]


def _report(data: dict[str, Any]) -> Report:
    return Report(**{name: _restored(name, value) for name, value in data.items()})


def _restored(name: str, value: Any) -> Any:
    """The value of a field; JSON has lists for tuples and dicts for records."""
    if name == "others":
        return tuple(map(_report, value))
    if name == "transfers":
        return tuple(TransferRecord(**record) for record in value)
    if name == "regions":
        return tuple(RegionRecord(region["name"], tuple(map(_step, region["steps"]))) for region in value)
    if name.startswith("curve_") or name == "not_stitched":
        return tuple((op, found) for op, found in value)
    return tuple(value) if isinstance(value, list) else value


def _step(record: dict[str, Any]) -> StepRecord:
    return StepRecord(record["kind"], tuple((name, op) for name, op in record["ops"]), tuple(record["after"]))
