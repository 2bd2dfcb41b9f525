"""Decides what leaves device memory, when it is released, and when it comes back. Pure: Timeline in, OffloadPlan out.

Policy `autovm` is Chen's (MASc thesis, Toronto 2020, section 3.3):

    which      outputs of forward ops that are large enough and not used again soon (Listing 3.1): here
    when       after the last forward use, and back in time (Listings 3.2 to 3.4): `placement`

and beyond it: any gap in any buffer's life is a candidate, not only the one between a forward and a backward use; the
size threshold is the largest whose plan meets the budget; what that plan could do without stays; and a buffer is
released at a planned position, as late as memory allows, because releasing waits for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from graph_passes.analysis.fragmentation import Failure, Room, first_failure
from graph_passes.analysis.simulate import Link, Move, Outcome, simulate, usage_under
from graph_passes.analysis.timeline import Gap, Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.offload.options import OffloadOptions
from graph_passes.offload.placement import one_layer_ahead, place, tight

REPAIRS = 4  # moves added or changed for the sake of contiguous room
ISLANDS = 32  # tensors considered for each, the largest: every one takes a replay of the step
SOONER = (1, 2, 4, 8, 16, 32)  # ops by which a tensor may be brought back sooner for it

Build = Callable[[Sequence[Gap]], list[Move]]
Repair = tuple[Gap, int | None, list[Move]]  # a tensor, when to bring it back (None: move it), the moves with it done


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
    """

    moves: tuple[Move, ...]
    budget: int
    size_threshold: int
    before: Outcome
    after: Outcome
    link: Link
    ordered: tuple[int, ...] = ()
    left_alone: tuple[tuple[str, str], ...] = ()


