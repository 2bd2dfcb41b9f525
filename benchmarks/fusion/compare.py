"""Ratios of what `benchmarks.fusion` measured; None where one of the two is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp, log
from typing import Any

from benchmarks.fusion.cases import COPY, OF_XLA, RECURRENT

BOUNDS = {True: 1e-4, False: 1e-5}  # relative: of the loss after all steps of training, of the outputs of inference
LEFT = ("left as it ", "left unchanged")  # how older and newer reports begin on a step that runs as given

Outcome = Mapping[str, Any]


def value(outcome: Outcome, system: str | None, key: str) -> Any:
    """A system's value under `key`; None if it has none."""
    return outcome.get("systems", {}).get(system, {}).get(key)


def best_xla(outcome: Outcome) -> str | None:
    """The faster of XLA's modes that ran."""
    ran = {name: found for name in OF_XLA if (found := value(outcome, name, "ms"))}
    return min(ran, key=ran.__getitem__) if ran else None


def divided(above: float | None, below: float | None) -> float | None:
    """The quotient; None if a number is missing or zero."""
    return above / below if above and below else None


def over_graph(outcome: Outcome, system: str | None) -> float | None:
    """How many times as fast as TensorFlow's executor."""
    return divided(value(outcome, "graph", "ms"), value(outcome, system, "ms"))


def best_xla_over_graph(outcome: Outcome) -> float | None:
    """How many times as fast as the executor XLA's faster mode is."""
    return over_graph(outcome, best_xla(outcome))


def over_xla(outcome: Outcome, system: str | None = "tfmem") -> float | None:
    """How many times as fast as XLA's faster mode a system is."""
    return divided(value(outcome, best_xla(outcome), "ms"), value(outcome, system, "ms"))


def fusion_alone(workload: str) -> str:
    """The system that is the fusion pass alone: all of tfmem, but where recurrent kernels run."""
    return "fusion" if workload in RECURRENT else "tfmem"


def busy_over_xla(outcome: Outcome, system: str) -> float | None:
    """The time in which the GPU is busy for a step, over that of XLA's faster mode: the paper's Figure 7."""
    return divided(value(outcome, system, "busy_ms"), value(outcome, best_xla(outcome), "busy_ms"))


def given_runs(outcome: Outcome, system: str) -> bool:
    """Whether the system runs the step as given, since stitched it was no faster. Older results say so as a text."""
    stitched = value(outcome, system, "stitched")
    return (value(outcome, system, "fusion") or "").startswith(LEFT) if stitched is None else not stitched


def fewer(outcome: Outcome, system: str | None) -> float | None:
    """How many times fewer kernels than TensorFlow's executor."""
    return divided(value(outcome, "graph", "kernels"), value(outcome, system, "kernels"))


def of_copy(outcome: Outcome, system: str) -> float | None:
    """The bytes that have to be moved, in the time that they took, over the same of a copy."""
    mine = divided(outcome.get("moved"), value(outcome, system, "ms"))
    return divided(mine, divided(value(outcome, COPY, "moved"), value(outcome, COPY, "ms")))


def mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of those that there are."""
    found = [each for each in values if each]
    return exp(sum(map(log, found)) / len(found)) if found else None


def wrong(outcome: Outcome) -> bool:
    """Whether tfmem strays from TensorFlow; on a GPU with TF32 products may round differently, and nothing is said."""
    difference = value(outcome, "tfmem", "difference")
    exact = not outcome.get("tf32") or outcome.get("device") == "CPU"
    return exact and difference is not None and not difference <= BOUNDS[bool(outcome.get("training"))]
