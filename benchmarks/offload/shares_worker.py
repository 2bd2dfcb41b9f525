"""Trains one network of `benchmarks.offload.shares` in this process, plain or in a budget:
`python -m benchmarks.offload.shares_worker TASK_JSON RESULT_FILE`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

import tfmem
from benchmarks.offload.networks import model, noise
from examples import models
from graph_passes.report import RECOMPUTED

WARM_UP = 10  # calls, in which memory is settled
PATIENCE = 170.0  # seconds that a step is run for until it is decided whether it is fused, at the most

Batch = tuple[tf.Tensor, tf.Tensor]


def main() -> None:
    """Read the task, run it, write the result."""
    task, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    step = models.make_step(model(task["name"], task["side"], task["width"]))
    batch = noise(task["name"], task["batch"], task["side"])
    if task["passes"] is None:
        result = timed(step, batch, device, task["steps"], lambda: True)
    else:
        result = within(step, batch, device, task)
    path.write_text(json.dumps({"status": "ok", "device": device, **result}))


def within(step: Any, batch: Batch, device: str, task: dict[str, Any]) -> dict[str, Any]:
    """What tfmem makes of a step under the task's budget, or why it refuses."""
    options: dict[str, Any] = {"policy": task["policy"]} if task["policy"] else {}
    step = tfmem.optimize(step, memory_budget=task["budget"], passes=tuple(task["passes"]), **options)

    try:
        found = timed(step, batch, device, task["steps"], lambda: tfmem.report(step).decided)
    except (tfmem.InfeasibleBudgetError, tf.errors.ResourceExhaustedError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    report = tfmem.report(step)
    recomputed = [each for each in report.transfers if each.offload_after == RECOMPUTED]
    return {
        **found,
        "predicted": (report.step_predicted_ns or 0) / 1e9 or found["seconds"],
        "bound": report.verdict.best_rate if report.verdict else None,
        "copied": len(report.transfers) - len(recomputed),
        "recomputed": len(recomputed),
        "bytes_out": report.bytes_out_predicted,
        "stall": (report.stall_predicted_ns or 0) / 1e9,
        "regions": len(report.running),
        "off": max(abs(a - b) / abs(a) for a, b in zip(task["losses"], found["losses"], strict=False)),
        "is_decided": report.decided,
        "fusion": report.fusion,
        "notes": report.notes,
    }


def timed(step: Any, batch: Batch, device: str, steps: int, is_decided: Callable[[], bool]) -> dict[str, Any]:
    """Seconds of the first call and of a step (the median), the peak, and the losses of all steps."""
    before = tf.config.experimental.get_memory_info(device)["current"]
    began, losses = time.perf_counter(), [float(step(*batch))]
    first = time.perf_counter() - began
    while len(losses) < WARM_UP or (not is_decided() and time.perf_counter() - began < PATIENCE):
        losses.append(float(step(*batch)))
    decided, calls = time.perf_counter() - began, len(losses)
    tf.config.experimental.reset_memory_stats(device)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(float(step(*batch)))
        seconds.append(time.perf_counter() - began)
    return {
        "before": before,
        "first": first,
        "seconds": statistics.median(seconds),
        "slowest": max(seconds),
        "peak": tf.config.experimental.get_memory_info(device)["peak"],
        "decided": decided,
        "calls": calls,
        "losses": losses,
    }


if __name__ == "__main__":
    main()
