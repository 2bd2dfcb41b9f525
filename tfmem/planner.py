"""`tfmem.plan`: what a step needs and what a budget costs, before anything runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from custom_ops.load import load
from graph_passes.analysis.cost import device_costs as profiles
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.device_report import duration
from graph_passes.errors import GraphError, InfeasibleBudgetError, NoGradientError, OptionsError, UnknownShapeError
from graph_passes.names import suffix_of
from graph_passes.passes.offload.options import Effort
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.plan_file import CurvePoint, Plan, digests
from graph_passes.splitting import CLEARLY, FASTER
from tfmem import __version__
from tfmem.api import make_engine
from tfmem.budgets import Budget, parse_budget
from tfmem.capture import concrete_function as functions
from tfmem.device_names import plain_name
from tfmem.devices import Target, device_names
from tfmem.options import Options, merged
from tfmem.planned_traces import traced
from tfmem.runtime.device_memory import DeviceMemory
from tfmem.runtime.engine import Engine
from tfmem.runtime.measured_call import Meter
from tfmem.runtime.notices import Notices
from tfmem.runtime.progress import shown
from tfmem.runtime.settings import Settings
from tfmem.search_batch import largest_batch, largest_divided_batch
from tfmem.steps import dividing
from tfmem.steps.given_plan import planned_moves
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import BatchProfiles, KnownProfiles
from tfmem.steps.planning import cuts_loops
from tfmem.steps.trace import Trace

POINTS = 7  # of the curve

# Where parts of a step run on pieces of the batch; each has those before it.
Splits = Literal["never", "needed", "faster"]


def plan(
    x: Any,
    batch: Any = None,
    *,
    budget: Budget = None,
    device: str = "",
    curve: bool = True,
    max_batch: bool = False,
    options: Options | None = None,
) -> Plan:
    """Say what a training step needs and what a budget costs, before anything runs.

    The step is traced and not run. Op times are estimates, unless an earlier run on this device measured them.

    Args:
        x: a compiled Keras model, a `tf.function`, a `ConcreteFunction`, or the path of a SavedModel.
        batch: what one step takes. For a Keras model a number, or `(x, y)` of arrays, tensors or `tf.TensorSpec`; for a
            `tf.function` a tuple of its arguments, or a number that replaces open dimensions of its input signature.
        budget: bytes, "10GiB", or a fraction of the device's memory; None plans nothing, and says what the step needs.
        device: "" or a device of this process ("GPU:0"), or the name of a profile: "h100", "v100".
        curve: whether to predict the step's time for several budgets.
        max_batch: whether to search the largest batch for the budget, first with nothing split, then with parts of the
            step split along the batch as `optimize` would; `batch` must be a number. The second takes many times as
            long, and `OffloadOptions(split="never")` leaves it out.
        options: see `tfmem.optimize`.

    Returns:
        The plan. It prints as text, `to_json` saves it, and `tfmem.optimize(x, plan=...)` carries it out.

    Raises:
        GraphError: the step cannot be traced or read.
        OptionsError: there is no such device or profile.
        InvalidBudgetError: the budget is no size, or larger than the device's memory.
    """
    planner = Planner.of(device, merged(options, None, None), budget)
    found = planner.planned(x, batch, curve)
    if not max_batch:
        return found
    if not isinstance(batch, int) or found.budget is None:
        raise OptionsError(
            "max_batch is searched for a budget, from a batch that is a number; "
            "pass budget (--memory-budget) and batch (--batch)"
        )
    whole = most = largest_batch(lambda size: planner.planned(x, size, curve=False, splits="never"), batch)
    if planner.splits != "never":
        most = largest_divided_batch(lambda size: planner.planned(x, size, curve=False, splits="needed"), whole)
    return replace(found, max_batch=most, max_batch_whole=whole)


@dataclass(frozen=True, eq=False)
class ProfileMemory(DeviceMemory):
    """The memory of a device that is not here: all of it is free."""

    @property
    def counts(self) -> bool:
        """True: a GPU's allocator counts."""
        return True

    def _in_use(self) -> tuple[int, bool]:
        return 0, True


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans steps for one device and budget.

    Attributes:
        engine: options on a device, which may be a profile.
        here: whether the device is one of this process.
    """

    engine: Engine
    here: bool

    @classmethod
    def of(cls, device: str, options: Options, budget: Budget) -> Planner:
        """A planner for a device of this process, or for a profile. Raises what `plan` does."""
        name = device.lower()
        if name not in profiles.profiles() or name == "cpu":
            here = device_names()
            if device and name != "cpu" and plain_name(device) not in here:
                known = ", ".join(each for each in profiles.profiles() if each not in ("cpu", "unit"))
                raise OptionsError(
                    f"device={device!r}: there is no such device; this process has {', '.join(here)}, and there are "
                    f"profiles of {known}"
                )
            options = replace(options, device=device if name != "cpu" else "CPU:0" if device else options.device)
            engine = make_engine(options, called=True)
            return cls(_within(engine, budget), here=True)
        ops, profile = load(), profiles.load(name)
        target = Target("/device:GPU:0", f"{name} (profile)", profile.memory or 16 << 30, profile)
        engine = Engine(
            settings=Settings.of(replace(options, device="", passes=("offload",)), target, counts=True),
            library=ops,
            memory=ProfileMemory(ops, target),
            meter=Meter(ops, target),
            link=Link(profile.offload, profile.prefetch),
            notices=Notices(),
        )
        return cls(_within(engine, budget), here=False)

    @property
    def splits(self) -> Splits:
        """Where parts of a step run on pieces of the batch, by the options and the device."""
        if self.engine.settings.options.offload.split == "never":
            return "never"
        return "faster" if self.engine.settings.splits_by_time else "needed"

    def planned(self, x: Any, batch: Any, curve: bool, splits: Splits = "faster") -> Plan:
        """The plan of a step; see `plan`. Parts run on pieces of the batch where both `splits` and the options say so;
        `optimize` measures no ConcreteFunction and no SavedModel, so it splits none of these because that is faster."""
        subject, concrete, shapes = traced(x, batch)
        unmeasured = isinstance(x, str | os.PathLike | functions.ConcreteFunction)
        splits = min(splits, self.splits, "needed" if unmeasured else "faster", key=get_args(Splits).index)
        engine = self.engine.under(replace(self.engine.settings.shaped(shapes), label=subject))
        sized = f" for a batch of {batch}" if isinstance(batch, int) else ""
        with shown(engine.settings.options.progress, lambda: f"planning {subject}{sized}"):
            try:
                return _Planned(engine, concrete, self.here).plan(curve, splits)
            except (UnknownShapeError, NoGradientError) as error:
                if batch is not None:
                    raise
                how = "give one (`--batch` on the command line)"
                raise GraphError(f"`{subject}` may leave its batch open: {how}; {error}") from error


class _Planned:
    def __init__(self, engine: Engine, concrete: Any, here: bool) -> None:
        self._engine = engine
        self._trace = trace = Trace(concrete, engine)
        self._notes: list[str] = []
        layers = trace.replaced_layers() if here else None
        if layers is not None:
            trace.use_layers(*layers)
        trace.read()
        step, budget = trace.step, engine.settings.budget
        if step.shared:
            raise GraphError(
                f"'{trace.name}' runs on several devices, which tfmem.plan does not plan ({step.shared}); call "
                "tfmem.optimize, whose report shows each device"
            )
        if budget is not None and cuts_loops(engine, trace, budget):
            step = trace.step
            self._notes.append("loops run in pieces")
        self._digests = digests(step.graph, step.order)
        known = KnownProfiles(engine, trace, BatchProfiles()).find() if here else None
        if known is None:
            self._timeline = step.timeline(
                engine.estimate(workspace=not engine.settings.target.is_gpu or engine.settings.budget is None)
            )
        else:
            self._timeline = Job(engine, trace, BatchProfiles(), engine.settings.budget, 0).timeline(known[0])
        self._timed = known is not None
        if not here:
            self._notes.append("the graph is the one for this machine: a GPU may run another layout and other fusions")

    def plan(self, curve: bool, splits: Splits) -> Plan:
        """The plan for the engine's budget."""
        engine = self._engine
        limit = self._timeline.peak if engine.settings.budget is None else engine.settings.budget
        unlimited = self._made(self._timeline, self._timeline.peak)
        assert unlimited is not None
        assert unlimited.verdict is not None
        points = self._curve(unlimited) if curve else ()
        found, refused = self._whole(limit)
        seconds = unlimited.before.seconds if found is None else found.after.seconds
        divided = self._divided(limit, unlimited, found, splits)
        if divided is not None:
            rate = self._measured(unlimited)
            seconds = divided.after.seconds * rate
            if found is None and points and divided.verdict is not None:
                points = self._in_pieces(points, divided.verdict.smallest_budget, rate)
            points = _with_split(points, limit, seconds, larger=splits == "faster")
            found, refused = divided, None
        verdict = unlimited.verdict if found is None or found.verdict is None else found.verdict
        smallest = verdict.smallest_budget if refused is None else max(verdict.smallest_budget, refused.least)
        trace, timeline = self._trace, self._timeline
        report = None if found is None else trace.describe(timeline, found, (), given=not found.moves)
        if report is not None:
            suffix = suffix_of(trace.name.rpartition(".")[0], report.named_ops())
            report = replace(report, scope_suffix=suffix)
        return Plan(
            subject=trace.name,
            device=f"{engine.settings.target.plain_name}, {engine.settings.target.description}",
            budget=engine.settings.budget,
            feasible=found is not None,
            fits=unlimited.before.peak <= limit,
            peak_before=unlimited.before.peak,
            peak=timeline.peak if found is None else found.after.peak,
            seconds_before=unlimited.before.seconds,
            seconds=seconds,
            least=verdict.least if divided is None else None,
            smallest_budget=smallest,
            op=verdict.op if refused is None else refused.op or verdict.op,
            timed=self._timed,
            moves=() if found is None else planned_moves(found.moves, timeline),
            split=trace.split is not None,
            curve=points,
            inputs=trace.input_specs,
            ops=self._digests,
            report=report,
            notes=tuple(self._notes),
            version=__version__,
            memory=engine.settings.target.memory,
        )

    def _whole(self, limit: int) -> tuple[OffloadPlan | None, InfeasibleBudgetError | None]:
        """The plan with nothing split, or why there is none."""
        try:
            return self._trace.plan(self._timeline, limit, timed=self._timed), None
        except InfeasibleBudgetError as error:
            return None, error

    def _divided(
        self, limit: int, unlimited: OffloadPlan, whole: OffloadPlan | None, splits: Splits
    ) -> OffloadPlan | None:
        """The plan with parts of the step on pieces of the batch, where they would run so; the trace is divided then.

        Args:
            limit: bytes.
            unlimited: the step without a budget.
            whole: the plan with nothing split; None if none meets the budget.
            splits: where parts may run on pieces.
        """
        engine, rate = self._engine, 0.0
        if whole is not None:
            rate = unlimited.before.seconds / whole.after.seconds
            if splits != "faster" or not whole.moves or not dividing.may_be_faster(engine.settings, self._trace, rate):
                return None
        elif splits == "never":
            return None
        trace = self._trace.variant(self._trace.optimized(), engine)
        trace.read()
        refused = trace.divide(limit, rate)
        if refused is not None:
            if whole is None:
                self._notes.append(f"no parts can be split along the batch: {refused}")
            return None
        timeline = trace.step.timeline(engine.estimate(workspace=False))
        found = trace.plan(timeline, limit)
        if whole is not None:
            took = duration(round(whole.after.seconds * 1e9))
            self._notes.append(
                f"with nothing split the step is predicted to take {took}; the first calls measure both, and the split "
                f"stays if it takes at most {FASTER} of that"
            )
        self._trace, self._timeline = trace, timeline
        return found

    def _measured(self, unlimited: OffloadPlan) -> float:
        """What the step was measured to take, by its estimate, from which a division was planned."""
        split = self._trace.split
        return unlimited.before.seconds / split.seconds_before if split and split.seconds_before else 1.0

    def _curve(self, unlimited: OffloadPlan) -> tuple[CurvePoint, ...]:
        """Predicted time over budgets from the smallest of copies and recomputation to what the step needs."""
        peak = unlimited.before.peak
        smallest = peak if unlimited.verdict is None else unlimited.verdict.smallest_budget
        if smallest >= peak:
            return (CurvePoint(peak, unlimited.before.seconds),)
        budgets = {int(value) for value in np.linspace(smallest, peak, POINTS)}
        if self._engine.settings.budget is not None and self._engine.settings.budget < peak:
            budgets.add(self._engine.settings.budget)
        points = []
        for budget in sorted(budgets):
            found = self._made(self._timeline, budget)
            points.append(CurvePoint(budget, None if found is None else found.after.seconds))
        return tuple(points)

    def _in_pieces(self, points: tuple[CurvePoint, ...], smallest: int, rate: float) -> tuple[CurvePoint, ...]:
        """The curve that goes on, in the pieces of this plan, to the smallest budget that they meet.

        Args:
            points: with nothing split.
            smallest: bytes.
            rate: see `_measured`.
        """
        met = [point for point in points if point.seconds is not None]
        first, last = min(smallest, met[0].budget), met[-1].budget
        apart = (last - first) / (2 * POINTS)  # points nearer to each other show nothing
        found = {point.budget: point for point in points if point.seconds is None}
        for budget in map(int, np.linspace(first, last, POINTS)):
            if budget < met[0].budget and budget not in found and (plan := self._made(self._timeline, budget)):
                found[budget] = CurvePoint(budget, plan.after.seconds * rate, split=True)
        for point in met:
            ends = point in (met[0], met[-1]) or point.budget == self._engine.settings.budget
            if ends or point.budget - max(found, default=0) >= apart:
                found[point.budget] = point
        return tuple(found[budget] for budget in sorted(found))

    def _made(self, timeline: Timeline, budget: int) -> OffloadPlan | None:
        try:
            return self._trace.plan(timeline, budget, timed=self._timed, effort=Effort.ONCE)
        except InfeasibleBudgetError:
            return None


def _with_split(points: tuple[CurvePoint, ...], limit: int, seconds: float, larger: bool) -> tuple[CurvePoint, ...]:
    """The curve with a split that meets `limit`; it meets a larger budget as well, where it runs if `larger`."""

    def runs(point: CurvePoint) -> bool:
        clearly = point.seconds is None or seconds <= CLEARLY * point.seconds
        better = clearly if larger else point.split and seconds < (point.seconds or 0.0)
        return point.budget == limit or (point.budget > limit and better)

    return tuple(replace(point, seconds=seconds, split=True) if runs(point) else point for point in points)


def _within(engine: Engine, budget: Budget) -> Engine:
    """The engine with a budget: of the options, or the one that is given."""
    if budget is None:
        return engine if engine.settings.must_fit else engine.under(replace(engine.settings, budget=None))
    limit = parse_budget(budget, engine.settings.target.memory)
    return engine.under(replace(engine.settings, budget=limit, must_fit=True))
