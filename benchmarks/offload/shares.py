"""How much of its uncapped rate a network keeps in a share of its memory: plain's step over tfmem's.

    python -m benchmarks.offload.shares --only resnet152 --output benchmarks/results/offload_shares_h100.json
    python -m benchmarks.offload.shares --table benchmarks/results/offload_shares_h100.json
    python -m benchmarks.offload.shares --only resnet152 --allocator cuda_malloc_async --output build/async.json

TensorFlow's own step runs first, then tfmem's with budgets that are shares of the peak of the first, with moves alone
and with fusion as well, each timed once its report is decided. Each runs in a separate process: TensorFlow keeps the
variables of a model until a process ends. With `--allocator`, TensorFlow takes a GPU's memory from another allocator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from benchmarks.offload.cases import NETWORKS
from benchmarks.records import begun, machine, save
from benchmarks.runs import asked, command_line, in_process

SHARES = (0.8, 0.6, 0.5, 0.4)
SYSTEMS = {"moves": ("recurrent", "offload"), "fused": ("recurrent", "fusion", "offload")}  # tfmem's passes
TINY = 16  # by which --tiny divides
ALLOCATORS = ("cuda_malloc_async",)  # beside TensorFlow's default, BFC
LEAST = 30  # seconds that a process needs at least
WORKER = "benchmarks.offload.shares_worker"


@dataclass(frozen=True)
class Case:
    """A network."""

    name: str


CASES = tuple(map(Case, NETWORKS))


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for, or print their table."""
    parser = command_line("offload.shares", __doc__, "build/offload_shares.json")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="budgets, of plain's peak")
    parser.add_argument("--policy", default="", help="tfmem's policy (its default)")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, help="of tfmem (both)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps (12)")
    parser.add_argument("--cache", default="", help="tfmem's cache, where profiles stay (none)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a network (300)")
    parser.add_argument("--tiny", action="store_true", help="small networks, for a CPU")
    parser.add_argument("--allocator", choices=ALLOCATORS, help="TensorFlow's, of a GPU's memory (its default)")
    options, cases = asked(parser, arguments, CASES, table)
    if not cases:
        return 0
    if options.allocator and not machine()["gpus"]:
        parser.error(f"--allocator {options.allocator} needs an NVIDIA GPU, and nvidia-smi finds none")
    results, began, failed = begun(options, allocator=options.allocator or ""), time.monotonic(), 0
    cache = {"TFMEM_CACHE_DIR": options.cache}
    cache |= {"TF_GPU_ALLOCATOR": options.allocator} if options.allocator else {}
    for case in cases:
        left = options.total_seconds - (time.monotonic() - began)
        if left < LEAST or (case.name in results["cases"] and not options.again):
            continue
        size = NETWORKS[case.name]
        task = {"name": case.name, **asdict(size), "width": 1.0, "steps": options.steps, "passes": None}
        if options.tiny:
            task |= {"batch": max(2, size.batch // TINY), "side": max(64, size.side // 4), "width": 1 / 8}
        plain = in_process(WORKER, task, min(options.timeout, left), **cache)
        outcome: dict[str, Any] = {key: value for key, value in plain.items() if key != "losses"}
        results["cases"][case.name] = outcome
        for share, system in product(options.shares, options.systems):
            left = options.total_seconds - (time.monotonic() - began)
            if plain["status"] == "ok" and left > LEAST:
                budget = int(share * plain["peak"])
                task |= {"budget": budget, "policy": options.policy, "passes": SYSTEMS[system]}
                task |= {"losses": plain["losses"]}
                found = in_process(WORKER, task, min(options.timeout, left), **cache)
                found.pop("losses", None)
                outcome.setdefault(system, {})[str(share)] = found
                failed += found["status"] != "ok"
            save(results, options.output)
        print("\n".join(lines(outcome)), flush=True)
        failed += outcome["status"] != "ok"
    return 1 if failed else 0


def lines(outcome: Mapping[str, Any]) -> list[str]:
    """What the processes of one network measured."""
    name, gib = outcome["name"], 1 << 30
    if outcome["status"] != "ok":
        return [f"{name}: {outcome['status']}: {outcome.get('message', '')[-300:]}"]
    plain = f"{1e3 * outcome['seconds']:.1f} ms, {outcome['peak'] / gib:.2f} GiB, first {outcome['first']:.0f} s"
    told = [f"{name}: plain {plain}"]
    for system in SYSTEMS:
        for share, found in outcome.get(system, {}).items():
            if "seconds" not in found:
                told.append(f"{name} at {share}, {system}: {found.get('error', found.get('message', ''))[:160]}")
                continue
            told.append(
                f"{name} at {share}, {system}: ratio {outcome['seconds'] / found['seconds']:.3f} (predicted "
                f"{outcome['seconds'] / found['predicted']:.3f}, at most {found.get('bound') or 1:.3f}), "
                f"peak {found['peak'] / found['budget']:.3f} of the budget, "
                f"first call {found['first']:.0f} s, decided {found['is_decided']} after "
                f"{found['decided']:.0f} s and {found['calls']} calls, {found['copied']} copied "
                f"{found['bytes_out'] / gib:.1f} GiB, {found['recomputed']} recomputed, {found['regions']} regions, "
                f"losses of plain's calls off by {found['off']:.1e}; {found['fusion']}"
            )
    return told


def table(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: ratio by network, system and share, and what the integer program says that no plan exceeds."""
    found = [(case, system) for case in cases.values() for system in SYSTEMS if system in case]
    shares = sorted({share for case, system in found for share in case[system]}, reverse=True)
    rows = ["| network, batch | plain | tfmem | " + " | ".join(shares) + " |", "| --- " * (len(shares) + 3) + "|"]
    for case, system in found:
        cells = [
            f"{case['name']}, {case['batch']}",
            f"{1e3 * case['seconds']:.0f} ms, {case['peak'] / (1 << 30):.1f} GiB",
            system,
        ]
        for share in shares:
            ran = case[system].get(share, {})
            kept = f"{case['seconds'] / ran['seconds']:.2f}" if "seconds" in ran else "refused"
            kept += f" of {ran['bound']:.2f}" if ran.get("bound") else ""
            cells.append(kept if ran else "")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    sys.exit(main())
