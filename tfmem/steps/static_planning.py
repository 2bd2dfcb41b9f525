"""Steps that run on their own, where no later call can bring a better plan: planned from estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from graph_passes import pipeline, step_report
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.analysis.memory.workspace import squeezed
from graph_passes.decision import FusionWhy
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph import serde
from graph_passes.graph.ir import parse_input
from graph_passes.graph.verify import verify_graph
from graph_passes.passes.fuse.plan import FusionPlan
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.passes.recurrent.match import RecurrentPlan
from graph_passes.refusals import Reason
from graph_passes.report import Report
from tfmem.capture.build import shaped_graph, sized_by_data
from tfmem.capture.captured import Captured, op_name, require_feeds, unique
from tfmem.kernels.replace_recurrent import replace_recurrent, with_replacements
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import NOT_PLANNABLE, error_note, estimated_peak, is_fault, left_alone, left_by_fault
from tfmem.runtime.progress import shown
from tfmem.steps.after_grappler import BeforeRegions, grappled, grappled_to_stitch, stitched, unobserved, unstitched

Made = TypeVar("Made")


def plan_unobserved(
    step: pipeline.Step, engine: Engine, budget: int | None = None
) -> tuple[Timeline, OffloadPlan | None]:
    """Plan a step that will not be observed, workspace estimated; no plan if there is no budget.

    Of two plans the faster is taken: one leaves each convolution the workspace that it would take, and one what is
    left, which may slow some of them down by less than the first plan's copies.

    Args:
        step: the step.
        engine: device and options.
        budget: bytes; by default the user's.

    Raises:
        BudgetError: no plan meets the budget, even if convolutions get by without workspace.
    """
    budget = engine.settings.budget if budget is None else budget
    try:
        return _plan_unobserved(step, engine, budget)
    except InfeasibleBudgetError:
        if not engine.memory.reclaimed():
            raise
    return _plan_unobserved(step, engine, budget)


def _plan_unobserved(step: pipeline.Step, engine: Engine, budget: int | None) -> tuple[Timeline, OffloadPlan | None]:
    least = step.timeline(engine.estimate(workspace=False))
    if budget is None:
        return least, None
    offload = engine.settings.options.offload
    generous = step.timeline(engine.estimate(workspace=True)) if engine.settings.target.is_gpu else least

    def planned(timeline: Timeline) -> OffloadPlan:
        return pipeline.plan_step(step, timeline, engine.link, budget, offload)

    def short_of_workspace() -> tuple[Timeline, OffloadPlan]:
        plan = planned(least)
        timeline = squeezed(generous, least, plan.moves, budget)
        return timeline, plan.under(timeline)

    try:
        timeline, plan = generous, planned(generous)
    except InfeasibleBudgetError:
        timeline, plan = short_of_workspace()
    else:
        if plan.moves and generous is not least:
            timeline, plan = min((timeline, plan), short_of_workspace(), key=lambda found: found[1].after.seconds)
    engine.memory.require_host_room(timeline, plan)
    return timeline, plan


def within_budget(
    engine: Engine,
    name: str,
    read: Callable[[], pipeline.Step],
    make: Callable[[pipeline.Step], tuple[Made, Report]],
    unplanned: Made,
    replaced: bool,
    graph: object | None = None,
) -> tuple[Made, Report]:
    """What `make` makes of the step that `read` reads, and its report; `unplanned` without a budget, and where the step
    cannot be planned for the device's memory.

    Args:
        engine: budget and device.
        name: of the graph, for the report.
        read: reads the step.
        make: plans and edits; it must have changed nothing if it fails.
        unplanned: what stays as it is.
        replaced: whether recurrent layers were replaced.
        graph: the `tf.Graph`, if there is one, which tells the most that the step may need where nothing else does.

    Raises:
        InfeasibleBudgetError, HostMemoryError: no plan meets the user's budget, or planning failed and the step may
            need more than that; or the host cannot hold what would move.
    """
    found = engine.settings.unplanned(name)
    engine.settings.require_used()
    if engine.settings.budget is None:
        return unplanned, found
    step = None
    try:
        with shown(engine.settings.options.progress, lambda: f"planning a {name}"):
            step = read()
            return make(step)
    except NOT_PLANNABLE as error:
        return unplanned, left_alone(engine, found, error, replaced)
    except Exception as error:
        if not is_fault(error, reading=step is None):
            raise
        return unplanned, left_by_fault(engine, found, error, estimated_peak(engine, step, graph))


def plan_graph_def(captured: Captured, engine: Engine, fetches: Sequence[str] = ()) -> tuple[Captured, Report]:
    """`captured` with its graph optimised, and what was done to it.

    Args:
        captured: the graph.
        engine: budget, device and options.
        fetches: names of what one step is run for; by default the ops that train.
    """
    serde.refuse_optimized((node.name, node.op) for node in captured.graph_def.node)
    require_feeds(captured, engine.settings.options.input_shapes)
    replacements = RecurrentPlan()
    if engine.settings.replaces:
        captured, replacements = replace_recurrent(
            captured, engine.settings.target, engine.settings.options, engine.settings.feed_shapes, fetches
        )
    given = _GraphDefStep(captured, engine, fetches)
    edited, found = within_budget(engine, "GraphDef", given.read, given.make, captured, bool(replacements.matches))
    if engine.settings.stitches and found.transfers:
        found = unstitched(found, engine, FusionWhy.PLANNED)
    elif engine.settings.stitches:
        edited, found = _stitched(captured, engine, found, fetches)
    engine.notices.warn_of_kept("GraphDef", replacements)
    return edited, with_replacements(found, replacements)


def _stitched(captured: Captured, engine: Engine, found: Report, fetches: Sequence[str]) -> tuple[Captured, Report]:
    """Where nothing has to move: the graph that Grappler leaves, with its regions; `captured` if there are none."""
    read = {op_name(name) for node in captured.graph_def.node for name in node.input}
    ends = [node.name for node in captured.graph_def.node if node.name not in read]
    try:
        roots = unique([*map(op_name, (*fetches, *captured.fetches)), *ends])
        optimized = grappled_to_stitch(captured, engine) or grappled(captured, engine)
        planned, done = stitched(BeforeRegions(optimized, engine, roots))
    except Exception as error:
        if not is_fault(error, reading=True):
            raise
        note = error_note(engine.notices, "GraphDef", error, "stitching", "the graph stays unchanged")
        planned, done, found = captured, FusionPlan(), replace(found, notes=(*found.notes, note))
    return planned if done.regions else captured, unobserved(found, done)


class _GraphDefStep:
    def __init__(self, captured: Captured, engine: Engine, fetches: Sequence[str]) -> None:
        self._captured = captured
        self._engine = engine
        self._fetches = fetches

    def read(self) -> pipeline.Step:
        self._optimized = optimized = grappled(self._captured, self._engine)
        self._graph = graph = serde.from_graph_def(
            optimized.graph_def,
            inferred=shaped_graph(optimized, feed_shapes=self._engine.settings.feed_shapes),
            functions=True,
        )
        return pipeline.Step.of_session(
            graph,
            self._fetches,
            creation_order=optimized.creation_order,
            fetches=[parse_input(name)[0] for name in optimized.fetches],
            merging=self._engine.settings.merges,
            counted=self._engine.settings.counted,
            hosted=self._engine.settings.target.is_gpu,
            of_data=sized_by_data(optimized, graph, self._engine.settings.feed_shapes),
        )

    def make(self, step: pipeline.Step) -> tuple[Captured, Report]:
        try:
            timeline, plan = plan_unobserved(step, self._engine)
        except InfeasibleBudgetError as error:
            raise error.with_split(str(Reason.SPLIT_IN_PLACE(kind="GraphDef"))) from error
        assert plan is not None  # there is a budget
        options, device = self._engine.settings.options.offload, self._engine.settings.target.description
        found = step_report.describe(step, timeline, plan, options.policy, graph="GraphDef", device=device)
        self._engine.notices.warn_of_losses(found)
        if not plan.moves:
            return self._captured, found
        pipeline.edit_step(step, timeline, plan, options, editor=self._graph, spill_key=self._engine.spill_key)
        verify_graph(self._graph)
        graph_def = serde.to_graph_def(self._graph, self._optimized.graph_def)
        return replace(self._captured, graph_def=graph_def), found
