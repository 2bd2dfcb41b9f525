"""Decides what leaves device memory, when it is released, and when it comes back. Pure: Timeline in, OffloadPlan out.

Policy `autovm` is Chen's (MASc thesis, Toronto 2020, section 3.3):

    which      outputs of forward ops that are large enough and not used again soon (Listing 3.1): here
    when       after the last forward use, and back in time (Listings 3.2 to 3.4): `placement`

and beyond it: any gap in any buffer's life is a candidate, not only the one between a forward and a backward use; the
size threshold is the largest whose plan meets the budget; what that plan could do without stays; and a buffer is
released at a planned position, as late as memory allows, because releasing waits for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from custom_ops.background import go_on
from graph_passes.analysis.memory.fragmentation import SMALL, Failure, Room, first_failure
from graph_passes.analysis.memory.simulate import Link, Move, Outcome, Padding, simulate, uncounted_under, usage_under
from graph_passes.analysis.memory.timeline import Gap, Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.placement import in_order, one_layer_ahead, place, tight
from graph_passes.passes.offload.repair import repaired

# Times the step's tensors that TensorFlow's CPU allocator may count beyond them, in chunks that they do not fill. It
# would be 1 if every chunk were just too small to be split. Five networks of keras.applications, observed once each,
# had 0.00 to 0.43; the rest is a margin, not a bound.
CHUNKS = 0.5


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
    """

    moves: tuple[Move, ...]
    budget: int
    size_threshold: int
    before: Outcome
    after: Outcome
    link: Link
    ordered: tuple[int, ...] = ()
    left_alone: tuple[tuple[str, str], ...] = ()
    paddings: tuple[Padding, ...] = ()

    @property
    def actions(self) -> tuple[tuple[Move, ...], tuple[Padding, ...]]:
        """What is done to the step; plans that do the same are the same."""
        return self.moves, self.paddings

    def tightened(self, over: int) -> int:
        """The budget to plan for when this plan ran `over` bytes over: within its own peak, or it would come again."""
        return min(self.budget, self.after.peak) - over

    def under(self, timeline: Timeline) -> OffloadPlan:
        """The same plan as predicted for other costs."""
        before = simulate(timeline, (), self.link)
        return replace(self, before=before, after=simulate(timeline, self.moves, self.link, self.paddings))

    def failure(self, timeline: Timeline, room: Room, *, excused: Container[int] = ()) -> Failure | None:
        """Where the step runs out of room; see `first_failure`."""
        return first_failure(timeline, self.moves, room, self.paddings, excused=excused)


