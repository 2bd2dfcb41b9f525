"""Which gaps of which buffers are spent out of device memory (Chen's thesis, Listing 3.1, and beyond it)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from custom_ops.background import go_on
from graph_passes.analysis.memory.simulate import Move, uncounted_under, usage_under
from graph_passes.analysis.memory.timeline import Gap, Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.passes.offload.options import RECOMPUTING, OffloadOptions

# Times the step's tensors that TensorFlow's CPU allocator may count beyond them, in chunks that they do not fill. It
# would be 1 if every chunk were just too small to be split. Five networks of keras.applications, observed once each,
# had 0.00 to 0.43; the rest is a margin, not a bound.
CHUNKS = 0.5


@dataclass(frozen=True)
class Selection:
    """The gaps that move.

    Attributes:
        gaps: all of them.
        again: those that chains end; None: `placement.place` decides by cost.
        threshold: bytes of the smallest tensor that was considered.
        least: seconds that no plan goes below; None where that is not known.
        note: what kept the solver from its work, if anything did.
        queue: the order of the copies out; none: by the ops that they follow.
    """

    gaps: tuple[Gap, ...]
    again: frozenset[Gap] | None = None
    threshold: int = 0
    least: float | None = None
    note: str = ""
    queue: tuple[Gap, ...] = ()


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


def is_thresholded(options: OffloadOptions) -> bool:
    return options.policy in ("autovm", *RECOMPUTING)


def candidate_gaps(
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
    if not is_thresholded(options):
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
        if wanted is None or distance == 1 or lowest(timeline, found).max(initial=0) <= wanted:
            return found
        distance //= 2


def select_copies(
    timeline: Timeline, candidates: Sequence[Gap], budget: int, options: OffloadOptions, again: Sequence[Gap] = ()
) -> tuple[list[Gap], int]:
    """The largest size threshold whose plan meets the budget, then without what that plan could do without.

    Args:
        timeline, candidates, budget, options: as elsewhere.
        again: gaps after which buffers are recomputed, those first that pay least; what could stay of these stays.
    """
    chosen, threshold = _copies(timeline, candidates, budget, options, again)
    usage = lowest(timeline, (*again, *chosen))
    return chosen + needed(timeline, again, usage, budget), threshold


def needed(timeline: Timeline, gaps: Iterable[Gap], usage: npt.NDArray[np.int64], budget: int) -> list[Gap]:
    """The gaps of `gaps` that do not fit when the ones before them are filled; fills `usage`."""
    kept = []
    for gap in gaps:
        hole = slice(gap.last + 1, gap.next)
        if usage[hole].max() + timeline.nbytes(gap) <= budget:
            usage[hole] += timeline.nbytes(gap)
        else:
            kept.append(gap)
    return kept


def _copies(
    timeline: Timeline, candidates: Sequence[Gap], budget: int, options: OffloadOptions, again: Sequence[Gap]
) -> tuple[list[Gap], int]:
    waiting = [gap for gap in candidates if timeline.crosses_turn(gap)]
    if waiting and lowest(timeline, (*again, *waiting)).max() <= budget:
        candidates = waiting  # the thesis's own candidates are enough
    if options.size_threshold != "auto":
        require_feasible(
            timeline, (*again, *candidates), budget, f"with every tensor over {options.size_threshold} bytes moved"
        )
        return list(candidates), options.size_threshold
    require_feasible(timeline, (*again, *candidates), budget, "with every candidate tensor moved out")
    sizes = sorted({timeline.nbytes(gap) for gap in candidates}, reverse=True)
    if not sizes:  # the bytes fit as they are
        return [], 0
    # More tensors never raise the lowest peak, so the thresholds that meet the budget are the small ones.
    low, high = 0, len(sizes) - 1
    while low < high:
        go_on()
        middle = (low + high) // 2
        if lowest(timeline, (*again, *_larger(timeline, candidates, sizes[middle]))).max() <= budget:
            high = middle
        else:
            low = middle + 1
    threshold = sizes[low]
    chosen = _larger(timeline, candidates, threshold)
    shortest = sorted(chosen, key=lambda gap: (gap.distance, gap.next))  # short gaps hide least
    return needed(timeline, shortest, lowest(timeline, (*again, *chosen)), budget), threshold


def widest_gaps(timeline: Timeline, candidates: Sequence[Gap], budget: int) -> list[Gap]:
    """Large tensors that wait across the turn; and what a plan within the budget needs besides, if that is more."""
    large = [gap for gap in candidates if timeline.crosses_turn(gap) and timeline.nbytes(gap) >= budget >> 10]
    short = np.flatnonzero(lowest(timeline, large) > budget)
    return large + [
        gap
        for gap in candidates
        if gap not in large and np.searchsorted(short, gap.last, side="right") < np.searchsorted(short, gap.next)
    ]


def _larger(timeline: Timeline, gaps: Sequence[Gap], size: int) -> list[Gap]:
    return [gap for gap in gaps if timeline.nbytes(gap) >= size]


def lowest(timeline: Timeline, gaps: Sequence[Gap]) -> npt.NDArray[np.int64]:
    """Bytes in use at each position when every gap is spent out of device memory."""
    return timeline.usage - timeline.within((gap.buffer, gap.last + 1, gap.next) for gap in gaps)


def require_feasible(timeline: Timeline, gaps: Sequence[Gap], budget: int, how: str) -> None:
    if lowest(timeline, gaps).max() > budget:
        moves = [Move(gap.buffer, gap.last, gap.last, gap.last + 1, gap.next, gap.next) for gap in gaps]
        raise infeasible(timeline, moves, budget, how)


def infeasible(timeline: Timeline, moves: Sequence[Move], budget: int, how: str) -> InfeasibleBudgetError:
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
        why += f". Unchanged, the step is estimated to take {timeline.peak:,}"
    why += in_use(timeline)
    return InfeasibleBudgetError(
        f"memory_budget is {budget:,} bytes, but {how} the step still needs {needed} bytes at op '{op}'; "
        f"give a budget of at least {safe:,} bytes, or a smaller batch{why}",
        safe,
        op,
        least,
    )


def in_use(timeline: Timeline) -> str:
    """A sentence for an error that has just said what the step needs: how much of that was in use before it."""
    if not timeline.base:
        return ""
    return f". {timeline.base:,} of these are in use before the step: its variables, and whatever else is in memory"


def filled(timeline: Timeline, budget: int) -> int:
    """Bytes of `budget` that the tensors may take, where a peak is not measured before the step stays as it is: all of
    it, but on a CPU what is left if chunks that they do not fill take the rest."""
    if not timeline.counted or budget <= timeline.base:
        return budget
    return timeline.base + int((budget - timeline.base) / (1 + CHUNKS))


def unfilled(timeline: Timeline, moves: Sequence[Move]) -> int:
    """Bytes that an allocator of whole chunks may count under `moves`, beyond the tensors in them.

    They are those of the allocator's peak, at any op: what it does not count is added to that (`simulate.uncounted`).
    """
    if not timeline.counted:
        return 0
    held = timeline.base - timeline.small_base
    counted = usage_under(timeline, moves) - uncounted_under(timeline, moves) - held
    return int(CHUNKS * counted.max(initial=0))
