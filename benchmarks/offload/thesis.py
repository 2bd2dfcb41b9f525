"""Tables and figures of the AutoVM thesis, chapter 6, by prediction. Nothing runs, and no GPU is needed.

    python -m benchmarks.offload.thesis --nets alexnet vgg19 resnet152 --output benchmarks/results/offload_thesis.json
    python -m benchmarks.offload.thesis --document docs/benchmarks_offload.md

Memory is the step's peak over N_m. A step's time is predicted for tfmem by its planner, and for NVIDIA's demand paging
by `benchmarks.offload.paging`, from chapter 4's rates as shares of this link, or from a file of
`benchmarks.offload.unified` (`--rates`). `python -m benchmarks.offload` measures tfmem at the same N_m on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.offload import traced
from benchmarks.offload.cases import NETWORKS
from benchmarks.offload.paging import Rates, paged
from benchmarks.offload.tables import write
from benchmarks.records import FORMAT, ROOT, commit, load, save
from benchmarks.runs import command_line
from graph_passes import pipeline
from graph_passes.analysis.cost import device_costs as devices
from graph_passes.analysis.cost.model import CostModel
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ops import FORWARD_CONVOLUTIONS
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.splitting import SplitStep, split_step

MARKERS = ("<!-- thesis: begin -->", "<!-- thesis: end -->")
NORMALISED = (0.5, 0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.7)
TABLE = (0.5, 1.0, 1.5, 2.0, 2.5)  # the columns of Table 6.2
POLICIES = ("autovm", "optimal")
THRESHOLDS = (0, 1, 4, 16, 64, 128, 256, 512)  # MiB
TUNED_AT = 1.25  # N_m of Figure 6.7; at the thesis's 1.4 AlexNet needs pieces
PARTS_AT = 1.25  # N_m at which parts are switched off
PIECES = "pieces"  # policy `optimal`, and pieces of the batch where no plan without them fits
MOST_OPS = 12_000  # of a step whose program is solved for every N_m
MIB, GIB = 1 << 20, 1 << 30
PARTS: Mapping[str, Mapping[str, Any]] = {
    "all": {},
    "no solver": {"policy": "hybrid"},
    "no recomputing": {"policy": "autovm"},
    "no recomputing, copies back begin early": {"policy": "autovm", "prefetch": "early"},
    "no recomputing, all tensors (vDNN)": {"policy": "vdnn_all"},
}
TITLES = {"alexnet": "AlexNet", "vgg19": "VGG-19", "resnet152": "ResNet-152"}


def main(arguments: list[str] | None = None) -> int:
    """Predict for the networks that are asked for, or write the tables."""
    parser = command_line("offload.thesis", __doc__)
    parser.add_argument("--nets", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--device", choices=devices.profiles(), default="h100")
    parser.add_argument("--rates", type=Path, help="results of benchmarks.offload.unified, from the device")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/offload_thesis.json")
    parser.add_argument("--document", type=Path, help="where to write the tables from the results")
    options = parser.parse_args(arguments)
    results = load(options.output) or {"format": FORMAT, "cases": {}}
    if options.document:
        write(options.document, "\n".join(tables(results["cases"])), MARKERS)
        return 0
    profile = devices.load(options.device)
    link = Link(profile.offload, profile.prefetch)
    rates = measured_rates(options.rates) if options.rates else Rates.of_link(link.offload, link.prefetch)
    for net in options.nets:
        step = traced.traced(net).step()
        found = predicted(step, traced.costs(options.device), link, rates)
        about = {"commit": commit(), "device": options.device, "batch": NETWORKS[net].batch}
        results["cases"][net] = {**about, "rates": "measured" if options.rates else "thesis", **found}
        save(results, options.output)
        print("\n".join(tables({net: results["cases"][net]})), flush=True)
    return 0


def measured_rates(path: Path) -> Rates:
    """What chapter 4's command measured."""
    case = json.loads(path.read_text())["cases"]["rates"]
    nbytes, times = case["mib"] * MIB, case["ms"]
    return Rates(1e3 * nbytes / times["faults"], 1e3 * nbytes / times["out"])


def predicted(step: pipeline.Step, costs: CostModel, link: Link, rates: Rates) -> dict[str, Any]:
    """All rows of one network."""
    timeline = step.timeline(costs)

    def milliseconds(budget: float, **options: Any) -> float | None:
        """The time of a plan for `budget` bytes; None if it is refused."""
        try:
            plan = pipeline.plan_step(step, timeline, link, int(budget), OffloadOptions(**options), timed=True)
        except InfeasibleBudgetError:
            return None
        return round(1e3 * plan.after.seconds, 1)

    peak = timeline.peak
    policies = POLICIES if len(timeline.steps) <= MOST_OPS else ("autovm", "hybrid")
    rows = []
    for normalised in NORMALISED:
        memory = peak / normalised
        found = paged(timeline, int(memory), rates)
        row: dict[str, Any] = {"normalised": normalised, "paging": round(1e3 * found.seconds, 1)}
        row |= {"paged_in": found.bytes_in, **{policy: milliseconds(memory, policy=policy) for policy in policies}}
        row[PIECES] = row[policies[-1]] or in_pieces(step, int(memory), link, costs)
        rows.append(row)
    return {
        "peak": peak,
        "milliseconds": round(1e3 * timeline.moments[-1], 1),
        "policies": [*policies, PIECES],
        "rows": rows,
        "convolution": convolution(step, timeline),
        "thresholds": {
            str(mib): milliseconds(peak / TUNED_AT, policy="autovm", size_threshold=mib * MIB) for mib in THRESHOLDS
        },
        "parts": {
            name: milliseconds(peak / PARTS_AT, **{"policy": policies[-1], **part}) for name, part in PARTS.items()
        },
    }


