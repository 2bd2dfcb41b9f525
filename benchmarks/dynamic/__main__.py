"""Sentences a second of a Tree-LSTM in training (forward, backward, Adam): tfmem.dynamic, and DyNet, which batches.

    python -m benchmarks.dynamic --dynet /elsewhere/bin/python --trees trees/train.txt

DyNet is run by a Python of its own that has it (`pip install dyNET38`); without --dynet it is left out. The systems
take turns, each in processes of their own, and the medians are shown: by wall time, and by processor time of all
threads, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from examples import trees

ROOT = Path(__file__).resolve().parents[2]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", type=Path, help="a file of trees; none: made ones")
    parser.add_argument("--dynet", help="a Python that has DyNet")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=256, help="that a measurement trains on")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    return parser.parse_args(given)


def numbered(given: list[trees.Tree]) -> list:
    """Trees whose words are numbers."""
    words: dict[str, int] = {}

    def of(tree: trees.Tree) -> list:
        if len(tree) == 2:
            return [tree[0], words.setdefault(tree[1], len(words))]
        return [tree[0], of(tree[1]), of(tree[2])]

    return [of(tree) for tree in given]


def run(python: str, worker: str, data: Path, hidden: int, batches: list[int]) -> list[dict]:
    command = [python, str(ROOT / "benchmarks/dynamic" / worker), str(data), str(hidden), *map(str, batches)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(rows: list[dict]) -> list[str]:
    """A row for each size: medians of all rounds, in sentences a second."""
    lines = [
        "| hidden | batch | tfmem, wall | DyNet, wall | ratio | tfmem, processor | DyNet, processor | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for hidden, batch in dict.fromkeys((row["hidden"], row["batch"]) for row in rows):
        cells = [str(hidden), str(batch)]
        for clock in ("wall", "processor"):
            rates = []
            for system in ("tfmem", "dynet"):
                found = [
                    row["sentences"] / row[clock]
                    for row in rows
                    if (row["hidden"], row["batch"], row["system"]) == (hidden, batch, system)
                ]
                rates.append(statistics.median(found) if found else None)
            cells += [f"{rate:.0f}" if rate else "-" for rate in rates]
            cells.append(f"{rates[0] / rates[1]:.1f}" if rates[0] and rates[1] else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    args = arguments()
    given = trees.read(args.trees) if args.trees else trees.made(args.sentences)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "trees.json"
        data.write_text(json.dumps(numbered(given[: args.sentences])))
        for _ in range(args.rounds):
            for hidden in args.hidden:
                rows += run(sys.executable, "ours.py", data, hidden, args.batch)
                if args.dynet:
                    rows += run(args.dynet, "with_dynet.py", data, hidden, args.batch)
    print("\n".join(table(rows)))
    if args.output:
        args.output.write_text(json.dumps({"format": 1, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
