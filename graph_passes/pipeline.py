"""The eight passes, each with its phase and its contract; and one captured step through the one that moves memory.

captured --BEFORE_GRAPPLER--> Grappler, once --AFTER_GRAPPLER--> (with a budget: UNDER_BUDGET) --> restored
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from graph_passes import pass_infra
from graph_passes.analysis.cost.folded import not_run
from graph_passes.analysis.cost.model import CostModel, held
from graph_passes.analysis.memory import roles
from graph_passes.analysis.memory.liveness import build_timeline, priced, refuse_open
from graph_passes.analysis.memory.replica_step import shared_by
from graph_passes.analysis.memory.session_step import reads_before_updates, step_region, with_waits
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.contract import Contract, Kept, Property
from graph_passes.errors import GraphError, InfeasibleBudgetError, NoGradientError, ReplicasError, UnknownShapeError
from graph_passes.graph.graph_source import Source
from graph_passes.graph.ir import Editor, Graph, TensorId, parse_input
from graph_passes.graph.ops import FUSION_OP, has_regions
from graph_passes.graph.order import schedule
from graph_passes.graph.rewrite import Rewrite, apply_rewrites
from graph_passes.graph.verify import verify_merged
from graph_passes.pass_infra import NeedsOf, Pass, PassOutcome, PassPhase
from graph_passes.passes.equal.apply import numbers_once
from graph_passes.passes.equal.plan import plan_equal
from graph_passes.passes.fuse.apply import fusion_rewrites
from graph_passes.passes.fuse.plan import plan_fusion
from graph_passes.passes.merge.apply import merge_rewrites
from graph_passes.passes.merge.plan import plan_merge
from graph_passes.passes.offload.apply import offload_rewrites
from graph_passes.passes.offload.options import RECOMPUTING, OffloadOptions
from graph_passes.passes.offload.plan import How, Needs, OffloadPlan, PlanRequest, Probing, plan_step_memory
from graph_passes.passes.offload.selection import in_use
from graph_passes.passes.prepare.apply import prepare_rewrites
from graph_passes.passes.prepare.copies import CHEAP
from graph_passes.passes.prepare.plan import plan_prepare
from graph_passes.passes.prepare.seeds import SEEDED
from graph_passes.passes.products.apply import MATMUL_OP, product_rewrites
from graph_passes.passes.products.plan import plan_products
from graph_passes.passes.recurrent.apply import recurrent_rewrites
from graph_passes.passes.recurrent.plan import plan_recurrent
from graph_passes.passes.split.apply import split_rewrites
from graph_passes.passes.split.plan import plan_split

__all__ = [
    "EQUAL", "FUSE", "MERGE", "OFFLOAD", "PASSES", "PREPARE", "PRODUCTS", "RECURRENT", "SPLIT", "Pass", "PassOutcome",
    "PassPhase", "Step", "StepSource", "edit_step", "plan_step", "run_passes", "runs",
]  # fmt: skip

_EDITS = Contract(
    ensures=frozenset({Property.WELL_FORMED}),
    leaves=frozenset({Kept.FETCHES, Kept.UPDATES, Kept.OTHERS}),
)
_AFTER_GRAPPLER = replace(_EDITS, requires=frozenset({Property.WELL_FORMED, Property.TYPED}))

RECURRENT = Pass(
    "recurrent",
    PassPhase.BEFORE_GRAPPLER,
    "recurrent",
    plan_recurrent,
    recurrent_rewrites,
    replace(_EDITS, requires=frozenset({Property.TYPED})),  # lowered loops are cycles
)
PRODUCTS = Pass(
    "products",
    PassPhase.BEFORE_GRAPPLER,
    "recurrent",
    plan_products,
    product_rewrites,
    replace(_EDITS, requires=frozenset({Property.TYPED}), inserts=frozenset({MATMUL_OP})),
)
PREPARE = Pass(
    "prepare",
    PassPhase.AFTER_GRAPPLER,
    "fusion",
    plan_prepare,
    prepare_rewrites,
    replace(
        _AFTER_GRAPPLER, inserts=frozenset({"BatchMatMulV2", "Const", "MatMul", "Reshape", "Transpose", SEEDED, *CHEAP})
    ),
)
MERGE = Pass(
    "merge",
    PassPhase.AFTER_GRAPPLER,
    "fusion",
    plan_merge,
    merge_rewrites,
    replace(_AFTER_GRAPPLER, inserts=frozenset({"Const", "MatMul", "Reshape", "ConcatV2", "Slice", "AddN", "BiasAdd"})),
)
FUSE = Pass(
    "fuse",
    PassPhase.AFTER_GRAPPLER,
    "fusion",
    plan_fusion,
    fusion_rewrites,
    replace(_AFTER_GRAPPLER, inserts=frozenset({FUSION_OP})),
)
EQUAL = Pass("equal", PassPhase.UNDER_BUDGET, "offload", plan_equal, numbers_once, _AFTER_GRAPPLER)
SPLIT = Pass("split", PassPhase.UNDER_BUDGET, "offload", plan_split, split_rewrites, _AFTER_GRAPPLER)
OFFLOAD = Pass(
    "offload",
    PassPhase.UNDER_BUDGET,
    "offload",
    plan_step_memory,
    offload_rewrites,
    replace(_EDITS, requires=frozenset({Property.WELL_FORMED})),  # it also computes ops of the graph a second time
)

# In the order in which they run.
PASSES: tuple[Pass[Any, Any], ...] = (RECURRENT, PRODUCTS, PREPARE, MERGE, FUSE, EQUAL, SPLIT, OFFLOAD)


def runs(phase: PassPhase, asked: Collection[str]) -> bool:
    """Whether a user who asked for these passes wants any of `phase`."""
    return any(each.phase is phase and each.option in asked for each in PASSES)


def run_passes(
    phase: PassPhase,
    asked: Collection[str],
    source: Source,
    needs: Mapping[str, NeedsOf],
    passes: Sequence[Pass[Any, Any]] = PASSES,
) -> dict[str, PassOutcome[Any]]:
    """See `pass_infra.run_passes`; by default of all passes."""
    return pass_infra.run_passes(phase, asked, source, needs, passes)


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
        shared: what ties it to other replicas, in words; "" if nothing does. Such a step has a plan for each device
            (`graph_passes.lane_edits`), or none.
        hosted: whether int32 tensors lie in the host's memory, as in a GPU's step.
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
    hosted: bool = False

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
        hosted: bool = False,
    ) -> Step:
        """Find the schedule of `graph`."""
        order, shared = tuple(schedule(graph, creation_order, merging)), shared_by(graph)
        return cls(graph, order, tuple(fetches), loss, merging, counted, of_data=of_data, shared=shared, hosted=hosted)

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
        return replace(cls.read(with_waits(region, held), **known), held=held)

    @cached_property
    def first_update(self) -> int:
        """The position of the first op that writes a variable which a layer reads; the step's length if none does."""
        return roles.first_update(self.graph, self.order)

    def timeline(self, costs: CostModel) -> Timeline:
        """The step under a cost model. All but the costs is found once.

        Raises:
            UnknownShapeError: its caller left a shape open, and more of it would be known if not.
            NoGradientError: the same, and the graph does not differentiate.
        """
        return priced(self._unpriced, self.graph, costs)

    @cached_property
    def _unpriced(self) -> Timeline:
        graph = self.graph
        timeline = build_timeline(graph, self.order, None, self.fetches, self.loss, self.merging, not_run(graph))
        try:
            refuse_open(graph, timeline, self.of_data)
        except UnknownShapeError as error:
            if roles.has_gradient(graph):
                raise
            raise NoGradientError(f"there is no gradient in the graph, and no size to plan with: {error}") from error
        unordered = roles.unordered(graph, self.order, self.merging, self.hosted)
        return replace(timeline, unordered=unordered, counted=self.counted, small_base=held(graph, self.counted))


