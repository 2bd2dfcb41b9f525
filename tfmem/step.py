"""One traced training step under a memory budget: estimated, observed, planned, confirmed.

    call 1   WARM      everything that can move moves: cuDNN chooses its algorithms with memory to spare
    call 2   OBSERVE   the same, with probes: op times, workspace, what else is in memory
    call 3   CONFIRM   the plan, with probes: does the allocator's peak meet the budget? if not, plan again
    then     READY     the plan

Every call computes the same step, so training starts with the first. A step that fits by estimate is left as it was.
"""

from __future__ import annotations

import enum
import itertools
import threading
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from custom_ops.errors import TfmemError
from custom_ops.load import Library
from graph_passes import pipeline, serde
from graph_passes.analysis.simulate import Link
from graph_passes.analysis.timeline import Timeline
from graph_passes.cost.model import CostModel, Measured, Roofline
from graph_passes.cost.observe import Observation, Sample, observe
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.ir import parse_input
from graph_passes.offload.apply import Probing
from graph_passes.offload.plan import OffloadPlan
from graph_passes.report import Report
from tfmem.capture.captured import Captured
from tfmem.capture.function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.config import Options, parse_budget
from tfmem.devices import Target, memory
from tfmem.host import require_room
from tfmem.profile import ProfileCache, fingerprint

CUDNN_WORKSPACE_LIMIT = 4 << 30  # TensorFlow's default, TF_CUDNN_WORKSPACE_LIMIT_IN_MB
SURELY_FITS = 0.75  # a step estimated at less than this share of the budget is not worth observing
REPLANS = 3
_runs = itertools.count(1)


class Stage(enum.Enum):
    """Where a step is on its way; see the module's docstring."""

    WARM = enum.auto()
    OBSERVE = enum.auto()
    CONFIRM = enum.auto()
    READY = enum.auto()


@dataclass(frozen=True, eq=False)
class Engine:
    """What every step of one optimised object shares."""

    options: Options
    library: Library
    target: Target
    link: Link

    @property
    def budget(self) -> int | None:
        """Bytes; None for no limit."""
        budget = parse_budget(self.options.memory_budget, self.target.memory)
        return self.target.memory if budget is None and self.target.is_gpu else budget

    def require_budget(self) -> None:
        """Raise InvalidBudgetError if the budget is not one for this device."""
        parse_budget(self.options.memory_budget, self.target.memory)

    def unlimited(self, graph: str) -> Report:
        """The report of a step that nothing limits."""
        return Report(
            graph=graph,
            device=self.target.description,
            policy=self.options.offload.policy,
            decision="unchanged: no budget",
            peak_before=0,
            peak_predicted=0,
            passes=self.options.passes,
        )