def plan_offload(
    timeline: Timeline,
    link: Link,
    budget: int,
    options: OffloadOptions,
    *,
    layers: Sequence[int] = (),
    convolution_inputs: Collection[int] = (),
    timed: bool = False,
    widest: bool = False,
    unmoved: bool = False,
    copied: bool = False,
    padded: bool = True,
    room: Room | None = None,
    relax: bool = True,
) -> OffloadPlan:
    """Make a plan whose peak is at most `budget` bytes.

    Args:
        timeline: the step.
        link: bandwidths of the link to the host.
        budget: bytes.
        options: the policy and its thresholds.
        layers: positions of the forward ops that multiply with a weight, ascending.
        convolution_inputs: indices of buffers that a forward convolution reads (for `vdnn_conv`).
        timed: whether the timeline's run times were measured.
        widest: move every tensor of size that waits across the turn, for its whole gap, whatever that stalls: a step
            with memory to spare, in which cuDNN is free to choose. If that is not enough, every candidate.
        unmoved: move nothing, whatever the budget: a step that is short of workspace alone still runs.
        copied: no rematerialisation, though the policy may choose it.
        padded: whether there may be padding allocations.
        room: where the allocations have to find room (see `memory.fragmentation`); moves are added until they do, as
            far as moves can help.
        relax: whether a default reuse distance that no plan can meet the budget with is halved until one can.

    Raises:
        InfeasibleBudgetError: no choice of tensors meets the budget.
    """
    if copied and options.policy == "hybrid":
        options = replace(options, policy="autovm")
    before = simulate(timeline, (), link)
    left_alone = tuple(
        (str(buffer.tensor), buffer.pinned_by)
        for buffer in timeline.buffers
        if buffer.pinned_by and buffer.nbytes >= budget // 100
    )
    fits = before.peak <= budget and not widest
    if unmoved or (fits and (room is None or first_failure(timeline, (), room) is None)):
        return OffloadPlan((), budget, 0, before, before, link, chained(timeline, (), budget), left_alone)

    candidates = _candidates(timeline, options, layers, convolution_inputs, budget if relax else None)
    if widest:
        chosen, threshold = _widest(timeline, candidates, budget), 0
    elif _thresholded(options):
        chosen, threshold = _choose(timeline, candidates, budget, options)
    else:
        chosen, threshold = candidates, min((timeline.nbytes(gap) for gap in candidates), default=0)
        _require_feasible(timeline, candidates, budget, "with every tensor the policy names moved out")

    def build(more: Sequence[Gap]) -> list[Move]:
        if widest:
            return [tight(timeline, gap, options) for gap in (*chosen, *more)]
        return place(timeline, (*chosen, *more), link, budget, options, timed)

    paddings: tuple[Padding, ...] = ()
    if not widest and not _thresholded(options):
        moves = [one_layer_ahead(timeline, gap, layers) for gap in chosen]
    elif room:
        moves, paddings = repaired(timeline, build, chosen, budget, room, padded)
    else:
        moves = build(())
    moves = in_order(timeline, moves)
    after = simulate(timeline, moves, link)
    if after.peak > budget and not widest:
        raise _infeasible(timeline, moves, budget, f"under policy {options.policy}")
    if paddings:
        after = simulate(timeline, moves, link, paddings)
    ordered = chained(timeline, moves, budget, paddings)
    return OffloadPlan(tuple(moves), budget, threshold, before, after, link, ordered, left_alone, paddings)


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
        return plan(budget=last.tightened(over))
    except InfeasibleBudgetError as error:
        found = plan(budget=error.least)
        return None if found.actions == last.actions else found


def reuse_distance_for(timeline: Timeline, layers: Sequence[int]) -> int:
    """The default reuse distance: the least that skips the outputs of the last two layers (thesis 3.3.1.1)."""
    if len(layers) < 3:
        return 1
    late = [
        gap.distance
        for gap in timeline.gaps()
        if timeline.crosses_turn(gap) and timeline.buffers[gap.buffer].start >= layers[-2]
    ]
    return max(late, default=0) + 1


def _thresholded(options: OffloadOptions) -> bool:
    return options.policy in ("autovm", "hybrid")


def _candidates(
    timeline: Timeline,
    options: OffloadOptions,
    layers: Sequence[int],
    convolution_inputs: Collection[int],
    wanted: int | None,
) -> list[Gap]:
    """Listing 3.1 without the size threshold, which is chosen later when it is `auto`.

    Args:
        wanted: the peak in bytes for which a default reuse distance may be lowered.
    """
    if not _thresholded(options):
        return [
            gap
            for gap in timeline.gaps()
            if timeline.crosses_turn(gap) and (options.policy == "vdnn_all" or gap.buffer in convolution_inputs)
        ]
    size = 0 if options.size_threshold == "auto" else options.size_threshold
    large = [gap for gap in timeline.gaps() if timeline.nbytes(gap) >= size]
    if options.reuse_distance != "auto":
        return [gap for gap in large if gap.distance >= options.reuse_distance]
    distance = reuse_distance_for(timeline, layers)
    while True:  # a copy in a short gap hides little, so short gaps are used only if they must be
        found = [gap for gap in large if gap.distance >= distance]
        if wanted is None or distance == 1 or _lowest(timeline, found).max(initial=0) <= wanted:
            return found
        distance //= 2