def in_pieces(step: pipeline.Step, memory: int, link: Link, costs: CostModel) -> float | None:
    """Milliseconds of the step where parts of it run on pieces of the batch; None if it is refused."""
    options = OffloadOptions()
    found = split_step(step, lambda each: each.timeline(costs), link, memory, options)
    if not isinstance(found, SplitStep):
        return None
    edited = pipeline.Step.read(found.graph, found.order, step.fetches)
    try:
        plan = pipeline.plan_step(edited, edited.timeline(costs), link, memory, options, timed=True)
    except InfeasibleBudgetError:
        return None
    return round(1e3 * plan.after.seconds, 1)


def convolution(step: pipeline.Step, timeline: Timeline) -> dict[str, int]:
    """Figure 6.2: bytes in memory while the fourth forward convolution runs."""
    forward = [
        place
        for place, item in enumerate(timeline.steps)
        if place <= timeline.turn and step.graph[item.node].op in FORWARD_CONVOLUTIONS | {"_FusedConv2D"}
    ]
    if len(forward) < 4:
        return {}
    at = forward[3]
    own = sum(buffer.nbytes for buffer in timeline.buffers if at == buffer.start or at in buffer.uses)
    workspace = int(timeline.workspace[at])
    return {"own": own, "workspace": workspace, "others": int(timeline.usage[at]) - own - workspace}


def tables(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: Table 6.2, Figures 6.1 to 6.4 and 6.7, and what each part is worth."""
    yield f"Faster than demand paging, in percent (Table 6.2). `autovm` is the thesis's policy; `{PIECES}` is"
    yield "`optimal`, with pieces of the batch where no plan without them fits:"
    yield ""
    yield f"| net | policy | {' | '.join(f'N_m {each}' for each in TABLE)} |"
    yield "| --- | --- |" + " --- |" * len(TABLE)
    for net, case in cases.items():
        by = {row["normalised"]: row for row in case["rows"]}
        for policy in case["policies"]:
            cells = [
                "refused" if by[each][policy] is None else f"{100 * (by[each]['paging'] / by[each][policy] - 1):+.0f}"
                for each in TABLE
            ]
            about = f"{TITLES[net]}, batch of {case['batch']} ({case['device']}, {case['commit']})"
            yield f"| {about} | `{policy}` | {' | '.join(cells)} |"
    yield ""
    yield "Milliseconds of a step (Figures 6.1, 6.3 and 6.4):"
    yield ""
    yield f"| net | | {' | '.join(map(str, NORMALISED))} |"
    yield "| --- | --- |" + " --- |" * len(NORMALISED)
    for net, case in cases.items():
        for name in ("paging", *case["policies"]):
            cells = ["refused" if row[name] is None else f"{row[name]:,.0f}" for row in case["rows"]]
            yield f"| {TITLES[net]}, {case['milliseconds']:,.0f} ms in enough memory | {name} | {' | '.join(cells)} |"
    yield ""
    yield from _figure_of_memory(cases)
    yield f"Milliseconds by the size from which on tensors move, at N_m {TUNED_AT}, policy `autovm` (Figure 6.7):"
    yield ""
    yield f"| net | {' | '.join(f'{each} MiB' for each in THRESHOLDS)} |"
    yield "| --- |" + " --- |" * len(THRESHOLDS)
    for net, case in cases.items():
        cells = [_time(case["thresholds"][str(each)]) for each in THRESHOLDS]
        yield f"| {TITLES[net]} | {' | '.join(cells)} |"
    yield ""
    yield f"Milliseconds with parts of tfmem switched off, at N_m {PARTS_AT} (section 6.4):"
    yield ""
    yield f"| net | {' | '.join(PARTS)} | demand paging |"
    yield "| --- |" + " --- |" * (len(PARTS) + 1)
    for net, case in cases.items():
        paging = next(row["paging"] for row in case["rows"] if row["normalised"] == PARTS_AT)
        yield f"| {TITLES[net]} | {' | '.join(_time(case['parts'][name]) for name in PARTS)} | {paging:,.0f} |"


def _figure_of_memory(cases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    shown = {net: case["convolution"] for net, case in cases.items() if case["convolution"]}
    if not shown:
        return
    yield "GiB in memory while the fourth forward convolution runs (Figure 6.2):"
    yield ""
    yield "| net | input and output | workspace | tensors of other ops |"
    yield "| --- | --- | --- | --- |"
    for net, found in shown.items():
        cells = " | ".join(f"{found[name] / GIB:.2f}" for name in ("own", "workspace", "others"))
        yield f"| {TITLES[net]} | {cells} |"
    yield ""


def _time(milliseconds: float | None) -> str:
    return "refused" if milliseconds is None else f"{milliseconds:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
