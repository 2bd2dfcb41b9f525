"""What tfmem did to one step, planned and measured. A report prints as text and is stored as JSON; `tfmem.plot` draws
it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from graph_passes.decision import Decision, Fusion, Xla
from graph_passes.device_report import DeviceReport, many
from graph_passes.headline import RECOMPUTED, headline
from graph_passes.report_text import report_text, unenforced
from graph_passes.verdict import Verdict

FORMAT = 1
UNCHANGED_FITS, UNCHANGED_OVER = Decision.FITS, Decision.OVER
ORDERED, ORDERED_OVER = Decision.ORDERED, Decision.ORDERED_OVER
MOVED, REPLACED, STITCHED = Decision.MOVED, Decision.REPLACED, Decision.STITCHED
UNDECIDED = "not decided yet"  # what `Report.fusion` begins with until then
REPORT_FILE = "assets.extra/tfmem_report.json"  # in a SavedModel, whose assets.extra TensorFlow leaves to its users

__all__ = ["RECOMPUTED", "UNDECIDED", "Report", "TransferRecord", "measured", "unenforced"]

MemoryCurve = tuple[tuple[str, int], ...]
Lane = Literal["compute", "wait", "out", "in"]


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
class Span:
    """A stretch of time of a planned step.

    Attributes:
        lane: "compute", "wait" (computation waits for a copy), "out" or "in" (a copy).
        name: the op, or the tensor.
        begin: nanoseconds from the step's start.
        end: nanoseconds from the step's start.
    """

    lane: Lane
    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class StepRecord:
    """One kernel or call of a region.

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
    """Ops that one fused op runs.

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
        """This record, for a region in a function that `caller` calls: "while/body"."""
        named = [tuple((f"{caller}/{name}", op) for name, op in step.ops) for step in self.steps]
        steps = (dataclasses.replace(step, ops=ops) for step, ops in zip(self.steps, named, strict=True))
        return RegionRecord(f"{caller}/{self.name}", tuple(steps))

    def __str__(self) -> str:
        ops = sum(len(step.ops) for step in self.steps)
        kernels, calls = self.count("kernel"), self.count("call")
        return f"{self.name}: {many(ops, 'op')} in {many(kernels, 'kernel')} and {many(calls, 'call')}"


@dataclass(frozen=True)
class SplitRecord:
    """Ops that run on pieces of the batch, one piece after the other.

    Attributes:
        ops: how many ops run by piece.
        again: how many of the ops each piece runs again for its backward pass.
        first, last: the first and the last of the ops.
        pieces: how many examples each piece has.
        exactness: how near the results are to those of the unmodified step, in words.
        device: where they run, as "GPU:1", in a step of several devices; else "".
    """

    ops: int
    again: int
    first: str
    last: str
    pieces: tuple[int, ...]
    exactness: str
    device: str = ""

    def __str__(self) -> str:
        sizes = " or ".join(map(str, sorted(set(self.pieces))))
        more = f", {self.again} of the forward pass again" if self.again else ""
        where = f"on {self.device}: " if self.device else ""
        found = f"{where}{many(self.ops, 'op')} from '{self.first}' to '{self.last}'{more}"
        return f"{found}, in {len(self.pieces)} pieces of {sizes} examples; {self.exactness}"


@dataclass(frozen=True)
class Report:
    """What was done to a graph, what that should cost, and what it cost when it ran.

    Sizes are bytes, times nanoseconds; flows and times are of one step. A `measured` or `achieved`
    field is None until a step has run.

    Attributes:
        graph: name of the optimised function or graph.
        device: the device whose memory was planned.
        policy: the policy that chose the tensors.
        decision: a `Decision`, or its value. `unchanged: <why>`; `ordered: ...`: nothing moves, but the order of ops is
            held; `moved`: tensors move; `split along the batch`: parts run by piece, and nothing moves; `replaced`:
            recurrent layers were replaced, and nothing moves; `stitched`: ops were fused, and nothing else changed;
            `run by XLA`. `... over budget`: the step was expected to fit, so nothing moves, and it took more.
        budget: the memory budget, None where no limit was asked for.
        passes: the passes that may change the graph, in order.
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
        replaced_layers: the names of `replaced`.
        kept_layers: (name, reason) of `not_replaced`.
        replaced: recurrent layers that now run as one kernel, a line for each.
        not_replaced: loops that stay unchanged, and why.
        regions: the fused ops: those that run if the step runs stitched (fused), else those that were planned.
        not_stitched: (op, why) for the ops that are in no region, in one sentence.
        fusion: whether the step runs stitched, and why, in words; empty if the pass did not run.
        fusion_state: whether the step runs stitched, as data.
        tuning: whether kernels of its regions are still timed while it runs, so that others may run later.
        decided: whether the step goes on as it runs now, but for kernels that are tuned, and for XLA.
        function: which of a model's functions this is about: "train", "test" or "predict".
        scope_suffix: what Keras puts behind the names of layers in names of ops; see `names.suffix_of`.
        scopes: the scopes of the step's ops, "net/conv1"; layers are among them.
        stalls: (tensor, nanoseconds that computation waits for it), slowest first, as planned.
        spans: when ops and copies run, as planned: the longest ones.
        alive_before: (tensor, bytes) in memory at the peak of the unmodified graph, largest first.
        alive_after: the same at the plan's peak.
        others: reports of the model's other functions.
        not_moved: (tensor, reason) for the large tensors that stay in memory.
        not_enforced: lists of loops that the budget does not count: what they hold is not known before they run.
        devices: the figures of each device, where the step runs on several. Then `budget` and the peaks are those of
            one, the fullest or the one furthest over its budget; flows and transfers are those of all.
        verdict: what the plan promises, and what no plan can; None where memory was not planned.
        splits: ops that run on pieces of the batch.
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
    tuning: bool = False
    decided: bool = True
    function: str = ""
    replaced_layers: tuple[str, ...] = ()
    kept_layers: tuple[tuple[str, str], ...] = ()
    scope_suffix: str = ""
    scopes: tuple[str, ...] = ()
    stalls: tuple[tuple[str, int], ...] = ()
    spans: tuple[Span, ...] = ()
    alive_before: tuple[tuple[str, int], ...] = ()
    alive_after: tuple[tuple[str, int], ...] = ()
    others: tuple[Report, ...] = ()
    not_moved: tuple[tuple[str, str], ...] = ()
    not_enforced: tuple[str, ...] = ()
    devices: tuple[DeviceReport, ...] = ()
    verdict: Verdict | None = None
    splits: tuple[SplitRecord, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "decision", Decision(self.decision))
        object.__setattr__(self, "fusion_state", Fusion(self.fusion_state))
        object.__setattr__(self, "jit_compile", Xla(self.jit_compile))

    def __str__(self) -> str:
        return self.to_text()

    @property
    def headline(self) -> str:
        """One sentence: whether the step fits, its peak, what that costs, and what was changed."""
        return headline(self)

    @property
    def xla_lost(self) -> bool:
        """Whether XLA would have run the step, and does not."""
        return self.jit_compile.is_lost

    @property
    def running(self) -> tuple[RegionRecord, ...]:
        """The regions of a step that runs stitched; none of another."""
        return self.regions if self.fusion_state is Fusion.STITCHED else ()

    def named_ops(self) -> Iterator[str]:
        """The names of the ops that the report tells of, with or without memory that was planned."""
        yield from (name for name, _ in self.curve_before)
        yield from self.replaced_layers
        yield from (name for name, _ in self.kept_layers)
        yield from (name for region in self.regions for step in region.steps for name, _ in step.ops)
        yield from (name for name, _ in self.not_stitched)

    def to_text(self, rows: int = 10) -> str:
        """A page for people: the headline, what was asked, done and not done, then details of the `rows` largest."""
        return report_text(self, rows)

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


def _report(data: dict[str, Any]) -> Report:
    return Report(**{name: _restored(name, value) for name, value in data.items()})


def _restored(name: str, value: Any) -> Any:
    """The value of a field; JSON has lists for tuples and dicts for records."""
    if name == "others":
        return tuple(map(_report, value))
    if name == "verdict":
        return Verdict(**value) if value else None
    if name == "splits":
        return tuple(SplitRecord(**{**record, "pieces": tuple(record["pieces"])}) for record in value)
    if name == "devices":
        return tuple(DeviceReport(**found) for found in value)
    if name == "transfers":
        return tuple(TransferRecord(**record) for record in value)
    if name == "regions":
        return tuple(RegionRecord(region["name"], tuple(map(_step, region["steps"]))) for region in value)
    if name == "spans":
        return tuple(Span(**span) for span in value)
    if name.startswith(("curve_", "alive_")) or name in ("not_stitched", "not_moved", "stalls", "kept_layers"):
        return tuple((op, found) for op, found in value)
    return tuple(value) if isinstance(value, list) else value


def _step(record: dict[str, Any]) -> StepRecord:
    return StepRecord(record["kind"], tuple((name, op) for name, op in record["ops"]), tuple(record["after"]))
