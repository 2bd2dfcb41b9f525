"""Decides what leaves device memory, when it is released, and when it comes back. Pure: Timeline in, OffloadPlan out.

The hard case: two gaps of which one is enough, and a copy back that comes too early or too late.

    bytes |      a a a a                        a a       a waits longest, b is larger: moving b alone may meet the
          |  b b b b b b b b           b b b b b b b      budget with fewer bytes over the link. A copy back that
          |----------------------|----------------->      begins late stalls the step; one that begins early fills
             forward            turn      backward        the memory that the move had freed.

    selection.select_copies            which gaps: the largest size threshold whose plan meets the budget
    placement.place                    when each move begins and ends
    repair.repaired                    more moves and paddings, until the allocator finds room
    chained                            the ops whose order decides the peak
    plan_step_memory                   the pass: a plan that is wanted, or one that was made before

Policy `autovm` is Chen's (MASc thesis, Toronto 2020, section 3.3):

    which      outputs of forward ops that are large enough and not used again soon (Listing 3.1): `selection`
    when       after the last forward use, and back in time (Listings 3.2 to 3.4): `placement`

and beyond it: any gap in any buffer's life is a candidate, not only the one between a forward and a backward use; the
size threshold is the largest whose plan meets the budget; what that plan could do without stays; and a buffer is
released at a planned position, as late as memory allows, because releasing waits for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace

from graph_passes.analysis.memory.fragmentation import SMALL, Failure, Room, first_failure
from graph_passes.analysis.memory.simulate import Link, Move, Padding, SimulatedStep, simulate
from graph_passes.analysis.memory.timeline import Gap, Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.graph_source import Readable
from graph_passes.graph.ir import Graph
from graph_passes.passes.offload.greedy import fastest
from graph_passes.passes.offload.optimal import select
from graph_passes.passes.offload.options import RECOMPUTING, Effort, OffloadOptions
from graph_passes.passes.offload.placement import in_order, one_layer_ahead, place, tight
from graph_passes.passes.offload.repair import repaired
from graph_passes.passes.offload.selection import (
    Selection,
    candidate_gaps,
    infeasible,
    is_thresholded,
    lowest,
    require_feasible,
    select_copies,
    widest_gaps,
)
from graph_passes.refusals import Refusal
from graph_passes.verdict import Verdict


@dataclass(frozen=True)
class OffloadPlan:
    """What moves and when, in positions of the timeline it was made for.

    Attributes:
        moves: the moves, by position of release.
        budget: bytes that the plan keeps within.
        size_threshold: bytes of the smallest tensor that was considered; 0 when nothing moves.
        before: what the step does with nothing moved.
        after: what it is predicted to do under the plan.
        link: the bandwidths it was predicted with.
        ordered: positions of the ops that allocate or free enough to matter; they run in this order.
        left_alone: tensors that were candidates by size but could not be moved, each with the reason.
        paddings: padding allocations, which keep tensors from where the allocator would put them.
        verdict: what the plan promises, and what no plan can.
    """

    moves: tuple[Move, ...]
    budget: int
    size_threshold: int
    before: SimulatedStep
    after: SimulatedStep
    link: Link
    ordered: tuple[int, ...] = ()
    left_alone: tuple[tuple[str, Refusal], ...] = ()
    paddings: tuple[Padding, ...] = ()
    verdict: Verdict | None = None

    @property
    def actions(self) -> tuple[tuple[Move, ...], tuple[Padding, ...]]:
        """What is done to the step; plans that do the same are the same."""
        return self.moves, self.paddings

    def tightened(self, over: int) -> int:
        """The budget to plan for when this plan ran `over` bytes over: within its own peak, or it would come again."""
        return min(self.budget, self.after.peak) - over

    def under(self, timeline: Timeline) -> OffloadPlan:
        """This plan as predicted for other costs."""
        before = simulate(timeline, (), self.link)
        after = simulate(timeline, self.moves, self.link, self.paddings)
        verdict = self.verdict and self.verdict.under(before.seconds, after.seconds)
        return replace(self, before=before, after=after, verdict=verdict)

    def failure(self, timeline: Timeline, room: Room, *, excused: Container[int] = ()) -> Failure | None:
        """Where the step runs out of room; see `first_failure`."""
        return first_failure(timeline, self.moves, room, self.paddings, excused=excused)


@dataclass(frozen=True)
class Probing:
    """Asks for a MemOpProbe behind every ordered op, and one between an op and the MemOps right before it.

    An observed step may run out of memory, and is then run again; so its variables wait for its last large op.

    Attributes:
        run: the table that the probes write to.
        device: where they sample, as TensorFlow names devices.
        holds: whether variables wait; not in a step of several lanes, which is never run again.
    """

    run: int
    device: str
    holds: bool = True


@dataclass(frozen=True, eq=False)
class How:
    """How a plan is made.

    Attributes:
        layers: positions of the forward ops that multiply with a weight, ascending.
        convolution_inputs: indices of buffers that a forward convolution reads (for `vdnn_conv`).
        timed: whether the timeline's run times were measured.
        widest: move every tensor of size that waits across the turn, for its whole gap, whatever that stalls: a step
            with memory to spare, in which cuDNN is free to choose. If that is not enough, every candidate.
        unmoved: move nothing, whatever the budget: a step that is short of workspace alone still runs.
        copied: no rematerialisation, though the policy may choose it.
        padded: whether there may be padding allocations.
        effort: see `Effort`.
        room: where the allocations have to find room (see `memory.fragmentation`); moves are added until they do, as
            far as moves can help.
        relax: whether a default reuse distance that no plan can meet the budget with is halved until one can.
        known: plans for the same timeline; the fastest that keeps within the budget is taken, if it is faster.
    """

    layers: Sequence[int] = ()
    convolution_inputs: Collection[int] = ()
    timed: bool = False
    widest: bool = False
    unmoved: bool = False
    copied: bool = False
    padded: bool = True
    effort: Effort = Effort.SEARCHED
    room: Room | None = None
    relax: bool = True
    known: Sequence[OffloadPlan] = ()


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """Asks for a plan; see `plan_offload` for what each is."""

    link: Link
    budget: int
    how: How = How()


@dataclass(frozen=True, eq=False)
class Needs:
    """What planning takes for one device.

    Attributes:
        timeline: the step.
        options: the policy, the mechanism and the spill settings.
        moves: what is wanted, or a plan that was made before, for a step is planned many times.
        probing: put probes behind the ordered ops.
        spill_key: what stands for `options.spill_directory`: a graph goes anywhere, and names no directory.
    """

    timeline: Timeline
    options: OffloadOptions
    moves: PlanRequest | OffloadPlan
    probing: Probing | None = None
    spill_key: str = ""


@dataclass(frozen=True)
class StepPlan:
    """What is done to a step on one device: all that `apply.offload_rewrites` needs to write it.

    Attributes:
        moves: what moves and when, in positions of the timeline.
        timeline, options, probing, spill_key: see `Needs`.
    """

    moves: OffloadPlan
    timeline: Timeline
    options: OffloadOptions
    probing: Probing | None = None
    spill_key: str = ""


def plan_step_memory(source: Readable, needs: Sequence[Needs]) -> tuple[tuple[StepPlan, ...], Graph]:
    """What is done to a step on each of its devices, and its graph, which the timelines were built from.

    Raises:
        InfeasibleBudgetError: no choice of tensors meets a budget.
    """
    found = []
    for each in needs:
        wanted = each.moves
        if isinstance(wanted, PlanRequest):
            wanted = plan_offload(each.timeline, wanted.link, wanted.budget, each.options, wanted.how)
        found.append(StepPlan(wanted, each.timeline, each.options, each.probing, each.spill_key))
    return tuple(found), source.read()


def plan_offload(timeline: Timeline, link: Link, budget: int, options: OffloadOptions, how: How = How()) -> OffloadPlan:
    """Make a plan whose peak is at most `budget` bytes.

    Args:
        timeline: the step.
        link: bandwidths of the link to the host.
        budget: bytes.
        options: the policy and its thresholds.
        how: what else planning depends on.

    Raises:
        InfeasibleBudgetError: no choice of tensors meets the budget.
    """
    room = how.room
    if how.copied and options.policy in RECOMPUTING:
        options = replace(options, policy="autovm")
    before = simulate(timeline, (), link)
    left_alone = tuple(
        (str(buffer.tensor), buffer.pinned_by)
        for buffer in timeline.buffers
        if buffer.pinned_by and buffer.nbytes >= budget // 100
    )
    fits = before.peak <= budget and not how.widest
    if how.unmoved or (fits and (room is None or first_failure(timeline, (), room) is None)):
        ordered = chained(timeline, (), budget)
        verdict = verdict_of(timeline, movable(timeline, options, how), budget, before.seconds, before.seconds)
        return OffloadPlan((), budget, 0, before, before, link, ordered, left_alone, verdict=verdict)

    chosen = _selected(timeline, link, budget, options, how)

    def build(more: Sequence[Gap]) -> list[Move]:
        if how.widest:
            return [tight(timeline, gap, options) for gap in (*chosen.gaps, *more)]
        gaps = (*chosen.gaps, *more)
        return place(timeline, gaps, link, budget, options, how.timed, chosen.again, chosen.queue)

    paddings: tuple[Padding, ...] = ()
    if not how.widest and not is_thresholded(options):
        moves = [one_layer_ahead(timeline, gap, how.layers) for gap in chosen.gaps]
    elif room:
        moves, paddings = repaired(timeline, build, chosen.gaps, budget, room, how.padded)
    else:
        moves = build(())
    moves = in_order(timeline, moves)
    after = simulate(timeline, moves, link)
    if after.peak > budget and not how.widest:
        raise infeasible(timeline, moves, budget, f"under policy {options.policy}")
    if paddings:
        after = simulate(timeline, moves, link, paddings)
    ordered = chained(timeline, moves, budget, paddings)
    gaps = movable(timeline, options, how)
    verdict = verdict_of(timeline, gaps, budget, before.seconds, after.seconds, chosen.least, chosen.note)
    found = OffloadPlan(
        tuple(moves), budget, chosen.threshold, before, after, link, ordered, left_alone, paddings, verdict
    )
    return found if how.widest else _fastest_known(timeline, found, how)


def _selected(timeline: Timeline, link: Link, budget: int, options: OffloadOptions, how: How) -> Selection:
    """The gaps that move, by the policy."""
    candidates = candidate_gaps(timeline, options, how.layers, how.convolution_inputs, budget if how.relax else None)
    if how.widest:
        return Selection(tuple(widest_gaps(timeline, candidates, budget)))
    if options.policy in RECOMPUTING:
        greedy = fastest(timeline, candidates, link, budget, options, how.timed)
        if options.policy != "optimal" or how.effort is Effort.GREEDY:
            return greedy
        every = tuple(movable(timeline, options, how))
        return select(timeline, every, link, budget, options, how.timed, greedy, how.effort)
    if is_thresholded(options):
        gaps, threshold = select_copies(timeline, candidates, budget, options)
        return Selection(tuple(gaps), threshold=threshold)
    require_feasible(timeline, candidates, budget, "with every tensor the policy names moved out")
    return Selection(tuple(candidates), threshold=min((timeline.nbytes(gap) for gap in candidates), default=0))


def movable(timeline: Timeline, options: OffloadOptions, how: How) -> list[Gap]:
    """Every gap that the policy may choose at the smallest budget."""
    return candidate_gaps(timeline, options, how.layers, how.convolution_inputs, 0 if how.relax else None)


def _fastest_known(timeline: Timeline, found: OffloadPlan, how: How) -> OffloadPlan:
    """`found`, or a plan for a smaller budget that is faster: more memory makes no plan slower."""
    for plan in how.known:
        if plan.after.peak > found.budget or plan.after.seconds >= found.after.seconds or plan.link != found.link:
            continue
        if (how.copied and any(move.recomputed for move in plan.moves)) or (plan.paddings and not how.padded):
            continue
        if how.room is not None and plan.failure(timeline, how.room) is not None:
            continue
        verdict = found.verdict and replace(found.verdict, seconds=plan.after.seconds)
        ordered = chained(timeline, plan.moves, found.budget, plan.paddings)
        found = replace(plan, budget=found.budget, ordered=ordered, left_alone=found.left_alone, verdict=verdict)
    return found


def verdict_of(
    timeline: Timeline,
    gaps: Sequence[Gap],
    budget: int,
    before: float,
    after: float,
    least: float | None = None,
    note: str = "",
) -> Verdict:
    """What a plan promises, beside what no plan can.

    Args:
        timeline, budget: the step.
        gaps: all that may move.
        before, after: seconds of the step with nothing moved, and under the plan.
        least: seconds that no plan goes below.
        note: of the solver.
    """
    usage = lowest(timeline, gaps)
    at = int(usage.argmax()) if len(usage) else 0
    return Verdict(
        fits=int(timeline.peak) <= budget,
        seconds_unlimited=before,
        seconds=after,
        least=least,
        smallest_budget=int(usage.max(initial=timeline.base)),
        op=timeline.steps[at].node if timeline.steps else "",
        note=note,
    )


def chained(
    timeline: Timeline, moves: Sequence[Move], budget: int, paddings: Sequence[Padding] = ()
) -> tuple[int, ...]:
    """Positions whose order decides the peak: TensorFlow allocates and frees in the order in which ops are enqueued."""
    smallest = min(SMALL, budget >> 16)  # 64,000 of these fill the budget; no step keeps so many
    found = {padding.position for padding in paddings}
    for buffer in timeline.buffers:
        if buffer.nbytes >= smallest:
            found.update((buffer.start, *buffer.uses))
    for move in moves:
        buffer = timeline.buffers[move.buffer]
        found.update((move.copy_after, move.release, move.prefetch, move.next, buffer.start, *buffer.uses))
    return tuple(sorted(found.difference(timeline.unordered)))


def tighter(plan: Callable[..., OffloadPlan], last: OffloadPlan, over: int) -> OffloadPlan | None:
    """A plan that takes less than `last`, which ran `over` bytes over; the tightest where there is none so tight.

    Returns:
        The plan, or None if `last` is the tightest.

    Raises:
        TfmemError: it cannot be made.
    """
    try:
        return plan(budget=last.tightened(over), effort=Effort.ONCE)
    except InfeasibleBudgetError as error:
        found = plan(budget=error.least)
        return None if found.actions == last.actions else found
