"""Rows in which each option of the search for a kernel wins.

`benchmarks.recurrent.tables` writes the table; `tests/pure/test_recurrent_options.py` fails where the search has a
value that no kernel of the results has. Replicas are searched on GPUs without clusters only, of which there are no
results; threads that fill warps (`_in_registers` of custom_ops/recurrent/search/space.py) follow from the hidden
size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.offload.tables import table
from benchmarks.recurrent.cases import Case
from benchmarks.recurrent.choice import trials_of
from benchmarks.recurrent.kernels import specs_of
from custom_ops.machine import Machine
from custom_ops.recurrent.search.space import enumerate_configurations
from custom_ops.recurrent.spec import Configuration

Values = Mapping[str, Any]  # of a configuration, by its fields
OPTIONS: Mapping[str, Callable[[Values], Any]] = {
    "exchange": lambda found: found["exchange"],
    "CTAs of a cluster": lambda found: found["ctas"] if found["exchange"] == "cluster" else None,
    "slices": lambda found: found["slices"],
    "product": lambda found: found["product"],
    "lanes": lambda found: found["lanes"],
    "replicated": lambda found: found["replicated"],
}
CASES = [Case("lstm", 64, 1), Case("lstm", 256, 20), Case("canonical_gru", 512, 64), Case("canonical_gru", 1024, 20)]
CASES += [Case("lstm", 2048, 64), Case("lstm", 512, 20, training=True)]


def won(results: Mapping[str, Any]) -> Iterator[tuple[str, Values]]:
    """The kernels that the tuner chose, with the row that each is of."""
    for name, case in results["cases"].items():
        for precision, chosen in case.get("kernels", {}).items():
            for kernel in chosen["kernels"]:
                yield f"{name}, {precision}", kernel["configuration"]


def searched(machine: Machine) -> dict[str, set[Any]]:
    """What the search has for `CASES`, option by option."""
    found: dict[str, set[Any]] = {option: set() for option in OPTIONS}
    for case in CASES:
        for spec in specs_of(case, "highest"):
            for configuration, _ in enumerate_configurations(machine, spec, case.batch):
                for option, value_of in OPTIONS.items():
                    found[option].add(value_of(vars(configuration)))
    found["CTAs of a cluster"].discard(None)
    return found


def written(results: Mapping[str, Any], search: Mapping[str, Any] | None) -> list[str]:
    """The table: each value that won, how often, and where it gains most by a search, or else one of its rows."""
    kernels = list(won(results))
    cases = {name: trials_of(case) for name, case in (search["cases"] if search else {}).items()}
    rows = []
    for option, value_of in OPTIONS.items():
        chosen: dict[Any, list[str]] = {}
        for name, values in kernels:
            chosen.setdefault(value_of(values), []).append(name)
        for value, names in sorted(chosen.items(), key=lambda item: str(item[0]).rjust(9)):
            if value is not None and len(chosen) > 1:
                gains = [(gain(trials, value_of, value), name) for name, trials in cases.items()]
                best, where = max(gains, default=(0.0, ""))
                example = (f"`{where}`", f"{best:.2f}x") if best > 1 else (f"`{names[0]}`", "-")
                rows.append((option, str(value), f"{len(names)} of {len(kernels)}", *example))
    header = ("option", "value", "chosen", "where it gains most in a search, or a row of it", "than without it")
    return [table("### Where each option of the search wins", header, rows)] if rows else []


def gain(trials: Mapping[Configuration, float], value_of: Callable[[Values], Any], value: Any) -> float:
    """How many times as long the fastest takes that does without; 0 where nothing has it or nothing does without."""
    times = {True: [0.0], False: [0.0]}
    for configuration, time in trials.items():
        times[value_of(vars(configuration)) == value].append(time)
    if not times[True][1:] or not times[False][1:]:
        return 0.0
    return min(times[False][1:]) / min(times[True][1:])