def plan_offload(
    timeline: Timeline,
    link: Link,
    budget: int,
    options: OffloadOptions,
    *,
    layers: Sequence[int] = (),
    convolution_inputs: Collection[int] = (),
    timed: bool = False,
    unordered: Collection[int] = (),
    widest: bool = False,
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
        unordered: positions that no order may be put on (see `roles.unordered`).
        widest: move every tensor of size that waits across the turn, for its whole gap, whatever that stalls: a step
            with memory to spare, in which cuDNN is free to choose. If that is not enough, every candidate.
        room: where the allocations have to find room (see `analysis.fragmentation`); moves are added until they do, as
            far as moves can help.
        relax: whether a default reuse distance that no plan can meet the budget with is halved until one can.

    Raises:
        InfeasibleBudgetError: no choice of tensors meets the budget.
    """
    before = simulate(timeline, (), link)
    left_alone = tuple(
        (str(buffer.tensor), buffer.pinned_by)
        for buffer in timeline.buffers
        if buffer.pinned_by and buffer.nbytes >= budget // 100
    )
    fits = before.peak <= budget and not widest
    if fits and (room is None or first_failure(timeline, (), room) is None):
        return OffloadPlan((), budget, 0, before, before, link, _ordered(timeline, (), budget, unordered), left_alone)

    candidates = _candidates(timeline, options, layers, convolution_inputs, budget if relax else None)
    if widest:
        chosen, threshold = _widest(timeline, candidates, budget), 0
    elif _thresholded(options):
        chosen, threshold = _choose(timeline, candidates, budget, options)
    else:
        chosen, threshold = candidates, min((_nbytes(timeline, gap) for gap in candidates), default=0)
        _require_feasible(timeline, candidates, budget, "with every tensor the policy names moved out")

    def build(more: Sequence[Gap]) -> list[Move]:
        if widest:
            return [tight(timeline, gap, options) for gap in (*chosen, *more)]
        return place(timeline, (*chosen, *more), link, budget, options, timed)

    if not widest and not _thresholded(options):
        moves = [one_layer_ahead(timeline, gap, layers) for gap in chosen]
    elif room:
        moves = _with_room(timeline, build, chosen, budget, room, options)
    else:
        moves = build(())
    moves = _in_order(moves)
    after = simulate(timeline, moves, link)
    if after.peak > budget and not widest:
        raise _infeasible(timeline, after.peak, after.peak_at, budget, f"under policy {options.policy}")
    ordered = _ordered(timeline, moves, budget, unordered)
    return OffloadPlan(tuple(moves), budget, threshold, before, after, link, ordered, left_alone)


def _ordered(timeline: Timeline, moves: Sequence[Move], budget: int, unordered: Collection[int]) -> tuple[int, ...]:
    """Positions whose order decides the peak: TensorFlow allocates and frees in the order in which ops are enqueued."""
    smallest = budget >> 16  # 64,000 of these fill the budget; no step keeps so many
    chained: set[int] = set()
    for buffer in timeline.buffers:
        if buffer.nbytes >= smallest:
            chained.update((buffer.start, *buffer.uses))
    for move in moves:
        buffer = timeline.buffers[move.buffer]
        chained.update((move.copy_after, move.release, move.prefetch, buffer.start, *buffer.uses))
    return tuple(sorted(chained.difference(unordered)))


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


def _nbytes(timeline: Timeline, gap: Gap) -> int:
    return timeline.buffers[gap.buffer].nbytes


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
    large = [gap for gap in timeline.gaps() if _nbytes(timeline, gap) >= size]
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
    sizes = sorted({_nbytes(timeline, gap) for gap in candidates}, reverse=True)
    # More tensors never raise the lowest peak, so the thresholds that meet the budget are the small ones.
    low, high = 0, len(sizes) - 1
    while low < high:
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
        if usage[hole].max() + _nbytes(timeline, gap) <= budget:
            usage[hole] += _nbytes(timeline, gap)
        else:
            kept.append(gap)
    return kept, threshold


def _widest(timeline: Timeline, candidates: Sequence[Gap], budget: int) -> list[Gap]:
    """Large tensors that wait across the turn; and what a plan within the budget needs besides, if that is more."""
    large = [gap for gap in candidates if timeline.crosses_turn(gap) and _nbytes(timeline, gap) >= budget >> 10]
    short = np.flatnonzero(_lowest(timeline, large) > budget)
    return large + [
        gap
        for gap in candidates
        if gap not in large and np.searchsorted(short, gap.last, side="right") < np.searchsorted(short, gap.next)
    ]


def _larger(timeline: Timeline, gaps: Sequence[Gap], size: int) -> list[Gap]:
    return [gap for gap in gaps if _nbytes(timeline, gap) >= size]


def _lowest(timeline: Timeline, gaps: Sequence[Gap]) -> npt.NDArray[np.int64]:
    """Bytes in use at each position when every gap is spent out of device memory."""
    change = np.zeros(len(timeline.steps) + 1, np.int64)
    for gap in gaps:
        change[gap.last + 1] -= _nbytes(timeline, gap)
        change[gap.next] += _nbytes(timeline, gap)
    return timeline.usage + np.cumsum(change[:-1])


def _require_feasible(timeline: Timeline, gaps: Sequence[Gap], budget: int, how: str) -> None:
    usage = _lowest(timeline, gaps)
    if usage.max() > budget:
        raise _infeasible(timeline, int(usage.max()), int(usage.argmax()), budget, how)


def _infeasible(timeline: Timeline, peak: int, position: int, budget: int, how: str) -> InfeasibleBudgetError:
    op = timeline.steps[position].node
    return InfeasibleBudgetError(
        f"memory_budget is {budget:,} bytes, but {how} the step still needs {peak:,} bytes at op '{op}'; "
        f"give a budget of at least {peak:,} bytes, or a smaller batch",
        peak,
        op,
    )


def _in_order(moves: Iterable[Move]) -> list[Move]:
    """As they are put into the graph: it decides who is allocated first at one position."""
    return sorted(moves, key=lambda move: (move.release, move.prefetch))


def _with_room(
    timeline: Timeline, build: Build, chosen: Collection[Gap], budget: int, room: Room, options: OffloadOptions
) -> list[Move]:
    """Move what splits the room that an op needs, or bring it back to another place, as long as that helps.

    Best fit puts long-lived tensors (a weight's gradient, say) wherever there is room, and when all around them is free
    again they lie in the middle of it.

    Args:
        timeline: the step.
        build: makes the moves of some gaps beside the chosen ones.
        chosen: the gaps that move anyway.
        budget: bytes that no repair may go over, if the moves it mends do not.
        room: where allocations have to find room.
        options: where copies start.
    """
    islands: dict[Gap, int] = {}  # what is moved for room, and the position that needs it
    sooner: dict[Gap, int] = {}  # what is brought back sooner, and when
    moves = _in_order(build(()))
    for _ in range(REPAIRS):
        failure = first_failure(timeline, moves, room)
        if failure is None:
            break
        reached, best = failure, None
        for gap, prefetch, changed in chain(
            _without_islands(timeline, moves, (*chosen, *islands), failure, options),
            _brought_sooner(timeline, moves, budget, failure),
        ):
            further = first_failure(timeline, _in_order(changed), room)
            if further is None or further.is_after(reached):
                best = gap, prefetch
            if further is None:
                break
            if further.is_after(reached):
                reached = further
        if best is None:
            break
        gap, prefetch = best
        if prefetch is None:
            islands[gap] = failure.position
        else:
            sooner[gap] = prefetch
        moves = _in_order(_mended(move, islands, sooner) for move in build(tuple(islands)))
    return moves


def _mended(move: Move, islands: Mapping[Gap, int], sooner: Mapping[Gap, int]) -> Move:
    gap = Gap(move.buffer, move.last, move.next)
    if move.remade:
        return move
    if gap in islands:
        move = replace(move, prefetch=min(move.next, max(move.prefetch, islands[gap] + 1)))
    if gap in sooner:
        move = replace(move, prefetch=max(move.release, min(move.prefetch, sooner[gap])))
    return move


def _without_islands(
    timeline: Timeline, moves: Sequence[Move], chosen: Collection[Gap], failure: Failure, options: OffloadOptions
) -> Iterator[Repair]:
    """One more tensor out of the way where there was no room: the small ones first, then the large."""
    around = [gap for gap in timeline.gaps() if gap.last < failure.position < gap.next and gap not in chosen]
    around.sort(key=lambda gap: _nbytes(timeline, gap))
    enough = [gap for gap in around if _nbytes(timeline, gap) >= failure.short]
    less = [gap for gap in around if _nbytes(timeline, gap) < failure.short]
    for gap in (*enough[:ISLANDS], *less[-ISLANDS:]):
        yield gap, None, [*moves, tight(timeline, gap, options)]


def _brought_sooner(timeline: Timeline, moves: Sequence[Move], budget: int, failure: Failure) -> Iterator[Repair]:
    """A large tensor that is back where there was no room, brought back sooner and so, perhaps, to a better place."""
    most = max(budget, int(usage_under(timeline, moves).max()))
    for index, move in enumerate(moves):
        buffer = timeline.buffers[move.buffer]
        there = failure.position - SOONER[-1] < move.prefetch <= failure.position <= timeline.end(buffer)
        if not there or move.remade or buffer.nbytes < budget >> 5:
            continue
        for ops in SOONER:
            if move.prefetch - ops < move.release:
                break
            changed = [*moves[:index], replace(move, prefetch=move.prefetch - ops), *moves[index + 1 :]]
            if usage_under(timeline, changed).max() <= most:
                yield Gap(move.buffer, move.last, move.next), move.prefetch - ops, changed
