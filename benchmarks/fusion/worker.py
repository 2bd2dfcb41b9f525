"""Measures one workload under all systems in this process:
`python -m benchmarks.fusion.worker TASK_JSON RESULT_FILE`.

Each system has separate variables, with the same numbers. Timed steps come in blocks: some of one system, then some
of the next, until each has run all its steps. So other work on the machine disturbs all systems alike. XLA's
clustering is a setting of the process that a call reads; it is set before a block, whose first steps are not timed."""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfmem
from benchmarks.fusion import graphs, kernels
from benchmarks.fusion.cases import COPY, OF_TFMEM, OF_XLA
from benchmarks.fusion.moves import MOVES, next_numbers
from benchmarks.fusion.quiet import Clocks, Patience
from benchmarks.fusion.systems import System
from benchmarks.fusion.workloads import make
from benchmarks.fusion.workloads.workload import Workload
from benchmarks.offload.worker import device_name, versions
from graph_passes.decision import Fusion

UNTIMED = 2  # steps at the beginning of a block
EARLY = (1, 10)  # steps after which losses are compared, too
MOVING = 60.0  # seconds for those after the first two


def main(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read the task, measure, write the result."""
    task, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        result = measure(task)
    except Exception as error:
        traceback.print_exc()
        result = {"status": "error", **said(error)}
    path.write_text(json.dumps(result))


def measured(task: dict[str, Any]) -> dict[str, Any]:
    """All that is known of the task's workload; the task is as `benchmarks.fusion.cases.task_of` makes it."""
    prepare(task)
    make_workload = partial(make, task["workload"])
    with graphs.collected() as found:
        System.begun("graph", make_workload)  # thrown away: to collect graphs takes time
    ops = graphs.kernels(found)
    outcomes: dict[str, dict[str, Any]] = {}
    systems: list[System] = []
    for name in task["asked"]:
        try:
            system, clusters = begun(name, make_workload)
            warm_up(system, task)
        except Exception as error:  # XLA has no kernel for some ops; tfmem's library may not be built
            outcomes[name] = {"status": "refused", **said(error)}
        else:
            systems.append(system)
            outcomes[name] = {"status": "ok", "first_seconds": round(system.first, 3), **clusters}
    workload = systems[0].workload
    copies = [System.begun(COPY, partial(make, f"large/{COPY}"))] if workload.moved else []
    rounds = timed([*systems, *copies], task)
    differences = compared(systems, task["parity"])
    for system in (*systems, *copies):
        found = summary(system.seconds) | differences.get(system.name, {}) | profiled(system) | regions_of(system)
        outcomes[system.name] = outcomes.get(system.name, {"status": "ok", "moved": system.workload.moved}) | found
    judged = workload.training and (not task["tf32"] or device_name() == "CPU")
    stray = strays(make_workload, task["parity"]) if judged else []
    furthest = [max(ways) for ways in zip(*stray, strict=True)]
    return {
        "status": "ok",
        "strays": furthest[-1] if stray else None,
        "strays_after": furthest,
        "strays_in_ways": [way[-1] for way in stray],
        "device": device_name(),
        "versions": versions(),
        "shapes": [list(each.shape) for each in workload.inputs],
        "training": workload.training,
        "draws": workload.draws,
        "moved": workload.moved,
        "ops": ops,
        **rounds,
        "systems": outcomes,
    }


def begun(name: str, make_workload: Callable[[], Workload]) -> tuple[System, dict[str, int]]:
    """A system after its first call; of clustering, how many clusters there are (their first call collects graphs)."""
    if name != "auto-jit":
        return System.begun(name, make_workload), {}
    with graphs.collected() as found:
        system = System.begun(name, make_workload)
    return system, {"clusters": graphs.clusters(found)}


def prepare(task: dict[str, Any]) -> None:
    """Settings that all systems share, and what TensorFlow, XLA and tfmem load once in a process, so that no first call
    has it."""
    tf.random.set_seed(0)
    tf.config.optimizer.set_experimental_options({"remapping": task["remapper"]})
    tf.config.experimental.enable_tensor_float_32_execution(task["tf32"])
    if task["deterministic"]:
        tf.config.experimental.enable_op_determinism()

    def libraries(x: tf.Tensor) -> tf.Tensor:
        images = tf.nn.conv2d(tf.reshape(x @ x, [1, 8, 8, 1]), tf.ones([3, 3, 1, 1]), 1, "SAME")
        return tf.reduce_sum(images)

    with contextlib.suppress(tfmem.OpLibraryError):  # it may not be built: then what it is asked for is refused
        tfmem.load_ops()
    for compiled in (False, True):
        float(tf.function(libraries, jit_compile=compiled)(tf.ones([8, 8])))


def warm_up(system: System, task: dict[str, Any]) -> None:
    """Steps that are not timed, after those in which tfmem observes, compiles and chooses: seconds, not steps."""
    system.enter()
    deadline = time.perf_counter() + task["settle"]
    while not system.is_tuned() and time.perf_counter() < deadline:
        system.scalar()
    for _ in range(task["warm_up"]):
        system.scalar()


def profiled(system: System) -> dict[str, Any]:
    """Kernels of a step and where its time goes, on a GPU whose driver lets that be seen."""
    if not tf.config.list_physical_devices("GPU"):
        return {}
    system.enter()
    system.scalar()
    try:
        return kernels.profiled(system.scalar)
    except tf.errors.OpError:
        traceback.print_exc()
        return {}


def regions_of(system: System) -> dict[str, Any]:
    """The numbers of regions, of ops, kernels and calls in them, and of recurrences that run as kernels.

    They also say whether the regions run. A step that runs unchanged has the regions that it would have had.
    """
    if system.name not in OF_TFMEM:
        return {}
    report = tfmem.report(system.function)
    return {
        "regions": len(report.regions),
        "stitched_ops": sum(len(step.ops) for region in report.regions for step in region.steps),
        "stitched_kernels": sum(region.count("kernel") for region in report.regions),
        "stitched_calls": sum(region.count("call") for region in report.regions),
        "fusion": report.fusion,
        "stitched": report.fusion_state is Fusion.STITCHED,
        "recurrences": len(report.replaced),
    }


def timed(systems: list[System], task: dict[str, Any]) -> dict[str, float]:
    """Fills `seconds` of each system, block after block; every other round goes through them backwards.

    Rounds in which other processes are busy are run again, while the task's patience lasts.

    Returns:
        The rounds, how many of them were dropped, and the share of the processors that others used in those kept.
    """
    patience, rounds, dropped, others = Patience(task["patience"]), 0, 0, list[float]()
    gc.collect()
    gc.disable()
    while len(systems[0].seconds) < task["steps"]:
        before, kept = patience.wait(), [len(system.seconds) for system in systems]
        for system in systems if rounds % 2 == 0 else reversed(systems):
            system.enter()
            for _ in range(UNTIMED):
                system.scalar()
            for _ in range(min(task["block"], task["steps"] - len(system.seconds))):
                system.timed()
        rounds += 1
        used = Clocks.now().others_since(before)
        if patience.was_disturbed(before):
            dropped += 1
            for system, count in zip(systems, kept, strict=True):
                del system.seconds[count:]
        else:
            others.append(used)
    gc.enable()
    return {"rounds": rounds, "dropped": dropped, "others": round(statistics.mean(others), 3)}


def compared(systems: list[System], steps: int) -> dict[str, dict[str, Any]]:
    """How far each is from the first, TensorFlow's executor: losses of `steps` steps from one state, or outputs.

    Where random numbers are drawn, all are called equally often before, so that their streams are at the same place;
    those of XLA are other numbers, and not compared.
    """
    most = max((system.calls for system in systems), default=0)
    found: dict[str, dict[str, Any]] = {}
    expected: list[np.ndarray] = []
    for system in systems:
        workload = system.workload
        system.enter()
        while workload.draws and system.name not in OF_XLA and system.calls < most:
            system.scalar()
        if workload.training:
            for variable, value in zip(workload.state, systems[0].start, strict=True):
                variable.assign(value)
            values = [np.array([system.scalar() for _ in range(steps)])]
            found[system.name] = {"loss": float(values[0][-1])}
        else:
            values, found[system.name] = system.values(), {}
        expected = expected or values
        if system.name == "graph" or not (workload.draws and system.name in OF_XLA):
            if workload.training:
                found[system.name]["differences"] = loss_distances(values[0], expected[0])
                found[system.name]["difference"] = found[system.name]["differences"][-1]
            else:
                found[system.name]["difference"] = largest_distance(values, expected)
    return found


def strays(make_workload: Callable[[], Workload], steps: int) -> list[list[float]]:
    """How far TensorFlow's executor strays from itself if its inputs move by one unit in the last place: all up, all
    down, and then each up or down at random, in up to `MOVES` ways, as many as `MOVING` has time for.

    So far may sums in another order lead. Each time begins from the same state and with the same random numbers.

    Returns:
        For each way the distance after each of the steps that `loss_distances` looks at.
    """

    def losses(move: Callable[[np.ndarray], np.ndarray] | None) -> np.ndarray:
        tf.random.set_seed(0)
        workload = make_workload()
        inputs = [each if move is None else tf.constant(move(each.numpy())) for each in workload.inputs]
        found = [workload.step(*inputs) for _ in range(steps)]
        return np.array([float(np.ravel(loss[0] if isinstance(loss, tuple) else loss)[0]) for loss in found])

    began = time.monotonic()
    expected, found = losses(None), []
    for way in (np.inf, -np.inf, *range(MOVES - 2)):
        if len(found) >= 2 and time.monotonic() - began > MOVING:
            break
        found.append(loss_distances(losses(partial(next_numbers, way=way)), expected))
    return found


def loss_distances(losses: np.ndarray, expected: np.ndarray) -> list[float]:
    """Relative, after each number of steps in `EARLY`, and of the last loss."""
    places = [step - 1 for step in EARLY if step < len(losses)] + [-1]
    return [float(abs(losses[at] - expected[at]) / max(abs(expected[at]), 1e-12)) for at in places]


def largest_distance(values: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest distance of all outputs, each relative to its largest number; 1 where chosen ids differ."""
    return max(
        float(np.abs(value - other).max() / max(np.abs(other).max(), 1e-12))
        if other.dtype.kind == "f"
        else float((value != other).any())
        for value, other in zip(values, expected, strict=True)
    )


def summary(seconds: list[float]) -> dict[str, Any]:
    """Milliseconds of a step."""
    first, middle, third = statistics.quantiles(seconds, n=4)
    return {
        "ms": round(1e3 * middle, 4),
        "quartiles": [round(1e3 * first, 4), round(1e3 * third, 4)],
        "least": round(1e3 * min(seconds), 4),
        "steps": len(seconds),
    }


def said(error: Exception) -> dict[str, str]:
    """What an error says first, without the stacks of Python that TensorFlow puts in between: paths of one machine."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(" ")]
    return {"message": f"{type(error).__name__}: " + " ".join(lines)[:400]}


if __name__ == "__main__":
    main(measured)
