"""GPU kernels for recurrent cells: ranked by GRNN's model, chosen by running the best, kept for good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from custom_ops.errors import KernelError
from custom_ops.jit import microbenchmark
from custom_ops.jit.bench import DeviceBench
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import Device
from custom_ops.jit.nvrtc import compiler_version
from custom_ops.jit.tune import BATCHES, TIME_STEPS, TunedRecurrent, tune
from custom_ops.machine import Machine
from custom_ops.spec import Configuration, Precision, RecurrentSpec
from graph_passes.cost.recurrent import rank
from graph_passes.recurrent.match import RecurrentPlan


def tuned_kernels(
    specs: Sequence[RecurrentSpec],
    folder: Path,
    batches: Sequence[int] = BATCHES,
    time_steps: int = TIME_STEPS,
    top: int | None = 5,
    progress: bool = True,
    ordinal: int = 0,
) -> list[TunedRecurrent]:
    """Programs for each specification, made and timed on a GPU of this machine, or made before.

    Args:
        specs: what the kernels compute.
        folder: of the cache of measurements, compiled kernels and choices.
        batches: sizes to choose for. Each choice holds down to the size before it, the last for everything above.
        time_steps: length of the sweeps that are timed.
        top: how many of the best ranked are timed; None for all that the model does not rule out.
        progress: whether to show a bar.
        ordinal: the GPU, as CUDA counts them.

    Raises:
        KernelError: there is no GPU, no compiler, or no kernel that runs.
    """
    cache = Cache(folder)
    with Device(ordinal) as device:
        machine = microbenchmark.measure(device, cache)
        found = []
        for spec in specs:

            def candidates(batch: int, spec: RecurrentSpec = spec) -> list[tuple[Configuration, float]]:
                return ranked(machine, spec, batch, time_steps)

            bench = DeviceBench(spec, device, cache)
            found.append(tune(bench, candidates, cache, batches, time_steps, top, progress))
        return found


def programs_for(
    plan: RecurrentPlan, folder: Path, precision: Precision = "highest", progress: bool = True, ordinal: int = 0
) -> tuple[dict[str, tuple[bytes, ...]], dict[str, str]]:
    """GPU programs for the launches of a plan, by name; and for those that get none, why.

    A launch without programs runs the op's own, slower kernels. Launches of equal cells share theirs.

    Raises:
        KernelError: there is no GPU or no compiler.
    """
    with Device(ordinal):  # raises where there is none
        compiler_version()
    programs: dict[str, tuple[bytes, ...]] = {}
    reasons: dict[str, str] = {}
    for launch in (launch for match in plan.matches for launch in match.launches):
        try:
            spec = RecurrentSpec(launch.cell, launch.units, launch.dtype, precision, len(launch.directions))  # type: ignore[arg-type]
            (tuned,) = tuned_kernels([spec], folder, progress=progress, ordinal=ordinal)
        except KernelError as error:
            reasons[launch.name] = str(error)
        else:
            programs[launch.name] = tuple(tuned.blobs())
    return programs, reasons


def ranked(
    machine: Machine, spec: RecurrentSpec, batch: int, time_steps: int, hopeless: float = 2.0
) -> list[tuple[Configuration, float]]:
    """Configurations and the nanoseconds of their sweeps, best first.

    What is predicted to be `hopeless` times slower than the best is left out.
    """
    found = [(each.configuration, each.nanoseconds(time_steps)) for each in rank(machine, spec, batch, time_steps)]
    return [each for each in found if each[1] <= hopeless * found[0][1]]
