"""Where the time of a step goes on a GPU, of what `benchmarks.fusion` measured: launches, kernels and the host.

python -m benchmarks.fusion.breakdown benchmarks/results/fusion_h200.json [--only vae nmt] [--missed]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.fusion.cases import SYSTEMS, TEN
from benchmarks.fusion.compare import over_graph, over_xla, value
from benchmarks.offload.tables import table as markdown
from benchmarks.runs import existing

OVER_GRAPH, OVER_XLA = 1.5, 1.0  # what each workload has to reach
NAME = 60  # characters of a kernel's name

COLUMNS = {
    "step": "ms",
    "profiled": "wall_ms",
    "in kernels": "kernel_ms",
    "before the first": "before_ms",
    "gaps": "gaps_ms",
    "after the last": "after_ms",
}


def main(arguments: list[str] | None = None) -> int:
    """Print it. Returns 1 if the results have no profile of what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion.breakdown", description=__doc__)
    parser.add_argument("results", type=Path, help="what benchmarks.fusion wrote")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="workloads (all)")
    parser.add_argument("--missed", action="store_true", help="only those of the ten that miss a target")
    options = parser.parse_args(arguments)
    cases = existing(parser, options.results)["cases"]
    wanted = {
        name: outcome
        for name, outcome in cases.items()
        if (not options.only or name.partition(",")[0] in options.only)
        and (not options.missed or missed(name, outcome))
    }
    found = [text for name, outcome in wanted.items() if (text := breakdown(name, outcome))]
    print("\n\n".join(found) or "no profile of a GPU's kernels in these results")
    return 0 if found else 1


def missed(name: str, outcome: Mapping[str, Any]) -> str:
    """The target that one of the ten workloads misses, in words; "" if none."""
    of_graph, of_xla = over_graph(outcome, "tfmem"), over_xla(outcome)
    if name.partition(",")[0] not in TEN:
        return ""
    found = [
        f"{ratio:.2f}x over {what}, of {least}x"
        for ratio, what, least in ((of_graph, "graph", OVER_GRAPH), (of_xla, "the better XLA", OVER_XLA))
        if ratio is not None and ratio < least
    ]
    return " and ".join(found)


def breakdown(name: str, outcome: Mapping[str, Any]) -> str:
    """The lines of one workload, for every system that was profiled; "" if none was."""
    profiled = [system for system in SYSTEMS if value(outcome, system, "largest")]
    if not profiled:
        return ""
    why = missed(name, outcome)
    rows = [(system, *_numbers(outcome, system)) for system in profiled]
    header = ("system", "kernels", "copies", *(f"{column}, ms" for column in COLUMNS))
    parts = [markdown(f"## {name}{why and ': '}{why}", header, rows)]
    for system in profiled:
        largest = value(outcome, system, "largest")
        lines = [(each["name"][:NAME], f"{each['count']:.1f}", f"{each['ms']:.4f}") for each in largest]
        parts.append(markdown(f"{system}: the largest kernels", ("kernel", "launches a step", "ms a step"), lines))
    return "\n\n".join(parts)


def _numbers(outcome: Mapping[str, Any], system: str) -> list[str]:
    counts = [f"{value(outcome, system, key):.1f}" for key in ("kernels", "copies")]
    times = [value(outcome, system, key) for key in COLUMNS.values()]
    return counts + ["-" if time is None else f"{time:.3f}" for time in times]


if __name__ == "__main__":
    sys.exit(main())
