"""Loops of unknown length that draw by a seed of each step: TensorFlow's executor beside tfmem, on a CPU.

    python -m benchmarks.recurrent.drawn --output benchmarks/results/recurrent_drawn_cpu.json
    python -m benchmarks.recurrent.drawn --table benchmarks/results/recurrent_drawn_cpu.json

A step is `h = tanh(x[i] @ K + h @ R + 0.1 * normal(seed=[i, 5]))`; all states are listed. In inference the list is the
result, in training the gradients of `K` and `R` are. Medians of calls in turn, every second round backwards; results
are compared first."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.offload.tables import table as markdown
from benchmarks.records import begun, save
from benchmarks.recurrent.ended import MODES, Case, timed
from benchmarks.runs import asked, command_line, waiting

STEPS = (1, 8, 50, 600)
ROUNDS = 20
SIZES = ((1, 8), (8, 32), (32, 128))
CASES = [Case(rows, units, mode) for mode in MODES for rows, units in SIZES]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write, or print the table of what was written."""
    parser = command_line("recurrent.drawn", __doc__, "recurrent_drawn.json")
    options, cases = asked(parser, arguments, CASES, lambda cases: [table(cases)])
    results = begun(options) if cases else {"cases": {}}
    for case in waiting(cases, results, options):
        results["cases"][case.name] = measured(case)
        save(results, options.output)
    if cases:
        print(table(results["cases"]))
    return 0


def loop(case: Case) -> Any:
    """The function of a case, of inputs [steps, rows, units]."""
    random = np.random.default_rng(0)
    matrices = [
        tf.Variable((random.standard_normal((case.units, case.units)) * case.units**-0.5).astype(np.float32))
        for _ in range(2)
    ]

    def states(x: tf.Tensor) -> tf.Tensor:
        def body(i: Any, h: Any, listed: Any) -> Any:
            noise = tf.random.stateless_normal([case.rows, case.units], tf.stack([i, 5]))
            h = tf.tanh(x[i] @ matrices[0] + h @ matrices[1] + 0.1 * noise)
            return i + 1, h, listed.write(i, h)

        count = tf.shape(x)[0]
        listed = tf.TensorArray(tf.float32, count, element_shape=[case.rows, case.units])
        begin = (0, tf.zeros([case.rows, case.units]), listed)
        return tf.while_loop(lambda i, *_: i < count, body, begin)[2].stack()

    def gradients(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(states(x) ** 2)
        return tape.gradient(loss, matrices)

    signature = [tf.TensorSpec([None, case.rows, case.units])]
    return tf.function(states if case.mode == "infer" else gradients, input_signature=signature, autograph=False)


def measured(case: Case) -> dict[str, Any]:
    """Whether the loop is replaced, and seconds of a call of both for each number of steps."""
    plain, optimized = loop(case), tfmem.optimize(loop(case), passes=("recurrent",))
    seconds: dict[str, dict[str, float]] = {}
    for steps in STEPS:
        shape = (steps, case.rows, case.units)
        inputs = (tf.constant(np.random.default_rng(1).standard_normal(shape).astype(np.float32)),)
        for a, b in zip(tf.nest.flatten(optimized(*inputs)), tf.nest.flatten(plain(*inputs)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        both = {"TensorFlow": plain, "tfmem": optimized}
        taken: dict[str, list[float]] = {name: [] for name in both}
        for number in range(ROUNDS):
            for name in both if number % 2 == 0 else reversed(both):
                taken[name].append(timed(both[name], inputs))
        seconds[str(steps)] = {name: statistics.median(found) for name, found in taken.items()}
    return {"replaced": bool(tfmem.report(optimized).replaced), "seconds": seconds}


def table(cases: Mapping[str, Any]) -> str:
    """The table in Markdown: TensorFlow's milliseconds, and how many times as fast tfmem is."""
    rows = []
    for name, case in cases.items():
        found = case["seconds"].values()
        cells = [f"{1e3 * each['TensorFlow']:.2f}, {each['TensorFlow'] / each['tfmem']:.2f}x" for each in found]
        rows.append((name, "replaced" if case["replaced"] else "loop", *cells))
    header = ("rows x units", "what runs", *(f"{steps} steps, ms" for steps in STEPS))
    return markdown("Loops that draw in each step, on a CPU", header, rows)


if __name__ == "__main__":
    sys.exit(main())
