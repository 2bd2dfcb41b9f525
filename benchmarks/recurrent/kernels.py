"""The kernels of tfmem that a case of the recurrent benchmark runs: ranked, compiled before all timing, chosen."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import repeat
from os import cpu_count
from pathlib import Path
from typing import Any

from benchmarks.recurrent.cases import Case
from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import DeviceContext
from custom_ops.machine import Machine
from custom_ops.recurrent import cells
from custom_ops.recurrent.cell import Cell
from custom_ops.recurrent.differentiate import Gradient, Request, differentiate
from custom_ops.recurrent.gpu_program import RecurrentProgram, build
from custom_ops.recurrent.search import microbenchmark
from custom_ops.recurrent.search.bench import DeviceBench
from custom_ops.recurrent.search.ranking import candidates, predict
from custom_ops.recurrent.search.tune import tune
from custom_ops.recurrent.spec import Configuration, RecurrentSpec

FOLDER = Path(tempfile.gettempdir()) / "tfmem_benchmark"
HALF = ("float16", "bfloat16")


def cell_of(case: Case) -> Cell:
    """The cell of a layer."""
    return cells.lstm() if case.layer == "lstm" else cells.gru(reset_after=case.layer == "gru")


def gradient_of(case: Case) -> Gradient | None:
    """What a training step runs; nothing reads the gradients of final states."""
    return differentiate(cell_of(case), Request(finals=())) if case.training else None


def specs_of(case: Case, precision: str) -> list[RecurrentSpec]:
    """The forward kernel, and the backward one of a training step."""
    dtype = precision if precision in HALF else "float32"
    spec = RecurrentSpec(cell_of(case), case.units, dtype, precision)  # type: ignore[arg-type]
    gradient = gradient_of(case)
    return [replace(spec, cell=cell) for cell in (gradient.forward, gradient.backward)] if gradient else [spec]


def prepare(tasks: Sequence[tuple[Case, str]], top: int) -> float:
    """Compile what cases will try in some precision, on all cores, so that nothing else runs while they are timed.

    Returns:
        Seconds.
    """
    began = time.perf_counter()
    with DeviceContext() as device:
        machine = microbenchmark.measure(device, Cache(FOLDER))
    workers = max(1, min(cpu_count() or 1, len(tasks)))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_prepare, tasks, repeat(machine), repeat(top)))
    return time.perf_counter() - began


def _prepare(task: tuple[Case, str], machine: Machine, top: int) -> None:
    case, precision = task
    for spec in specs_of(case, precision):
        ranked = candidates(machine, spec, case.batch, case.steps)[:top]
        compile_all(spec, [configuration for configuration, _ in ranked], machine.arch)


def compile_all(spec: RecurrentSpec, configurations: Sequence[Configuration], arch: int) -> None:
    """Compile into the cache; a kernel that cannot be compiled raises when it is to run."""
    for configuration in configurations:
        with contextlib.suppress(KernelError):
            build(spec, configuration, arch, Cache(FOLDER))


def choose(case: Case, precision: str, top: int) -> tuple[list[RecurrentProgram], dict[str, Any]]:
    """A program for each specification, and what was tried.

    Raises:
        KernelError: none runs.
    """
    began = time.perf_counter()
    cache = Cache(FOLDER)
    programs, kernels = [], []
    with DeviceContext() as device:
        machine = microbenchmark.measure(device, cache)
        for spec in specs_of(case, precision):
            ranked = partial(candidates, machine, spec, time_steps=case.steps)
            bench = DeviceBench(spec, device, cache, case.steps)
            tuned = tune(bench, ranked, cache, (case.batch,), top, progress=False)
            programs.append(tuned.program_of(case.batch))
            chosen = tuned.chosen[0]
            prediction = predict(machine, spec, chosen.configuration, case.batch)
            kernels.append(
                {
                    "configuration": vars(chosen.configuration),
                    "nanoseconds": chosen.measured,
                    "parts": vars(prediction.step),
                    "trials": [{**vars(trial), "configuration": vars(trial.configuration)} for trial in tuned.trials],
                }
            )
    seconds = time.perf_counter() - began
    return programs, {"machine": machine.to_json(), "kernels": kernels, "selection_seconds": seconds}
