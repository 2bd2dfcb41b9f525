"""What splits along the batch promise, beside plans without them: shares of the unlimited rate. Nothing runs.

    python -m benchmarks.offload.predicted_splits --nets vgg19 --output benchmarks/results/offload_splits.json
    python -m benchmarks.offload.predicted_splits --document docs/offload.md

As `benchmarks.offload.predicted`, of which it uses the nets, the costs and the link.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.offload import traced
from benchmarks.offload.cases import NETWORKS
from benchmarks.offload.predicted import GIB, SHARES, TITLES
from benchmarks.offload.tables import write
from benchmarks.records import FORMAT, ROOT, commit, load, save
from benchmarks.runs import command_line
from graph_passes import pipeline
from graph_passes.analysis.cost import device_costs as devices
from graph_passes.analysis.memory.simulate import Link
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.splitting import SplitStep, split_step

MARKERS = ("<!-- splits: begin -->", "<!-- splits: end -->")


def main(arguments: list[str] | None = None) -> int:
    """Plan for the networks that are asked for, or write the table."""
    parser = command_line("offload.predicted_splits", __doc__)
    parser.add_argument("--nets", nargs="+", choices=TITLES, default=["vgg19"])
    parser.add_argument("--device", choices=devices.profiles(), default="h100")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/offload_splits.json")
    parser.add_argument("--document", type=Path, help="where to write the table from the results")
    options = parser.parse_args(arguments)
    results = load(options.output) or {"format": FORMAT, "cases": {}}
    if options.document:
        write(options.document, table(results), MARKERS)
        return 0
    for net in options.nets:
        results["cases"][net] = _case(net, options.device)
        save(results, options.output)
    return 0


def _case(net: str, device: str) -> dict[str, Any]:
    step, profile = traced.traced(net).step(), devices.load(device)
    link, costs = Link(profile.offload, profile.prefetch), traced.costs(device)
    timeline = step.timeline(costs)
    rows = []
    for share in SHARES:
        began, budget = time.perf_counter(), timeline.peak * share // 100
        row: dict[str, Any] = {"share": share}
        found = split_step(step, lambda each: each.timeline(costs), link, budget, OffloadOptions())
        if isinstance(found, SplitStep):
            edited = pipeline.Step.read(found.graph, found.order, step.fetches)
            try:
                plan = pipeline.plan_step(edited, edited.timeline(costs), link, budget, OffloadOptions(), timed=True)
            except InfeasibleBudgetError as error:
                row |= {"least": error.least}
            else:
                rate = timeline.moments[-1] / plan.after.seconds
                row |= {"rate": round(rate, 3), "pieces": len(found.plan.regions[0].pieces), "peak": plan.after.peak}
        row["planning"] = round(time.perf_counter() - began, 1)
        rows.append(row)
        print(row, flush=True)
    about = {"commit": commit(), "device": device, "batch": NETWORKS[net].batch, "ops": len(step.order)}
    return {**about, "peak": timeline.peak, "rows": rows}


def table(results: Mapping[str, Any]) -> str:
    """The rows of all networks."""
    lines = [f"| net | {' | '.join(f'{share}%' for share in SHARES)} |", "| --- |" + " --- |" * len(SHARES)]
    for net, found in results["cases"].items():
        about = f"{TITLES[net]}, batch of {found['batch']}, {found['peak'] / GIB:.2f} GiB"
        cells = " | ".join(
            f"{row['rate']:.3f} in {row['pieces']} pieces" if "rate" in row else "refused" for row in found["rows"]
        )
        lines.append(f"| {about} ({found['device']}, {found['commit']}) | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
