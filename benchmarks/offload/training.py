"""A whole training in a budget, beside one without: steps until an accuracy, and the time that they take (Figure 6.5).

    python -m benchmarks.offload.training --output benchmarks/results/offload_training_cpu.json
    python -m benchmarks.offload.training --table benchmarks/results/offload_training_cpu.json

A net of the size that CIFAR-10 takes learns images of ten classes, which are made here: a pattern for each class, moved
and under noise. Each training is a separate process, with the same seeds, and ends when it has labelled 85% of a set
that it does not learn. Losses have to be equal to the bit, and so the number of steps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, in_process

WORKER = "benchmarks.offload.training_worker"
OUTPUT = "benchmarks/results/offload_training.json"
BATCHES = (64, 128)
SHARE = 60  # percent of the peak without a budget
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """A batch size."""

    name: str
    batch: int


CASES = tuple(Case(str(batch), batch) for batch in BATCHES)


def main(arguments: list[str] | None = None) -> int:
    """Train what is asked for, and print the table. Returns 1 if a training failed or differs."""
    parser = command_line("offload.training", __doc__, OUTPUT)
    parser.add_argument("--share", type=int, default=SHARE, help="the budget, percent of the peak without one (60)")
    parser.add_argument("--width", type=int, default=32, help="filters of the first layer (32)")
    parser.add_argument("--steps", type=int, default=400, help="steps at most (400)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one training (600)")
    options, cases = asked(parser, arguments, CASES, table)
    if not cases:
        return 0
    results = begun(options)
    for case in cases:
        task = {"batch": case.batch, "width": options.width, "steps": options.steps, "budget": 0}
        plain = in_process(WORKER, task, options.timeout)
        found = {"batch": case.batch, "plain": plain}
        if plain["status"] == "ok":
            budget = plain["before"] + (plain["peak"] - plain["before"]) * options.share // 100
            found["budgeted"] = in_process(WORKER, {**task, "budget": budget}, options.timeout)
        results["cases"][case.name] = found
        save(results, options.output)
    print("\n".join(table(results["cases"])))
    return 0 if all(equal(results["cases"][case.name]) for case in cases) else 1


def equal(found: Mapping[str, Any]) -> bool:
    """Whether both trainings of a batch size ended, with the same losses after the same number of steps."""
    runs: Sequence[Mapping[str, Any]] = [found["plain"], found.get("budgeted", {})]
    return all(run.get("status") == "ok" for run in runs) and runs[0]["losses"] == runs[1]["losses"]


def table(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: steps, seconds and memory of each training."""
    rows = [
        "| batch | | steps | accuracy | seconds | seconds of a step | peak, MiB | losses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for found in cases.values():
        same = "equal to the bit" if equal(found) else "DIFFER"
        for name, losses in (("plain", ""), ("budgeted", same)):
            run = found.get(name, {})
            if run.get("status") != "ok":
                rows.append(f"| {found['batch']} | {name} | {run.get('status', 'not run')} | | | | | |")
                continue
            rows.append(
                f"| {found['batch']} | {name} | {len(run['losses'])} | {run['accuracy']:.3f} | {run['seconds']:.0f} | "
                f"{run['step']:.3f} | {run['peak'] / MIB:.0f} | {losses} |"
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
