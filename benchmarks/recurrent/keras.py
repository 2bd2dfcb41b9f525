"""A Keras recurrent layer before and after `tfmem.optimize`, end to end, in one TensorFlow process.

    python -m benchmarks.recurrent.keras --output benchmarks/results/recurrent_keras_h200.json
    python -m benchmarks.recurrent.keras --only train/

The input lies on the device, `[batch, time, units]`; a call ends when its outputs are there. Keras takes cuDNN where it
can (LSTM, and GRU with `reset_after`); the canonical GRU runs as a loop. A training step is that of a model of the
layer alone, with the mean square for its loss and SGD: forward, backward, update. Models are compiled as Keras does by
itself; with layers that cuDNN can run it leaves XLA off. Before and after take turns, so that whatever else the machine
does hits both. TensorFlow lets products of float32 round to TF32, and so does tfmem then; with `--no-tf32` neither
does. Results are added to the output file after each case, training after all others, and cases that are in it already
are not run again."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tfmem
from benchmarks.offload.worker import device_name, versions
from benchmarks.records import begun, save
from benchmarks.recurrent.cases import WITHOUT_TF32, Case, all_cases
from benchmarks.recurrent.keras_models import pair
from benchmarks.runs import asked, command_line
from custom_ops.jit.launch import cuda_driver

WARM_UP = 3
ROUNDS = 5  # before and after take turns
LEAST, MOST = 10, 200  # calls of one round
SECONDS = 0.05  # of one round, between LEAST and MOST calls
TOLERANCES = {True: 2e-3, False: 1e-5}  # between before and after, with TF32 and without


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for. Returns 1 if one failed or was wrong."""
    parser = command_line("recurrent.keras", __doc__, "recurrent_keras.json")
    parser.add_argument("--no-tf32", action="store_true", help="products of float32 in float32")
    options, cases = asked(parser, arguments, sorted(all_cases(), key=lambda case: case.training))
    if not cases:
        return 0
    tf32 = not options.no_tf32
    tf.config.experimental.enable_tensor_float_32_execution(tf32)
    results = begun(options, versions=versions(), device=device_name())
    deadline = time.monotonic() + options.total_seconds
    failed = 0
    for case in cases:
        name = case.name if tf32 else case.name + WITHOUT_TF32
        known = results["cases"].get(name, {}).get("status") == "ok" and not options.again
        if known or time.monotonic() > deadline:
            continue
        outcome = measure(case, tf32)
        results["cases"][name] = outcome
        save(results, options.output)
        print(f"{name}: {outcome['status']}, {in_words(outcome)}", flush=True)
        failed += outcome["status"] != "ok"
    return 1 if failed else 0


def in_words(outcome: dict[str, Any]) -> str:
    """One line for the terminal."""
    if "after" not in outcome:
        return str(outcome["message"])
    before, after = outcome["before"], outcome["after"]
    return f"{before:.3f} ms before, {after:.3f} ms after, {before / after:.2f}x"


def measure(case: Case, tf32: bool) -> dict[str, Any]:
    """Milliseconds of a call, before and after, and how far what they compute is apart."""
    times: dict[str, list[float]] = {"before": [], "after": []}
    try:
        found = pair(case)
        for _ in range(ROUNDS):
            for name in times:
                times[name] += called(getattr(found, name))
    except (tfmem.TfmemError, tf.errors.OpError) as error:
        return {"status": "error", "message": str(error)[:800]}
    right = found.error <= TOLERANCES[tf32]
    return {
        "status": "ok" if right else "wrong",
        "message": "" if right else f"{'losses' if case.training else 'outputs'} differ by {found.error:.2g}",
        "error": found.error,
        "optimize_seconds": found.seconds,
        "calls": len(times["before"]),
        **{name: statistics.median(values) for name, values in times.items()},
        "replaced": found.replaced,
    }


def called(function: Callable[[], Any]) -> list[float]:
    """Milliseconds of each of many calls, every one until all that it enqueued is done."""
    wait = synchronize()
    for _ in range(WARM_UP):
        function()
    wait()
    found: list[float] = []
    deadline = time.perf_counter() + SECONDS
    while len(found) < MOST and (len(found) < LEAST or time.perf_counter() < deadline):
        began = time.perf_counter()
        function()
        wait()
        found.append(1e3 * (time.perf_counter() - began))
    return found


@functools.cache
def synchronize() -> Callable[[], Any]:
    """Waits for the GPU: the driver's own call, as `tf.test.experimental.sync_devices` runs an op on each device, which
    takes longer than a short layer.
    """
    if not tf.config.list_physical_devices("GPU"):
        return lambda: None
    driver = cuda_driver()
    _, context = driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxSetCurrent(context)
    return driver.cuCtxSynchronize


if __name__ == "__main__":
    sys.exit(main())
