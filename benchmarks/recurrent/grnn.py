"""GRNN's own kernels for the canonical GRU, for the recurrent benchmark's results.

    git clone https://github.com/cmikeh2/grnn
    python -m benchmarks.recurrent.grnn --source grnn/src --output benchmarks/results/recurrent_h200.json

Its sources are copied aside and patched, for they were written for 80 multiprocessors and for one launch: arrays of
flags for more CTAs, flags zeroed before every launch, barriers and fences before a CTA signals and after it waits,
an index the wrong way round, room behind arrays that are read past their ends, and for the outputs of all steps where
there is room for one (the others were written over what lies behind it, the barrier's flags too). Both forms, one and
two synchronisations, are built in the configurations that the paper's model ranks best, on all cores before anything
runs; the fastest counts. Its times have its own product with the inputs in them, like ours. It computes with weights of
its own, so only its time is taken. Cases that the results do not have yet are added, for benchmarks.recurrent to
complete.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import ceil
from os import cpu_count
from pathlib import Path
from typing import Any

from benchmarks.records import save
from benchmarks.recurrent.cases import Case, Chip, all_cases, floor
from benchmarks.runs import command_line, existing, named
from custom_ops.machine import Machine, from_json
from custom_ops.recurrent.search import grnn_model
from graph_passes.cost import device

FORMS = {"single": grnn_model.gru_single_step, "double": grnn_model.gru_double_step}
GATES = 2  # whose columns a CTA's groups share; the third follows
NAME = "grnn patched, plain"
STATIC_SHARED = 48 << 10  # bytes, all that nvcc allows
SECONDS = 5  # for one program, which takes one; its barriers spin for ever if something is wrong
REPEATS = 100  # after as many to warm up; there are 1000 in its programs


@dataclass(frozen=True)
class Build:
    """One program: a form in one configuration."""

    case: Case
    form: str
    tiling: grnn_model.GrnnTiling

    @property
    def columns(self) -> int:
        """Of one group."""
        return GATES * self.tiling.width // self.tiling.groups


def main(arguments: list[str] | None = None) -> int:
    """Build, run, add to the results. Returns 1 if a case has no program that runs."""
    parser = command_line("recurrent.grnn", __doc__)
    parser.add_argument("--source", type=Path, required=True, help="the folder src of a checkout of GRNN")
    parser.add_argument("--output", type=Path, required=True, help="results of benchmarks.recurrent, to add to")
    parser.add_argument("--only", nargs="+", default=[], metavar="PREFIX", help="cases to run")
    parser.add_argument("--top", type=int, default=3, help="configurations of each form (3)")
    parser.add_argument("--arch", default="sm_90", help="what nvcc compiles for (sm_90)")
    parser.add_argument("--total-seconds", type=float, default=540, help="begin no case when this is over (540)")
    options = parser.parse_args(arguments)
    results = existing(parser, options.output)
    deadline = time.monotonic() + options.total_seconds
    cases = named([case for case in all_cases() if case.layer == "canonical_gru"], options.only)
    for case in cases:
        results["cases"].setdefault(case.name, empty(case))
    known = {name: case["systems"].get(NAME, {}).get("status") for name, case in results["cases"].items()}
    waiting = [case for case in cases if known[case.name] != "ok"]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cpu_count()) as pool:
        programs: dict[Case, list[tuple[Build, Future[Path]]]] = {}
        for case in waiting:
            kernels = results["cases"][case.name].get("kernels", {}).get("highest", {})
            machine = from_json(kernels["machine"]) if "machine" in kernels else device.machine("h200")
            programs[case] = [
                (
                    build,
                    pool.submit(compiled, build, options.source, Path(folder) / case.name / str(place), options.arch),
                )
                for place, build in enumerate(ranked(machine, case, options.top))
            ]
        for case in waiting:
            if time.monotonic() > deadline:
                break
            outcome = measure(programs[case])
            results["cases"][case.name]["systems"][NAME] = outcome
            save(results, options.output)
            print(f"{case.name}: {outcome}", flush=True)
            failed += outcome["status"] != "ok"
        pool.shutdown(cancel_futures=True)
    return 1 if failed else 0


def empty(case: Case) -> dict[str, Any]:
    """A case that no other system ran yet."""
    return {**asdict(case), "status": "incomplete", "floor": asdict(floor(case, Chip())), "systems": {}, "kernels": {}}


def ranked(machine: Machine, case: Case, top: int) -> list[Build]:
    """The best of each form, by the paper's model, of those that its kernels can be built in."""
    found = []
    for form, price in FORMS.items():
        builds = [
            Build(case, form, tiling)
            for tiling in grnn_model.tilings(machine, case.units, case.batch, gates=3)
            if possible(case, form, tiling)
        ]
        costs = {build: price(machine, case.units, case.batch, build.tiling).total for build in builds}
        found += sorted(builds, key=costs.__getitem__)[:top]
    return found