def _choose(
    timeline: Timeline, candidates: Sequence[Gap], budget: int, options: OffloadOptions
) -> tuple[list[Gap], int]:
    """The largest size threshold whose plan meets the budget, then without what that plan could do without."""
    waiting = [gap for gap in candidates if timeline.crosses_turn(gap)]
    if waiting and _lowest(timeline, waiting).max() <= budget:
        candidates = waiting  # the thesis's own candidates are enough
    if options.size_threshold != "auto":
        _require_feasible(timeline, candidates, budget, f"with every tensor over {options.size_threshold} bytes moved")
        return list(candidates), options.size_threshold
    _require_feasible(timeline, candidates, budget, "with every candidate tensor moved out")
    sizes = sorted({timeline.nbytes(gap) for gap in candidates}, reverse=True)
    if not sizes:  # the bytes fit as they are
        return [], 0
    # More tensors never raise the lowest peak, so the thresholds that meet the budget are the small ones.
    low, high = 0, len(sizes) - 1
    while low < high:
        go_on()
        middle = (low + high) // 2
        if _lowest(timeline, _larger(timeline, candidates, sizes[middle])).max() <= budget:
            high = middle
        else:
            low = middle + 1
    threshold = sizes[low]
    chosen = _larger(timeline, candidates, threshold)
    usage = _lowest(timeline, chosen)
    kept = []
    for gap in sorted(chosen, key=lambda gap: (gap.distance, gap.next)):  # short gaps hide least
        hole = slice(gap.last + 1, gap.next)
        if usage[hole].max() + timeline.nbytes(gap) <= budget:
            usage[hole] += timeline.nbytes(gap)
        else:
            kept.append(gap)
    return kept, threshold


def _widest(timeline: Timeline, candidates: Sequence[Gap], budget: int) -> list[Gap]:
    """Large tensors that wait across the turn; and what a plan within the budget needs besides, if that is more."""
    large = [gap for gap in candidates if timeline.crosses_turn(gap) and timeline.nbytes(gap) >= budget >> 10]
    short = np.flatnonzero(_lowest(timeline, large) > budget)
    return large + [
        gap
        for gap in candidates
        if gap not in large and np.searchsorted(short, gap.last, side="right") < np.searchsorted(short, gap.next)
    ]


def _larger(timeline: Timeline, gaps: Sequence[Gap], size: int) -> list[Gap]:
    return [gap for gap in gaps if timeline.nbytes(gap) >= size]


def _lowest(timeline: Timeline, gaps: Sequence[Gap]) -> npt.NDArray[np.int64]:
    """Bytes in use at each position when every gap is spent out of device memory."""
    return timeline.usage - timeline.within((gap.buffer, gap.last + 1, gap.next) for gap in gaps)


def _require_feasible(timeline: Timeline, gaps: Sequence[Gap], budget: int, how: str) -> None:
    if _lowest(timeline, gaps).max() > budget:
        moves = [Move(gap.buffer, gap.last, gap.last, gap.last + 1, gap.next, gap.next) for gap in gaps]
        raise _infeasible(timeline, moves, budget, how)


def _infeasible(timeline: Timeline, moves: Sequence[Move], budget: int, how: str) -> InfeasibleBudgetError:
    usage = usage_under(timeline, moves)
    least = int(usage.max())
    safe = least + unfilled(timeline, moves)
    op = timeline.steps[int(usage.argmax())].node
    needed, why = f"{least:,}", ""
    if safe > least:
        needed = f"between {least:,} and {safe:,}"
        why = (
            f". {least:,} are the tensors alone; TensorFlow's CPU allocator counts whole chunks, of which a tensor may "
            "fill little more than half"
        )
    if safe > timeline.peak:
        why += f". As it was given, the step is estimated to take {timeline.peak:,}"
    if timeline.base:
        why += f". {timeline.base:,} of these are in use before the step: its variables, and whatever else is in memory"
    return InfeasibleBudgetError(
        f"memory_budget is {budget:,} bytes, but {how} the step still needs {needed} bytes at op '{op}'; "
        f"give a budget of at least {safe:,} bytes, or a smaller batch{why}",
        safe,
        op,
        least,
    )


def unfilled(timeline: Timeline, moves: Sequence[Move]) -> int:
    """Bytes that an allocator of whole chunks may count under `moves`, beyond the tensors in them.

    They are those of its own peak, wherever that is: what it does not count is added to that (`simulate.uncounted`).
    """
    if not timeline.counted:
        return 0
    held = timeline.base - timeline.small_base
    counted = usage_under(timeline, moves) - uncounted_under(timeline, moves) - held
    return int(CHUNKS * counted.max(initial=0))
