"""The first six calls of a step on a CPU, beside plain TensorFlow's: their seconds, in half of the memory.

    python -m benchmarks.offload.first_steps --output benchmarks/results/offload_first_steps_cpu.json
    python -m benchmarks.offload.first_steps --table --output benchmarks/results/offload_first_steps_cpu.json

Each runs in a separate process, round by round: plain, tfmem with an empty cache, and tfmem with the cache that this
one left. With oneDNN TensorFlow counts a CPU's memory, so the step is observed. TensorFlow uses it by default on
Linux where the processor has VNNI, bfloat16 or AMX instructions. Without it plans are made by estimates alone.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.offload.tables import write
from benchmarks.records import ROOT, begun, load, save
from benchmarks.runs import command_line, in_process, named

NETS = ("ResNet50", "EfficientNetB0", "MobileNetV2", "unet")  # of keras.applications, and `networks.model`
SYSTEMS = ("plain", "tfmem", "cached")
SIDE, BATCH, CALLS = 96, 8, 6
SHARE = 0.5  # of the memory that tfmem.plan estimates
LEAST = 60  # seconds that a round needs at least
WORKER = "benchmarks.offload.first_steps_worker"
MARKERS = ("<!-- first steps: begin -->", "<!-- first steps: end -->")
DOCUMENT = ROOT / "docs" / "benchmarks_offload.md"


@dataclass(frozen=True)
class Case:
    """A network, with oneDNN's kernels or without."""

    net: str
    onednn: bool

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.net}/{'onednn' if self.onednn else 'without'}"


CASES = tuple(Case(net, onednn) for onednn in (True, False) for net in NETS)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for, or write the table."""
    parser = command_line("offload.first_steps", __doc__, "build/offload_first_steps.json")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each system (3)")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for a process (150)")
    parser.add_argument("--table", action="store_true", help="write the results' table into docs/benchmarks_offload.md")
    options = parser.parse_args(arguments)
    if options.table:
        results = load(options.output)
        if results is None:
            parser.error(f"{options.output} does not exist")
        write(DOCUMENT, table(results["cases"]), MARKERS)
        return 0
    cases = named(CASES, options.only)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    results, deadline = begun(options), time.monotonic() + options.total_seconds
    for case in cases:
        if deadline - time.monotonic() < LEAST or (case.name in results["cases"] and not options.again):
            continue
        results["cases"][case.name] = found = _measured(case, options.rounds, options.timeout)
        save(results, options.output)
        print(_row(case.name, found), flush=True)
    return 1 if any("message" in found for found in results["cases"].values()) else 0


def _measured(case: Case, rounds: int, timeout: float) -> dict[str, Any]:
    """The seconds of each call, by system and round, and the commit."""
    found: dict[str, Any] = {system: [] for system in SYSTEMS}
    budget = 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for system in SYSTEMS:
                task = {"net": case.net, "budget": budget if system != "plain" else 0}
                variables = {"TF_ENABLE_ONEDNN_OPTS": str(int(case.onednn)), "TFMEM_CACHE_DIR": cache}
                ran = in_process(WORKER, task, timeout, **variables)
                if ran["status"] != "ok":
                    return found | {"message": ran.get("message", "")}
                found[system].append({key: ran[key] for key in ("wall", "processor")})
                found["commit"] = ran["commit"]
                if system == "plain":
                    budget = int(SHARE * ran["peak"])
    return found


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each network."""
    head = "| net | plain, s | tfmem | cached | plain's first call, s | tfmem's | cached | commit |"
    return "\n".join([head, "|" + " --- |" * 8, *(_row(name, found) for name, found in cases.items())])


def _row(name: str, found: Mapping[str, Any]) -> str:
    """Processor seconds of all calls, and of the first by the clock: plain's, and what others take in terms of it."""
    if "message" in found:
        return f"| {name} | failed |"
    cells = []
    for seconds in (lambda ran: sum(ran["processor"]), lambda ran: ran["wall"][0]):
        plain, *others = (statistics.median(map(seconds, found[system])) for system in SYSTEMS)
        cells += [f"{plain:.1f}", *(f"{other / plain:.2f}" for other in others)]
    return f"| {name} | {' | '.join(cells)} | {found['commit']} |"


if __name__ == "__main__":
    sys.exit(main())
