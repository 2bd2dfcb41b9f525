"""Seconds until a layer that is called for the first time runs as a persistent kernel, with an empty cache and a full
one.

    python -m benchmarks.recurrent.first_calls --output benchmarks/results/recurrent_first_calls_h200.json
    python -m benchmarks.recurrent.first_calls --table benchmarks/results/recurrent_first_calls_h200.json

Each layer has two processes: one with an empty cache, and one that finds what the first has left there. What TensorFlow
and tfmem load once in a process is not in the times."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, in_process, waiting

WORKER = "benchmarks.recurrent.first_call"
TITLES = (
    "layer",
    "cache",
    "first call alone, s",
    "under tfmem, s",
    "kernel runs after, s",
    "decided after, s",
    "commit",
)


@dataclass(frozen=True)
class Case:
    """A layer over 16 sequences of 100 steps.

    Attributes:
        layer: "lstm" or "gru".
        units: its units; inputs have as many.
    """

    layer: str
    units: int

    @property
    def name(self) -> str:
        """Unique: `lstm/256`."""
        return f"{self.layer}/{self.units}"


CASES = [Case(layer, units) for units in (256, 1024) for layer in ("lstm", "gru")]


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, and print the table. Returns 1 if a layer failed."""
    parser = command_line("recurrent.first_calls", __doc__, "recurrent_first_calls.json")
    parser.add_argument("--settle", type=float, default=25, help="seconds to wait at most (25)")
    options, cases = asked(parser, arguments, CASES, lines)
    if not cases:
        return 0
    results = begun(options)
    for case in waiting(cases, results, options):
        task = {"layer": case.layer, "units": case.units, "batch": 16, "steps": 100, "settle": options.settle}
        with tempfile.TemporaryDirectory() as cache:
            found = {when: in_process(WORKER, task, 90, TFMEM_CACHE_DIR=cache) for when in ("empty", "full")}
        results["cases"][case.name] = found
        save(results, options.output)
    print("\n".join(lines(results["cases"])))
    return int(any(found[when]["status"] != "ok" for found in results["cases"].values() for when in found))


def lines(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table, as lines of text."""
    rows = [TITLES, *(_row(name, when, found) for name, both in cases.items() for when, found in both.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(name: str, when: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    if found["status"] != "ok":
        return (name, when, found.get("message", found["status"])[:60], *["-"] * (len(TITLES) - 3))
    seconds = (found[part] for part in ("alone", "first", "replaced", "decided"))
    return (name, when, *("-" if each is None else f"{each:.2f}" for each in seconds), found["commit"])


if __name__ == "__main__":
    sys.exit(main())
