"""Loops of TensorFlow beside what tfmem makes of them, on a CPU, for each number of steps.

Medians of calls in turn, every second round backwards; results are compared first."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.offload.tables import table as markdown
from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, waiting

MODES = ("infer", "train")
Inputs = tuple[tf.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A loop of so many rows and units, in inference or in training."""

    rows: int
    units: int
    mode: str

    @property
    def name(self) -> str:
        """See `benchmarks.runs`."""
        return f"{self.rows}x{self.units}/{self.mode}"


@dataclass(frozen=True)
class Loops:
    """A benchmark of loops.

    Attributes:
        name: of its module in `benchmarks.recurrent`.
        text: what its command prints as help.
        title: of its table.
        sizes: (rows, units) of each case.
        steps: how many each loop takes, in turn.
        rounds: of calls in turn.
        make: the function of a case, the same again at each call.
        given: makes the inputs of a case for so many steps.
    """

    name: str
    text: str
    title: str
    sizes: Sequence[tuple[int, int]]
    steps: Sequence[int]
    rounds: int
    make: Callable[[Case], Any]
    given: Callable[[Case, int], Inputs]

    def main(self, arguments: list[str] | None = None) -> int:
        """Measure and write, or print the table of what was written."""
        every = [Case(rows, units, mode) for mode in MODES for rows, units in self.sizes]
        parser = command_line(f"recurrent.{self.name}", self.text, f"recurrent_{self.name}.json")
        options, cases = asked(parser, arguments, every, lambda cases: [self.table(cases)])
        results = begun(options) if cases else {"cases": {}}
        for case in waiting(cases, results, options):
            results["cases"][case.name] = self.measured(case)
            save(results, options.output)
        if cases:
            print(self.table(results["cases"]))
        return 0

    def measured(self, case: Case) -> dict[str, Any]:
        """Whether the loop is replaced, and seconds of a call of both for each number of steps."""
        plain, optimized = self.make(case), tfmem.optimize(self.make(case), passes=("recurrent",))
        seconds: dict[str, dict[str, float]] = {}
        for steps in self.steps:
            inputs = self.given(case, steps)
            for a, b in zip(tf.nest.flatten(optimized(*inputs)), tf.nest.flatten(plain(*inputs)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
            both = {"TensorFlow": plain, "tfmem": optimized}
            taken: dict[str, list[float]] = {name: [] for name in both}
            for number in range(self.rounds):
                for name in both if number % 2 == 0 else reversed(both):
                    taken[name].append(_timed(both[name], inputs))
            seconds[str(steps)] = {name: statistics.median(found) for name, found in taken.items()}
        return {"replaced": bool(tfmem.report(optimized).replaced), "seconds": seconds}

    def table(self, cases: Mapping[str, Any]) -> str:
        """The table in Markdown: TensorFlow's milliseconds, and how many times as fast tfmem is."""
        rows = []
        for name, case in cases.items():
            found = case["seconds"].values()
            cells = [f"{1e3 * each['TensorFlow']:.2f}, {each['TensorFlow'] / each['tfmem']:.2f}x" for each in found]
            rows.append((name, "replaced" if case["replaced"] else "loop", *cells))
        header = ("rows x units", "what runs", *(f"{steps} steps, ms" for steps in self.steps))
        return markdown(self.title, header, rows)


def _timed(function: Callable[..., Any], inputs: Inputs) -> float:
    """Seconds of one call, until its results are there."""
    began = time.perf_counter()
    tf.nest.map_structure(np.asarray, function(*inputs))
    return time.perf_counter() - began
