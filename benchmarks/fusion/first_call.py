"""The first call of a workload under tfmem, and the calls until it is decided how it runs, in this process:
`python -m benchmarks.fusion.first_call TASK_JSON RESULT_FILE`."""

from __future__ import annotations

import cProfile
import pstats
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fusion.systems import System
from benchmarks.fusion.worker import main, prepare
from benchmarks.fusion.workloads import make
from benchmarks.offload.worker import device_name

SHOWN = 12  # functions of a profile


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """Seconds: of the first call, of that of TensorFlow alone (which traces, too), until it was decided how the step
    runs, and of the slowest call before that.

    Args:
        task: "workload", "settle" (seconds to wait for the decision), "profile", and what `prepare` takes.
    """
    import tfmem

    prepare(task)
    make_workload = partial(make, task["workload"])
    System.begun("graph", make_workload)  # what TensorFlow loads for this workload's ops
    plain = System.begun("graph", make_workload)
    profile = cProfile.Profile()
    if task["profile"]:
        profile.enable()
    began = time.perf_counter()
    system = System.begun("tfmem", make_workload)
    profile.disable()
    slowest, decided = 0.0, None
    while decided is None and time.perf_counter() - began < task["settle"]:
        called = time.perf_counter()
        system.scalar()
        slowest = max(slowest, time.perf_counter() - called)
        if system.is_decided():
            decided = time.perf_counter() - began
    report = tfmem.report(system.function)
    return {
        "status": "ok",
        "device": device_name(),
        "graph": round(plain.first, 3),
        "first": round(system.first, 3),
        "slowest": round(slowest, 3),
        "decided": decided and round(decided, 2),
        "calls": system.calls,
        "fusion": report.fusion,
        "replaced": len(report.replaced),
        "profile": shown(profile) if task["profile"] else [],
    }


def shown(profile: cProfile.Profile) -> list[str]:
    """The functions of this package that took longest, with what they called: "seconds calls where"."""
    root = str(Path(__file__).parents[2])
    found = []
    for (file, line, name), (_, calls, _, total, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file.startswith(root) and "site-packages" not in file:
            found.append((total, f"{total:6.2f} s {calls:6d} calls  {file[len(root) + 1 :]}:{line} {name}"))
    return [text for _, text in sorted(found, reverse=True)[:SHOWN]]


if __name__ == "__main__":
    main(measured)
