"""Recurrent layers in one run on one GPU: PyTorch's cuDNN in every setting, and tfmem's persistent kernels.

    python -m benchmarks.recurrent --list
    python -m benchmarks.recurrent --only lstm/256 canonical_gru --output results.json

It needs PyTorch and cuda.bindings, no TensorFlow (benchmarks.recurrent.keras compares with Keras). Every system is
timed from an idle GPU with CUDA events, once enqueued call by call and once as the replay of a CUDA graph, and what it
computes is held against float64. Results are added to the output file after each case, and cases that are in it already
are not run again, so that a benchmark can be spread over several sessions. `benchmarks.recurrent.tables` makes the
tables of docs/benchmarks_recurrent.md."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.records import begun, save
from benchmarks.recurrent import ours
from benchmarks.recurrent.cases import BOUNDS, TOP, Case, Chip, all_cases, fastest, floor
from benchmarks.recurrent.kernels import prepare
from benchmarks.recurrent.peers import (
    Problem,
    Run,
    captured,
    median_milliseconds,
    peers,
    reference,
    relative_error,
    settings,
)
from benchmarks.runs import asked, command_line

View = Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]

KINDS = ("plain", "graph")  # enqueued call by call, and as the replay of a CUDA graph
PEER_BOUND = 5e-2  # a peer that is off by more computes something else


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for. Returns 1 if one of our kernels failed or was wrong."""
    parser = command_line("recurrent", __doc__, "recurrent.json")
    parser.add_argument("--top", type=int, default=TOP, help=f"configurations of ours, compiled and timed ({TOP})")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    options, cases = asked(parser, arguments, all_cases())
    if options.top < 1:
        parser.error("--top must be 1 or more")
    if not cases:
        return 0
    results = begun(options, versions=versions())
    deadline = time.monotonic() + options.total_seconds
    failed = 0
    known = results["cases"]
    waiting = [case for case in cases if options.again or known.get(case.name, {}).get("status") != "ok"]
    tasks = [(case, precision) for case in waiting for precision in case.precisions]
    print(f"compiled in {prepare(tasks, options.top):.0f} s", flush=True)
    for case in cases:
        if case not in waiting:
            print(f"{case.name}: from before", flush=True)
            continue
        if time.monotonic() > deadline:
            print(f"{case.name}: not begun, --total-seconds are over", flush=True)
            continue
        began = time.monotonic()
        outcome = measure(case, options)
        outcome["seconds"] = time.monotonic() - began
        others = known.get(case.name, {}).get("systems", {})  # benchmarks.recurrent.grnn's are from before
        outcome["systems"] |= {name: system for name, system in others.items() if name.startswith("grnn")}
        results["cases"][case.name] = outcome
        save(results, options.output)
        print(line(case, outcome), flush=True)
        failed += outcome["status"] != "ok"
    return 1 if failed else 0


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Time every system on one case. The status is `ok` when ours ran and was right."""
    problem = Problem.draw(case)
    expected = reference(problem)
    others = {} if options.no_peers else of_peers(problem, expected)
    systems, kernels = of_ours(problem, expected, case.precisions, options.top)
    return {
        **asdict(case),
        "status": "ok" if all(outcome["status"] == "ok" for outcome in systems.values()) else "failed",
        "floor": asdict(floor(case, Chip())),
        "systems": others | systems,
        "kernels": kernels,
    }


def of_peers(problem: Problem, expected: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """The outcomes of `peers`."""
    systems: dict[str, Any] = {}
    for name, (switches, make) in peers(problem.case).items():
        with settings(**switches):
            systems |= timed(name, make, problem, expected, PEER_BOUND)
    return systems


def of_ours(
    problem: Problem, expected: tuple[torch.Tensor, ...], precisions: Sequence[str], top: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outcomes of our kernels, and by precision what was chosen."""
    systems: dict[str, Any] = {}
    kernels: dict[str, Any] = {}
    for precision in precisions:

        def make(problem: Problem, precision: str = precision) -> tuple[Run, View]:
            layer = ours.build(problem, precision, top)
            kernels[precision] = layer.report
            return layer.run, layer.as_torch

        with settings(tf32=precision != "highest"):
            systems |= timed(f"tfmem {precision}", make, problem, expected, BOUNDS[precision])
    return systems, kernels


def timed(
    name: str,
    make: Callable[[Problem], Any],
    problem: Problem,
    expected: tuple[torch.Tensor, ...],
    bound: float,
) -> dict[str, Any]:
    """Build one system, hold all that it computes against `expected`, time it in the ways of `KINDS`."""
    try:
        made = make(problem)
        run, view = made if isinstance(made, tuple) else (made, tuple)
        error = max(relative_error(*pair) for pair in zip(view(run()), expected, strict=True))
    except Exception as failure:
        traceback.print_exc()
        return {f"{name}, plain": raised(failure)}
    if not error <= bound:
        return {f"{name}, plain": {"status": "wrong", "error": error, "message": f"off by {error:.2g}, over {bound:g}"}}
    return dict(_timings(name, run, error))


def _timings(name: str, run: Run, error: float) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in KINDS:
        try:
            result = median_milliseconds(run if kind == "plain" else captured(run))
        except Exception as failure:
            yield f"{name}, {kind}", raised(failure)
        else:
            yield f"{name}, {kind}", {"status": "ok", "error": error, **result}


def raised(error: Exception) -> dict[str, Any]:
    """What a system that raised leaves in the results."""
    return {"status": "error", "message": f"{type(error).__name__}: {error}"[:800]}


def line(case: Case, outcome: dict[str, Any]) -> str:
    """One case in one line."""
    words = [f"{case.name}: {outcome['status']}"]
    mine, other = fastest(outcome["systems"], tfmem=True), fastest(outcome["systems"], tfmem=False)
    if mine:
        words.append(f"{mine[1]:.4f} ms ({mine[0]})")
    if other:
        words.append(f"{other[0]} {other[1]:.4f} ms")
    if mine and other:
        words.append(f"{other[1] / mine[1]:.2f}x")
    words += [f"{name}: {each['message']}" for name, each in outcome["systems"].items() if each["status"] != "ok"]
    words.append(f"({outcome.get('seconds', 0):.0f} s)")
    return ", ".join(words)


def versions() -> dict[str, str]:
    """The versions of everything that the numbers depend on."""
    import cuda.bindings

    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "cuda-bindings": cuda.bindings.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
