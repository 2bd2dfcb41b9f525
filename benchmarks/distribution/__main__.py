"""Times Keras's networks on all GPUs under MirroredStrategy: TensorFlow's own step, then with a budget.

    python -m benchmarks.distribution --output benchmarks/results/distribution_h100.json
    python -m benchmarks.distribution --table benchmarks/results/distribution_h100.json

Each case runs in a process with a time limit: a step that waits for itself would never end. With `exact`, ops are
deterministic, and losses and weights are compared to the bit. The budget is a share of the peak of TensorFlow's step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.offload.tables import table, write
from benchmarks.records import FORMAT, ROOT, load, machine, save

CASES = {
    "vgg19/64/0.7": ("VGG19", 64, 0.7, False),
    "resnet50/128/0.6": ("ResNet50", 128, 0.6, False),
    "vgg19/64/0.85/exact": ("VGG19", 64, 0.85, True),
    "resnet50/128/0.8/exact": ("ResNet50", 128, 0.8, True),
}
LIMIT = 200  # seconds for a case
MARKERS = ("<!-- distribution: begin -->", "<!-- distribution: end -->")
DOCUMENT = ROOT / "docs" / "distribution.md"


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distribution", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/distribution.json"))
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--table", type=Path, help="results whose table goes into docs/distribution.md")
    options = parser.parse_args(arguments)
    if options.table:
        results = load(options.table)
        if results is None:
            parser.error(f"{options.table} does not exist")
        write(DOCUMENT, rows(results), MARKERS)
        return 0
    results = load(options.output) or {"format": FORMAT, "cases": {}}
    results["machine"] = machine()
    for name in options.only:
        command = [sys.executable, "-m", "benchmarks.distribution.case", *map(str, CASES[name])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
            found = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"error": done.stderr[-2000:]}
        except subprocess.TimeoutExpired:
            found = {"error": f"not done after {LIMIT} s"}
        results["cases"][name] = found
        save(results, options.output)
        print(name, {key: value for key, value in found.items() if "losses" not in key}, flush=True)
    return 0


def rows(results: Mapping[str, Any]) -> str:
    """The table of a page: one row for each case that ended."""
    header = (
        "network, batch",
        "budget",
        "peak",
        "peak without",
        "ms",
        "ms without",
        "rate kept",
        "first call",
        "equal",
    )
    found = []
    for name, case in results["cases"].items():
        if "error" in case:
            continue
        network, batch, _, exact = CASES[name]
        plain, ours, gib = case["plain"], case["tfmem"], 1 << 30
        found.append(
            (
                *(f"{network}, {batch}", f"{case['budget'] / gib:.2f} GiB"),
                *(f"{max(ours['peaks']) / gib:.2f} GiB", f"{max(plain['peaks']) / gib:.2f} GiB"),
                *(f"{ours['ms']:.1f}", f"{plain['ms']:.1f}", f"{plain['ms'] / ours['ms']:.2f}"),
                f"{ours['first']:.1f} s ({plain['first']:.1f} s without)",
                "to the bit" if exact and case["equal"] else "differs" if exact else "not compared",
            )
        )
    gpus, commit = results["machine"]["gpus"], results["machine"]["commit"][:7]
    return f"{len(gpus)} x {gpus[0].partition(',')[0]}, commit {commit}.\n{table('', header, found)}"


if __name__ == "__main__":
    sys.exit(main())
