"""One launch for a whole sequence against a launch for each stage of each step, and against one CTA for each group of
rows, which recomputes what a launch could not: the kernels alone, in fp32.

    python -m benchmarks.recurrent.launches --output benchmarks/results/recurrent_launches_h200.json
    python -m benchmarks.recurrent.launches --table benchmarks/results/recurrent_launches_h200.json

The best five of the first by the model, and the one form of the second, are compiled, held against float64 and timed,
as the tuner does it, in CUDA graphs; the one CTA is timed once, up to 1,024 units. It needs cuda.bindings and NVRTC,
no framework."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.records import begun, save
from benchmarks.recurrent.cases import BLOCKS, STAGES, TOP, Case, Chip, kernel_in_words
from benchmarks.recurrent.kernels import FOLDER, specs_of
from benchmarks.runs import asked, command_line, waiting
from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import Device
from custom_ops.machine import Machine
from custom_ops.recurrent.launch import Launcher
from custom_ops.recurrent.search import microbenchmark
from custom_ops.recurrent.search.bench import DeviceBench
from custom_ops.recurrent.search.ranking import LAUNCH, predict, rank
from custom_ops.recurrent.search.samples import Samples
from custom_ops.recurrent.search.space import launched
from custom_ops.recurrent.search.tune import Ranked, Trial, tune
from custom_ops.recurrent.spec import RecurrentSpec

CASES = [Case(layer, units, batch) for layer in ("lstm", "canonical_gru") for units in (512, 1024, 2048, 4096)
         for batch in (1, 16, 64)]  # fmt: skip
LARGEST_ALONE = 1024  # units, above which one CTA takes seconds
L2_BYTES = 50 << 20  # of an H200
L2_BYTES_PER_SECOND = 132 * 77.5e9  # by the micro-benchmark, all multiprocessors together


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for, or print the table of results."""
    parser = command_line("recurrent.launches", __doc__, "recurrent_launches.json")
    options, cases = asked(parser, arguments, CASES, table)
    if not cases:
        return 0
    results = begun(options)
    cache = Cache(FOLDER)
    with Device() as device:
        machine = microbenchmark.measure(device, cache)
        for case in waiting(cases, results, options):
            results["cases"][case.name] = {**asdict(case), **run(case, machine, device, cache)}
            save(results, options.output)
            print(table({case.name: results["cases"][case.name]})[-1], flush=True)
    return 0


def run(case: Case, machine: Machine, device: Device, cache: Cache) -> dict[str, Any]:
    """The fastest of each, and how long one CTA takes.

    Raises:
        KernelError: no kernel of either runs.
    """
    (spec,) = specs_of(case, "highest")
    bench = DeviceBench(spec, device, cache)

    def fastest(kind: str, ranked: list[Ranked]) -> Trial:
        choices = Cache(cache.folder / kind)  # they are kept by what is computed, not by what was ranked
        return tune(bench, lambda _: ranked, choices, (case.batch,), case.steps, TOP, progress=False).chosen[0]

    ranked = [
        (each.configuration, each.nanoseconds(case.steps)) for each in rank(machine, spec, case.batch, case.steps)
    ]
    whole, configuration = fastest("whole", ranked), launched(machine, spec, case.batch)
    if configuration is None:
        raise KernelError(f"{case.name}: a launch for each stage does not fit")
    predicted = predict(machine, spec, configuration, case.batch).nanoseconds(case.steps)
    staged = fastest("staged", [(configuration, predicted)])
    alone = None
    if whole.configuration.needs_fallback and case.units <= LARGEST_ALONE:
        alone = one_cta(Launcher(bench.build(whole.configuration)), spec, case, device)
    return {"whole": asdict(whole), "staged": asdict(staged), "one_block_nanoseconds": alone}


def one_cta(launcher: Launcher, spec: RecurrentSpec, case: Case, device: Device) -> float:
    """Nanoseconds of the fallback, by the host's clock: it takes milliseconds and more."""
    samples = Samples(spec, device, case.batch, case.steps)
    memory = device.upload(np.full(launcher.memory_bytes(case.batch), 0xFF, np.uint8))
    status = np.zeros(1, np.int32)
    for _ in range(2):  # once to warm up
        began = time.perf_counter()
        launcher.launch_fallback(case.steps, case.batch, samples.pointers, memory, device.stream)
        device.download(memory, status)
        seconds = time.perf_counter() - began
    return 1e9 * seconds


def table(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In Markdown. The floor is of a launch for each stage: weights once a step, or FMAs, and launches."""
    heads = ["layer", "hidden", "batch", "one launch, ms", "a launch for each stage, ms"]
    heads += ["floor of these: FMAs / weights / launches, ms", "times one launch", "one CTA for each group, ms"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for case in cases.values():
        whole, staged = (case[kind]["measured"] / 1e6 for kind in ("whole", "staged"))
        of_whole, of_staged = (kernel_in_words(case[kind]["configuration"]) for kind in ("whole", "staged"))
        alone = case["one_block_nanoseconds"]
        lines.append(
            f"| {case['layer']} | {case['units']} | {case['batch']} | {whole:.3f} ({of_whole}) | "
            f"{staged:.3f} ({of_staged}) | {' / '.join(f'{part:.2f}' for part in floor(case))} | "
            f"{staged / whole:.2f} | {'-' if alone is None else f'{alone / 1e6:.0f}'} |"
        )
    return lines


def floor(case: Mapping[str, Any], chip: Chip | None = None) -> tuple[float, float, float]:
    """Milliseconds of the recurrent products' FMAs, of reading their weights in every step, from L2 if it holds them,
    and of launches with next to nothing to do."""
    chip = chip or Chip()
    words = BLOCKS[case["layer"]] * case["units"] ** 2
    rate = L2_BYTES_PER_SECOND if 4 * words <= L2_BYTES else chip.bytes_per_second
    steps = case["steps"]
    fmas = words * case["batch"] * steps / chip.fmas_per_second
    return 1e3 * fmas, 1e3 * 4 * words * steps / rate, LAUNCH * STAGES[case["layer"]] * steps / 1e6


if __name__ == "__main__":
    sys.exit(main())
