"""A graph that its users hold on to, edited in place: a `tf.Graph` no session ran, or a FuncGraph being built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graph_passes import pipeline, step_report
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.decision import FusionWhy
from graph_passes.errors import AlreadyOptimizedError, GraphError, InfeasibleBudgetError
from graph_passes.graph import serde
from graph_passes.graph.graph_source import Source
from graph_passes.graph.ir import Graph, TensorId, parse_input
from graph_passes.graph.rewrite import Rewrite, applied, apply_rewrites
from graph_passes.passes.offload.plan import OffloadPlan
from graph_passes.passes.recurrent.match import RecurrentPlan
from graph_passes.passes.recurrent.plan import Needs
from graph_passes.pipeline import RECURRENT, PassOutcome, PassPhase, run_passes
from graph_passes.refusals import Reason, Refusal
from graph_passes.report import Report
from graph_passes.splitting import with_split
from tfmem.capture.build import shaped_graph, sized_by_data
from tfmem.capture.captured import require_feeds, unique
from tfmem.capture.gradient_check import step_gradient_fault
from tfmem.capture.inserted_gradients import gradients
from tfmem.capture.live_editor import LiveEditor, capture_graph
from tfmem.capture.strategies import other_replicas
from tfmem.frontends.live_split import divide_live, trains_if_evaluated
from tfmem.kernels.fusion_needs import fusion_needs, sinks
from tfmem.kernels.recurrent import with_kernels
from tfmem.kernels.replace_recurrent import recurrent_plan, with_replacements
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import is_fault
from tfmem.steps.after_grappler import stitch, unobserved, unstitched
from tfmem.steps.static_planning import plan_unobserved, within_budget

FETCHED = "a tensor of the parts in pieces that fetches does not name is computed on the whole batch if it is fetched"
REPORT = "_tfmem_report"  # the attribute in which objects that are not tfmem's own keep their report


def optimize_live(graph: Any, engine: Engine, loss: Any | None = None, fetches: Sequence[str] = ()) -> Report:
    """Insert MemOps into `graph`.

    Args:
        graph: a `tf.Graph`; TensorFlow's Grappler cannot run before the edit here, so sessions run it with
            `tfmem.session_config()`.
        engine: budget, device and options.
        loss: the loss tensor, where the caller knows it.
        fetches: names of the tensors and ops that one step is run for, and whose tensors stay; found from the
            updates of weights if not given.

    Raises:
        AlreadyOptimizedError: its step was split before.
        GraphInUseError: a session ran the graph.
        GraphError: no fetches are given, and there are several training steps.
    """
    if _is_split(graph):
        raise AlreadyOptimizedError("the graph's step was split along the batch before; give the original graph")
    editor, name = LiveEditor(graph), type(graph).__name__
    source = _LiveSource(graph, editor, fetches, engine.settings.options.input_shapes)
    replacements = _replace_layers(graph, source, engine)
    step = _LiveStep(graph, source, editor, engine, loss, fetches)
    _, found = within_budget(engine, name, step.read, step.make, None, bool(replacements.matches), graph)
    engine.notices.warn_of_kept(name, replacements)
    found = with_replacements(found, replacements)
    if engine.settings.stitches:
        found = _stitched(graph, source, engine, fetches, found)
    setattr(graph, REPORT, found)
    return found


class _LiveStep:
    """The step of a graph that tfmem edits in place: it is planned, described, and edited in a copy first.

    TensorFlow may still refuse an edit in place. Then `LiveEditor.undone_on_error` restores the edges, and no op reads
    the inserted ops.
    """

    def __init__(
        self,
        graph: Any,
        source: _LiveSource,
        editor: LiveEditor,
        engine: Engine,
        loss: Any | None,
        fetches: Sequence[str],
    ) -> None:
        self._graph = graph
        self._source = source
        self._editor = editor
        self._engine = engine
        self._loss = loss
        self._fetches = fetches

    def read(self, graph: Graph | None = None, creation_order: Sequence[str] = ()) -> pipeline.Step:
        loss, fetches = self._loss, self._fetches
        run = [*fetches, *([loss.name] if loss is not None and fetches else [])]
        graph = self._source.read() if graph is None else graph
        step = pipeline.Step.of_session(
            graph,
            run,
            creation_order=creation_order,
            fetches=[parse_input(name)[0] for name in fetches],
            loss=_identity(loss),
            merging=self._engine.settings.merges,
            counted=self._engine.settings.counted,
            hosted=self._engine.settings.target.is_gpu,
            of_data=sized_by_data(capture_graph(self._graph), graph, self._engine.settings.feed_shapes),
        )
        return replace(step, shared=step.shared or other_replicas())

    def make(self, step: pipeline.Step) -> tuple[None, Report]:
        try:
            timeline, plan = plan_unobserved(step, self._engine)
        except InfeasibleBudgetError as error:
            found = self._divided(step)
            if isinstance(found, Refusal):
                raise error.with_split(str(found)) from error
            return None, found
        found = self._described(step, timeline, plan)
        if plan is not None and plan.moves:
            self._edit(step, timeline, plan)
        return None, found

    def _described(
        self, step: pipeline.Step, timeline: Timeline, plan: OffloadPlan | None, notes: Sequence[str] = ()
    ) -> Report:
        assert plan is not None  # there is a budget
        options, name = self._engine.settings.options.offload, type(self._graph).__name__
        device = self._engine.settings.target.description
        found = step_report.describe(step, timeline, plan, options.policy, graph=name, device=device, notes=notes)
        self._engine.notices.warn_of_losses(found)
        return found

    def _edit(self, step: pipeline.Step, timeline: Timeline, plan: OffloadPlan) -> None:
        options, spill_key = self._engine.settings.options.offload, self._engine.spill_key
        pipeline.edit_step(step, timeline, plan, options)
        with self._editor.undone_on_error():
            pipeline.edit_step(step, timeline, plan, options, editor=self._editor, spill_key=spill_key)

    def _divided(self, step: pipeline.Step) -> Report | Refusal:
        """The report of the step with parts that run on pieces of the batch, or why there are none."""
        engine = self._engine
        if self._graph.building_function or self._loss is not None:
            return Reason.SPLIT_IN_PLACE(kind=type(self._graph).__name__)
        if open_feeds := _open_feeds(self._graph, engine.settings.options.input_shapes or {}):
            return Reason.SPLIT_OPEN(names=", ".join(open_feeds))
        found = divide_live(self._source.read(), step, self.read, engine)
        if isinstance(found, Refusal):
            return found
        timeline, plan = plan_unobserved(found.step, engine, found.budget)
        assert plan is not None  # there is a budget
        ordered = pipeline.edit_step(found.step, timeline, plan, engine.settings.options.offload)
        if refused := trains_if_evaluated(found, ordered):
            return refused
        report = replace(self._described(found.step, timeline, plan, (FETCHED,)), budget=engine.settings.budget)
        with self._editor.undone_on_error():
            self._source.carry_out(found.given, found.rewrites)
            self._edit(found.step, timeline, plan)
        return with_split(report, found.split, bool(plan.moves))


class _LiveSource:
    """A `graph_passes.graph.graph_source.Source`, read once until it is edited.

    Replaced ops stay in the live graph, but no op reads them.
    """

    def __init__(
        self,
        graph: Any,
        editor: LiveEditor,
        fetches: Sequence[str],
        input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """
        Args:
            graph: the live graph.
            editor: of it.
            fetches: names of what is fetched.
            input_shapes: of inputs, where better known than in the graph.
        """
        self._live = graph
        self._editor = editor
        self._keep = {parse_input(name)[0].node for name in fetches}
        self._input_shapes = input_shapes or {}
        self._graph: Graph | None = None
        self._with_functions = False

    structure = None

    def read(self, _: Collection[str] | None = None, functions: bool = True) -> Graph:
        if self._graph is None or (functions and not self._with_functions):
            self._graph = _read(self._live, self._input_shapes, functions)
            self._with_functions = functions
        return self._graph

    def follow(self, _: Source) -> Mapping[str, str]:
        raise GraphError("internal error in tfmem: a live graph cannot follow another; please report this")

    def keep(self, _: Graph) -> set[str]:
        return self._keep

    def bodies(self) -> Mapping[str, Source]:
        return {}  # others may call these functions as well

    def edit(
        self, graph: Graph, rewrites: Sequence[Rewrite], check: Callable[[Graph], object]
    ) -> Mapping[str, Exception]:
        _, errors = applied(rewrites, graph, check)  # tried on a copy first
        self.carry_out(graph, [each for each in rewrites if each.name not in errors])
        return errors

    def carry_out(self, graph: Graph, rewrites: Sequence[Rewrite]) -> None:
        """Edit the live graph by rewrites of `graph`, which were tried on a copy."""
        self._graph = None
        with self._editor.undone_on_error():
            apply_rewrites(rewrites, graph, self._editor)


def _replace_layers(graph: Any, source: _LiveSource, engine: Engine) -> RecurrentPlan:
    """Replace recurrent layers in place.

    Where a function is being traced, a loop that reads variables counts as a side effect and would run in any case.
    """
    try:
        source.read(functions=engine.settings.replaces)
    except Exception as error:
        if not is_fault(error, reading=True):
            raise
        return recurrent_plan({RECURRENT.name: PassOutcome(failed=error)})
    needs = Needs(
        gradients,
        step_gradient_fault,
        lambda plan: with_kernels(plan, engine.settings.target, engine.settings.options),
        in_place=True,
        traced=graph.building_function,
        unrolls_draws=engine.settings.target.is_gpu,
    )
    done = run_passes(PassPhase.BEFORE_GRAPPLER, engine.settings.passes, source, {RECURRENT.name: lambda _: needs})
    return recurrent_plan(done) if done else RecurrentPlan()


def _stitched(graph: Any, source: _LiveSource, engine: Engine, fetches: Sequence[str], found: Report) -> Report:
    """Stitch regions in place, where nothing moves and nothing more of the graph is to come; the report of both."""
    if found.transfers or found.splits:
        return unstitched(found, engine, FusionWhy.PLANNED)
    if graph.building_function:
        return unstitched(found, engine, FusionWhy.TRACED)
    read = source.read(functions=False)
    feeds = [node.name for node in read if node.op.startswith("Placeholder")]
    roots = unique([*(parse_input(name)[0].node for name in fetches), *sinks(read)])
    needs = fusion_needs(feeds, engine.settings.target, engine.settings.options, roots, in_place=True)
    return unobserved(found, stitch(source, engine, needs))


def _is_split(graph: Any) -> bool:
    """Whether a step of the graph runs on pieces of the batch already."""
    report = getattr(graph, REPORT, None)
    return report is not None and bool(report.splits)


def _open_feeds(graph: Any, input_shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The inputs of which users said sizes that the graph itself leaves open."""
    return [name for name in input_shapes if not graph.get_tensor_by_name(f"{name}:0").shape.is_fully_defined()]


def _read(graph: Any, input_shapes: Mapping[str, tuple[int, ...]], functions: bool) -> Graph:
    if not input_shapes:
        return serde.from_tf_graph(graph, functions)
    captured = capture_graph(graph)
    require_feeds(captured, input_shapes)
    inferred = shaped_graph(captured, feed_shapes={f"{name}:0": shape for name, shape in input_shapes.items()})
    return serde.from_graph_def(captured.graph_def, inferred=inferred, functions=functions)


def _identity(tensor: Any | None) -> TensorId | None:
    return None if tensor is None else parse_input(tensor.name)[0]