def possible(case: Case, form: str, tiling: grnn_model.GrnnTiling) -> bool:
    """What GRNN's kernels ask of a configuration: whole columns of whole units, a thread for each result of a group."""
    threads = tiling.groups * tiling.group_size
    columns = GATES * tiling.width / tiling.groups
    weights = columns * ceil(case.units / tiling.group_size)
    weights += tiling.width * ceil(case.units / threads) if form == "single" else weights / 2
    states, sums = (2, 2) if form == "single" else (1, 4)  # of a row, in shared memory
    row = states * tiling.group_size * ceil(case.units / tiling.group_size) + sums * tiling.width
    return (
        columns == int(columns)
        and tiling.groups % GATES == 0
        and columns * tiling.height <= tiling.group_size
        and tiling.width * tiling.height <= threads
        and ceil(case.units / tiling.width) <= threads
        and (form == "single" or case.units % tiling.width == 0)
        and (form == "single" or ceil(case.units / tiling.group_size) % 2 == 0)
        and grnn_model.FLOAT * tiling.height * row <= STATIC_SHARED
        and weights + 32 <= 255
        and (weights + 32) * threads <= 65536
    )


def measure(programs: Sequence[tuple[Build, Future[Path]]]) -> dict[str, object]:
    """Milliseconds of the fastest, and what went wrong with the others; or with the last."""
    if not programs:
        return {"status": "infeasible", "message": "no configuration fits the registers"}
    times: list[tuple[float, Build]] = []
    failed: list[str] = []
    for build, program in programs:
        try:
            place = program.result()
            ran = subprocess.run(
                [place], capture_output=True, text=True, timeout=SECONDS, check=False, cwd=place.parent
            ).stdout
        except subprocess.CalledProcessError as error:
            failed.append(f"{build.form} {build.tiling}: {error.stderr[-300:]}")
            continue
        except (OSError, subprocess.TimeoutExpired) as error:
            failed.append(f"{build.form} {build.tiling}: {type(error).__name__}")
            continue
        time_of_one = re.search(r"([\d.e+-]+) ms$", ran.strip())
        if time_of_one:
            times.append((float(time_of_one[1]), build))
        else:
            failed.append(f"{build.form} {build.tiling}: {ran[-200:]}")
    if not times:
        return {"status": "error", "message": failed[-1]}
    best, build = min(times, key=lambda each: each[0])
    tiling = vars(build.tiling)
    return {"status": "ok", "ms": best, "error": None, "form": build.form, "tiling": tiling, "failed": failed}


def compiled(build: Build, source: Path, place: Path, arch: str) -> Path:
    """Patch a copy and compile it.

    Raises:
        CalledProcessError: nvcc failed.
    """
    place.mkdir(parents=True)
    name = f"GRU_{build.form}"
    main_file = f"single_layer_{name}.cpp"
    for file in (f"{name}.cu", f"{name}.h", "RNNBase.h", "misc.h", main_file):
        text = (source / file).read_text()
        if file.endswith(".cu"):
            text = patched_kernel(text, build)
        elif file == main_file:
            text = patched_main(text, build)
        (place / file).write_text(text)
    options = ["-O3", "-std=c++17", "-include", "cstdint", f"-arch={arch}", "-w"]  # its headers use uint32_t
    command = ["nvcc", *options, f"{name}.cu", main_file, "-o", "program"]
    subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
    return place / "program"


def patched_kernel(text: str, build: Build) -> str:
    """GRNN's kernel in one configuration, safe to launch again and on more multiprocessors."""
    tiling, case = build.tiling, build.case
    numbers = (case.units, build.columns, tiling.height, tiling.groups, tiling.group_size, case.batch)
    text = re.sub(r"gru_rnn<[\d, ]+>", f"gru_rnn<{', '.join(map(str, numbers))}>", text)
    text = text.replace("80 * sizeof(int)", "1024 * sizeof(int)").replace("80 * numBlocks", "132 * numBlocks")
    text = text.replace("outputs_reg[i][j] = 0.f", "outputs_reg[j][i] = 0.f")
    for array, times in (("packed_biases_gpu), bias", 4), ("packed_hidden_weights_r_gpu), hidden_r", 2)):
        name, _, footprint = array.partition(" ")
        text = text.replace(f"(this->{array}_footprint)", f"(this->{name} {times} * {footprint}_footprint)")
    text = text.replace("&(this->gpu_output), this->output_size", "&(this->gpu_output), 200 * this->output_size")
    zero = "".join(f"cudaMemset(this->gpu_sync{way}, 0, 1024 * sizeof(int));\n  " for way in ("In", "Out"))
    text = text.replace("cudaEventRecord(start);", f"{zero}cudaEventRecord(start);")
    fence = "__threadfence();\n    __syncthreads();\n    "
    text = re.sub(r"(if \(tid == 0\) \{\s*syncIn)", rf"{fence}\1", text)
    # each wait ends in a barrier, one for the CTA that collects and one for the others
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
    return text.replace("i < 1000", f"i < {REPEATS}").replace("time / 1000", f"time / {REPEATS}")


if __name__ == "__main__":
    sys.exit(main())