def plan_step(
    step: Step,
    timeline: Timeline,
    link: Link,
    budget: int,
    options: OffloadOptions,
    **how: Any,
) -> OffloadPlan:
    """See `plan_offload` of the offload pass; `how` is the rest of its `How`, by name.

    Raises:
        ReplicasError: the budget is too small, and the step is one of several replicas.
        NoGradientError: the budget is too small, and the graph does not differentiate.
        InfeasibleBudgetError: the budget is too small for any plan.
    """
    try:
        wanted = PlanRequest(
            link,
            budget,
            How(
                layers=roles.layers(step.graph, timeline),
                convolution_inputs=roles.convolution_inputs(step.graph, timeline),
                # the layers in regions are not known
                relax=not step.merging or has_regions(step.graph) or options.policy in RECOMPUTING,
                **how,
            ),
        )
        found = OFFLOAD.plan(StepSource(step), [Needs(timeline, options, wanted)])[0][0].moves
    except InfeasibleBudgetError as error:
        if step.shared:
            raise _shared(step, timeline, budget) from error
        if not roles.has_gradient(step.graph):
            raise NoGradientError(
                f"the budget is {budget:,} bytes, and the step needs {timeline.peak:,}{in_use(timeline)}. Nothing that "
                "its layers read waits for a gradient: there is no gradient in the graph; optimise the training step "
                "(avm_gradients, a compiled Keras model, or a function that applies gradients), or raise the budget"
            ) from error
        raise
    if found.moves and step.shared:
        raise _shared(step, timeline, budget)
    return found


