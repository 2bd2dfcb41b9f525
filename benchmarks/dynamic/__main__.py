"""Sentences a second of a Tree-LSTM in training (forward, backward, Adam): tfmem.dynamic, and DyNet, which batches.

    python -m benchmarks.dynamic --dynet /elsewhere/bin/python --trees trees/train.txt

DyNet runs in another Python that has it (`pip install dyNET38`); without --dynet it is left out. The systems
take turns, each in separate processes, and the medians are shown: by wall time, and by processor time of all
threads, which a busy machine disturbs less.

On a GPU, against PyTorch (node by node, and level by level as DGL does, also by CUDA graphs) and TensorFlow (eager),
within a given time; results are written as they come:

    python -m benchmarks.dynamic --gpu --output results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.dynamic import gpu
from benchmarks.dynamic.processes import numbered, run, versions
from benchmarks.records import FORMAT, machine
from examples import trees


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, help="a file of trees; none: made ones")
    parser.add_argument("--dynet", help="a Python that has DyNet")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=256, help="that a measurement trains on")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--gpu", action="store_true", help="compare with what runs on a GPU")
    parser.add_argument("--total-seconds", type=float, default=480, help="of all measurements on a GPU")
    return parser.parse_args(given)


def table(rows: list[dict]) -> list[str]:
    """A row for each size: medians of all rounds, in sentences a second."""
    titles = ("hidden", "batch", "tfmem, batches made before", "tfmem", "DyNet", "ratio")
    titles = (*titles, "tfmem, processor", "DyNet, processor", "ratio")
    lines = [f"| {' | '.join(titles)} |", "|" + len(titles) * "---|"]
    for hidden, batch in dict.fromkeys((row["hidden"], row["batch"]) for row in rows):

        def rate(system: str, clock: str, size: tuple[int, int] = (hidden, batch)) -> float | None:
            found = [
                row["sentences"] / row[clock]
                for row in rows
                if (row["hidden"], row["batch"]) == size and row["system"] == system
            ]
            return statistics.median(found) if found else None

        cells = [str(hidden), str(batch), _rounded(rate("tfmem, batches made before", "wall"))]
        for clock in ("wall", "processor"):
            ours, theirs = rate("tfmem", clock), rate("dynet", clock)
            cells += [_rounded(ours), _rounded(theirs), f"{ours / theirs:.1f}" if ours and theirs else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _rounded(rate: float | None) -> str:
    return f"{rate:.0f}" if rate else "-"


def main() -> None:
    args = arguments()
    given = trees.read(args.trees) if args.trees else trees.made(args.sentences)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "trees.json"
        data.write_text(json.dumps(numbered(given[: args.sentences])))
        if args.gpu:
            gpu.compare(data, args.hidden, args.batch, args.total_seconds, args.output)
            return
        for _ in range(args.rounds):
            for hidden in args.hidden:
                rows += run(sys.executable, "ours.py", data, hidden, 0, args.batch)
                if args.dynet:
                    rows += run(args.dynet, "with_dynet.py", data, hidden, None, args.batch)
    print("\n".join(table(rows)))
    if args.output:
        about = machine() | {"versions": versions(args.dynet)}
        args.output.write_text(json.dumps({"format": FORMAT, "machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
