"""One trace on its way through the passes: captured, its recurrent layers swapped, read, planned on, edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graph_passes import pipeline, serde
from graph_passes.analysis.region import keep_variables_in_place
from graph_passes.analysis.timeline import Timeline
from graph_passes.cost.model import CostModel
from graph_passes.ir import parse_input
from graph_passes.offload.apply import Probing
from graph_passes.offload.plan import OffloadPlan
from graph_passes.recurrent.match import RecurrentPlan
from graph_passes.report import ORDERED, Report
from tfmem.capture.captured import require_feeds
from tfmem.capture.function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.devices import conditions
from tfmem.engine import Engine
from tfmem.profile import fingerprint
from tfmem.recurrent import swap_recurrent, with_swaps
from tfmem.rehearsal import can_rehearse, without_updates

RECURRENT_OUTSIDE = "off: recurrent kernels cannot live inside XLA"


class Trace:
    """What the passes know of a trace, and what they make of it.

    Attributes:
        concrete: the trace as it was given, a `ConcreteFunction`.
        base: the trace with its recurrent layers swapped; `concrete` if none was.
        name: of the function.
        swaps: what the recurrent pass did.
    """

    def __init__(self, concrete: Any, engine: Engine, jit_compile: bool = False) -> None:
        """Swap recurrent layers.

        Args:
            concrete: the trace.
            engine: device and options.
            jit_compile: whether the trace would run under XLA if nothing had to move.
        """
        self.concrete = self.base = concrete
        self.name = tf.compat.as_str(concrete.name)
        self.swaps = RecurrentPlan()
        self._engine = engine
        self._jit_compile = jit_compile
        self._shapes = engine.feed_shapes
        self._source = capture_concrete(concrete)
        if engine.swaps:
            self._source, self.swaps = swap_recurrent(
                self._source, engine.target, engine.options, self._shapes, final=True
            )
        if self.swaps.matches:
            optimized = run_grappler(self._source, device=engine.target.kind)
            self.base = restore_concrete(concrete, optimized, optimized.graph_def, self._shapes)

    def read(self) -> None:
        """Read the step that planning is about.

        Raises:
            AlreadyOptimizedError: the trace holds tfmem's ops.
            GraphError: `input_shapes` names what is no input.
        """
        engine = self._engine
        serde.refuse_optimized((node.name, node.op) for node in self._source.graph_def.node)
        require_feeds(self._source, engine.options.input_shapes)
        self._captured = run_grappler(self._source, device=engine.target.kind)
        inferred = restore_concrete(self.concrete, self._captured, self._captured.graph_def, self._shapes)
        graph = serde.from_graph_def(self._captured.graph_def, inferred=inferred.graph)
        if engine.target.is_gpu:
            keep_variables_in_place(graph)
        fetches = [parse_input(name)[0] for name in self._captured.fetches]
        self.step = pipeline.Step.read(graph, self._captured.creation_order, fetches, merging=not engine.target.is_gpu)
        self.can_rehearse = engine.target.is_gpu and can_rehearse(graph)

    def fingerprint(self, budget: int) -> str:
        """What a profile of the step is kept under."""
        return fingerprint(self.step.graph, {**conditions(self._engine.target), "budget": budget})

    def timeline(self, costs: CostModel) -> Timeline:
        """The step under a cost model."""
        return self.step.timeline(costs)

    def plan(self, timeline: Timeline, budget: int, **how: Any) -> OffloadPlan:
        """See `pipeline.plan_step`."""
        engine = self._engine
        return pipeline.plan_step(self.step, timeline, engine.link, budget, engine.options.offload, **how)

    def build(
        self, timeline: Timeline, plan: OffloadPlan, probing: Probing | None = None, rehearse: bool = False
    ) -> Any:
        """A function that runs `plan`, with probes if told; a rehearsal writes no variable."""
        edited = pipeline.edit_step(self.step, timeline, plan, self._engine.options.offload, probing)
        graph_def = serde.to_graph_def(edited, self._captured.graph_def)
        if rehearse:
            graph_def = without_updates(graph_def)
        return restore_concrete(self.concrete, self._captured, graph_def, self._shapes)

    def unplanned(self) -> Report:
        """The report while nothing is planned."""
        lost = self._jit_compile and self.swaps.matches
        report = replace(self._engine.unlimited(self.name), jit_compile=RECURRENT_OUTSIDE if lost else "")
        return with_swaps(report, self.swaps)

    def describe(self, timeline: Timeline, plan: OffloadPlan, notes: Sequence[str], *, given: bool) -> Report:
        """The report of `plan`.

        Args:
            timeline: what it was made on.
            plan: the plan.
            notes: what else to say.
            given: whether the trace runs in the order that TensorFlow gives it.
        """
        engine = self._engine
        policy, device = engine.options.offload.policy, engine.target.description
        report = pipeline.describe(self.step, timeline, plan, policy, graph=self.name, device=device, notes=notes)
        ordered = not plan.moves and not given
        note = ""
        if self._jit_compile:
            note = "off: the planned order cannot be held inside XLA" if ordered else "left on"
            note = "off: memory ops cannot live inside XLA" if plan.moves else note
            note = RECURRENT_OUTSIDE if self.swaps.matches else note
        decision = ORDERED if ordered else report.decision
        report = replace(report, decision=decision, budget=engine.budget, jit_compile=note)
        return with_swaps(report, self.swaps)
