"""A Keras recurrent layer before and after `tfmem.optimize`, end to end, in one TensorFlow process.

    python -m benchmarks.recurrent_keras --output benchmarks/results/recurrent_keras_h200.json

The input lies on the device, `[batch, time, units]`; a call ends when its outputs are there. Keras takes cuDNN where it
can (LSTM, and GRU with `reset_after`); the canonical GRU runs as a loop. Before and after take turns, so that whatever
else the machine does hits both. Results are added to the output file after each case, and cases that are in it already
are not run again."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.offload import FORMAT, load, machine, save
from benchmarks.recurrent_cases import Case, chosen
from benchmarks.runs import command_line
from benchmarks.worker import device_name, versions
from graph_passes.recurrent.options import RecurrentOptions

LAYERS: dict[str, Callable[[int], keras.layers.Layer]] = {
    "lstm": lambda units: keras.layers.LSTM(units, return_sequences=True),
    "gru": lambda units: keras.layers.GRU(units, return_sequences=True),
    "canonical_gru": lambda units: keras.layers.GRU(units, return_sequences=True, reset_after=False),
}
WARM_UP = 3
ROUNDS = 5  # before and after take turns
LEAST, MOST = 10, 200  # calls of one round
SECONDS = 0.3  # of one round, between LEAST and MOST calls
TOLERANCE = 2e-3  # between before and after: cuDNN and TensorFlow's products may use TF32


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for. Returns 1 if one failed or was wrong."""
    parser = command_line("recurrent_keras", __doc__, "recurrent_keras.json")
    options = parser.parse_args(arguments)
    cases = [case for case in chosen(options.only) if not case.training]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    results = load(options.output) or load(options.resume) or {"format": FORMAT, "cases": {}}
    results["machine"] = machine() | {"versions": versions(), "device": device_name()}
    deadline = time.monotonic() + options.total_seconds
    failed = 0
    for case in cases:
        known = results["cases"].get(case.name, {}).get("status") == "ok" and not options.again
        if known or time.monotonic() > deadline:
            continue
        outcome = measure(case)
        results["cases"][case.name] = outcome
        save(results, options.output)
        speed = f"{outcome['before'] / outcome['after']:.2f}x" if "after" in outcome else outcome["message"]
        print(f"{case.name}: {outcome['status']}, {speed}", flush=True)
        failed += outcome["status"] != "ok"
    return 1 if failed else 0


def measure(case: Case) -> dict[str, Any]:
    """Milliseconds of a call, before and after, and how far their outputs are from each other."""
    keras.utils.set_random_seed(0)
    layers = [LAYERS[case.layer](case.units) for _ in range(case.layers)]
    model = keras.Sequential([keras.Input((case.steps, case.units)), *layers])
    inputs = tf.random.stateless_normal((case.batch, case.steps, case.units), seed=(0, 1))

    @tf.function(input_signature=[tf.TensorSpec((None, case.steps, case.units), tf.float32)])
    def before(batch: tf.Tensor) -> tf.Tensor:
        return model(batch, training=False)

    began = time.perf_counter()
    try:
        options = tfmem.Options(recurrent=RecurrentOptions(on_gpu=True))
        after = tfmem.optimize(before, options=options)
        found = np.asarray(after(inputs))
    except tfmem.TfmemError as error:
        return {"status": "error", "message": str(error)[:800]}
    seconds = time.perf_counter() - began
    expected = np.asarray(before(inputs))
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    times: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(ROUNDS):
        for name, function in (("before", before), ("after", after)):
            times[name] += called(lambda function=function: function(inputs))
    right = error <= TOLERANCE
    return {
        "status": "ok" if right else "wrong",
        "message": "" if right else f"outputs differ by {error:.2g}",
        "error": error,
        "optimize_seconds": seconds,
        "calls": len(times["before"]),
        **{name: statistics.median(values) for name, values in times.items()},
        "swapped": any("TfmemRecurrent" in node.op for node in nodes_of(after, inputs)),
    }


def called(function: Callable[[], tf.Tensor]) -> list[float]:
    """Milliseconds of each of many calls, every one until its output is there."""
    for _ in range(WARM_UP):
        function()
    tf.test.experimental.sync_devices()
    found: list[float] = []
    deadline = time.perf_counter() + SECONDS
    while len(found) < MOST and (len(found) < LEAST or time.perf_counter() < deadline):
        began = time.perf_counter()
        function()
        tf.test.experimental.sync_devices()
        found.append(1e3 * (time.perf_counter() - began))
    return found


def nodes_of(function: Any, inputs: tf.Tensor) -> list[tf.compat.v1.NodeDef]:
    """Every op that a call runs, those of called functions too."""
    graph_def = function.get_concrete_function(inputs).graph.as_graph_def()
    return [*graph_def.node, *(node for each in graph_def.library.function for node in each.node_def)]


if __name__ == "__main__":
    sys.exit(main())
