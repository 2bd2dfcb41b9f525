"""TfmemRecurrent against the same Keras layers on the CPU: Keras 3 and tf_keras, in one process, runs interleaved.

    python -m benchmarks.recurrent.cpu --output benchmarks/results/recurrent_cpu.json

A layer reads `[batch, time, hidden]` and returns all its outputs; the product with the input is part of every time."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks.records import machine
from benchmarks.runs import command_line
from custom_ops.load import Library, load
from custom_ops.recurrent import cells
from custom_ops.recurrent.op import recurrent

CELLS = {"LSTM": cells.lstm(), "GRU": cells.gru()}
KERASES: Mapping[str, Any] = {"keras": keras, "tf_keras": tf_keras}
SEED_BATCH = 7
TOLERANCE = 2e-5  # between our outputs and Keras's


def main(arguments: list[str] | None = None) -> int:
    """Time every case; print a table."""
    parser = command_line("recurrent.cpu", __doc__)
    parser.add_argument("--layers", nargs="+", choices=sorted(CELLS), default=list(CELLS))
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 10, 16, 20, 64])
    parser.add_argument("--time", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each case is measured (3)")
    parser.add_argument("--output", type=Path, help="where to write the times as JSON")
    options = parser.parse_args(arguments)

    library = load()
    rows = []
    print(f"{'layer':>5} {'hidden':>6} {'batch':>5}  {'tfmem':>8} {'keras':>8} {'tf_keras':>8} us/step  speedups")
    for layer in options.layers:
        for hidden in options.hidden:
            for batch in options.batch:
                row = {"layer": layer, "hidden": hidden, "batch": batch}
                row |= measured(library, layer, hidden, batch, options.time, options.seconds)
                rows.append(row)
                times = [row[name] for name in ("tfmem", *KERASES)]
                speedups = [row[name] / row["tfmem"] for name in KERASES]
                print(
                    f"{layer:>5} {hidden:6} {batch:5} ",
                    *(f"{value:8.2f}" for value in times),
                    "        ",
                    *(f"{value:5.1f}x" for value in speedups),
                    flush=True,
                )
    if options.output:
        versions = {"tensorflow": tf.__version__, "keras": keras.__version__, "tf_keras": tf_keras.__version__}
        about = machine() | {"cores": len(os.sched_getaffinity(0))} | versions
        result = {
            "machine": about,
            "time": options.time,
            "unit": "microseconds a step; median, and best of all runs",
            "rows": rows,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measured(library: Library, layer: str, hidden: int, batch: int, steps: int, seconds: float) -> dict[str, float]:
    """The median and best time of a step of each system, in microseconds; their outputs are compared first."""
    x = tf.constant(np.random.default_rng(SEED_BATCH).normal(size=(batch, steps, hidden)).astype("float32"))
    systems: dict[str, Callable[[], tf.Tensor]] = {}
    for name, module in KERASES.items():
        built = getattr(module.layers, layer)(hidden, return_sequences=True)
        built(x)
        if name == "keras":
            weights = built.get_weights()
        else:
            built.set_weights(weights)
        systems[name] = called(built, x)
    systems["tfmem"] = called(ours(library, layer, hidden, built.trainable_weights), x)
    expected = systems["keras"]().numpy()
    for name, run in systems.items():
        error = float(np.abs(run().numpy() - expected).max())
        if not error < TOLERANCE:
            raise RuntimeError(f"{name}'s {layer} of {hidden}, batch {batch}, is {error} off")
    wait_until_idle()
    times: dict[str, list[float]] = {name: [] for name in systems}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["tfmem"]) < 5:
        for name, run in systems.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    median = {name: 1e6 * statistics.median(found) / steps for name, found in times.items()}
    best = {f"{name}_best": 1e6 * min(found) / steps for name, found in times.items()}
    return {name: round(value, 2) for name, value in (median | best).items()}


def called(layer: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> Callable[[], tf.Tensor]:
    function = tf.function(layer, autograph=False, jit_compile=False)
    return lambda: function(x)


def ours(library: Library, layer: str, hidden: int, weights: list[tf.Variable]) -> Callable[[tf.Tensor], tf.Tensor]:
    """What `tfmem.optimize` makes of the layer: one GEMM for all inputs, then the op."""
    cell = CELLS[layer]
    kernel, recurrent_kernel, bias = weights

    def run(x: tf.Tensor) -> tf.Tensor:
        of_input, of_state = (bias, []) if layer == "LSTM" else (bias[0], [bias[1]])
        by_time = tf.transpose(x, [1, 0, 2])
        gates = tf.nn.bias_add(tf.reshape(by_time, [-1, hidden]) @ kernel, of_input)
        gates = tf.reshape(gates, [*by_time.shape[:2], gates.shape[1]])
        states = [tf.zeros([x.shape[0], hidden])] * len(cell.states)
        outputs, _ = recurrent(library.ops, cell, hidden, [gates], [], of_state, [recurrent_kernel], states)
        return tf.transpose(outputs[0], [1, 0, 2])

    return run


def wait_until_idle() -> None:
    """Wait while other processes use more than 5% of the processors, but not for ever."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        before = processor_times()
        time.sleep(0.5)
        idle, total = (now - then for now, then in zip(processor_times(), before, strict=True))
        if total - idle <= 0.05 * total:
            return


def processor_times() -> tuple[int, int]:
    """Of all processors together, idle and in all, in ticks."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


if __name__ == "__main__":
    sys.exit(main())
