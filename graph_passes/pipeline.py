"""The passes, each with its phase, and what runs them; and one captured step through those that move memory.

    captured --BEFORE_GRAPPLER--> Grappler, once --AFTER_GRAPPLER--> (with a budget: UNDER_BUDGET) --> restored

What a pass needs of TensorFlow or of a device (gradients, kernels that are timed, costs) is handed to its plan.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from custom_ops.background import go_on
from graph_passes.analysis.cost.model import CostModel, held
from graph_passes.analysis.memory import roles
from graph_passes.analysis.memory.liveness import UNKNOWN_LIST, build_timeline, refuse_open
from graph_passes.analysis.memory.region import reads_before_updates, step_region
from graph_passes.analysis.memory.replicas import shared_by
from graph_passes.analysis.memory.simulate import Link, uncounted, usage_under
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.errors import InfeasibleBudgetError, NoGradientError, ReplicasError, UnknownShapeError
from graph_passes.graph.ir import Editor, Graph, TensorId, parse_input
from graph_passes.graph.order import schedule
from graph_passes.graph.rewrite import Rewrite, apply_rewrites
from graph_passes.graph.source import Source
from graph_passes.graph.verify import verify_graph
from graph_passes.passes.fuse.apply import fusion_rewrites
from graph_passes.passes.fuse.plan import plan_fusion
from graph_passes.passes.merge.plan import merging_rewrites, plan_merging
from graph_passes.passes.offload.apply import Probing, offload_rewrites, transfers
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import OffloadPlan, plan_offload
from graph_passes.passes.prepare.plan import plan_preparation, preparation_rewrites
from graph_passes.passes.products.apply import product_rewrites
from graph_passes.passes.products.plan import plan_products
from graph_passes.passes.recurrent.apply import recurrent_rewrites
from graph_passes.passes.recurrent.plan import plan_recurrent
from graph_passes.report import MOVED, RECOMPUTED, UNCHANGED_FITS, Report, TransferRecord


class Phase(enum.Enum):
    """Where in the pipeline a pass stands.

    Attributes:
        BEFORE_GRAPPLER: on the graph as its author left it, with loops as they were written.
        AFTER_GRAPPLER: on the ops that will run, whether there is a budget or not.
        UNDER_BUDGET: the same, where memory is limited.
    """

    BEFORE_GRAPPLER = enum.auto()
    AFTER_GRAPPLER = enum.auto()
    UNDER_BUDGET = enum.auto()


@dataclass(frozen=True)
class Pass:
    """One pass. Neither of its functions edits anything: `run_passes` and `edit_step` do.

    Attributes:
        name: what it is called.
        phase: where it stands.
        option: the name in a user's `passes` that asks for it.
        plan: decides. `(source, needs) -> (a frozen dataclass, the graph that it is for)`; under a budget as
            `plan_offload`, since a step is planned many times.
        rewrites: `(plan, graph) -> Sequence[Rewrite]`, with no choice left; under a budget as `offload_rewrites`.
    """

    name: str
    phase: Phase
    option: str
    plan: Callable[..., Any]
    rewrites: Callable[..., Sequence[Rewrite]]


OFFLOAD = Pass("offload", Phase.UNDER_BUDGET, "offload", plan_offload, offload_rewrites)

# In the order in which they run.
PASSES = (
    Pass("recurrent", Phase.BEFORE_GRAPPLER, "recurrent", plan_recurrent, recurrent_rewrites),
    Pass("products", Phase.BEFORE_GRAPPLER, "recurrent", plan_products, product_rewrites),
    Pass("preparation", Phase.AFTER_GRAPPLER, "fusion", plan_preparation, preparation_rewrites),
    Pass("merging", Phase.AFTER_GRAPPLER, "fusion", plan_merging, merging_rewrites),
    Pass("fusion", Phase.AFTER_GRAPPLER, "fusion", plan_fusion, fusion_rewrites),
    OFFLOAD,
)


def runs(phase: Phase, asked: Collection[str]) -> bool:
    """Whether a user who asked for these passes wants any of `phase`."""
    return any(each.phase is phase and each.option in asked for each in PASSES)


@dataclass(frozen=True)
class Outcome:
    """What came of one pass.

    Attributes:
        plan: what it decided; None if it failed.
        errors: why rewrites could not be carried out, by their names; the graph is without these.
        failed: what it failed with. The graph is as it was before.
    """

    plan: Any = None
    errors: Mapping[str, Exception] = field(default_factory=dict)
    failed: Exception | None = None


Needs = Callable[[Mapping[str, Outcome]], Any]


def run_passes(
    phase: Phase,
    asked: Collection[str],
    source: Source,
    needs: Mapping[str, Needs],
    passes: Sequence[Pass] = PASSES,
) -> dict[str, Outcome]:
    """Plan and carry out the passes of a phase, each on what those before it left; one that fails costs no other.

    Args:
        phase: not `UNDER_BUDGET`, whose passes are planned again for each stage of a step.
        asked: the user's `passes`.
        source: what is read and edited.
        needs: by name of a pass, what its plan is handed, made of what came of the passes before it. None, or no entry:
            the pass does not run.
        passes: all passes.

    Returns:
        What came of each pass that ran, by its name.
    """
    done: dict[str, Outcome] = {}
    for each in passes:
        if each.phase is not phase or each.option not in asked or each.name not in needs:
            continue
        go_on()
        try:
            handed = needs[each.name](done)
            if handed is None:
                continue
            plan, graph = each.plan(source, handed)
            rewrites = each.rewrites(plan, graph)
            done[each.name] = Outcome(plan, source.edit(graph, rewrites) if rewrites else {})
        except Exception as error:  # whatever it is, the step runs without this pass
            done[each.name] = Outcome(failed=error)
    return done


@dataclass(frozen=True, eq=False)
class Step:
    """A graph and what planning needs to know of it.

    Attributes:
        graph: the graph, never edited.
        order: its schedule.
        fetches: the tensors it returns.
        loss: the loss, where the caller named it.
        merging: whether the runtime merges pairs of ops after all passes (see `graph_passes.graph.merged`).
        counted: bytes of the smallest buffer that the device's allocator counts (see `Timeline.counted`).
        held: (update, the op that it waits for): edges that `graph` has, and the graph that it was read from has not.
        of_data: tensors whose size depends on data, so that it would not be known if inputs had no open dimension.
        shared: what ties it to other replicas, in words; "" if nothing does. Such a step is never edited.
    """

    graph: Graph
    order: tuple[str, ...]
    fetches: tuple[TensorId, ...]
    loss: TensorId | None = None
    merging: bool = False
    counted: int = 0
    held: tuple[tuple[str, str], ...] = ()
    of_data: frozenset[TensorId] = frozenset()
    shared: str = ""

    @classmethod
    def read(
        cls,
        graph: Graph,
        creation_order: Sequence[str] = (),
        fetches: Collection[TensorId] = (),
        loss: TensorId | None = None,
        merging: bool = False,
        counted: int = 0,
        of_data: frozenset[TensorId] = frozenset(),
    ) -> Step:
        """Find the schedule of `graph`."""
        order, shared = tuple(schedule(graph, creation_order, merging)), shared_by(graph)
        return cls(graph, order, tuple(fetches), loss, merging, counted, of_data=of_data, shared=shared)

    @classmethod
    def of_session(cls, graph: Graph, run: Sequence[str] = (), **known: Any) -> Step:
        """The part of a session's graph that one step runs; each update waits for what reads its variable in place.

        Args:
            graph: the whole graph; not changed.
            run: names of the tensors or ops that a step is run for; by default the ops that train.
            known: see `read`.
        """
        region = step_region(graph, [parse_input(name)[0].node for name in run])
        held = tuple(reads_before_updates(region))
        for update, reader in held:
            region.add_control(update, reader)
        return replace(cls.read(region, **known), held=held)

    @cached_property
    def first_update(self) -> int:
        """The position of the first op that writes a variable which a layer reads; the step's length if none does."""
        return roles.first_update(self.graph, self.order)

    def timeline(self, costs: CostModel) -> Timeline:
        """The step under a cost model.

        Raises:
            UnknownShapeError: its caller left a shape open, and more of it would be known if not.
            NoGradientError: the same, and the graph does not differentiate.
        """
        timeline = build_timeline(self.graph, self.order, costs, self.fetches, self.loss, self.merging)
        try:
            refuse_open(self.graph, timeline, self.of_data)
        except UnknownShapeError as error:
            if roles.has_gradient(self.graph):
                raise
            raise NoGradientError(f"there is no gradient in the graph, and no size to plan with: {error}") from error
        return replace(
            timeline,
            unordered=roles.unordered(self.graph, self.order, self.merging),
            counted=self.counted,
            small_base=held(self.graph, self.counted),
        )


