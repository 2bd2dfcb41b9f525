"""What every step of one optimised object shares, and plans made without observing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from custom_ops.errors import TfmemError
from custom_ops.load import Library
from graph_passes import pipeline, serde
from graph_passes.analysis.region import reads_before_updates, step_region
from graph_passes.analysis.simulate import Link
from graph_passes.analysis.timeline import Timeline
from graph_passes.analysis.workspace import squeezed
from graph_passes.cost.model import Roofline
from graph_passes.errors import InfeasibleBudgetError, NoGradientError, UnknownShapeError
from graph_passes.ir import Graph, Node, parse_input
from graph_passes.offload.plan import OffloadPlan
from graph_passes.recurrent.match import RecurrentPlan
from graph_passes.report import Report
from graph_passes.verify import verify_graph
from tfmem.capture.captured import Captured, require_feeds
from tfmem.capture.function import capture_concrete, restore_concrete
from tfmem.capture.grappler import run_grappler
from tfmem.config import Options, parse_budget, workspace_limits
from tfmem.devices import Target, memory
from tfmem.host import require_room
from tfmem.measuring import alone
from tfmem.recurrent import swap_recurrent, with_swaps

NOT_PLANNABLE = (NoGradientError, UnknownShapeError)  # graphs that the offload pass is not for


@dataclass(frozen=True, eq=False)
class Engine:
    """Options with the device they meet.

    Attributes:
        options: the user's.
        library: the op library.
        target: the device whose memory is planned.
        link: bandwidth between the device and where tensors go.
    """

    options: Options
    library: Library
    target: Target
    link: Link

    @property
    def budget(self) -> int | None:
        """Bytes; None for no limit.

        Raises:
            InvalidBudgetError: the budget is none for this device.
        """
        budget = parse_budget(self.options.memory_budget, self.target.memory)
        if "offload" not in self.options.passes:
            return None
        return self.target.memory if budget is None and self.target.is_gpu else budget

    @property
    def must_fit(self) -> bool:
        """Whether the user gave the budget; else it is the device's memory, and planning for it a courtesy."""
        return self.budget is not None and self.options.memory_budget is not None

    @property
    def observes(self) -> bool:
        """Whether steps are observed: the user lets it, and the device's allocator counts bytes.

        TensorFlow's plain CPU allocator (oneDNN off) does not.
        """
        return self.options.observe and memory(self.library, self.target.name).bytes_in_use >= 0

    def unobserved(self) -> Engine:
        """The same for steps that run on their own, where no later call can swap in a better plan."""
        return replace(self, options=replace(self.options, observe=False))

    def estimate(self, workspace: bool) -> Estimate:
        """Costs before anything ran.

        Args:
            workspace: whether convolutions are charged with what cuDNN may take.
        """
        limits = workspace_limits() if workspace and self.target.is_gpu else (0, 0)
        return Estimate(Roofline(self.target.profile, limits, self.target.is_gpu), self.in_use)

    @property
    def in_use(self) -> int:
        """Bytes of the device's memory that are taken now; 0 where its allocator does not count."""
        return self._in_use()[0]

    @property
    def in_use_alone(self) -> int | None:
        """The same; None if a step that is measured ran meanwhile: what it takes would be counted."""
        size, known = self._in_use()
        return size if known else None

    def _in_use(self) -> tuple[int, bool]:
        with alone(reads=True) as turn:
            return max(0, memory(self.library, self.target.name).bytes_in_use), turn.alone

    def require_host_room(self, timeline: Timeline, plan: OffloadPlan) -> None:
        """Raise if the host cannot take what `plan` moves; see `tfmem.host`."""
        moved = sum(timeline.buffers[move.buffer].nbytes for move in plan.moves)
        require_room(moved, self.options.offload, self.target.is_gpu)

    @property
    def swaps(self) -> bool:
        """Whether recurrent layers are to be swapped."""
        return "recurrent" in self.options.passes

    def swapped(self, concrete: Any) -> tuple[Captured, RecurrentPlan, Any]:
        """The graph of a trace with its recurrent layers swapped, what was swapped, and what runs it."""
        source, swaps = capture_concrete(concrete), RecurrentPlan()
        if self.swaps:
            source, swaps = swap_recurrent(source, self.target, self.options, self.feed_shapes, final=True)
        if not swaps.matches:
            return source, swaps, concrete
        optimized = run_grappler(source, device=self.target.kind)
        return source, swaps, restore_concrete(concrete, optimized, optimized.graph_def, self.feed_shapes)

    @property
    def feed_shapes(self) -> dict[str, tuple[int, ...]]:
        """The user's input shapes, by tensor name."""
        return {f"{name}:0": shape for name, shape in self.options.input_shapes.items()}

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

    def left_alone(self, report: Report, error: TfmemError) -> Report:
        """`report` of a step whose memory cannot be planned, saying why.

        Args:
            report: of the step without a budget.
            error: one of `NOT_PLANNABLE`, as it was caught; raised again if the user gave a budget.
        """
        if self.must_fit:
            raise error
        return replace(report, notes=(*report.notes, f"memory was not planned: {error}"))


