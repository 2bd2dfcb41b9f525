"""What plans promise, by policy, and what no plan can exceed: shares of the unlimited rate. Nothing runs.

    python -m benchmarks.offload.predicted --nets vgg19 unet --output benchmarks/results/offload_predicted.json
    python -m benchmarks.offload.predicted --document docs/offload.md

Steps are traced from shapes; op times and the link are a device's profile, and convolutions take no workspace.
Results are added to those that the file has; with `--document` they are written there, and nothing is planned.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.offload import traced
from benchmarks.offload.cases import NETWORKS
from benchmarks.offload.tables import write
from benchmarks.records import FORMAT, ROOT, commit, load, save
from benchmarks.runs import command_line
from graph_passes import pipeline
from graph_passes.analysis.cost import device_costs as devices
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.passes.offload.options import OffloadOptions, Policy

SHARES = (80, 60, 50, 40)
POLICIES = tuple(policy for policy in get_args(Policy) if not policy.startswith("vdnn"))
MARKERS = ("<!-- predicted: begin -->", "<!-- predicted: end -->")
TITLES = {
    "vgg19": "VGG-19",
    "resnet152": "ResNet-152",
    "resnet50": "ResNet-50",
    "unet": "U-Net 512",
    "bert": "BERT-base",
}
GIB = 1 << 30


def main(arguments: list[str] | None = None) -> int:
    """Plan for the networks that are asked for, or write the table."""
    parser = command_line("offload.predicted", __doc__)
    parser.add_argument("--nets", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--device", choices=devices.profiles(), default="h100")
    parser.add_argument("--slower", type=float, default=1.0, help="times the roofline's that ops take (1)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/offload_predicted.json")
    parser.add_argument("--document", type=Path, help="where to write the table from the results")
    options = parser.parse_args(arguments)
    results = load(options.output) or {"format": FORMAT, "cases": {}}
    if options.document:
        write(options.document, table(results), MARKERS)
        return 0
    for net in options.nets:
        step = traced.traced(net).step()
        timeline = step.timeline(traced.costs(options.device))
        profile = devices.load(options.device)
        link = Link(options.slower * profile.offload, options.slower * profile.prefetch)  # beside ops as they are
        rows = predicted(step, timeline, link)
        results["cases"][net] = {
            "commit": commit(),
            "device": options.device,
            "batch": NETWORKS[net].batch,
            "ops": len(step.order),
            "peak": timeline.peak,
            "milliseconds": round(1e3 * options.slower * timeline.moments[-1], 1),
            "rows": rows,
        }
        save(results, options.output)
    return 0


def predicted(step: pipeline.Step, timeline: Timeline, link: Link) -> list[dict[str, Any]]:
    """A row for each share of the memory and each policy."""
    rows = []
    for share in SHARES:
        for policy in POLICIES:
            began = time.perf_counter()
            row: dict[str, Any] = {"share": share, "policy": policy}
            budget = timeline.peak * share // 100
            try:
                plan = pipeline.plan_step(step, timeline, link, budget, OffloadOptions(policy=policy), timed=True)
            except InfeasibleBudgetError as error:
                row |= {"least": error.least, "op": error.op}
            else:
                verdict = plan.verdict
                row |= {"rate": round(timeline.moments[-1] / plan.after.seconds, 3)}
                if verdict is not None and verdict.best_rate is not None:
                    row |= {"bound": round(verdict.best_rate, 3)}
            row["planning"] = round(time.perf_counter() - began, 1)
            rows.append(row)
            print(row, flush=True)
    return rows


def table(results: Mapping[str, Any]) -> str:
    """The rows of all networks, policies and the bound side by side."""
    shares = " | ".join(f"{share}%" for share in SHARES)
    lines = [f"| net | policy | {shares} |", "| --- | --- |" + " --- |" * len(SHARES)]
    for net, found in results["cases"].items():
        about = (
            f"{TITLES[net]}, batch of {found['batch']}: {found['ops']:,} ops, {found['peak'] / GIB:.2f} GiB, "
            f"{found['milliseconds']:.0f} ms ({found['device']}, {found['commit']})"
        )
        for policy in POLICIES:
            lines.append(f"| {about} | `{policy}` | {_cells(found['rows'], policy, 'rate')} |")
            about = ""
        lines.append(f"| | bound | {_cells(found['rows'], 'optimal', 'bound')} |")
    return "\n".join(lines)


def _cells(rows: Sequence[Mapping[str, Any]], policy: str, key: str) -> str:
    by_share = {row["share"]: row for row in rows if row["policy"] == policy}
    return " | ".join(
        f"{by_share[share][key]:.3f}" if key in by_share[share] else "refused" if "least" in by_share[share] else "-"
        for share in SHARES
    )


if __name__ == "__main__":
    sys.exit(main())
