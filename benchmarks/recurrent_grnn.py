"""GRNN's own kernels for the canonical GRU, for the recurrent benchmark's results.

    git clone https://github.com/cmikeh2/grnn
    python -m benchmarks.recurrent_grnn --source grnn/src --output benchmarks/results/recurrent_h200.json

Its sources are copied aside and patched, for they were written for 80 multiprocessors and for one launch: arrays of
flags for more blocks, flags zeroed before every launch, barriers and fences before a block signals and after it waits,
an index the wrong way round. Both forms, one and two synchronisations, are built in the configurations that the paper's
model ranks best; the fastest counts. Its times have its own product with the inputs in them, like ours. It computes
with weights of its own, so only its time is taken."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from os import cpu_count
from pathlib import Path

from benchmarks.offload import load, save
from benchmarks.recurrent_cases import Case, chosen
from custom_ops.machine import Machine, from_json
from graph_passes.cost import device, grnn

FORMS = {"single": grnn.gru_single_step, "double": grnn.gru_double_step}
GATES = 2  # whose columns a block's groups share; the third follows
NAME = "grnn patched, plain"
SECONDS = 60  # for one program; its barriers spin for ever if something is wrong


@dataclass(frozen=True)
class Build:
    """One program: a form in one configuration."""

    case: Case
    form: str
    tiling: grnn.Tiling

    @property
    def columns(self) -> int:
        """Of one group."""
        return GATES * self.tiling.width // self.tiling.groups


def main(arguments: list[str] | None = None) -> int:
    """Build, run, add to the results. Returns 1 if a case has no program that runs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recurrent_grnn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", type=Path, required=True, help="the folder src of a checkout of GRNN")
    parser.add_argument("--output", type=Path, required=True, help="results of benchmarks.recurrent, to add to")
    parser.add_argument("--only", nargs="+", default=["canonical_gru"], metavar="PREFIX", help="cases to run")
    parser.add_argument("--top", type=int, default=3, help="configurations of each form (3)")
    parser.add_argument("--arch", default="sm_90", help="what nvcc compiles for (sm_90)")
    parser.add_argument("--total-seconds", type=float, default=540, help="begin no case when this is over (540)")
    options = parser.parse_args(arguments)
    results = load(options.output)
    if results is None:
        parser.error(f"{options.output} does not exist; run benchmarks.recurrent first")
    deadline = time.monotonic() + options.total_seconds
    failed = 0
    for case in chosen(options.only):
        measured = results["cases"].get(case.name)
        if case.layer != "canonical_gru" or measured is None or NAME in measured["systems"]:
            continue
        if time.monotonic() > deadline:
            break
        kernels = measured.get("kernels", {}).get("highest", {})
        machine = from_json(kernels["machine"]) if kernels else device.machine("h200")
        outcome = measure(ranked(machine, case, options.top), options.source, options.arch)
        measured["systems"][NAME] = outcome
        save(results, options.output)
        print(f"{case.name}: {outcome}", flush=True)
        failed += outcome["status"] != "ok"
    return 1 if failed else 0


def ranked(machine: Machine, case: Case, top: int) -> list[Build]:
    """The best of each form, by the paper's model, of those that its kernels can be built in."""
    found = []
    for form, price in FORMS.items():
        builds = [
            Build(case, form, tiling)
            for tiling in grnn.tilings(machine, case.units, case.batch, gates=3)
            if possible(case, form, tiling)
        ]
        costs = {build: price(machine, case.units, case.batch, build.tiling).total for build in builds}
        found += sorted(builds, key=costs.__getitem__)[:top]
    return found


def possible(case: Case, form: str, tiling: grnn.Tiling) -> bool:
    """What GRNN's kernels ask of a configuration: whole columns of whole units, a thread for each result of a group."""
    threads = tiling.groups * tiling.group_size
    columns = GATES * tiling.width / tiling.groups
    weights = columns * ceil(case.units / tiling.group_size)
    weights += tiling.width * ceil(case.units / threads) if form == "single" else weights / 2
    return (
        columns == int(columns)
        and tiling.groups % GATES == 0
        and columns * tiling.height <= tiling.group_size
        and tiling.width * tiling.height <= threads
        and ceil(case.units / tiling.width) <= threads
        and (form == "single" or ceil(case.units / tiling.group_size) % 2 == 0)
        and weights + 32 <= 255
        and (weights + 32) * threads <= 65536
    )


