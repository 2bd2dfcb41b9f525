"""How long first calls take under tfmem, with nothing in its cache and with all of it, beside XLA's.

    python -m benchmarks.fusion.first_calls --results benchmarks/results/fusion_h100.json --output first_calls.json

Each workload has two processes: one with an empty cache, and one that finds what the first has left there. Both go on
until it is decided how the step runs, at most `--settle` seconds. XLA's first calls are read from `--results`, of
the same machine. In none of them is what is loaded once in a process."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.fusion.cases import OF_XLA, TEN
from benchmarks.records import load, machine
from benchmarks.runs import in_process

WORKER = "benchmarks.fusion.first_call"
SHARE = 0.5  # of XLA's first call: the most that a cold one is to take
WARM = 1.0  # second: the most that a warm one is to take
HELD_UP = 5.0  # seconds: the most that a call is to take before it is decided


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a table. Returns 1 if a workload failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fusion.first_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, help="results of benchmarks.fusion, for XLA's first calls")
    parser.add_argument("--output", type=Path, default=Path("first_calls.json"), help="results (JSON)")
    parser.add_argument("--only", nargs="+", choices=TEN, default=list(TEN), help="workloads, in this order (all)")
    parser.add_argument("--settle", type=float, default=10, help="seconds that a process waits at most (10)")
    parser.add_argument("--profile", nargs="*", choices=TEN, default=[], help="workloads to say what took longest of")
    parser.add_argument("--total-seconds", type=float, default=180, help="begin no workload when this is over (180)")
    options = parser.parse_args(arguments)
    known = (load(options.results) or {"cases": {}})["cases"] if options.results else {}
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    began = time.monotonic()
    for name in options.only:
        if time.monotonic() - began > options.total_seconds:
            break
        task = {
            "workload": name,
            "settle": options.settle,
            "profile": name in options.profile,
            "remapper": False,
            "tf32": True,
            "deterministic": False,
        }
        with tempfile.TemporaryDirectory() as cache:
            cold = in_process(WORKER, task, 120, TFMEM_CACHE_DIR=cache)
            warm = in_process(WORKER, task, 120, TFMEM_CACHE_DIR=cache)
        results["cases"][name] = {"cold": cold, "warm": warm, "xla": best_of_xla(known.get(name, {}))}
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        print(name, cold.get("message", cold.get("fusion")), "|", warm.get("message", warm.get("fusion")), flush=True)
        for when, outcome in (("cold", cold), ("warm", warm)):
            print("\n".join(f"  {when} {text}" for text in outcome.get("profile", ())), end="\n" * task["profile"])
    print("\n".join(table(results["cases"])))
    return (
        1 if any(each[when]["status"] != "ok" for each in results["cases"].values() for when in ("cold", "warm")) else 0
    )


def best_of_xla(case: Mapping[str, Any]) -> float | None:
    """Seconds of the first call of XLA's mode that takes less, in results of `benchmarks.fusion`."""
    systems = case.get("systems", {})
    found = [systems[name]["first_seconds"] for name in OF_XLA if "first_seconds" in systems.get(name, {})]
    return min(found, default=None)


def table(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of text."""
    measured = ("graph", "first", "decided", "slowest")
    titles = [f"{when}: {each}" for when in ("cold", "warm") for each in measured]
    rows = [("workload", "XLA", *titles, "missed")]
    for name, case in cases.items():
        cold, warm = case["cold"], case["warm"]
        if cold["status"] != "ok" or warm["status"] != "ok":
            rows.append((name, *["-"] * (1 + len(titles)), "failed"))
            continue
        xla = case["xla"]
        missed = [
            *(["cold"] if xla is not None and cold["first"] > SHARE * xla else []),
            *(["warm"] if warm["first"] > WARM else []),
            *(["held up"] if max(cold["slowest"], warm["slowest"]) > HELD_UP else []),
        ]
        numbers = [xla, *(outcome[each] for outcome in (cold, warm) for each in measured)]
        rows.append((name, *("-" if each is None else f"{each:.2f}" for each in numbers), ", ".join(missed)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    sys.exit(main())
