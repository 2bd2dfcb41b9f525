"""Times Keras's networks on one GPU, on all under MirroredStrategy, and in one worker for each GPU: plain and tfmem's.

    python -m benchmarks.distribution --gpus 2 --output benchmarks/results/distribution_h100.json
    python -m benchmarks.distribution --table benchmarks/results/distribution_h100.json

Each case runs in a process with a time limit: a step that waits for itself would never end. Cases of one GPU run side
by side, each on a GPU. A budget is a share of the peak of TensorFlow's own step on as many GPUs. With `exact`, ops are
deterministic, and losses and weights are compared to the bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.distribution.case import visible_gpus
from benchmarks.offload.tables import table, write
from benchmarks.records import ROOT, begun, load, save
from benchmarks.runs import command_line, in_process, named

NETWORKS = {"ResNet50": (128, 224), "VGG19": (64, 224), "BERT": (16, 512)}  # rows for each GPU, and pixels or words
PLACES = ("one", "all", "workers")
FUSED = ("recurrent", "fusion", "offload")
# what `tfmem.optimize` is given, None for TensorFlow's own step; and the budget, a share of its peak
SYSTEMS: Mapping[str, tuple[Mapping[str, Any] | None, float | None, bool]] = {
    "plain": (None, None, False),
    "default": ({}, None, False),
    "stitched": ({"passes": FUSED}, None, False),
    "budget": ({"passes": ("recurrent", "offload")}, 0.6, False),
    "stitched_budget": ({"passes": FUSED}, 0.6, False),
    "exact_plain": (None, None, True),
    "exact_budget": ({"passes": ("recurrent", "offload")}, 0.7, True),
}
MARKERS = ("<!-- distribution: begin -->", "<!-- distribution: end -->")
DOCUMENT = ROOT / "docs" / "distribution.md"


@dataclass(frozen=True)
class Case:
    """A network on so many GPUs, as one system runs it.

    Attributes:
        network: a key of `NETWORKS`.
        place: `one` GPU, `all` under MirroredStrategy, or a worker for each.
        system: a key of `SYSTEMS`.
    """

    network: str
    place: str
    system: str

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.network}/{self.place}/{self.system}"

    @property
    def plain(self) -> str:
        """The case whose peak a budget is a share of."""
        return f"{self.network}/{self.place}/{'exact_' * SYSTEMS[self.system][2]}plain"


def all_cases() -> list[Case]:
    """Every case, plain ones before those that need their peaks.

    BERT is a model of Keras 3, whose own `fit` fails in several workers.
    """
    return [
        Case(network, place, system)
        for network in NETWORKS
        for place in PLACES
        for system in SYSTEMS
        if (network, place) != ("BERT", "workers")
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for, or write the table."""
    parser = command_line("distribution", __doc__, "build/distribution.json")
    parser.add_argument("--gpus", type=int, default=2, help="GPUs in use (2)")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for a case (150)")
    parser.add_argument("--table", action="store_true", help="write the results' table into docs/distribution.md")
    options = parser.parse_args(arguments)
    cases = named(all_cases(), options.only)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.table:
        results = load(options.output)
        if results is None:
            parser.error(f"{options.output} does not exist")
        write(DOCUMENT, rows(results), MARKERS)
        return 0
    results, deadline = begun(options, used=options.gpus), time.monotonic() + options.total_seconds
    for group in together(cases, options.gpus):
        left = deadline - time.monotonic()
        waiting = [case for case in group if options.again or case.name not in results["cases"]]
        if left < 20 or not waiting:
            continue
        with ThreadPoolExecutor(len(waiting)) as pool:
            tasks = [pool.submit(run_case, case, results, options, left, gpu) for gpu, case in enumerate(waiting)]
        for case, task in zip(waiting, tasks, strict=True):
            results["cases"][case.name] = found = task.result()
            print(line(case.name, found, results["cases"].get(case.plain)), flush=True)
        save(results, options.output)
    return 0


