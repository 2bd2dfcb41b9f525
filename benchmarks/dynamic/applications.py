"""Examples a second of all applications in training: tfmem.dynamic, DyNet, and TensorFlow node by node, on the CPU.

    python -m benchmarks.dynamic.applications --dynet /elsewhere/bin/python \
      --output benchmarks/results/dynamic_applications_cpu.json --document docs/benchmarks_dynamic.md

The systems take turns, each in a separate process; the medians of all rounds are shown. tfmem makes its batches within
the timed part, as DyNet makes its graphs; another column has the rate with batches that were made before. Hidden
sizes are 64, embeddings 64; all systems train by Adam.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.dynamic.processes import output_of, rows_in, versions
from benchmarks.offload.tables import write
from benchmarks.records import FORMAT, machine

MARKERS = ("<!-- applications: begin -->", "<!-- applications: end -->")
APPLICATIONS = (
    "tree_lstm",
    "rvnn",
    "td_rnn",
    "td_lstm",
    "bilstm_tagger",
    "bilstm_character_tagger",
    "graph_net",
    "biaffine_parser",
)
SYSTEMS = ("tfmem, batches made before", "tfmem", "dynet", "tensorflow")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynet", help="a Python that has DyNet")
    parser.add_argument("--applications", nargs="+", default=APPLICATIONS, choices=APPLICATIONS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--examples", type=int, default=256, help="that a measurement trains on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--document", type=Path, help="a page whose table between two markers is replaced")
    return parser.parse_args(given)


def table(rows: Sequence[dict]) -> list[str]:
    """A row for each application: medians of examples a second, and tfmem beside the other systems."""
    lines = [
        "| application | tfmem, batches made before | tfmem | DyNet | ratio | by processor time | TensorFlow | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["application"] for row in rows):
        rates = {
            (system, clock): statistics.median(found)
            for system in SYSTEMS
            for clock in ("wall", "processor")
            if (found := [r["examples"] / r[clock] for r in rows if (r["application"], r["system"]) == (name, system)])
        }
        ours = rates["tfmem", "wall"]

        def ratio(system: str, clock: str = "wall", rates: dict = rates) -> str:
            own, other = rates["tfmem", clock], rates.get((system, clock))
            return f"{own / other:.1f}" if other else "-"

        def shown(system: str, rates: dict = rates) -> str:
            return f"{rates[system, 'wall']:,.0f}" if (system, "wall") in rates else "-"

        cells = [name, shown(SYSTEMS[0]), f"{ours:,.0f}", shown("dynet"), ratio("dynet"), ratio("dynet", "processor")]
        lines.append(f"| {' | '.join([*cells, shown('tensorflow'), ratio('tensorflow')])} |")
    return lines


def text(results: dict) -> str:
    """The table, and what it depends on."""
    about = results["machine"]
    conditions = (
        f"{about['cores']} x {about['cpu']}, load {about['load']:.1f} before the run, Python {about['python']}, "
        + ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    )
    rows = results["rows"]
    rounds = len({row["round"] for row in rows})
    return "\n".join(
        [
            f"{conditions}. Examples a second, batches of {rows[0]['batch']}; medians of {rounds} rounds.",
            "",
            *table(rows),
        ]
    )


def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    load = os.getloadavg()[0]
    workers = [(sys.executable, "applications_ours.py")]
    workers += [(args.dynet, "applications_dynet.py")] if args.dynet else []
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "examples.json"
        for number in range(args.rounds):
            for python, worker in workers:
                command = [python, f"benchmarks/dynamic/{worker}", str(data), str(args.batch), str(args.examples)]
                found = rows_in(output_of([*command, *args.applications]))
                rows += [row | {"round": number, "batch": args.batch} for row in found]
    about = machine() | {"versions": versions(args.dynet), "load": load}
    results = {"format": FORMAT, "machine": about, "rows": rows}
    print(text(results))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    if args.document:
        write(args.document, text(results), MARKERS)


if __name__ == "__main__":
    main()
