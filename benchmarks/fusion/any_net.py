"""One network of `benchmarks.fusion.anyone` under TensorFlow, XLA and tfmem, in this process:
`python -m benchmarks.fusion.any_net TASK_JSON RESULT_FILE`.

tfmem's calls before the decision are measured first, alone; then all systems are timed in turn."""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.fusion.cases import DEFAULT
from benchmarks.fusion.systems import System
from benchmarks.fusion.worker import main, prepare, profiled, said, summary
from benchmarks.fusion.workloads import make
from benchmarks.offload.worker import device_name
from graph_passes.decision import Fusion, Xla

WARM_UP = 3  # calls of plain TensorFlow that do not count
FEW, MOST = 8, 200  # calls of each system in a block, by how long they take
BLOCKS = 5
BLOCK_SECONDS = 0.4  # of one system


class Phases(logging.Handler):
    """Notes when a step passes from phase to phase, which tfmem logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._began = [("given", time.perf_counter())]
        logger = logging.getLogger("tfmem.steps")
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        """Note the phase that begins, the last argument of the record."""
        assert isinstance(record.args, tuple)
        self._began.append((str(record.args[-1]), time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """What the step spent in each phase until now."""
        spent = Counter[str]()
        for (phase, begin), (_, end) in pairwise([*self._began, ("", time.perf_counter())]):
            spent[phase] += end - begin
        return {phase: round(seconds, 2) for phase, seconds in spent.items()}


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """What `benchmarks.fusion.anyone` shows, and on a GPU what `profiled` finds of each system.

    Args:
        task: "workload", "settle" and "afterwards" (seconds to wait for the decision, and then for tuned kernels),
            "xla", and what `prepare` takes.
    """
    prepare(task)
    make_workload = partial(make, task["workload"])
    plain = System.begun("graph", make_workload)
    for _ in range(WARM_UP):
        plain.scalar()
    alone = statistics.median(_call(plain) for _ in range(FEW))
    phases = Phases()
    tfmem_system = System.begun(DEFAULT, make_workload)
    found = {**until_decided(tfmem_system, task["settle"]), "phases": phases.seconds()}
    tuned = train(tfmem_system, task["afterwards"])
    systems, outcomes = [plain, tfmem_system], dict[str, Any]()
    if task["xla"]:
        try:
            systems.append(System.begun("jit_compile", make_workload))
        except Exception as error:  # XLA has no kernel for some ops
            outcomes["jit_compile"] = {"status": "refused", **said(error)}
    timed(systems)
    for system in systems:
        found_of = {"first": round(system.first, 2), **summary(system.seconds), **profiled(system)}
        outcomes["tfmem" if system is tfmem_system else system.name] = {"status": "ok", **found_of}
    return {
        "status": "ok",
        "device": device_name(),
        "plain_alone_ms": round(1e3 * alone, 3),
        **found,
        "tuned": tuned,
        **reported(tfmem_system),
        "systems": outcomes,
    }


def until_decided(system: System, settle: float) -> dict[str, Any]:
    """Calls of a step under tfmem until it is decided how it runs: seconds until then, of the slowest call but the
    first, and their mean; seconds until then are None if `settle` seconds did not suffice."""
    began, seconds, decided = time.perf_counter(), [], system.is_decided()
    while not decided and time.perf_counter() - began < settle:
        seconds.append(_call(system))
        decided = system.is_decided()
    return {
        "first": round(system.first, 2),
        "decided": round(system.first + time.perf_counter() - began, 2) if decided else None,
        "slowest_ms": round(1e3 * max(seconds, default=0.0), 1),
        "mean_ms": round(1e3 * statistics.mean(seconds), 3) if seconds else None,
        "median_ms": round(1e3 * statistics.median(seconds), 3) if seconds else None,
        "calls": len(seconds),
    }


def train(system: System, seconds: float) -> float | None:
    """Call a step until tfmem has tuned its kernels, for some seconds at most: how many it took; None if more."""
    began = time.perf_counter()
    while not (tuned := system.is_tuned()) and time.perf_counter() - began < seconds:
        system.scalar()
    return round(time.perf_counter() - began, 2) if tuned else None


def timed(systems: list[System]) -> None:
    """Fills `seconds` of each system, block after block in turn."""
    counts = {}
    for system in systems:
        system.scalar()
        counts[system.name] = max(FEW, min(MOST, int(BLOCK_SECONDS / max(_call(system), 1e-6))))
    for _ in range(BLOCKS):
        for system in systems:
            system.scalar()
            for _ in range(counts[system.name]):
                system.timed()


def reported(system: System) -> dict[str, Any]:
    """What tfmem's report says of the step."""
    import tfmem

    report = tfmem.report(system.function)
    outside = [why for _, why in report.not_stitched if not why.startswith(("it is a constant", "it is an argument"))]
    return {
        "fusion": report.fusion,
        "stitched": report.fusion_state is Fusion.STITCHED,
        "xla_runs": report.jit_compile is Xla.RUNS,
        "regions": len(report.regions),
        "inside": sum(len(step.ops) for region in report.regions for step in region.steps),
        "kernels": sum(region.count("kernel") for region in report.regions),
        "library_calls": sum(region.count("call") for region in report.regions),
        "outside": len(outside),
        "reasons": Counter(outside).most_common(8),
        "notes": list(report.notes)[-3:],
    }


def _call(system: System) -> float:
    began = time.perf_counter()
    system.scalar()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(measured)
