"""Writes what benchmarks.dynamic measured into docs/benchmarks_dynamic.md, between two markers.

python -m benchmarks.dynamic.tables --cpu benchmarks/results/dynamic_cpu.json \
  --host benchmarks/results/dynamic_host.json --gpu benchmarks/results/dynamic_h200.json"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.dynamic import gpu
from benchmarks.dynamic.__main__ import table
from benchmarks.offload.tables import table as markdown
from benchmarks.offload.tables import write
from benchmarks.records import ROOT

MARKERS = ("<!-- dynamic: begin -->", "<!-- dynamic: end -->")

# The host's costs: the key in the results, what it is, the most that it may be.
HOST = (
    ("tensors, forward", "a batch of tensors: checked, levels, script, and a forward pass by it", 50),
    ("tensors, step", "the same, forward, backward and Adam", None),
    ("nodes to tensors", "one call of `Handle.node` for each node, and `Handle.batch`", 50),
    ("ops to tensors", "every op of every node recorded, and `Handle.batch`", 200),
)


def main(arguments: list[str] | None = None) -> int:
    """Read results, replace what is between the markers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", type=Path, required=True, help="what benchmarks.dynamic wrote")
    parser.add_argument("--host", type=Path, required=True, help="what benchmarks.dynamic.host wrote")
    parser.add_argument("--gpu", type=Path, required=True, help="what benchmarks.dynamic --gpu wrote")
    parser.add_argument("--document", type=Path, default=ROOT / "docs" / "benchmarks_dynamic.md")
    options = parser.parse_args(arguments)
    cpu, host, on_gpu = (json.loads(path.read_text()) for path in (options.cpu, options.host, options.gpu))
    write(options.document, tables(cpu, host, on_gpu), MARKERS)
    return 0


def tables(cpu: Mapping[str, Any], host: Mapping[str, Any], on_gpu: Mapping[str, Any]) -> str:
    """Every table."""
    sentences = cpu["rows"][0]["sentences"]
    of_cpu = f"{machine(cpu)}. Sentences a second; medians of {rounds(cpu['rows'])} rounds of {sentences} sentences."
    cases = host["cases"]
    of_tree = f"{machine(host)}. Microseconds of processor time for a tree of {cases['nodes']} nodes."
    of_ops = (
        f"Recorded, a tree is {cases['ops']:.0f} ops. One takes {cases['one expression']:.2f} microseconds to make."
    )
    parts = [
        f"## Against DyNet\n\n{of_cpu}",
        "\n".join(table(cpu["rows"])),
        f"## What the host does\n\n{of_tree}",
        of_host(cases),
        of_ops,
        f"## On a GPU\n\n{machine(on_gpu)}. Sentences a second.",
        "\n".join(gpu.table(on_gpu["rows"])),
    ]
    return "\n\n".join(parts)


def machine(results: Mapping[str, Any]) -> str:
    """What the numbers depend on, in a line."""
    about = results["machine"]
    parts = [*about.get("gpus", [])]
    if "cpu" in about:
        parts.append(f"{about['cores']} x {about['cpu']}")
        parts += [f"Python {about['python']}"]
    parts += [f"{name} {number}" for name, number in about.get("versions", {}).items()]
    return ", ".join(parts)


def rounds(rows: list[Mapping[str, Any]]) -> int:
    """How often each case was measured."""
    first = rows[0]
    return sum(all(row[key] == first[key] for key in ("system", "hidden", "batch")) for row in rows)


def of_host(cases: Mapping[str, Any]) -> str:
    """The host's costs beside what they may be."""
    lines = [[what, f"{cases[key]:.0f}", str(most or "-")] for key, what, most in HOST]
    return markdown("", ["what", "microseconds", "at most"], lines).strip()


if __name__ == "__main__":
    sys.exit(main())