class ManagedStep:
    """One trace of a function, run under a budget. Calls are as to the trace itself."""

    def __init__(self, concrete: Any, engine: Engine, jit_compile: bool = False) -> None:
        """Plan by estimate.

        Args:
            concrete: the trace, a `ConcreteFunction`.
            engine: budget, device and options.
            jit_compile: whether the trace would run under XLA if nothing had to move.

        Raises:
            InfeasibleBudgetError, NoGradientError, UnknownShapeError, AlreadyOptimizedError, HostMemoryError,
            SpillDirectoryError: see `graph_passes.errors`.
        """
        self._concrete = concrete
        self._engine = engine
        self._jit_compile = jit_compile
        self._lock = threading.RLock()
        self._notes: list[str] = []
        self._failure: TfmemError | None = None
        self._function = concrete
        self._stage = Stage.READY
        self._run = next(_runs)
        self.report = engine.unlimited(tf.compat.as_str(concrete.name))
        budget = engine.budget
        if budget is None:
            return
        self._budget = budget
        self._target_bytes = budget

        captured = capture_concrete(concrete)
        serde.refuse_optimized((node.name, node.op) for node in captured.graph_def.node)
        self._captured = run_grappler(captured, device=engine.target.kind)
        shapes = {f"{name}:0": shape for name, shape in engine.options.input_shapes.items()}
        self._shapes = shapes
        inferred = restore_concrete(concrete, self._captured, self._captured.graph_def, shapes)
        graph = serde.from_graph_def(self._captured.graph_def, inferred=inferred.graph)
        fetches = [parse_input(name)[0] for name in self._captured.fetches]
        self._step = pipeline.Step.read(
            graph, self._captured.creation_order, fetches, merging=not engine.target.is_gpu
        )
        in_use = memory(engine.library, engine.target.name).bytes_in_use
        self._estimate = _Estimate(Roofline(engine.target.profile), in_use)
        self._key = fingerprint(
            graph, {"device": engine.target.description, "budget": budget, "tensorflow": tf.__version__}
        )
        self._cache = ProfileCache(engine.options.cache_directory)
        self._begin()

    @property
    def moves(self) -> bool:
        """Whether the step moves anything."""
        return self._function is not self._concrete

    @property
    def settled(self) -> bool:
        """Whether the plan is final."""
        return self._stage is Stage.READY

    @property
    def function(self) -> Any:
        """The `ConcreteFunction` that runs by now."""
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        if self._stage is Stage.READY:
            return self._function(*args, **kwargs)
        with self._lock:  # an observed step runs alone
            if self._stage is Stage.READY:
                return self._function(*args, **kwargs)
            if self._failure is not None:
                raise self._failure
            return self._staged(args, kwargs)

    def _begin(self) -> None:
        workspace = CUDNN_WORKSPACE_LIMIT if self._engine.target.is_gpu else 0
        careful = _Estimate(Roofline(self._engine.target.profile, workspace), self._estimate.in_use)
        timeline = self._step.timeline(careful)
        if timeline.peak <= self._budget * (SURELY_FITS if workspace else 1.0):
            self._settle(timeline, self._plan(timeline, timed=False))
            return
        self._timeline = self._step.timeline(self._estimate)
        # Workspace is unknown yet; without it, this is the least that any plan needs.
        widest = self._plan(self._timeline, timed=False, keep_all=True)
        if widest.after.peak > self._budget:
            self._plan(self._timeline, timed=False)  # raises, and names the op
        known = self._cache.load(self._key)
        if known is not None:
            self._learn(known)
            self._plan_now = self._plan(self._timeline, timed=True)
            self._notes.append("op times and memory come from a cached profile")
        elif self._engine.options.observe:
            self._plan_now = self._plan(self._timeline, timed=False)
        else:
            self._notes.append("op times and memory are estimates: nothing was observed")
            self._plan_now = self._plan(self._timeline, timed=False)
        self._widest = self._within_host(widest)
        self._check_host(self._plan_now)
        self._known = known
        if self._engine.options.observe:
            self._enter(Stage.WARM if known is None or self._engine.target.is_gpu else Stage.CONFIRM)
        else:
            self._settle(self._timeline, self._plan_now)

    def _staged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        library, device = self._engine.library, self._engine.target.name
        if self._stage is Stage.WARM:
            result = self._function(*args, **kwargs)
            self._enter(Stage.OBSERVE if self._known is None else Stage.CONFIRM)
            return result
        library.clear_probes(self._run)
        library.set_stall_timing(True)
        before = library.counters()
        memory(library, device, reset=True)
        try:
            result = self._function(*args, **kwargs)
            tf.test.experimental.sync_devices()
        finally:
            library.set_stall_timing(False)
        samples = [
            Sample(
                row.index, (row.device_ns if row.device_ns >= 0 else row.host_ns) * 1e-9, row.bytes_in_use, row.peak_bytes
            )
            for row in library.probes(self._run)
        ]
        library.clear_probes(self._run)
        if self._stage is Stage.OBSERVE:
            seen = observe(self._timeline, self._widest.moves, samples)
            self._cache.store(self._key, seen)
            self._learn(seen)
            try:
                self._plan_now = self._plan(self._timeline, timed=True)
                self._check_host(self._plan_now)
            except TfmemError as error:
                self._failure = error  # this step's result is good; the next call says why there is no more
                return result
            if self._plan_now.moves:
                self._enter(Stage.CONFIRM)
            else:
                self._settle(self._timeline, self._plan_now)
            return result
        self._confirm(samples, before, library.counters())
        return result

    def _confirm(self, samples: list[Sample], before: Any, after: Any) -> None:
        seen = observe(self._timeline, self._plan_now.moves, samples)
        measured = replace(
            self._describe(self._timeline, self._plan_now),
            peak_measured=seen.peak,
            bytes_out_achieved=after.bytes_out - before.bytes_out,
            bytes_in_achieved=after.bytes_in - before.bytes_in,
            stall_measured_ns=after.stall_ns - before.stall_ns,
            step_measured_ns=round(seen.step_seconds * 1e9),
            curve_after=seen.curve,
        )
        if seen.peak > self._budget and len(self._notes) < REPLANS:
            over = seen.peak - self._budget
            self._notes.append(f"replanned: a plan for {self._target_bytes:,} bytes peaked {over:,} over the budget")
            self._target_bytes -= over
            try:
                self._plan_now = self._plan(self._timeline, timed=True)
                self._enter(Stage.CONFIRM)
                return
            except InfeasibleBudgetError as error:
                self._notes.append(f"no plan is left that could meet the budget: {error}")
        self._settle(self._timeline, self._plan_now)
        self.report = replace(measured, notes=self.report.notes)

    def _learn(self, seen: Observation) -> None:
        """Times and workspace are properties of the ops; what else is in memory is a property of this process."""
        costs = Measured(seen.seconds, seen.workspace, seen.base, self._estimate.roofline)
        self._timeline = self._step.timeline(costs)

    def _plan(self, timeline: Timeline, *, timed: bool, keep_all: bool = False) -> OffloadPlan:
        return pipeline.plan_step(
            self._step,
            timeline,
            self._engine.link,
            self._target_bytes,
            self._engine.options.offload,
            timed=timed,
            keep_all=keep_all,
        )

    def _enter(self, stage: Stage) -> None:
        plan = self._plan_now if stage is Stage.CONFIRM else self._widest
        probing = None if stage is Stage.WARM else Probing(self._run, self._engine.target.name)
        self._function = self._build(self._timeline, plan, probing)
        self.report = self._describe(self._timeline, self._plan_now)
        self._stage = stage

    def _settle(self, timeline: Timeline, plan: OffloadPlan) -> None:
        self._function = self._build(timeline, plan, None) if plan.moves else self._concrete
        self.report = self._describe(timeline, plan)
        self._stage = Stage.READY

    def _build(self, timeline: Timeline, plan: OffloadPlan, probing: Probing | None) -> Any:
        edited = pipeline.edit_step(self._step, timeline, plan, self._engine.options.offload, probing)
        graph_def = serde.to_graph_def(edited, self._captured.graph_def)
        return restore_concrete(self._concrete, self._captured, graph_def, self._shapes)

    def _within_host(self, widest: OffloadPlan) -> OffloadPlan:
        """The widest plan if the host can hold it, else the plan that moves the least."""
        try:
            self._check_host(widest)
        except TfmemError:
            return self._plan_now
        return widest

    def _check_host(self, plan: OffloadPlan) -> None:
        moved = sum(self._timeline.buffers[move.buffer].nbytes for move in plan.moves)
        require_room(moved, self._engine.options.offload, self._engine.target.is_gpu)

    def _describe(self, timeline: Timeline, plan: OffloadPlan) -> Report:
        report = pipeline.describe(
            self._step,
            timeline,
            plan,
            self._engine.options.offload.policy,
            graph=tf.compat.as_str(self._concrete.name),
            device=self._engine.target.description,
            notes=self._notes,
        )
        note = ""
        if self._jit_compile:
            note = "off: memory ops cannot live inside XLA" if plan.moves else "left on"
        return replace(report, budget=self._budget, jit_compile=note)