def plan_step(
    step: Step,
    timeline: Timeline,
    link: Link,
    budget: int,
    options: OffloadOptions,
    **how: Any,
) -> OffloadPlan:
    """See `plan_offload` of the offload pass; `how` is `timed`, `widest`, `unmoved`, `copied`, `padded`, `room`.

    Raises:
        ReplicasError: the budget is too small, and the step is one of several replicas.
        NoGradientError: the budget is too small, and the graph does not differentiate.
        InfeasibleBudgetError: the budget is too small for any plan.
    """
    try:
        found: OffloadPlan = OFFLOAD.plan(
            timeline,
            link,
            budget,
            options,
            layers=roles.layers(step.graph, timeline),
            convolution_inputs=roles.convolution_inputs(step.graph, timeline),
            relax=not step.merging,
            **how,
        )
    except InfeasibleBudgetError as error:
        if step.shared:
            raise _shared(step, timeline, budget) from error
        if not roles.has_gradient(step.graph):
            raise NoGradientError(
                f"the step needs {timeline.peak:,} bytes, more than the budget of {budget:,}, and nothing that its "
                "layers read waits for a gradient: there is no gradient in the graph; optimise the training step "
                "(avm_gradients, a compiled Keras model, or a function that applies gradients)"
            ) from error
        raise
    if found.moves and step.shared:
        raise _shared(step, timeline, budget)
    return found


