"""Gives mutated GraphDefs to `tfmem.optimize`, and counts what comes of them.

    python -m tests.soak --seed 1 --count 20000 --output soak.jsonl
    python -m tests.soak --table soak.jsonl

Each seed is one mutated training step (`graphs.py`, `mutations.py`), optimised without a memory budget and with one
in another process (`worker.py`), and run beside the original if it was changed. A fault is an exception that is not
tfmem's (unless TensorFlow does not import the graph either), a result that differs or does not run though the original
does, and an end of the process, by a signal or by the clock, that TensorFlow does not come to without tfmem."""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runs import command_line

FAULTS = ("fault", "differs", "does not run", "died", "hangs")
ENDED = {"died": "TensorFlow dies of it, too", "hangs": "TensorFlow hangs, too"}
START = 300  # seconds for a process to be ready
END = 60  # for one that was killed or has closed its output


class Worker:
    """One process, started again after it ended."""

    def __init__(self, mode: Sequence[str], seconds: float) -> None:
        self._mode, self._seconds = list(mode), seconds
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def answer(self, seed: int) -> dict[str, Any]:
        """What came of `seed`; {"outcome": "died" or "hangs"} with the stage in which the process ended."""
        process = self._started()
        assert process.stdin is not None
        process.stdin.write(f"{seed}\n")
        process.stdin.flush()
        stages, deadline = [], time.monotonic() + self._seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                return {"outcome": "hangs", "stages": stages[-3:]}
            if line is None:
                process.wait(END)
                self.close()
                return {"outcome": "died", "status": process.returncode, "stages": stages[-3:]}
            values = json.loads(line)
            if "outcome" in values:
                return dict(values)
            stages.append(values["stage"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END)
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None:
            return self._process
        command = [sys.executable, "-m", "tests.soak.worker", *self._mode]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TFMEM_CACHE_DIR": ""}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._lines = queue.Queue()
        threading.Thread(target=_pump, args=(process, self._lines), daemon=True).start()
        if self._lines.get(timeout=START) is None:
            raise RuntimeError(f"{' '.join(command)} does not start; run it by hand to see why")
        self._process = process
        return process


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def examine(worker: Worker, seed: int, seconds: float) -> dict[str, Any]:
    """What came of `seed`; where the process ended, whether TensorFlow's own does."""
    found = worker.answer(seed)
    if found["outcome"] not in ENDED:
        return found
    alone = Worker(["plain"], seconds)
    try:
        theirs = alone.answer(seed)
    finally:
        alone.close()
    if theirs["outcome"] == found["outcome"]:
        return {**found, "outcome": ENDED[found["outcome"]], "theirs": theirs}
    return {**found, "theirs": theirs}


def soak(seeds: Sequence[int], workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """What came of each seed, in no order.

    Args:
        seeds: what to examine.
        workers: processes at once.
        seconds: that one seed may take.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        waiting.put(seed)
    done: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()

    def work() -> None:
        worker = Worker([], seconds)
        try:
            while True:
                seed = waiting.get_nowait()
                done.put({"seed": seed, **examine(worker, seed, seconds)})
        except queue.Empty:
            pass
        except BaseException as error:  # the reader raises it
            done.put(error)
        finally:
            worker.close()

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    for _ in seeds:
        result = done.get()
        if isinstance(result, BaseException):
            raise result
        yield result


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """How often each thing came of a seed; every fault with its seed."""
    counts = Counter(result["outcome"] for result in results)
    lines = ["| with a budget | seeds |", "| --- | --- |"]
    lines += [f"| {outcome} | {count} |" for outcome, count in counts.most_common()]
    without = Counter(result["without"] for result in results if "without" in result)
    lines += ["", "| without | seeds |", "| --- | --- |"]
    lines += [f"| {outcome} | {count} |" for outcome, count in without.most_common()]
    faults = [result for result in results if result["outcome"] in FAULTS]
    seeds = [result["seed"] for result in results]
    lines += ["", f"{len(results)} seeds from {min(seeds, default=0)} to {max(seeds, default=0)}, {len(faults)} faults"]
    for fault in faults:
        lines.append(f"  seed {fault['seed']}: {fault['outcome']}: {fault.get('error', fault.get('stages'))}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Examine seeds, and print the table. Returns 1 if there are faults."""
    parser = command_line("soak", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first (1)")
    parser.add_argument("--count", type=int, default=300, help="how many (300)")
    parser.add_argument("--only", type=int, nargs="+", metavar="SEED", help="these, with all that is known of each")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (one a core)")
    parser.add_argument("--seconds", type=float, default=120, help="that one seed may take (120)")
    parser.add_argument("--total-seconds", type=float, default=float("inf"), help="begin no seed when this is over")
    parser.add_argument("--output", type=Path, help="results, one JSON text a line; seeds in it are not run again")
    parser.add_argument("--table", type=Path, help="results to make a table of, and run nothing")
    options = parser.parse_args(arguments)
    results = _read(options.table or options.output)
    if not options.table:
        known = {result["seed"] for result in results}
        seeds = options.only or [s for s in range(options.seed, options.seed + options.count) if s not in known]
        results += _run(seeds, options)
    print("\n".join(table(results)))
    return int(any(result["outcome"] in FAULTS for result in results))


def _run(seeds: Sequence[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    results, deadline = [], time.monotonic() + options.total_seconds
    for result in soak(seeds, options.workers, options.seconds):
        results.append(result)
        if options.output:
            with options.output.open("a") as file:
                print(json.dumps(result), file=file)
        if options.only or result["outcome"] in FAULTS:
            print("\n".join(f"{name}: {value}" for name, value in result.items()), flush=True)
        if time.monotonic() > deadline:
            break
    return results


def _read(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
