"""GPU kernels for recurrent cells: ranked by GRNN's cost model, chosen by timing the best, and cached."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from custom_ops.background import go_on
from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import DeviceContext
from custom_ops.recurrent.search import microbenchmark
from custom_ops.recurrent.search.bench import DeviceBench
from custom_ops.recurrent.search.ranking import candidates, predict
from custom_ops.recurrent.search.space import launched
from custom_ops.recurrent.search.tune import tune
from custom_ops.recurrent.spec import Configuration, Precision, RecurrentSpec
from graph_passes.analysis.cost import device_costs
from graph_passes.passes.recurrent.match import Kernels, Match, RecurrentPlan, Unmatched
from graph_passes.passes.recurrent.options import OLDEST, RecurrentOptions
from graph_passes.refusals import Reason, Refusal
from tfmem.devices import Target
from tfmem.kernels.draw_programs import with_draws
from tfmem.kernels.exported import exported_programs
from tfmem.options import Options

# Ops of a step on single numbers with which a CPU was measured to run a small recurrence faster than the loop.
MOST_OF_FEW_ROWS, MOST_IN_TRAINING = 1024, 3072
ENOUGH_ROWS = 8
# Products, and ops on single numbers, of one step with which a CPU was measured to run a loop that its states end as
# fast as the loop itself; with twice as many it took up to 1.3 times as long, since steps behind the end run in vain.
MOST_ENDED_PRODUCTS, MOST_ENDED_OPS = 1 << 19, 1 << 13
OF_UNKNOWN_BATCH = 32  # rows


def tuned_kernels(
    spec: RecurrentSpec, folder: Path, batches: Sequence[int], options: RecurrentOptions, ordinal: int
) -> Kernels:
    """Programs for a specification, made and timed on a GPU of this machine, or made before.

    Args:
        spec: what the kernels compute.
        folder: of the cache of measurements, compiled kernels and choices.
        batches: sizes to choose for. Each choice holds down to the size before it, the last for everything above.
        options: what is timed, and for how long.
        ordinal: the GPU, as CUDA counts them.

    Raises:
        KernelError: there is no GPU or one too old, no compiler, or no kernel that runs.
    """
    cache = Cache(folder)
    with DeviceContext(ordinal) as device:
        if device.arch < OLDEST:
            raise KernelError(
                f"{device.name} (compute capability {device.arch / 10}) is too old: recurrent kernels need compute "
                f"capability {OLDEST / 10}"
            )
        known = device_costs.measured_machine(device.name, device.arch, device.processors)
        machine, steps = known or microbenchmark.measure(device, cache), options.time_steps

        def without_waiting() -> tuple[Configuration, float] | None:
            batch = max(batches)
            staged = launched(machine, spec, batch)
            return (staged, predict(machine, spec, staged, batch).nanoseconds(steps)) if staged else None

        with contextlib.closing(DeviceBench(spec, device, cache, steps)) as bench:
            ranked = partial(candidates, machine, spec, time_steps=steps)
            tuned = tune(bench, ranked, cache, batches, options.candidates, options.progress, without_waiting)
    return Kernels(tuned.programs, steps, tuple((trial.point, trial.measured / 1e6) for trial in tuned.chosen))


def with_kernels(plan: RecurrentPlan, target: Target, options: Options) -> RecurrentPlan:
    """What of `plan` the target can run, and with which precision and kernels.

    On a CPU that is all of it, without kernels, but for those that `architectures` asks for. A match whose kernels
    cannot be made stays as it is, with the reason.
    """
    chosen = options.recurrent.precision
    precision = target.precision if chosen == "auto" else chosen
    others = options.recurrent.capabilities
    if not target.is_gpu:
        plan = _without_slow(plan)
    if not plan.matches or not (target.is_gpu or others):
        return replace(plan, precision=precision)
    made: dict[str, Kernels] = {}
    reasons: dict[str, Refusal] = {}
    with kernel_folder(options.cache_directory) as folder:
        for (spec, batch), names in _specifications(plan, precision, reasons).items():
            go_on()
            batches = options.recurrent.batches if batch is None else (batch,)
            try:
                kernels = Kernels(())
                if target.is_gpu:
                    kernels = tuned_kernels(spec, folder, batches, options.recurrent, target.ordinal)
                if others:
                    here = {program.image.arch for program in kernels.programs}
                    more = exported_programs(spec, folder, batches, [arch for arch in others if arch not in here])
                    kernels = replace(kernels, programs=(*kernels.programs, *more))
            except KernelError as error:
                reasons |= dict.fromkeys(names, Reason.NO_KERNEL(detail=str(error)))
            else:
                made |= dict.fromkeys(names, kernels)
        kept, left = [], []
        for match in plan.matches:
            names = [launch.name for launch in (*match.counting, *match.launches)]
            reason = next((reasons[name] for name in names if name in reasons), None)
            if reason is None:
                images = [program.image for name in names for program in made[name].programs]
                try:
                    kept.append(with_draws(match, images, Cache(folder)))
                except KernelError as error:
                    reason = Reason.NO_KERNEL(detail=str(error))
            if reason is not None:
                left.append(Unmatched(match.name, match.carrier, reason))
    return RecurrentPlan(tuple(kept), (*plan.unmatched, *left), precision, made)


def _without_slow(plan: RecurrentPlan) -> RecurrentPlan:
    """`plan` without what `slower_on_cpu` refuses."""
    kept, left = list[Match](), list(plan.unmatched)
    for match in plan.matches:
        reason = slower_on_cpu(match, trains=len(match.launches) > 1)
        if reason is None:
            kept.append(match)
        else:
            left.append(Unmatched(match.name, match.carrier, reason))
    return replace(plan, matches=tuple(kept), unmatched=tuple(left))


def slower_on_cpu(match: Match, trains: bool) -> Refusal | None:
    """Why a CPU keeps a loop that it was measured to run faster (docs/recurrent.md): of a small recurrence with few
    rows, or a large one that its states end."""
    launch = match.launches[0]
    if match.counting:
        rows, cell = launch.batch or OF_UNKNOWN_BATCH, launch.base or launch.cell
        work, most = rows * len(cell.nodes), MOST_ENDED_OPS
        if launch.units > 1:
            work, most = rows * cell.blocks * launch.units**2, MOST_ENDED_PRODUCTS
        if work > most:
            return Reason.STATES_END(work=work, most=most)
    count, few = len((launch.base or launch.cell).nodes), (launch.batch or 1) < ENOUGH_ROWS
    most = MOST_OF_FEW_ROWS if few else MOST_IN_TRAINING if trains else count
    if launch.units > 1 or count <= most:
        return None
    return Reason.FEW_ROWS(count=count, most=most, rows=f"fewer than {ENOUGH_ROWS} rows" if few else "training")


def _specifications(
    plan: RecurrentPlan, precision: Precision, reasons: dict[str, Refusal]
) -> dict[tuple[RecurrentSpec, int | None], list[str]]:
    """The distinct kernels of a plan, with their batch if it is known, and the launches that want them; `reasons` takes
    what no GPU kernel is for."""
    found: dict[tuple[RecurrentSpec, int | None], list[str]] = {}
    for launch in (launch for match in plan.matches for launch in (*match.counting, *match.launches)):
        try:
            spec = RecurrentSpec(launch.cell, launch.units, launch.dtype, precision, len(launch.directions))  # type: ignore[arg-type]
        except KernelError as error:
            reasons[launch.name] = Reason.NO_KERNEL(detail=str(error))
        else:
            found.setdefault((spec, launch.batch or None), []).append(launch.name)
    return found


@contextlib.contextmanager
def kernel_folder(cache_directory: str) -> Iterator[Path]:
    """The folder of kernels: the cache, or a temporary folder for this call if there is none."""
    if cache_directory:
        yield Path(cache_directory) / "kernels"
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