def _shared(step: Step, timeline: Timeline, budget: int) -> ReplicasError:
    return ReplicasError(
        f"the step needs {timeline.peak:,} bytes, more than the budget of {budget:,}, and no tensor of a step that "
        f"runs in several replicas or workers can be moved: {step.shared}; train in one replica or with a smaller batch"
    )


def edit_step(
    step: Step,
    timeline: Timeline,
    plan: OffloadPlan,
    options: OffloadOptions,
    probing: Probing | None = None,
    editor: Editor | None = None,
    spill_key: str = "",
) -> Graph:
    """The graph with the plan's MemOps; `step.graph` stays as it is.

    Args:
        editor: edit this (a live `tf.Graph`) instead of a copy of the graph.
        spill_key: what stands for the directory of spill files (`Library.spill_key`).

    Raises:
        GraphError: the plan is none for this step; nothing was edited.
    """
    rewrites = OFFLOAD.rewrites(step.graph, timeline, plan, options, probing, spill_key)
    if editor is not None:
        for update, reader in step.held:
            editor.add_control(update, reader)
        apply_rewrites(rewrites, step.graph, editor)
        return step.graph
    edited = step.graph.copy()
    apply_rewrites(rewrites, edited)
    verify_graph(edited)
    return edited


def describe(
    step: Step,
    timeline: Timeline,
    plan: OffloadPlan,
    policy: str,
    *,
    graph: str,
    device: str,
    notes: Sequence[str] = (),
) -> Report:
    """The report of a plan, nothing measured yet."""
    names = [item.node for item in timeline.steps]
    peaks = {plan.before.peak_at, plan.after.peak_at} if names else set()  # a step may have no op at all
    shown = sorted({*plan.ordered, *peaks})
    after = usage_under(timeline, plan.moves, plan.paddings)
    records = tuple(
        TransferRecord(
            tensor=str(tensor),
            bytes=timeline.buffers[move.buffer].nbytes,
            offload_after=RECOMPUTED if move.recomputed else names[move.copy_after],
            release_before=names[move.release],
            prefetch_before=names[move.prefetch],
            first_use=names[move.next],
        )
        for move, tensor in transfers(step.graph, timeline, plan)
    )
    moved = sum(record.bytes for record in records if record.offload_after != RECOMPUTED)
    uncounted_lists = tuple(str(buffer.tensor) for buffer in timeline.buffers if buffer.pinned_by == UNKNOWN_LIST)
    unknown = [(buffer.tensor, buffer.pinned_by) for buffer in timeline.buffers if not buffer.nbytes]
    left_alone = [f"left alone: {tensor}: {reason}" for tensor, reason in (*unknown, *plan.left_alone)]
    return Report(
        graph=graph,
        device=device,
        policy=policy,
        decision=MOVED if records else UNCHANGED_FITS,
        budget=plan.budget,
        passes=("offload",),
        peak_before=plan.before.peak,
        peak_predicted=plan.after.peak,
        peak_uncounted=uncounted(timeline, plan.moves, plan.paddings),
        bytes_out_predicted=moved,
        bytes_in_predicted=moved,
        stall_predicted_ns=round(plan.after.stall * 1e9),
        step_predicted_ns=round(plan.after.seconds * 1e9),
        size_threshold=plan.size_threshold if records else None,
        transfers=records,
        curve_before=tuple((names[p], int(timeline.usage[p])) for p in shown),
        curve_after=tuple((names[p], int(after[p])) for p in shown),
        notes=(*notes, *left_alone),
        not_enforced=uncounted_lists,
    )
