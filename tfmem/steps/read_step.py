"""A trace as it is planned: its graph after Grappler, with all that planning needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from graph_passes import pipeline
from graph_passes.analysis.memory.replica_step import shared_by
from graph_passes.analysis.memory.session_step import waits_in_place, with_waits
from graph_passes.graph import serde
from graph_passes.graph.ir import Graph, TensorId, parse_input
from graph_passes.pass_infra import PassOutcome
from graph_passes.passes.equal import plan as equal
from tfmem.capture.build import shaped_graph, sized_by_data
from tfmem.capture.captured import Captured, every_node, unique, with_whole_names
from tfmem.runtime.engine import Engine
from tfmem.runtime.notices import REPORT_IT
from tfmem.steps.dry_run import can_dry_run
from tfmem.steps.random_streams import StepGraphs


@dataclass(frozen=True)
class ReadStep:
    """A trace as it is planned.

    Attributes:
        captured: after Grappler, its recurrent layers replaced.
        step: the graph, and what planning needs to know of it.
        graphs: makes functions of graphs that run in place of the trace.
        dry_run: whether a dry run of it would leave nothing behind.
    """

    captured: Captured
    step: pipeline.Step
    graphs: StepGraphs
    dry_run: bool


def read_step(
    captured: Captured,
    engine: Engine,
    shapes: Mapping[str, tuple[int, ...]],
    graphs_of: Callable[[Captured], StepGraphs],
    rehearsed: bool,
) -> ReadStep:
    """Read the step that planning is about.

    Args:
        captured: the trace after Grappler.
        engine: device and options.
        shapes: of inputs, where better known than in the graph.
        graphs_of: what makes functions of a graph.
        rehearsed: whether it is tried in dry runs on a CPU, too.
    """
    shared = shared_by(every_node(captured.graph_def))
    if shared:  # each device has a timeline
        captured = with_whole_names(captured)
    inferred = shaped_graph(captured, feed_shapes=shapes)
    graph = serde.from_graph_def(captured.graph_def, inferred=inferred, functions=True)
    fetches = tuple(parse_input(name)[0] for name in captured.fetches)
    graph, successors = _with_numbers_once(graph, fetches, engine)
    run = unique([successors.get(name, name) for name in captured.control_fetches])
    captured = replace(captured, control_fetches=run)
    if engine.settings.target.is_gpu:
        graph = with_waits(graph, waits_in_place(graph))
    step = pipeline.Step.read(
        graph,
        captured.creation_order,
        fetches,
        merging=engine.settings.merges,
        counted=engine.settings.counted,
        hosted=engine.settings.target.is_gpu,
        of_data=sized_by_data(captured, graph, shapes),
    )
    step = replace(step, shared=step.shared or shared)
    dry_run = (engine.settings.target.is_gpu or rehearsed) and can_dry_run(graph)
    return ReadStep(captured, step, graphs_of(captured), dry_run)


def _with_numbers_once(graph: Graph, fetches: tuple[TensorId, ...], engine: Engine) -> tuple[Graph, Mapping[str, str]]:
    """`graph` with equal numbers computed once, and by name of each op that went the one that computes its number.

    Where that fails, there is a warning, and `graph` stays as it is.
    """
    source = pipeline.StepSource(pipeline.Step(graph, (), fetches))
    needs = {pipeline.EQUAL.name: lambda _: equal.Needs()}
    done = pipeline.run_passes(pipeline.PassPhase.UNDER_BUDGET, (pipeline.EQUAL.option,), source, needs)
    outcome: PassOutcome[equal.EqualPlan] = done[pipeline.EQUAL.name]
    if outcome.failed is not None:
        engine.notices.warn("fault", f"equal numbers are not computed once: {outcome.failed}", REPORT_IT)
    successors = {other: each.name for each in outcome.plan.equal for other in each.others} if outcome.plan else {}
    return source.edited, successors
