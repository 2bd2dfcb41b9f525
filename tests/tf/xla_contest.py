"""The contest of a step's three runners, with times that a test gives."""

from __future__ import annotations

from typing import Any

import pytest

import tfmem
from tests.tf.stitched_steps import batch
from tfmem.steps import on_copies, xla_runner
from tfmem.timing.ab_timing import Times

FAST, FULL = tfmem.FusionOptions(tune="fast"), tfmem.FusionOptions(tune="full")
WINS, LOSES = Times(0.002, 0.001), Times(0.001, 0.002)


class Found:
    """In place of comparing: times of the step with regions against the step without, then of XLA's against these."""

    def __init__(self, *found: Times) -> None:
        self.left = list(found)

    def __call__(self) -> Found:
        return self

    def go_on(self, given: Any, stitched: Any, limit: float) -> Times:
        given(), stitched()
        return self.left.pop(0)


@pytest.fixture(name="compared")
def fixture_compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    def compared(*found: Times, with_largest: bool = True) -> Found:
        """`with_largest`: a step may have a maximum, as on a GPU, where XLA's kernels keep NaN."""
        times = Found(*found)
        if with_largest:
            monkeypatch.setattr(xla_runner, "loses", lambda _: "")
        monkeypatch.setattr(on_copies, "Slices", times)
        return times

    return compared


def step_in(step: Any) -> Any:
    (known,) = step._steps.values()
    return known[()]


def waited(step: Any, count: int) -> list[Any]:
    """Results of so many steps; each waits for what threads do meanwhile."""
    found = []
    for seed in range(count):
        found.append(step(*batch(seed)))
        step_in(step).wait()
    return found
