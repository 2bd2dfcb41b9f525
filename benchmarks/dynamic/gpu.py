"""The Tree-LSTM on a GPU: tfmem.dynamic, PyTorch node by node and level by level, TensorFlow eager; in bounded time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.dynamic.processes import ROOT, command, installed, rows_in
from benchmarks.records import FORMAT, machine

# Systems with their workers, the slowest last: what time runs out for is left out.
WORKERS = (
    ("ours.py", ()),
    ("with_torch.py", ("levels",)),
    ("with_torch.py", ("eager",)),
    ("with_tensorflow.py", ()),
)
PEERS = ("torch levels", "torch eager", "tensorflow eager")
START = 12.0  # seconds that a process takes before it measures
TIMED = 0.5  # of a measurement's share; the rest is for what comes before it


def compare(data: Path, hidden: Sequence[int], batches: Sequence[int], total: float, output: Path | None) -> list[dict]:
    """Runs all workers, and prints a table last. Rows are written to `output` after each process.

    Args:
        data: trees as JSON.
        hidden, batches: sizes.
        total: seconds that may pass until the table is printed.
    """
    end = time.monotonic() + total
    each = (total - START * len(WORKERS) * len(hidden)) / (len(WORKERS) * len(hidden) * len(batches))
    seconds = max(0.2, TIMED * each)
    about = machine() | {"versions": installed("tensorflow", "torch")}
    rows: list[dict] = []
    failures: list[str] = []
    # a middle size first, so that a short run has one whole comparison
    for size in sorted(hidden, key=lambda size: abs(size - 256)):
        for worker, more in WORKERS:
            left = end - time.monotonic()
            if left < START:
                failures.append(f"{worker} {' '.join(more)} at hidden {size}: no time left")
                continue
            words = command(sys.executable, worker, data, size, seconds, batches, *more)
            found, problem = _run(words, left)
            rows += found
            if problem:
                failures.append(f"{worker} {' '.join(more)} at hidden {size}: {problem}")
            if output is not None:
                found_here = {"format": FORMAT, "machine": about, "rows": rows, "failures": failures}
                output.write_text(json.dumps(found_here, indent=1) + "\n")
    for failure in failures:
        print(failure)
    print("\n".join(table(rows)))
    return rows


def _run(words: list[str], left: float) -> tuple[list[dict], str]:
    """A worker's rows, and what went wrong."""
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        return rows_in(out), "stopped, its time was over"
    return rows_in(out), "" if process.returncode == 0 else f"failed: {errors[-1500:]}"


def table(rows: Sequence[dict]) -> list[str]:
    """A row for each size: sentences a second, our ratio to the best peer, and bytes of weights read for a batch."""
    lines = [
        f"| hidden | batch | tfmem | {' | '.join(PEERS)} | ratio to the best | weights read, MB | by each node, MB |",
        "|---|---|---|" + "---|" * len(PEERS) + "---|---|---|",
    ]
    found = {(row["hidden"], row["batch"], row["system"]): row for row in rows}
    for hidden, batch in sorted({(row["hidden"], row["batch"]) for row in rows}):
        ours = found.get((hidden, batch, "tfmem"))
        rates = [_rate(found.get((hidden, batch, peer))) for peer in PEERS]
        known = [rate for rate in rates if rate]
        ratio = f"{_rate(ours) / max(known):.1f}" if ours and known else "-"
        bytes_read = [f"{ours[key] / 1e6:.1f}" if ours and key in ours else "-" for key in _TRAFFIC]
        shown = [f"{rate:.0f}" if rate else "-" for rate in (_rate(ours), *rates)]
        lines.append("| " + " | ".join([str(hidden), str(batch), *shown, ratio, *bytes_read]) + " |")
    notes = [
        f"hidden {row['hidden']}: specialised in {row['specialised']:.1f} s; gradients are the CPU's within "
        f"{row['difference']:.1e}"
        for row in rows
        if "difference" in row and row["batch"] == min(r["batch"] for r in rows)
    ]
    return [*lines, "", *notes] if notes else lines


_TRAFFIC = ("weight_bytes", "weight_bytes_by_node")


def _rate(row: dict | None) -> float:
    return row["sentences"] / row["wall"] if row else 0.0