@dataclass(frozen=True)
class Estimate:
    """A roofline, and what the allocator holds already; a `CostModel`."""

    roofline: Roofline
    in_use: int

    def seconds(self, graph: Graph, node: Node) -> float:
        """See `CostModel`."""
        return self.roofline.seconds(graph, node)

    def workspace(self, graph: Graph, node: Node) -> int:
        """See `CostModel`."""
        return self.roofline.workspace(graph, node)

    def base(self, graph: Graph) -> int:
        """See `CostModel`: variables exist already, or will."""
        return max(self.roofline.base(graph), self.in_use)


def plan_unobserved(step: pipeline.Step, engine: Engine) -> tuple[Timeline, OffloadPlan | None]:
    """Plan a step that will not be observed, workspace estimated; no plan if there is no budget.

    Of two plans the faster is taken: one leaves each convolution the workspace that it would take, and one what is
    left, which may slow some of them down by less than the first plan's copies.

    Raises:
        BudgetError: no plan meets the budget, even if convolutions get by without workspace.
    """
    least = step.timeline(engine.estimate(workspace=False))
    if engine.budget is None:
        return least, None
    budget, offload = engine.budget, engine.options.offload
    generous = step.timeline(engine.estimate(workspace=True)) if engine.target.is_gpu else least

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
    engine.require_host_room(timeline, plan)
    return timeline, plan


def plan_graph_def(captured: Captured, engine: Engine, fetches: Sequence[str] = ()) -> tuple[Captured, Report]:
    """`captured` with its graph optimised, and what was done to it.

    Args:
        captured: the graph.
        engine: budget, device and options.
        fetches: names of what one step is run for; by default the ops that train.
    """
    serde.refuse_optimized((node.name, node.op) for node in captured.graph_def.node)
    require_feeds(captured, engine.options.input_shapes)
    swaps = RecurrentPlan()
    if engine.swaps:
        captured, swaps = swap_recurrent(captured, engine.target, engine.options, engine.feed_shapes, fetches)
    edited, found = captured, engine.unlimited("GraphDef")
    if engine.budget is not None:
        try:
            edited, found = _offload(captured, engine, fetches)
        except NOT_PLANNABLE as error:
            found = engine.left_alone(found, error)
    return edited, with_swaps(found, swaps)


def _offload(captured: Captured, engine: Engine, fetches: Sequence[str]) -> tuple[Captured, Report]:
    optimized = run_grappler(captured, device=engine.target.kind)
    graph = serde.from_graph_def(optimized.graph_def, engine.options.input_shapes)
    region = step_region(graph, [parse_input(name)[0].node for name in fetches])
    for update, reader in reads_before_updates(region):
        region.add_control(update, reader)
        graph.add_control(update, reader)
    kept = [parse_input(name)[0] for name in optimized.fetches]
    step = pipeline.Step.read(region, optimized.creation_order, kept, merging=not engine.target.is_gpu)
    timeline, plan = plan_unobserved(step, engine)
    assert plan is not None  # there is a budget
    options = engine.options.offload
    found = pipeline.describe(step, timeline, plan, options.policy, graph="GraphDef", device=engine.target.description)
    if not plan.moves:
        return captured, found
    pipeline.edit_step(step, timeline, plan, options, editor=graph)
    verify_graph(graph)
    return replace(captured, graph_def=serde.to_graph_def(graph, optimized.graph_def)), found
