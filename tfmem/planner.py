"""`tfmem.plan`: what a step needs and what a budget costs, before anything runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from custom_ops.load import load
from graph_passes.analysis.cost import device_costs as profiles
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.errors import GraphError, InfeasibleBudgetError, NoGradientError, OptionsError, UnknownShapeError
from graph_passes.names import suffix_of
from graph_passes.passes.offload.options import Effort
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.plan_file import CurvePoint, Plan, digests
from tfmem import __version__
from tfmem.api import make_engine
from tfmem.budgets import Budget, parse_budget
from tfmem.capture import concrete_function as functions
from tfmem.capture import keras_functions
from tfmem.device_names import plain_name
from tfmem.devices import Target, device_names
from tfmem.frontends.keras import CALLED_BY
from tfmem.frontends.sample import specs_of
from tfmem.options import Options, merged
from tfmem.runtime.device_memory import DeviceMemory
from tfmem.runtime.engine import Engine
from tfmem.runtime.measured_call import Meter
from tfmem.runtime.notices import Notices
from tfmem.runtime.progress import shown
from tfmem.runtime.settings import Settings
from tfmem.search_batch import largest_batch, largest_divided_batch
from tfmem.steps.given_plan import planned_moves
from tfmem.steps.job import Job
from tfmem.steps.known_profiles import BatchProfiles, KnownProfiles
from tfmem.steps.trace import Trace

POINTS = 7  # of the curve


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
        raise OptionsError("the largest batch is searched for a budget, from a batch that is a number; give both")
    whole = most = largest_batch(lambda size: planner.planned(x, size, curve=False, splits=False), batch)
    if planner.splits:
        most = largest_divided_batch(lambda size: planner.planned(x, size, curve=False), whole)
    return replace(found, max_batch=most, max_batch_whole=whole)


@dataclass(frozen=True, eq=False)
class ProfileMemory(DeviceMemory):
    """The memory of a device that is not here: all of it is free."""

    @property
    def counts(self) -> bool:
        """As a GPU's allocator does."""
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
    def splits(self) -> bool:
        """Whether parts of a step may run on pieces of the batch."""
        return self.engine.settings.options.offload.split != "never"

    def planned(self, x: Any, batch: Any, curve: bool, splits: bool = True) -> Plan:
        """The plan of a step; see `plan`. Without `splits` no part runs on pieces of the batch."""
        subject, concrete, shapes = traced(x, batch)
        engine = self.engine.under(replace(self.engine.settings.shaped(shapes), label=subject))
        sized = f" for a batch of {batch}" if isinstance(batch, int) else ""
        with shown(engine.settings.options.progress, lambda: f"planning {subject}{sized}"):
            try:
                return _Planned(engine, concrete, self.here).plan(curve, splits and self.splits)
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
        step = trace.step
        if step.shared:
            raise GraphError(
                f"'{trace.name}' runs on several devices, which tfmem.plan does not plan ({step.shared}); call "
                "tfmem.optimize, whose report shows each device"
            )
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

    def plan(self, curve: bool, splits: bool) -> Plan:
        """The plan for the engine's budget."""
        engine, timeline, step = self._engine, self._timeline, self._trace.step
        limit = timeline.peak if engine.settings.budget is None else engine.settings.budget
        unlimited = self._made(timeline, timeline.peak)
        assert unlimited is not None
        assert unlimited.verdict is not None
        points = self._curve(unlimited) if curve else ()
        try:
            found, refused = self._trace.plan(timeline, limit, timed=self._timed), None
        except InfeasibleBudgetError as error:
            found, refused = None, error
            why = self._trace.divide(limit) if splits else None
            if why is not None:
                self._notes.append(f"no parts can be split along the batch: {why}")
            elif splits:
                timeline = self._trace.step.timeline(engine.estimate(workspace=False))
                found, refused = self._trace.plan(timeline, limit), None
                seconds = found.after.seconds
                points = tuple(replace(p, seconds=seconds) if p.budget == limit else p for p in points)
        verdict = unlimited.verdict if found is None or found.verdict is None else found.verdict
        smallest = verdict.smallest_budget if refused is None else max(verdict.smallest_budget, refused.least)
        report = None if found is None else self._trace.describe(timeline, found, (), given=not found.moves)
        if report is not None:
            suffix = suffix_of(self._trace.name.rpartition(".")[0], (name for name, _ in report.curve_before))
            report = replace(report, scope_suffix=suffix)
        return Plan(
            subject=self._trace.name,
            device=f"{engine.settings.target.plain_name}, {engine.settings.target.description}",
            budget=engine.settings.budget,
            feasible=found is not None,
            fits=unlimited.before.peak <= limit,
            peak_before=unlimited.before.peak,
            peak=timeline.peak if found is None else found.after.peak,
            seconds_before=unlimited.before.seconds,
            seconds=unlimited.before.seconds if found is None else found.after.seconds,
            least=verdict.least,
            smallest_budget=smallest,
            op=verdict.op if refused is None else refused.op or verdict.op,
            timed=self._timed,
            moves=() if found is None else planned_moves(found.moves, timeline),
            split=self._trace.split is not None,
            curve=points,
            inputs=self._trace.input_specs,
            ops=digests(step.graph, step.order),
            report=report,
            notes=tuple(self._notes),
            version=__version__,
        )

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

    def _made(self, timeline: Timeline, budget: int) -> OffloadPlan | None:
        try:
            return self._trace.plan(timeline, budget, timed=self._timed, effort=Effort.ONCE)
        except InfeasibleBudgetError:
            return None


