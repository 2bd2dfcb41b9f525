"""Loops that end before their bound when their states say so: TensorFlow's executor beside tfmem, on a CPU.

    python -m benchmarks.recurrent.ended --output benchmarks/results/recurrent_ended_cpu.json
    python -m benchmarks.recurrent.ended --table benchmarks/results/recurrent_ended_cpu.json

A step is `h = where(goes on, tanh(x[i] + h @ R), h)`; the bound is 256 steps. In inference all states are listed, in
training the gradient of `R` is taken. A loop that tfmem leaves to TensorFlow has the word "loop" in its row. Medians of
calls in turn, every second round backwards; results are compared first."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.offload.tables import table as markdown
from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, waiting

BOUND = 256
STEPS = (4, 9, 21, 66, 256)  # after which the loop ends
ROUNDS = 30
SIZES = ((1, 32), (8, 256), (16, 128), (16, 256), (32, 64))
MODES = ("infer", "train")


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


CASES = [Case(rows, units, mode) for mode in MODES for rows, units in SIZES]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write, or print the table of what was written."""
    parser = command_line("recurrent.ended", __doc__, "recurrent_ended.json")
    options, cases = asked(parser, arguments, CASES, lambda cases: [table(cases)])
    results = begun(options) if cases else {"cases": {}}
    for case in waiting(cases, results, options):
        results["cases"][case.name] = measured(case)
        save(results, options.output)
    if cases:
        print(table(results["cases"]))
    return 0


def loop(case: Case) -> tuple[Any, tuple[tf.Tensor, tf.Tensor]]:
    """The function of a case, whose last argument are the steps of each row; and its other arguments."""
    random = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    matrix = tf.Variable(numbers(case.units, case.units) * case.units**-0.5)

    def states(x: tf.Tensor, h: tf.Tensor, left: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        def body(i: Any, h: Any, left: Any, listed: Any) -> Any:
            h = tf.where(left[:, None] > 0.5, tf.tanh(x[i] + h @ matrix), h)
            return i + 1, h, left - 1.0, listed.write(i, h)

        listed = tf.TensorArray(tf.float32, BOUND, element_shape=[case.rows, case.units])
        found = tf.while_loop(lambda i, h, left, _: (i < BOUND) & tf.reduce_any(left > 0.5), body, (0, h, left, listed))
        return found[1], found[3].stack()

    def gradient(x: tf.Tensor, h: tf.Tensor, left: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(states(x, h, left)[0])
        return tape.gradient(loss, matrix)

    function = tf.function(states if case.mode == "infer" else gradient, autograph=False)
    return function, (tf.constant(numbers(BOUND, case.rows, case.units)), tf.zeros([case.rows, case.units]))


def measured(case: Case) -> dict[str, Any]:
    """Whether the loop is replaced, and seconds of a call of both for each number of steps."""
    plain, given = loop(case)
    optimized = tfmem.optimize(loop(case)[0], passes=("recurrent",))
    seconds: dict[str, dict[str, float]] = {}
    for steps in STEPS:
        inputs = (*given, tf.fill([case.rows], float(steps)))
        for a, b in zip(tf.nest.flatten(optimized(*inputs)), tf.nest.flatten(plain(*inputs)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        both = {"TensorFlow": plain, "tfmem": optimized}
        taken: dict[str, list[float]] = {name: [] for name in both}
        for number in range(ROUNDS):
            for name in both if number % 2 == 0 else reversed(both):
                taken[name].append(timed(both[name], inputs))
        seconds[str(steps)] = {name: statistics.median(found) for name, found in taken.items()}
    return {"replaced": bool(tfmem.report(optimized).replaced), "seconds": seconds}


def timed(function: Callable[..., Any], inputs: tuple[tf.Tensor, ...]) -> float:
    """Seconds of one call, until its results are there."""
    began = time.perf_counter()
    tf.nest.map_structure(np.asarray, function(*inputs))
    return time.perf_counter() - began


def table(cases: Mapping[str, Any]) -> str:
    """The table in Markdown: TensorFlow's milliseconds, and how many times as fast tfmem is."""
    rows = []
    for name, case in cases.items():
        found = case["seconds"].values()
        cells = [f"{1e3 * each['TensorFlow']:.2f}, {each['TensorFlow'] / each['tfmem']:.2f}x" for each in found]
        rows.append((name, "replaced" if case["replaced"] else "loop", *cells))
    header = ("rows x units", "what runs", *(f"{steps} steps, ms" for steps in STEPS))
    return markdown("Loops that their states end, on a CPU", header, rows)


if __name__ == "__main__":
    sys.exit(main())