@dataclass(frozen=True)
class _Estimate(CostModel):
    """A roofline, and what the allocator holds already."""

    roofline: Roofline
    in_use: int

    def seconds(self, graph: Any, node: Any) -> float:
        return self.roofline.seconds(graph, node)

    def workspace(self, graph: Any, node: Any) -> int:
        return self.roofline.workspace(graph, node)

    def base(self, graph: Any) -> int:
        return max(self.roofline.base(graph), self.in_use)


def plan_unobserved(step: pipeline.Step, engine: Engine) -> tuple[Timeline, OffloadPlan | None]:
    """Plan a step that will not be observed, workspace estimated; no plan if there is no budget.

    Raises:
        BudgetError: no plan meets the budget, even if convolutions get by without workspace.
    """
    in_use = memory(engine.library, engine.target.name).bytes_in_use
    timeline = step.timeline(_Estimate(Roofline(engine.target.profile), in_use))
    if engine.budget is None:
        return timeline, None
    options = engine.options.offload
    if engine.target.is_gpu:
        careful = step.timeline(_Estimate(Roofline(engine.target.profile, CUDNN_WORKSPACE_LIMIT), in_use))
        try:
            return careful, pipeline.plan_step(step, careful, engine.link, engine.budget, options)
        except InfeasibleBudgetError:
            pass  # convolutions will have to take algorithms with less workspace
    plan = pipeline.plan_step(step, timeline, engine.link, engine.budget, options)
    moved = sum(timeline.buffers[move.buffer].nbytes for move in plan.moves)
    require_room(moved, options, engine.target.is_gpu)
    return timeline, plan


def plan_graph_def(captured: Captured, engine: Engine) -> tuple[Any, Report]:
    """The GraphDef of `captured`, optimised, and what was done to it."""
    serde.refuse_optimized((node.name, node.op) for node in captured.graph_def.node)
    optimized = run_grappler(captured, device=engine.target.kind)
    graph = serde.from_graph_def(optimized.graph_def, engine.options.input_shapes)
    fetches = [parse_input(name)[0] for name in optimized.fetches]
    step = pipeline.Step.read(graph, optimized.creation_order, fetches, merging=not engine.target.is_gpu)
    timeline, plan = plan_unobserved(step, engine)
    if plan is None or not plan.moves:
        return captured.graph_def, engine.unlimited("GraphDef")
    options = engine.options.offload
    edited = pipeline.edit_step(step, timeline, plan, options)
    found = pipeline.describe(
        step, timeline, plan, options.policy, graph="GraphDef", device=engine.target.description
    )
    return serde.to_graph_def(edited, optimized.graph_def), found
