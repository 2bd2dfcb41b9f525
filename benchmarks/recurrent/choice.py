"""What the model as it is now makes of the kernels that a search has timed, and what the tuner would choose.

    python -m benchmarks.recurrent.choice benchmarks/results/recurrent_search_h200.json

For each case: how much slower the model's first is than the fastest, the fastest of its first five, and the one that
the tuner chooses by the times that are on record. The model's parameters are those of
custom_ops/devices."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.recurrent.cases import TOP, Case
from benchmarks.recurrent.kernels import specs_of
from benchmarks.runs import command_line, existing
from custom_ops.errors import KernelError
from custom_ops.jit.cache import Cache
from custom_ops.jit.image import KernelImage
from custom_ops.recurrent.gpu_program import ANY_BATCH, RecurrentProgram
from custom_ops.recurrent.search.ranking import in_order, predict
from custom_ops.recurrent.search.tune import SweepBench, tune
from custom_ops.recurrent.spec import Configuration
from custom_ops.timing.tuner import MeasuredKernel
from graph_passes.analysis.cost import device_costs

PRECISION = "highest"
NUMBERS = 5  # of a trial, in front of its configuration


class Recorded(SweepBench):
    """A bench on which every kernel takes what is on record."""

    def __init__(self, times: Mapping[Configuration, float]) -> None:
        self.identity = "recorded"
        self._times = times

    def compile(self, configurations: Sequence[Configuration]) -> None:
        """Nothing to do."""

    def build(self, configuration: Configuration, max_batch: int = ANY_BATCH) -> RecurrentProgram:
        """A program without code."""
        return RecurrentProgram(KernelImage(0, "", configuration.threads, b""), max_batch=max_batch)

    def measure(self, configuration: Configuration, point: int) -> MeasuredKernel:
        """Raises KernelError if it failed."""
        if configuration not in self._times:
            raise KernelError("it failed when it was timed")
        return MeasuredKernel(self._times[configuration], 0, 0)


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each case, and the means."""
    parser = command_line("recurrent.choice", __doc__)
    parser.add_argument("results", type=Path, help="what benchmarks.recurrent.search wrote")
    parser.add_argument("--machine", default="h200", help="of custom_ops/devices (h200)")
    options = parser.parse_args(arguments)
    cases = existing(parser, options.results)["cases"]
    found = {name: slower(case, options.machine) for name, case in cases.items()}
    print(f"{'':24}{'first':>8}{'first ' + str(TOP):>9}{'tuner':>8}   slower than the fastest")
    for name, shares in found.items():
        print(line(name, shares))
    columns = list(zip(*found.values(), strict=True))
    print(line("on average", [sum(column) / len(column) for column in columns]))
    print(line("at most", [max(column) for column in columns]))
    return 0


def line(name: str, shares: Sequence[float]) -> str:
    return f"{name:24}{shares[0]:8.1%}{shares[1]:9.1%}{shares[2]:8.1%}"


def slower(case: Mapping[str, Any], machine: str) -> tuple[float, float, float]:
    """How much slower than the fastest, in one case: the model's first, the best of its five, the tuner's choice."""
    asked = Case(**{field.name: case[field.name] for field in fields(Case)})
    (spec,) = specs_of(asked, PRECISION)
    times = {configuration: time for configuration, time in trials_of(case).items() if time < float("inf")}
    model = device_costs.machine(machine)
    ranked = in_order([predict(model, spec, each, asked.batch) for each in times], asked.steps)
    best = min(times.values())
    order = [times[each.configuration] for each in ranked]
    candidates = [(each.configuration, each.nanoseconds(asked.steps)) for each in ranked]
    with tempfile.TemporaryDirectory() as folder:
        bench, cache = Recorded(times), Cache(Path(folder))
        tuned = tune(bench, lambda _: candidates, cache, (asked.batch,), TOP, progress=False)
    return order[0] / best - 1, min(order[:TOP]) / best - 1, tuned.chosen[0].measured / best - 1


def trials_of(case: Mapping[str, Any]) -> dict[Configuration, float]:
    """The nanoseconds of each configuration, as `search.short` wrote them; without those that no kernel has
    any more: rows in several passes, which were 1.3 to 3.4 times slower in each case that has them, and replicas that
    multiply with all weights, which were slower than partial sums in each."""
    (kernel,) = case["kernels"][PRECISION]["kernels"]
    found = {}
    for trial in kernel["trials"]:
        words = trial.split()
        values: dict[str, Any] = dict(zip(kernel["columns"].split(), words[NUMBERS:], strict=False))
        whole_replicas = values.pop("partial_sums", values["replicated"]) != values["replicated"]
        if values.pop("passes", "1") != "1" or whole_replicas:
            continue
        for field in fields(Configuration):
            default, word = field.default, values[field.name]
            values[field.name] = word == "True" if isinstance(default, bool) else type(default)(word)
        found[Configuration(**values)] = float(words[2])
    return found


if __name__ == "__main__":
    sys.exit(main())
