"""Plain TensorFlow, tfmem and the uncapped oracle, one configuration in each process.

    python -m benchmarks.offload --list
    python -m benchmarks.offload --only link vgg19/oracle vgg19/19.5GiB --output results.json

Results are added to the output file after each case, and cases that are in it already are not run
again, so that a benchmark can be spread over several sessions. `benchmarks.offload.tables` makes the
tables of docs/benchmarks_offload.md."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from typing import Any

from benchmarks.offload.cases import FULL, TINY, Case, all_cases
from benchmarks.records import begun, save
from benchmarks.runs import asked, command_line, in_process


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for. Returns 1 if one of them failed in a way that is not a result."""
    parser = command_line("offload", __doc__, "offload.json")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (20)")
    parser.add_argument("--warm-up", type=int, default=8, help="steps before them (8)")
    parser.add_argument("--policy", default="autovm", help="tfmem's policy (autovm)")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for one case (180)")
    parser.add_argument("--least-seconds", type=float, default=60, help="what a case needs at least (60)")
    parser.add_argument("--tiny", action="store_true", help="small networks, for a CPU")
    options, cases = asked(parser, arguments, all_cases())
    if options.steps < 1 or options.warm_up < 1:
        parser.error("--steps and --warm-up must be 1 or more")
    if not cases:
        return 0
    results = begun(options)
    deadline = time.monotonic() + options.total_seconds
    failed = 0
    for case in cases:
        known = results["cases"].get(case.name, {}).get("status")
        if known in ("ok", "oom", "infeasible") and not options.again:
            print(f"{case.name}: {known}, from before", flush=True)
            continue
        left = deadline - time.monotonic()
        if left < options.least_seconds:
            print(f"{case.name}: not begun, {left:.0f} s left of --total-seconds", flush=True)
            continue
        outcome = run_case(case, results, options, min(options.timeout, left))
        results["cases"][case.name] = outcome
        save(results, options.output)
        print(line(case, outcome), flush=True)
        failed += outcome["status"] not in ("ok", "oom", "infeasible")
    return 1 if failed else 0


def run_case(case: Case, results: dict[str, Any], options: argparse.Namespace, timeout: float) -> dict[str, Any]:
    """Run one case in a fresh process and return what it measured, or how it failed."""
    sizes = TINY if options.tiny else FULL
    try:
        cap = case.cap(sizes, results["cases"])
    except LookupError as error:
        return {"status": "skipped", "message": str(error)}
    task = {
        **asdict(case),
        "batch": sizes.batches.get(case.network, 0),
        "image_size": sizes.image_size,
        "classes": sizes.classes,
        "width": sizes.width,
        "cap": cap,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "policy": case.policy or options.policy,
    }
    limit = {"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "32"} if case.deterministic else {}
    return in_process("benchmarks.offload.worker", task, timeout, **limit)


def line(case: Case, outcome: dict[str, Any]) -> str:
    """One case in one line."""
    words = [f"{case.name}: {outcome['status']}"]
    if outcome.get("cap"):
        words.append(f"cap {outcome['cap'] / (1 << 30):.2f} GiB")
    if outcome["status"] == "ok" and "median_seconds" in outcome:
        words.append(f"{1e3 * outcome['median_seconds']:.1f} ms a step")
        words.append(f"peak {outcome['peak'] / (1 << 30):.2f} GiB")
        if outcome.get("bytes_out"):
            words.append(f"{outcome['bytes_out'] / (1 << 30):.2f} GiB out a step")
            words.append(f"stall {outcome['stall_ns'] / 1e6:.1f} ms")
    if outcome.get("message"):
        words.append(outcome["message"][-400:])
    words.append(f"({outcome.get('process_seconds', 0):.0f} s)")
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
