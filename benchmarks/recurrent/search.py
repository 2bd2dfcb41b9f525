"""The model's choice among our recurrent kernels against all configurations there are, the kernel alone.

    python -m benchmarks.recurrent.search --output benchmarks/results/recurrent_search_h200.json

Every configuration of a case is compiled, held against float64 and timed as the tuner does it. What the model predicts
to be `--hopeless` times slower than its best is left out, but for `--sample` of those, drawn at random, that would show
whether a fast one is among them. At the end the fastest and the model's first are timed once more: the least of many
times is too small by luck. All cores compile while the GPU works. It needs cuda.bindings and NVRTC, no framework.
Results are added to the output file after each case; `benchmarks.recurrent.tables --search` makes the table."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from os import cpu_count
from typing import Any

from benchmarks.records import begun, save
from benchmarks.recurrent.cases import TOP, Case, single_passes
from benchmarks.recurrent.kernels import FOLDER, compile_all, specs_of
from benchmarks.runs import asked, command_line
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import DeviceContext
from custom_ops.machine import Machine
from custom_ops.recurrent.search import microbenchmark
from custom_ops.recurrent.search.bench import DeviceBench
from custom_ops.recurrent.search.ranking import rank
from custom_ops.recurrent.search.tune import SweepBench, Trial
from custom_ops.recurrent.spec import Configuration, RecurrentSpec
from custom_ops.timing.tuner import NEVER, timed

PRECISION = "highest"
SHARE = 2  # configurations that a core compiles at a time
FINALISTS = 10
COLUMNS = " ".join(field.name for field in fields(Configuration))  # of a trial, behind its five numbers

Ranked = dict[int, Trial]  # by their places in the model's order


@dataclass(frozen=True)
class Space:
    """What there is for a case, and what of it is timed."""

    case: Case
    spec: RecurrentSpec
    size: int
    trials: Ranked

    @classmethod
    def of(cls, case: Case, model: Machine, options: argparse.Namespace) -> Space:
        """Ranked, and chosen by the command line."""
        (spec,) = specs_of(case, PRECISION)
        found = rank(model, spec, case.batch, case.steps)
        times = [each.nanoseconds(case.steps) for each in found]
        wanted = selected(times, options.hopeless, options.sample)
        trials = {place: Trial(found[place].configuration, case.batch, times[place]) for place in wanted}
        return cls(case, spec, len(found), trials)

    def compile(self, pool: ProcessPoolExecutor, arch: int) -> list[tuple[Future[None], Ranked]]:
        """Ask for all kernels: what will be there when."""
        shares, trials = [], list(self.trials.items())
        for first in range(0, len(trials), SHARE):
            share = dict(trials[first : first + SHARE])
            configurations = [trial.configuration for trial in share.values()]
            shares.append((pool.submit(compile_all, self.spec, configurations, arch), share))
        return shares


def main(arguments: list[str] | None = None) -> int:
    """Search the cases asked for. Returns 1 if one has no kernel that runs."""
    parser = command_line("recurrent.search", __doc__, "recurrent_search.json")
    parser.add_argument("--hopeless", type=float, default=2.0, help="times the best, by the model (2.0)")
    parser.add_argument("--sample", type=int, default=40, help="hopeless ones that are timed nevertheless (40)")
    parser.add_argument("--jobs", type=int, default=cpu_count(), help="processes that compile (the number of cores)")
    parser.set_defaults(only=["lstm/"])
    options, cases = asked(parser, arguments, single_passes())
    if not cases:
        return 0
    results = begun(options)
    results["sources"] = {"search": source(options)}
    known = results["cases"]
    waiting = [case for case in cases if options.again or known.get(case.name, {}).get("status") != "ok"]
    deadline = time.monotonic() + options.total_seconds
    cache = Cache(FOLDER)
    spawn = multiprocessing.get_context("spawn")
    with DeviceContext() as device, ProcessPoolExecutor(options.jobs, spawn) as pool:
        model = microbenchmark.measure(device, cache)
        spaces = [Space.of(case, model, options) for case in waiting]
        spaces.sort(key=lambda space: len(space.trials))  # so that the GPU has work soon
        for space, shares in [(space, space.compile(pool, model.arch)) for space in spaces]:
            if time.monotonic() > deadline:
                break
            began = time.monotonic()
            with contextlib.closing(DeviceBench(space.spec, device, cache, space.case.steps)) as bench:
                trials = search(bench, shares)
            found = outcome(trials)
            seconds = time.monotonic() - began
            known[space.case.name] = {**asdict(space.case), **found, "space": space.size, "seconds": seconds}
            save(results, options.output)
            print(f"{space.case.name}: {found['status']}, {in_words(trials)} of {space.size}", flush=True)
        pool.shutdown(cancel_futures=True)
    return int(any(known.get(case.name, {}).get("status") == "failed" for case in waiting))


def source(options: argparse.Namespace) -> str:
    """What stands beside the table."""
    return (
        f"all that the model does not predict to be {options.hopeless:g} times slower than its best, and "
        f"{options.sample} of the others of each case, at random"
    )


def selected(predicted: Sequence[float], hopeless: float, sample: int) -> list[int]:
    """Places of what is timed."""
    limit = hopeless * min(predicted, default=0.0)
    near = [place for place, nanoseconds in enumerate(predicted) if nanoseconds <= limit]
    far = [place for place, nanoseconds in enumerate(predicted) if nanoseconds > limit]
    return near + sorted(random.Random(len(predicted)).sample(far, min(sample, len(far))))


def search(bench: SweepBench, shares: Sequence[tuple[Future[None], Ranked]]) -> Ranked:
    """Every trial with its time; those that are compared, timed when all others were."""
    trials: Ranked = {}
    for future, share in shares:
        future.result()
        trials |= {place: timed(bench, trial) for place, trial in share.items()}
    fastest = sorted(trials, key=lambda place: trials[place].measured)[:FINALISTS]
    for place in dict.fromkeys([*fastest, *sorted(trials)[:TOP]]):
        trials[place] = timed(bench, trials[place])
    return trials


def outcome(trials: Ranked) -> dict[str, Any]:
    """The trials, where benchmarks.recurrent writes its own, but short: there are thousands."""
    ran = any(trial.measured < NEVER for trial in trials.values())
    written = [short(place, trial) for place, trial in sorted(trials.items())]
    return {
        "status": "ok" if ran else "failed",
        "kernels": {PRECISION: {"kernels": [{"columns": COLUMNS, "trials": written}]}},
    }


def short(place: int, trial: Trial) -> str:
    """A trial in one line: its rank, nanoseconds predicted and measured, registers, bytes of local memory, its
    configuration's values as `COLUMNS` names them, and what went wrong."""
    measured = trial.measured if trial.error else round(trial.measured)
    numbers = (place, round(trial.predicted), measured, trial.registers, trial.local)
    return " ".join(map(str, (*numbers, *vars(trial.configuration).values(), trial.error[:200]))).strip()


def in_words(trials: Ranked) -> str:
    """One case in one line."""
    times = [trial.measured for _, trial in sorted(trials.items())]
    best, failed = min(times), [trial.error for trial in trials.values() if trial.error]
    if best == NEVER:
        return f"none of {len(times)} runs: {failed[0][:200]}"
    words = [
        f"{best / 1e6:.4f} ms",
        f"first {times[0] / best - 1:.1%}",
        f"first {TOP} {min(times[:TOP]) / best - 1:.1%}",
    ]
    words += [f"{len(failed)} failed: {failed[0][:200]}"] if failed else []
    return ", ".join([*words, f"{len(times)} timed"])


if __name__ == "__main__":
    sys.exit(main())
