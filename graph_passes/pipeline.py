"""The passes, each with its phase; and one captured step through those that move memory: read, planned on, edited.

    captured --BEFORE_GRAPPLER--> Grappler, once --AFTER_GRAPPLER--> (with a budget: UNDER_BUDGET) --> restored

What a pass needs of TensorFlow or of a device (gradients, kernels that are timed, costs) is handed to its plan.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from graph_passes.cost.model import CostModel, held
from graph_passes.errors import InfeasibleBudgetError, NoGradientError
from graph_passes.graph.ir import Editor, Graph, TensorId, parse_input
from graph_passes.graph.order import schedule
from graph_passes.graph.verify import verify_graph
from graph_passes.matmul.apply import apply_products
from graph_passes.matmul.plan import plan_products
from graph_passes.memory import roles
from graph_passes.memory.liveness import build_timeline
from graph_passes.memory.region import reads_before_updates, step_region
from graph_passes.memory.simulate import Link, uncounted, usage_under
from graph_passes.memory.timeline import Timeline
from graph_passes.offload.apply import apply_offload
from graph_passes.offload.memops import Probing, transfers
from graph_passes.offload.options import OffloadOptions
from graph_passes.offload.plan import OffloadPlan, plan_offload
from graph_passes.recurrent.apply import apply_recurrent
from graph_passes.recurrent.inference import plan_source
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
    """One pass.

    Attributes:
        name: what it is called.
        phase: where it stands.
        option: the name in a user's `passes` that asks for it.
        plan: decides; pure, and gives a frozen dataclass.
        apply: edits as the plan says, and makes no choice.
    """

    name: str
    phase: Phase
    option: str
    plan: Callable[..., Any]
    apply: Callable[..., None]


# In the order in which they run.
PASSES = (
    Pass("recurrent", Phase.BEFORE_GRAPPLER, "recurrent", plan_source, apply_recurrent),
    Pass("products", Phase.BEFORE_GRAPPLER, "recurrent", plan_products, apply_products),
    Pass("offload", Phase.UNDER_BUDGET, "offload", plan_offload, apply_offload),
)


def runs(phase: Phase, asked: Collection[str]) -> bool:
    """Whether a user who asked for these passes wants any of `phase`."""
    return any(each.phase is phase and each.option in asked for each in PASSES)


@dataclass(frozen=True, eq=False)
class Step:
    """A graph and what planning needs to know of it.

    Attributes:
        graph: the graph, never edited.
        order: its schedule.
        fetches: the tensors it returns.
        loss: the loss, where the caller named it.
        merging: whether the runtime merges pairs of ops after all passes (see `roles.unordered`).
        counted: bytes of the smallest buffer that the device's allocator counts (see `Timeline.counted`).
        held: (update, the op that it waits for): edges that `graph` has, and the graph that it was read from has not.
    """

    graph: Graph
    order: tuple[str, ...]
    fetches: tuple[TensorId, ...]
    loss: TensorId | None = None
    merging: bool = False
    counted: int = 0
    held: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(
        cls,
        graph: Graph,
        creation_order: Sequence[str] = (),
        fetches: Collection[TensorId] = (),
        loss: TensorId | None = None,
        merging: bool = False,
        counted: int = 0,
    ) -> Step:
        """Find the schedule of `graph`."""
        return cls(graph, tuple(schedule(graph, creation_order, merging)), tuple(fetches), loss, merging, counted)

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
        """The step under a cost model."""
        timeline = build_timeline(self.graph, self.order, costs, self.fetches, self.loss)
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
    """See `graph_passes.offload.plan.plan_offload`; `how` is `timed`, `widest`, `unmoved`, `copied` and `room`.

    Raises:
        NoGradientError: the budget is too small, and the graph does not differentiate.
        InfeasibleBudgetError: the budget is too small for any plan.
    """
    try:
        return plan_offload(
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
        if not roles.has_gradient(step.graph):
            raise NoGradientError(
                f"the step needs {timeline.peak:,} bytes, more than the budget of {budget:,}, and nothing that its "
                "layers read waits for a gradient: there is no gradient in the graph; optimise the training step "
                "(avm_gradients, a compiled Keras model, or a function that applies gradients)"
            ) from error
        raise


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
    """
    if editor is not None:
        for update, reader in step.held:
            editor.add_control(update, reader)
        apply_offload(step.graph, timeline, plan, options, probing, spill_key, editor)
        return step.graph
    edited = step.graph.copy()
    apply_offload(edited, timeline, plan, options, probing, spill_key)
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
    )
