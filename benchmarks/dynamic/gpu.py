"""The Tree-LSTM on a GPU: tfmem.dynamic, PyTorch node by node and level by level, TensorFlow eager; in bounded time.

PyTorch's CUDA graphs replay batches that were captured before, so they apply where the same batches come again; to
capture them is not timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.dynamic.processes import ROOT, command, installed, rows_in
from benchmarks.records import FORMAT, machine

# Systems with their workers and the largest batch, the slowest last: what time runs out for is left out.
WORKERS = (
    ("ours.py", (), 1 << 20),
    ("with_torch.py", ("levels",), 1 << 20),
    ("with_torch.py", ("graphs",), 1 << 20),
    ("with_torch.py", ("eager",), 32),
    ("with_tensorflow.py", (), 8),
)
PEERS = ("torch levels", "torch eager", "tensorflow eager")
GRAPHS = "torch graphs"
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
    measurements = sum(sum(batch <= most for batch in batches) for _, _, most in WORKERS) * len(hidden)
    each = (total - START * len(WORKERS) * len(hidden)) / max(1, measurements)
    seconds = max(0.2, TIMED * each)
    about = machine() | {"versions": installed("tensorflow", "torch")}
    rows: list[dict] = []
    failures: list[str] = []

    def keep(row: dict | None = None) -> None:
        rows.extend([row] if row is not None else [])
        if output is not None:
            kept = {"format": FORMAT, "machine": about, "rows": rows, "failures": failures}
            output.write_text(json.dumps(kept, indent=1) + "\n")

    # a middle size first, so that a short run has one whole comparison
    for size in sorted(hidden, key=lambda size: abs(size - 256)):
        for worker, more, most in WORKERS:
            wanted = [batch for batch in batches if batch <= most]
            left = end - time.monotonic()
            words = command(sys.executable, worker, data, size, seconds, wanted, *more)
            if not wanted:
                continue
            problem = "no time left" if left < max(START, 0.1) else _run(words, left, keep)
            if problem:
                failures.append(f"{worker} {' '.join(more)} at hidden {size}: {problem}")
                keep()
    for failure in failures:
        print(failure)
    print("\n".join(table(rows)))
    return rows


def _run(words: list[str], left: float, keep: Callable[[dict], None]) -> str:
    """Gives a worker's rows to `keep` as they come; what went wrong, or nothing."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        timer = threading.Timer(left, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            for row in rows_in(line):
                keep(row)
        process.wait()
        in_time = timer.is_alive()
        timer.cancel()
        if not in_time:
            return "stopped, its time was over"
        errors.seek(0)
        return "" if process.returncode == 0 else f"failed: {errors.read()[-1500:]}"


def table(rows: Sequence[dict]) -> list[str]:
    """A row for each size: sentences a second, our ratio to the best peer and to CUDA graphs, and bytes of weights read
    for a batch."""
    columns = ("hidden", "batch", "tfmem", *PEERS, "ratio to the best", GRAPHS, "ratio", *_TRAFFIC.values())
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    found = {(row["hidden"], row["batch"], row["system"]): row for row in rows}
    for hidden, batch in sorted({(row["hidden"], row["batch"]) for row in rows}):
        ours = found.get((hidden, batch, "tfmem"))
        rates = [_rate(found.get((hidden, batch, peer))) for peer in PEERS]
        graphs = _rate(found.get((hidden, batch, GRAPHS)))
        shown = [f"{rate:.0f}" if rate else "-" for rate in (_rate(ours), *rates)]
        shown += [_ratio(ours, max(rates)), f"{graphs:.0f}" if graphs else "-", _ratio(ours, graphs)]
        shown += [f"{ours[key] / 1e6:.1f}" if ours and key in ours else "-" for key in _TRAFFIC]
        lines.append("| " + " | ".join([str(hidden), str(batch), *shown]) + " |")
    notes = [
        f"hidden {row['hidden']}: kernel compiled in {_seconds(row, 'cold')}, net specialised in "
        f"{_seconds(row, 'warm')} once it is; gradients are the CPU's within {row['difference']:.1e}"
        for row in rows
        if "warm" in row and row["batch"] == min(r["batch"] for r in rows if r["hidden"] == row["hidden"])
    ]
    return [*lines, "", *notes] if notes else lines


_TRAFFIC = {"weight_bytes": "weights read, MB", "weight_bytes_by_node": "by each node, MB"}


def _rate(row: dict | None) -> float:
    return row["sentences"] / row["wall"] if row else 0.0


def _seconds(row: dict, key: str) -> str:
    return f"{row[key]:.2f} s" if key in row else "(not measured)"


def _ratio(ours: dict | None, other: float) -> str:
    return f"{_rate(ours) / other:.1f}" if ours and other else "-"
