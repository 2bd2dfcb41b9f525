"""A case of `benchmarks.fusion.loops` in this process:
`python -m benchmarks.fusion.loops_worker TASK_JSON RESULT_FILE`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.fusion.loop_nets import Bahdanau, LoopNet, Luong, Sinkhorn
from benchmarks.fusion.loops import COPIES, MOST
from benchmarks.fusion.worker import main
from graph_passes.decision import Fusion

ROUNDS = 15
BLOCK = 0.2  # seconds of one copy before the next one's turn
NETS: Mapping[str, Callable[[], LoopNet]] = {
    "bahdanau/small": lambda: Bahdanau(16, 20, 64, 20),
    "bahdanau/large": lambda: Bahdanau(32, 30, 128, 30),
    "luong/small": lambda: Luong(16, 20, 64, 20),
    "luong/large": lambda: Luong(32, 30, 128, 30),
    "sinkhorn/small": lambda: Sinkhorn(16, 16, 32, 20),
    "sinkhorn/large": lambda: Sinkhorn(32, 64, 64, 20),
}


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a call of each copy, and what it took to decide.

    Args:
        task: "net", "size" and "mode".
    """
    tfmem.load_ops()
    float(tf.function(lambda x: tf.reduce_sum(x @ x))(tf.ones([8, 8])))  # loads what a process loads once
    nets = {copy: NETS[f"{task['net']}/{task['size']}"]() for copy in COPIES}
    steps = {copy: getattr(net, task["mode"]) for copy, net in nets.items()}
    steps["unstitched"] = tfmem.optimize(steps["unstitched"], passes=("recurrent", "offload"))
    steps["default"] = tfmem.optimize(steps["default"])
    calls = {
        copy: lambda copy=copy: tf.nest.map_structure(np.asarray, steps[copy](*nets[copy].inputs)) for copy in COPIES
    }

    def undecided() -> bool:
        return tfmem.report(steps["default"]).fusion_state is Fusion.UNDECIDED

    first = {copy: timed(call) for copy, call in calls.items()}
    early = until_decided(calls["default"], undecided)
    seconds = medians(calls)
    report = tfmem.report(steps["default"])
    extra = first["default"] - first["unstitched"] + sum(early) - len(early) * seconds["unstitched"]
    return {
        "status": "ok",
        "seconds": seconds,
        "calls": 1 + len(early),
        "extra": extra,
        "longest": max(early, default=0.0),
        "first": first,
        "fusion": report.fusion,
        "regions": [region.name for region in report.running],
    }


def until_decided(call: Callable[[], object], undecided: Callable[[], bool]) -> list[float]:
    """Seconds of each call until nothing is undecided, or too long has passed."""
    seconds: list[float] = []
    began = time.perf_counter()
    while undecided() and time.perf_counter() - began < MOST:
        seconds.append(timed(call))
    return seconds


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def medians(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each copy: the median of blocks in turn, every second round backwards."""
    seconds: dict[str, list[float]] = {copy: [] for copy in calls}
    for number in range(ROUNDS):
        for copy in calls if number % 2 == 0 else reversed(calls):
            began, found = time.perf_counter(), list[float]()
            while not found or time.perf_counter() - began < BLOCK:
                found.append(timed(calls[copy]))
            seconds[copy].append(statistics.median(found))
    return {copy: statistics.median(found) for copy, found in seconds.items()}


if __name__ == "__main__":
    main(measured)