def together(cases: Sequence[Case], gpus: int) -> Iterator[list[Case]]:
    """The cases in groups that run at once: plain ones of one GPU, then others of one GPU, then one by one."""
    for exact in (False, True):
        for plain in (True, False):
            small = [
                case
                for case in cases
                if case.place == "one" and SYSTEMS[case.system][2] == exact and (case.name == case.plain) == plain
            ]
            yield from (small[start : start + gpus] for start in range(0, len(small), gpus))
    yield from ([case] for case in cases if case.place != "one")


def run_case(case: Case, results: Mapping[str, Any], options: Any, left: float, gpu: int) -> dict[str, Any]:
    """Run a case in a process; what it measured."""
    given, share, exact = SYSTEMS[case.system]
    budget = None
    if share is not None:
        plain = results["cases"].get(case.plain, {})
        if plain.get("status") != "ok":
            return {"status": "skipped", "message": f"needs {case.plain}"}
        budget = int(share * max(plain["peaks"]))
    (batch, side), alone = NETWORKS[case.network], case.place == "one"
    task = {**asdict(case), "batch": batch, "side": side, "options": given, "budget": budget, "exact": exact}
    task |= {"gpus": 1 if alone else options.gpus, "workers": case.place == "workers"}
    limited = {"CUDA_VISIBLE_DEVICES": visible_gpus(options.gpus)[gpu]} if alone else {}
    return in_process("benchmarks.distribution.case", task, min(options.timeout, left), **limited)


def line(name: str, found: Mapping[str, Any], plain: Mapping[str, Any] | None) -> str:
    """One case in one line."""
    if found["status"] != "ok":
        return f"{name}: {found['status']}: {str(found.get('message'))[-300:]}"
    peak = max(found["peaks"]) / (1 << 30)
    kept = f", {plain['ms'] / found['ms']:.3f} of plain's rate" if plain and plain.get("status") == "ok" else ""
    over = f", {max(found['peaks']) / found['budget']:.3f} of the budget" if found["budget"] else ""
    equal = f", equal {found['digest'] == plain['digest']}" if plain and found["exact"] and "digest" in plain else ""
    return f"{name}: {found['ms']:.1f} ms, {peak:.2f} GiB{over}, first {found['first']:.0f} s{kept}{equal}"


def rows(results: Mapping[str, Any]) -> str:
    """The tables of a page: rates by place, and what is equal."""
    cases, gib = results["cases"], 1 << 30
    header = ("network, batch", "GPUs", "system", "ms", "rate kept", "scaling", "peak", "budget", "first call", "equal")
    found = []
    for case in all_cases():
        mine, plain = cases.get(case.name, {}), cases.get(case.plain, {})
        if mine.get("status") != "ok" or plain.get("status") != "ok":
            continue
        one = cases.get(f"{case.network}/one/{case.system}", {})
        places = {
            "one": "1",
            "all": str(results["machine"]["used"]),
            "workers": f"{results['machine']['used']} workers",
        }
        found.append(
            (
                *(f"{case.network}, {mine['batch']}", places[case.place], case.system.replace("_", ", ")),
                *(f"{mine['ms']:.1f}", f"{plain['ms'] / mine['ms']:.2f}"),
                f"{one['ms'] / mine['ms']:.2f}" if one.get("status") == "ok" else "",
                f"{max(mine['peaks']) / gib:.2f} GiB",
                f"{mine['budget'] / gib:.2f} GiB" if mine["budget"] else "",
                f"{mine['first']:.0f} s",
                ("to the bit" if mine["digest"] == plain["digest"] else "differs") if mine["exact"] else "",
            )
        )
    machine = results["machine"]
    of = f"{machine['used']} of {len(machine['gpus'])} x {machine['gpus'][0].partition(',')[0]}"
    return f"{of}, commit {machine['commit'][:7]}.\n{table('', header, found)}"


if __name__ == "__main__":
    sys.exit(main())
