"""One trace on its way through the passes: captured, its recurrent layers replaced, read, planned on, edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graph_passes import pipeline, step_report
from graph_passes.analysis.memory.pieces import splits
from graph_passes.analysis.memory.replica_step import shared_by
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.decision import Xla
from graph_passes.errors import GraphError
from graph_passes.graph import serde
from graph_passes.graph.ops import has_regions
from graph_passes.lane_edits import edit_lanes
from graph_passes.names import spoken
from graph_passes.passes.offload.lanes import LanePlan
from graph_passes.passes.offload.plan import OffloadPlan, Probing
from graph_passes.passes.recurrent.match import RecurrentPlan
from graph_passes.refusals import Reason, Refusal
from graph_passes.report import ORDERED, Report
from graph_passes.splitting import SplitStep, with_split
from tfmem.capture.captured import Captured, every_node, require_feeds
from tfmem.capture.concrete_function import capture_concrete, input_specs, is_distributed, restore_concrete
from tfmem.capture.split_loops import with_pieces
from tfmem.devices import conditions
from tfmem.kernels.replace_recurrent import replace_recurrent, with_replacements
from tfmem.runtime.engine import Engine
from tfmem.runtime.faults import estimated_peak
from tfmem.runtime.profile_cache import fingerprint
from tfmem.steps.after_grappler import grappled, grappled_to_stitch, without_conditions
from tfmem.steps.random_streams import Draws, StepGraphs
from tfmem.steps.read_step import ReadStep, read_step
from tfmem.steps.replicas import describe_replicas
from tfmem.steps.splits import split_under
from tfmem.steps.work import Work

MOST_KEPT = 32  # plans of a timeline


class Trace:
    """A trace, the results of the passes on it, and the functions made from these.

    Attributes:
        concrete: the unmodified trace, a `ConcreteFunction`.
        base: the trace with its recurrent layers replaced; `concrete` if none was.
        name: of the function, as the user wrote it.
        replacements: what the recurrent pass did.
        split: what runs on pieces of the batch; None if nothing does.
        in_use: bytes that were taken before the step first ran; None where that is not known.
        divided_from: the key of the step before this trace divided it; "" if it did not.
        not_taken: whether the report says why a plan of an earlier process was not taken.
        rehearsed: whether a step that trains otherwise tries it, in dry runs on a CPU, too.
    """

    def __init__(
        self, concrete: Any, engine: Engine, jit_compile: bool | None = False, draws: Draws | None = None
    ) -> None:
        """
        Args:
            concrete: the trace.
            engine: device and options.
            jit_compile: whether the trace would run under XLA if nothing had to move; None: it may, False: it must not.
            draws: random streams that this step shares with others; by default new ones.
        """
        self.concrete = self.base = concrete
        self.name = engine.settings.label or spoken(tf.compat.as_str(concrete.name))
        self.replacements = RecurrentPlan()
        self.split: SplitStep | None = None
        self.in_use: int | None = None
        self.divided_from = ""
        self.not_taken = False
        self._engine = engine
        self.jit_compile = jit_compile
        self._shapes = engine.settings.feed_shapes
        self._source: Captured | None = None
        self._optimized: Captured | None = None
        self._to_stitch: Work[Captured | None] | None = None
        self._in_pieces = False  # whether planning has edited `_optimized`: pieces of the batch, or of loops' lists
        self._draws = draws
        self._read: ReadStep | None = None
        self._kept: tuple[Timeline, tuple[OffloadPlan, ...]] | None = None
        self.rehearsed = False

    def replaced_layers(self) -> tuple[Captured, RecurrentPlan] | None:
        """The trace with its recurrent layers replaced, for `use_layers`; None if they are not to be.

        Raises:
            GraphError: the trace cannot be read, or the shapes that were given contradict it.
        """
        engine = self._engine
        if not engine.settings.replaces:
            return None
        return replace_recurrent(
            self._captured_once(), engine.settings.target, engine.settings.options, self._shapes, final=True
        )

    def use_layers(self, source: Captured, replacements: RecurrentPlan) -> None:
        """Use the result of `replaced_layers` from now on; a failure changes nothing."""
        engine, base = self._engine, self.concrete
        optimized = self._optimized if source is self._source else None
        if replacements.matches:  # else the unmodified trace runs, and TensorFlow runs Grappler on it
            optimized = grappled(source, engine)
            base = restore_concrete(self.concrete, optimized, optimized.graph_def, self._shapes)
        self._source, self._optimized, self.replacements, self.base = source, optimized, replacements, base

    def optimized(self) -> Captured:
        """The trace after Grappler, its recurrent layers replaced.

        Raises:
            AlreadyOptimizedError: the trace holds tfmem's ops.
            GraphError: `input_shapes` names what is no input.
        """
        source = self._captured_once()
        serde.refuse_optimized((node.name, node.op) for node in source.graph_def.node)
        require_feeds(source, self._engine.settings.options.input_shapes)
        if self._optimized is None:
            self._optimized = grappled(source, self._engine)
        return self._optimized

    def given(self) -> Captured:
        """The trace as TensorFlow made it."""
        return capture_concrete(self.concrete) if self.replacements.matches else self._captured_once()

    def to_stitch(self) -> Captured:
        """`optimized`, in the layout that suits what is stitched, and without conditions where it is timed.

        Raises what `optimized` raises.
        """
        if self._in_pieces:  # Grappler would start from the whole batch and whole loops again
            return without_conditions(self.optimized(), self._engine)
        self._captured_once()
        beside = self.begin_to_stitch()
        plain = self.optimized()
        beside.wait()
        if beside.error is not None:
            raise beside.error
        other, self._to_stitch = beside.result, None
        return without_conditions(other or plain, self._engine)

    def begin_to_stitch(self) -> Work[Captured | None]:
        """Let a thread make what `to_stitch` needs in another layout: Grappler runs outside of Python's lock."""
        if self._to_stitch is None:
            self._to_stitch = Work(self._in_other_layout, "tfmem grappler", pause=0)
            self._to_stitch.begin()
        return self._to_stitch

    def _in_other_layout(self) -> Captured | None:
        return grappled_to_stitch(self._captured_once(), self._engine)

    def variant(self, captured: Captured, engine: Engine, rehearsed: bool = False) -> Trace:
        """A trace of the same function, which continues the random streams of this one.

        Args:
            captured: its graph after Grappler; before that runs, see `prepared`.
            engine: plans its memory alone.
            rehearsed: whether it is tried in dry runs on a CPU, too.
        """
        found = Trace(self.concrete, engine, draws=self.drawing().streams)
        found._source, found._optimized, found.replacements = self._source, captured, self.replacements
        found.split, found._in_pieces, found.rehearsed = self.split, self._in_pieces, rehearsed
        found.in_use = self.in_use
        return found

    def prepared(self) -> Trace:
        """This, with a function of its graph for where nothing moves."""
        captured = self.optimized()
        self.base = self.graphs_of(captured).restore(captured.graph_def)
        return self

    def _captured_once(self) -> Captured:
        if self._source is None:
            self._source = capture_concrete(self.concrete)
        return self._source

    @property
    def draws(self) -> bool:
        """Whether it holds random ops whose streams must continue when another graph replaces it."""
        return self.graphs_of(self._captured_once()).draws

    def graphs_of(self, captured: Captured) -> StepGraphs:
        """What makes functions of graphs that run in place of the trace."""
        return StepGraphs(self.concrete, captured, self._shapes, self._draws, self._engine)

    def drawing(self) -> StepGraphs:
        """The `StepGraphs` for the trace after Grappler; its functions continue the streams of earlier ones."""
        return self._read.graphs if self._read else self.graphs_of(self.optimized())

    def read(self) -> None:
        """Read the step that planning is about.

        Raises:
            AlreadyOptimizedError: the trace holds tfmem's ops.
            GraphError: `input_shapes` names what is no input.
        """
        captured = self.optimized()
        self._read = read_step(captured, self._engine, self._shapes, self.graphs_of, self.rehearsed)

    def divide(self, budget: int, rate: float = 0.0, **how: Any) -> Refusal | None:
        """Let parts of the step run on pieces of the batch from now on, or say why not; of a trace that was read.

        Args:
            budget, rate, how: see `split_under`.
        """
        read = self._known
        if self.split is not None or has_regions(read.step.graph):
            return Reason.SPLIT_AGAIN()
        found = split_under(read.step, self._engine, budget, rate, **how)
        if isinstance(found, Refusal):
            return found
        graph_def = serde.to_graph_def(found.graph, read.captured.graph_def)
        captured = replace(read.captured, graph_def=graph_def, creation_order=found.order)
        self.divided_from = self.fingerprint()
        self._draws = self.drawing().streams  # graphs that ran before continue in this one
        self._optimized, self.split, self._in_pieces, self._kept = captured, found, True, None
        self.read()
        self.base = self.graphs.restore(graph_def)
        return None

    def become(self, other: Trace) -> None:
        """Go on as `other`, a copy of this trace that was divided."""
        vars(self).update(vars(other))

    def split_loops(self, least: int) -> bool:
        """Put loops into pieces whose lists hold so many bytes, and read the step again; whether there are any.

        The unmodified step stays as it is, and runs where nothing moves.
        """
        found = splits(self.step.graph, least, self.step.fetches)
        if not found:
            return False
        self._optimized, self._in_pieces = with_pieces(self.optimized(), found), True
        self.read()
        return True

    def surely_fits(self, budget: int) -> bool:
        """Whether the step needs so much less than the budget that nothing has to move: all its tensors together, where
        their sizes are known, or by an estimate; see `read`."""
        plenty = self._engine.settings.surely_fits * budget
        together = estimated_peak(self._engine, None, self.concrete.graph)
        if together is not None and together <= plenty:
            return True
        self.read()
        return self.step.timeline(self._engine.estimate(workspace=True)).peak <= plenty

    @property
    def shared(self) -> bool:
        """Whether other replicas run the step with this one, which waits for them; see `pipeline.Step`."""
        return self._read is not None and bool(self._read.step.shared)

    @property
    def of_replicas(self) -> bool:
        """Whether it is of a distribution strategy: by its variables, or by its ops, which may use none."""
        return is_distributed(self.concrete) or bool(shared_by(every_node(self._captured_once().graph_def)))

    @property
    def step(self) -> pipeline.Step:
        """What `read` read."""
        return self._known.step

    @property
    def graphs(self) -> StepGraphs:
        """What makes functions of the graphs that run in place of the trace, once it was read."""
        return self._known.graphs

    @property
    def creation_order(self) -> tuple[str, ...]:
        """Names of its ops, in the order in which the program made them; of a trace that was read."""
        return self._known.captured.creation_order

    @property
    def was_read(self) -> bool:
        """Whether its step is known; not where reading it failed."""
        return self._read is not None

    @property
    def can_dry_run(self) -> bool:
        """Whether a dry run of the step would leave nothing behind; of a trace that was read."""
        return self._known.dry_run

    @property
    def _known(self) -> ReadStep:
        if self._read is None:
            raise GraphError(f"internal error in tfmem: '{self.name}' was not read; please report this")
        return self._read

    @property
    def input_specs(self) -> tuple[tuple[str, tuple[int | None, ...] | None], ...]:
        """Dtype and shape of each input, as they are planned; None where the rank is not known."""
        return input_specs(self.concrete, self._shapes)

    def estimated_peak(self) -> int | None:
        """Bytes that the unmodified trace needs, for use after an error; None if unknown."""
        return estimated_peak(self._engine, self._read.step if self._read else None, self.concrete.graph)

    def fingerprint(self) -> str:
        """The key of the step's profile in the cache."""
        return fingerprint(self.step.graph, conditions(self._engine.settings.target))

    def plan(self, timeline: Timeline, budget: int, **how: Any) -> OffloadPlan:
        """See `pipeline.plan_step`; plans of the same timeline are kept, so that more memory makes none slower."""
        engine = self._engine
        if self._kept is None or self._kept[0] is not timeline:
            self._kept = timeline, ()
        known = self._kept[1]
        options = engine.settings.options.offload
        found = pipeline.plan_step(self.step, timeline, engine.link, budget, options, known=known, **how)
        if found.moves and not how.get("widest"):
            self._kept = timeline, (*known, found)[-MOST_KEPT:]
        return found

    def build(
        self, timeline: Timeline, plan: OffloadPlan, probing: Probing | None = None, dry_run: bool = False
    ) -> Any:
        """A function that runs `plan`, with probes if asked; a dry run writes no variable."""
        options, key = self._engine.settings.options.offload, self._engine.spill_key
        edited = pipeline.edit_step(self.step, timeline, plan, options, probing, spill_key=key)
        graph_def = serde.to_graph_def(edited, self._known.captured.graph_def)
        return self.graphs.restore(graph_def, dry_run=dry_run)

    def build_lanes(self, plans: Sequence[LanePlan], probing: Sequence[Probing] = (), final: bool = False) -> Any:
        """A function that runs a plan on each device; `base` where nothing moves, with the same random streams.

        Args:
            plans: one for each lane.
            probing: the probes of each; () for none.
            final: whether no other graph can follow, which would go on with the streams.
        """
        if not probing and not any(each.plan.moves for each in plans):
            return self.base if final else self.unmoved()
        edited = edit_lanes(self.step, plans, self._engine.settings.options.offload, self._engine.spill_key, probing)
        return self.graphs.restore(serde.to_graph_def(edited, self._known.captured.graph_def), dry_run=False)

    def unmoved(self) -> Any:
        """The function that runs where nothing moves; `base` from now on."""
        self.base = self.graphs.unmoved(self.base, bool(self.jit_compile) and self.split is None)
        return self.base

    def ran(self, function: Any) -> None:
        """`function` ran last in place of the trace."""
        if self._read is not None:
            self._read.graphs.ran(function)

    def unplanned(self) -> Report:
        """The report while nothing is planned."""
        lost = self.jit_compile and self.replacements.matches
        report = replace(self._engine.settings.unplanned(self.name), jit_compile=Xla.RECURRENT if lost else Xla.NO_PART)
        return with_replacements(report, self.replacements)

    def describe(self, timeline: Timeline, plan: OffloadPlan, notes: Sequence[str], *, given: bool) -> Report:
        """The report of `plan`.

        Args:
            timeline: what it was made on.
            plan: the plan.
            notes: what else to say.
            given: whether the trace runs in the order that TensorFlow gives it.
        """
        engine = self._engine
        policy, device = engine.settings.options.offload.policy, engine.settings.target.description
        report = step_report.describe(self.step, timeline, plan, policy, graph=self.name, device=device, notes=notes)
        ordered = not plan.moves and not given
        decision = ORDERED if ordered else report.decision
        report = replace(report, decision=decision, budget=engine.settings.budget)
        if self.split is not None:
            report = with_split(report, self.split, bool(plan.moves))
        return self._complete(report, bool(plan.moves), ordered or self.split is not None)

    def describe_lanes(self, plans: Sequence[LanePlan], timed: bool = False) -> Report:
        """The report of a plan for each device; `timed` where it was made by measured run times."""
        report = describe_replicas(self.step, plans, self._engine, self.name, timed, self.split)
        return self._complete(report, any(each.plan.moves for each in plans), ordered=self.split is not None)

    def _complete(self, report: Report, moves: bool, ordered: bool) -> Report:
        """`report` with the passes, and what became of XLA, if it would run the trace, and of recurrent layers."""
        report = replace(report, passes=self._engine.settings.passes)
        if self.jit_compile:
            report = replace(report, jit_compile=self._xla(moves, ordered))
        return with_replacements(report, self.replacements)

    def _xla(self, moves: bool, ordered: bool) -> Xla:
        """What becomes of XLA, which would run the trace, if tensors move or the order is held."""
        if self.replacements.matches:
            return Xla.RECURRENT
        if moves:
            return Xla.MOVED
        return Xla.ORDERED if ordered else Xla.LEFT_ON
