"""One row of `benchmarks.offload.verdicts`: `python -m benchmarks.offload.verdicts_worker TASK_JSON RESULT_FILE`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.applications.worker import CPU, data, network
from custom_ops.load import load
from tfmem.devices import memory

STEPS = 10  # plain ones, and those whose losses are compared
UNTIL_SETTLED = 14  # calls: a first plan, an observed one, four trials and checks
TIMED = 5
LONGEST_WAIT = 300.0  # seconds for a solver


def main() -> int:
    """Do the task of the command line."""
    task, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    found = under(task) if task["budget"] else plain(task)
    path.write_text(json.dumps(found))
    return 0


def plain(task: dict[str, Any]) -> dict[str, Any]:
    """The unmodified network, trained twice from the same weights, and what tfmem estimates before it runs."""
    model = fresh(task)
    model.optimizer.build(model.trainable_variables)
    start = [(variable, np.array(variable)) for variable in model.variables]
    first = trained(model, task, calls=STEPS)
    for variable, value in start:
        variable.assign(value)
    again = trained(model, task, calls=STEPS)
    estimate, uncounted = before_it_runs(task)
    return {
        **first,
        "again": again["losses"],
        "seconds": min(first["seconds"], again["seconds"]),
        "peak": first["peak"] + uncounted,
        "estimate": estimate,
        "versions": {"tensorflow": tf.__version__, "keras": tf.keras.__version__},
    }


def under(task: dict[str, Any]) -> dict[str, Any]:
    """The network under the task's budget, or how it was refused."""
    model = fresh(task)
    tfmem.optimize(model, memory_budget=task["budget"], passes=("offload",))
    try:
        first = trained(model, task, calls=UNTIL_SETTLED)
        until_solved(model, task)
        found = {**trained(model, task, calls=TIMED), "losses": first["losses"], "first_six": first["first_six"]}
    except tfmem.InfeasibleBudgetError as error:
        return {"status": "refused", "least": error.least, "smallest": error.smallest_budget, "op": error.op}
    report = tfmem.report(model)
    verdict = report.verdict
    return found | {
        "peak": found["peak"] + report.peak_uncounted,
        "peak_predicted": report.peak_predicted,
        "seconds_predicted": (report.step_predicted_ns or 0) / 1e9,
        "verdict": str(verdict),
        "best_rate": verdict.best_rate if verdict else None,
        "smallest": verdict.smallest_budget if verdict else 0,
        "decision": report.decision,
        "notes": report.notes,
    }


def until_solved(model: Any, task: dict[str, Any]) -> None:
    """Train on while a thread solves the step's integer program, and until its plan has been tried and checked."""
    began, (images, labels) = time.monotonic(), data(task)
    while not tfmem.report(model).decided and time.monotonic() - began < LONGEST_WAIT:
        model.train_on_batch(images, labels)


def before_it_runs(task: dict[str, Any]) -> tuple[int, int]:
    """The peak that tfmem estimates of the unmodified step, and how much of it the allocator does not count."""
    held = memory(load(), CPU).bytes_in_use
    model = fresh(task)
    tfmem.optimize(model, memory_budget=0.95, passes=("offload",), observe=False)
    images, labels = data(task)
    model.train_on_batch(images, labels)
    report = tfmem.report(model)
    return report.peak_before - held, report.peak_uncounted


def fresh(task: dict[str, Any]) -> Any:
    """The compiled model, with the weights that it always begins with."""
    tf.keras.utils.set_random_seed(1)
    return network(task)


def trained(model: Any, task: dict[str, Any], calls: int) -> dict[str, Any]:
    """Losses of the first steps; peak and median time of the last ones."""
    library, (images, labels) = load(), data(task)
    losses, seconds, peaks = [], [], []
    for _ in range(calls):
        memory(library, CPU, reset=True)
        began = time.perf_counter()
        losses.append(float(model.train_on_batch(images, labels)))
        seconds.append(time.perf_counter() - began)
        peaks.append(memory(library, CPU).peak_bytes)
    return {
        "status": "ok",
        "losses": losses[:STEPS],
        "seconds": statistics.median(seconds[-TIMED:]),
        "first_six": sum(seconds[:6]),
        "peak": max(peaks[-TIMED:]),
    }


if __name__ == "__main__":
    sys.exit(main())