def _shared(step: Step, timeline: Timeline, budget: int) -> ReplicasError:
    return ReplicasError(
        f"the budget is {budget:,} bytes, and the step needs {timeline.peak:,}{in_use(timeline)}. tfmem moves no "
        f"tensor of a step of several replicas in this form: {step.shared}; optimise the tf.function "
        "around `strategy.run`, or the compiled Keras model, or train with a smaller batch"
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
    return edit_on_devices(step, [Needs(timeline, options, plan, probing, spill_key)], editor)


def edit_on_devices(step: Step, needs: Sequence[Needs], editor: Editor | None = None) -> Graph:
    """See `edit_step`; the plans of all devices are carried out, and checked, together."""
    source = StepSource(step, editor)
    outcomes = run_passes(PassPhase.UNDER_BUDGET, (OFFLOAD.option,), source, {OFFLOAD.name: lambda _: needs})
    outcome = outcomes[OFFLOAD.name]
    failed = next(iter(outcome.errors.values()), outcome.failed)
    if failed is not None:
        raise failed
    return source.edited


class StepSource:
    """A `Source` of one step: its graph is edited in a copy, or by an editor.

    Attributes:
        edited: the graph with what was done to it.
    """

    structure = None

    def __init__(self, step: Step, editor: Editor | None = None) -> None:
        self._step = step
        self._editor = editor
        self.edited = step.graph

    def read(self, _: Collection[str] | None = None, functions: bool = True) -> Graph:
        return self._step.graph

    def keep(self, _: Graph) -> set[str]:
        return {tensor.node for tensor in self._step.fetches}

    def bodies(self) -> Mapping[str, Source]:
        return {}

    def follow(self, _: Source) -> Mapping[str, str]:
        raise GraphError("internal error in tfmem: a step cannot follow another; please report this")

    def edit(
        self, graph: Graph, rewrites: Sequence[Rewrite], check: Callable[[Graph], object]
    ) -> Mapping[str, Exception]:
        if self._editor is None:
            edited = graph.copy()
            apply_rewrites(rewrites, edited)
            check(edited)
            if self._step.merging:
                verify_merged(graph, edited)
            self.edited = edited
            return {}
        for update, reader in self._step.held:
            self._editor.add_control(update, reader)
        apply_rewrites(rewrites, graph, self._editor)
        return {}
