"""A recurrent layer that is called for the first time under tfmem, in this process:
`python -m benchmarks.recurrent.first_call TASK_JSON RESULT_FILE`."""

from __future__ import annotations

import time
from typing import Any

import keras
import tensorflow as tf

import tfmem
from benchmarks.fusion.worker import main
from benchmarks.offload.worker import device_name

LAYERS = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU}
SMALL = 8  # units of the layer that is called before, so that libraries are loaded


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the first call, alone and under tfmem, and from then on until the layer's kernel runs and all is
    decided; calls go on meanwhile.

    Args:
        task: "layer", "units", "batch", "steps", and "settle" (seconds to wait at most).
    """
    inputs = tf.random.stateless_normal((task["batch"], task["steps"], task["units"]), seed=(0, 1))
    first_seconds(tf.function(LAYERS[task["layer"]](SMALL)), inputs[:, :, :SMALL])
    first_seconds(tfmem.optimize(tf.function(lambda x: tf.tanh(x) * 2.0)), inputs)
    layer = LAYERS[task["layer"]](task["units"], return_sequences=True)
    layer.build(inputs.shape)
    alone = first_seconds(tf.function(layer.call), inputs)
    optimized = tfmem.optimize(tf.function(layer.call))
    began = time.perf_counter()
    found = {"alone": alone, "first": first_seconds(optimized, inputs), "replaced": None, "decided": None}
    while found["decided"] is None and time.perf_counter() - began < task["settle"]:
        first_seconds(optimized, inputs)
        report = tfmem.report(optimized)
        for name, is_so in (("replaced", bool(report.replaced)), ("decided", report.decided)):
            if is_so and found[name] is None:
                found[name] = time.perf_counter() - began
    return {
        "status": "ok",
        "device": device_name(),
        **{name: value and round(value, 3) for name, value in found.items()},
    }


def first_seconds(function: Any, inputs: tf.Tensor) -> float:
    """What one call takes until its result is on the host."""
    began = time.perf_counter()
    function(inputs).numpy()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(measured)