def measure(builds: list[Build], source: Path, arch: str) -> dict[str, object]:
    """Milliseconds of the fastest, or what went wrong with the last."""
    if not builds:
        return {"status": "infeasible", "message": "no configuration fits the registers"}
    times: list[tuple[float, Build]] = []
    message = ""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cpu_count()) as pool:
        places = [Path(folder) / str(index) for index in range(len(builds))]
        programs = pool.map(lambda build, place: compiled(build, source, place, arch), builds, places)
        for build, program in zip(builds, programs, strict=True):
            try:
                ran = subprocess.run(
                    [program], capture_output=True, text=True, timeout=SECONDS, check=False, cwd=folder
                ).stdout
                times.append((float(ran.split()[-2]), build))
            except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
                message = f"{build.form} {build.tiling}: {error}"
    usable = [each for each in times if 0 < each[0] < float("inf")]
    if not usable:
        return {"status": "error", "message": message or "no program ran"}
    best, build = min(usable, key=lambda each: each[0])
    return {"status": "ok", "ms": best, "error": float("nan"), "form": build.form, "tiling": vars(build.tiling)}


def compiled(build: Build, source: Path, place: Path, arch: str) -> Path:
    """Patch a copy and compile it; where nvcc fails, there is no file."""
    place.mkdir()
    name = f"GRU_{build.form}"
    main_file = f"single_layer_{name}.cpp"
    for file in (f"{name}.cu", f"{name}.h", "RNNBase.h", "misc.h", main_file):
        text = (source / file).read_text()
        if file.endswith(".cu"):
            text = patched_kernel(text, build)
        elif file == main_file:
            text = patched_main(text, build)
        (place / file).write_text(text)
    command = ["nvcc", "-O3", "-std=c++17", f"-arch={arch}", "-w", f"{name}.cu", main_file, "-o", "program"]
    subprocess.run(command, cwd=place, capture_output=True, check=False)
    return place / "program"


def patched_kernel(text: str, build: Build) -> str:
    """GRNN's kernel in one configuration, safe to launch again and on more multiprocessors."""
    tiling, case = build.tiling, build.case
    numbers = (case.units, build.columns, tiling.height, tiling.groups, tiling.group_size, case.batch)
    text = re.sub(r"gru_rnn<[\d, ]+>", f"gru_rnn<{', '.join(map(str, numbers))}>", text)
    text = text.replace("80 * sizeof(int)", "1024 * sizeof(int)").replace("80 * numBlocks", "132 * numBlocks")
    text = text.replace("outputs_reg[i][j] = 0.f", "outputs_reg[j][i] = 0.f")
    zero = "".join(f"cudaMemset(this->gpu_sync{way}, 0, 1024 * sizeof(int));\n  " for way in ("In", "Out"))
    text = text.replace("cudaEventRecord(start);", f"{zero}cudaEventRecord(start);")
    fence = "__threadfence();\n    __syncthreads();\n    "
    text = re.sub(r"(if \(tid == 0\) \{\s*syncIn)", rf"{fence}\1", text)
    # each wait ends in a barrier, one for the block that collects and one for the others
    return re.sub(r"(while \(syncOut\[bidy\][^}]*\}\s*\}\s*__syncthreads\(\);\s*\})", r"\1\n    __threadfence();", text)


def patched_main(text: str, build: Build) -> str:
    """Its program for one case, with fewer repeats."""
    values = {
        "input": build.case.units,
        "hidden": build.case.units,
        "x_tile_size": build.columns,
        "y_tile_size": build.tiling.height,
        "num_groups": build.tiling.groups,
        "group_threads": build.tiling.group_size,
        "batch": build.case.batch,
        "input_length": build.case.steps,
    }
    for name, value in values.items():
        text = re.sub(rf"uint32_t {name} = \d+;", f"uint32_t {name} = {value};", text)
    return text.replace("i < 1000", "i < 200").replace("time / 1000", "time / 200")


if __name__ == "__main__":
    sys.exit(main())
