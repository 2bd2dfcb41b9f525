"""What planning of regions found, and the two variants of a step that are timed, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graph_passes.decision import FusionWhy
from graph_passes.device_report import milliseconds
from graph_passes.passes.fuse.plan import FusionPlan
from graph_passes.report import Report
from tfmem.capture.captured import Captured
from tfmem.capture.concrete_function import RestoredFunction
from tfmem.kernels.fusion_tuning import FusionKernels
from tfmem.steps.states import Settled
from tfmem.steps.trace import Trace
from tfmem.steps.variable_copies import Run
from tfmem.timing.ab_timing import Times


@dataclass(frozen=True)
class Later:
    """What is tuned once it is decided how a step runs.

    Attributes:
        captured: the step with its regions.
        plan: the regions.
        kernels: makes and times their kernels.
    """

    captured: Captured
    plan: FusionPlan
    kernels: FusionKernels


@dataclass(frozen=True)
class Before:
    """What was decided before kernels were tuned.

    Attributes:
        stays: the state that follows if other kernels are not faster.
        times: of the step without regions, and with the kernels that the model chose.
        key: in the cache, of the step without regions and with the tuned kernels.
    """

    stays: Settled
    times: Times
    key: str


@dataclass(frozen=True)
class Variants:
    """The two variants to choose between.

    Attributes:
        function: runs stitched.
        given, stitched: the variants that are timed: without regions and with them. Both have separate random streams.
        noticed: why tfmem cannot time the step; else empty.
        key: of the choice in the cache.
        later: what is tuned afterwards; None: nothing.
        before: what was decided before, if these are the tuned kernels.
        report: of the step with regions, where it has moves, too; None: it is that of the step without, but for fusion.
        kept: what has to live as long as it.
        xla: if the other variant is XLA's, what the report says of a step that XLA runs; else empty.
    """

    function: RestoredFunction
    given: Run
    stitched: Run
    noticed: str
    key: str
    later: Later | None = None
    before: Before | None = None
    report: Report | None = None
    kept: tuple[Any, ...] = ()
    xla: str = ""


@dataclass(frozen=True)
class Composition:
    """Regions of a step in which tensors are to move.

    Attributes:
        trace: the trace with its regions.
        done: what they are.
    """

    trace: Trace
    done: FusionPlan


@dataclass(frozen=True)
class Found:
    """The result of planning.

    Attributes:
        report: with the regions.
        variants: None where there is no region.
        why: why there is none.
        composed: regions of the step where tensors are to move as well, those first that should be the fastest.
        kernels: a digest of those regions of `variants` that have to be equal on all workers; "" where there are none.
    """

    report: Report
    variants: Variants | None = None
    why: str = FusionWhy.NOTHING
    composed: tuple[Composition, ...] = ()
    kernels: str = ""


@dataclass(frozen=True)
class TimedChoice:
    """How a choice was made, for the report.

    Attributes:
        times: seconds of both.
        how: how they were found, as text behind them.
    """

    times: Times
    how: str

    def __str__(self) -> str:
        times = f"{milliseconds(self.times.stitched)} a step against {milliseconds(self.times.given)}{self.how}"
        if self.times.is_faster:
            return f"stitched: {times}"
        unclear = self.times.stitched < self.times.given
        noise = f"; times are off by up to {milliseconds(self.times.noise)}" if unclear else ""
        return f"left unchanged: stitched it took {times}{noise}"