def traced(x: Any, batch: Any) -> tuple[str, Any, dict[str, tuple[int, ...]]]:
    """What users call a step, its trace, and shapes of inputs that it leaves open.

    Raises:
        GraphError: `x` is nothing that can be traced, or `batch` is missing.
    """
    if isinstance(x, str | os.PathLike):
        return _of_saved_model(Path(x), batch)
    if keras_functions.is_keras_model(x):
        keras_functions.require_trainable(x)
        step = keras_functions.keras_function(x, "train").step
        label = f"{x.name}.{CALLED_BY['train']}"
        return label, step.get_concrete_function(specs_of(x, batch)), {}
    if isinstance(x, functions.ConcreteFunction):
        return "", x, _sized(x, batch)
    if hasattr(x, "get_concrete_function"):
        return _of_function(x, batch)
    raise GraphError(
        f"cannot plan a {type(x).__name__}; expected a compiled Keras model, a tf.function, a ConcreteFunction or the "
        "path of a SavedModel"
    )


def _of_function(x: Any, batch: Any) -> tuple[str, Any, dict[str, tuple[int, ...]]]:
    name = getattr(x.python_function, "__name__", "")
    if batch is None or isinstance(batch, int):
        if x.input_signature is None:
            raise GraphError(f"`{name}` has no input signature; give batch=(argument, ...), tensors or tf.TensorSpec")
        concrete = x.get_concrete_function()
        return name, concrete, _sized(concrete, batch)
    given = batch if isinstance(batch, tuple) else (batch,)
    concrete = x.get_concrete_function(*given)
    shapes = [value.shape for value in tf.nest.flatten(given) if hasattr(value, "shape")]
    inputs = _inputs(concrete)
    if len(inputs) != len(shapes):
        return name, concrete, {}
    opened = {
        t.op.name: tuple(shape) for t, shape in zip(inputs, shapes, strict=True) if not t.shape.is_fully_defined()
    }
    return name, concrete, {input_name: shape for input_name, shape in opened.items() if None not in shape}


def _sized(concrete: Any, batch: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs of a trace that has open dimensions: each is the batch."""
    opened = [t for t in _inputs(concrete) if t.shape.rank is not None and not t.shape.is_fully_defined()]
    if not opened or batch is None:
        return {}
    if not isinstance(batch, int):
        raise GraphError(f"batch={batch!r}: expected a number, which replaces the open dimensions of the inputs")
    return {t.op.name: tuple(batch if size is None else size for size in t.shape) for t in opened}


def _inputs(concrete: Any) -> list[tf.Tensor]:
    """The tensors that a caller gives."""
    captured = {id(inner) for _, inner in concrete.graph.captures}
    return [tensor for tensor in concrete.inputs if id(tensor) not in captured]


def _of_saved_model(path: Path, batch: Any) -> tuple[str, Any, dict[str, tuple[int, ...]]]:
    if not (path / "saved_model.pb").is_file():
        raise GraphError(f"'{path}' is not a SavedModel, it has no saved_model.pb; pass the directory with it")
    model = tf.saved_model.load(str(path))
    if not model.signatures:
        raise GraphError(f"the SavedModel in '{path}' has no signature to plan; save it with signatures")
    name = "train" if "train" in model.signatures else next(iter(model.signatures))
    concrete = model.signatures[name]
    concrete.graph.saved_model = model  # else its variables are gone with the model
    return f"{path.name}.{name}", concrete, _sized(concrete, batch)


def _within(engine: Engine, budget: Budget) -> Engine:
    """The engine with a budget: of the options, or the one that is given."""
    if budget is None:
        return engine if engine.settings.must_fit else engine.under(replace(engine.settings, budget=None))
    limit = parse_budget(budget, engine.settings.target.memory)
    return engine.under(replace(engine.settings, budget=limit, must_fit=True))
