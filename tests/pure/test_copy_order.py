"""The order of copies out, on the unit device (1 flop/s, 1 byte/s): expected numbers are worked out beside it."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.memory.simulate import Link, Move, duration, run_through, simulate
from graph_passes.analysis.memory.timeline import Buffer, Gap, ScheduledOp, Timeline
from graph_passes.graph.ir import TensorId
from graph_passes.passes.offload.copy_order import best_order
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.placement import Tightest, _queued, in_order, place, tightest
from tests.tiers import examples

UNIT = Link(offload=1.0, prefetch=1.0)
OPTIONS = OffloadOptions(reuse_distance=1)


def timeline_of(length: int, *buffers: tuple[int, int, tuple[int, ...]], seconds: float = 10.0) -> Timeline:
    """Ops of equal time, and buffers of (bytes, start, uses)."""
    steps = tuple(ScheduledOp(f"op{place}", seconds) for place in range(length))
    named = (
        Buffer(TensorId(f"op{start}", place), *rest)
        for place, (nbytes, start, uses) in enumerate(buffers)
        for rest in [(nbytes, start, uses)]
    )
    return Timeline(steps, tuple(named), turn=length // 2)


# three that wait, of which c has to leave before op 6 for the sake of what is made there
SKIPPING = timeline_of(20, (40, 0, (1, 18)), (40, 2, (3, 17)), (40, 4, (5, 16)), (80, 6, (7,)))
GAPS = (Gap(0, 1, 18), Gap(1, 3, 17), Gap(2, 5, 16))


def start_of(timeline: Timeline, gaps: tuple[Gap, ...], budget: int) -> Tightest:
    return tightest(timeline, gaps, UNIT, budget, OPTIONS, frozenset())


def seconds(timeline: Timeline, gaps: tuple[Gap, ...], budget: int, queue: tuple[Gap, ...] = ()) -> float:
    moves = in_order(timeline, place(timeline, gaps, UNIT, budget, OPTIONS, True, frozenset(), queue))
    found = simulate(timeline, moves, UNIT)
    assert found.peak <= budget
    return found.seconds


def test_a_copy_that_the_step_waits_for_leaves_ahead_of_those_that_could_stay():
    # By last uses the copy of 80 bytes leaves from 20 to 100, then that of 10 bytes, which is to be away before op 5,
    # at 50. The other one has room until op 14, at 140. If it goes second, both have left in time.
    timeline = timeline_of(32, (80, 0, (1, 30)), (10, 2, (3, 28)), (20, 5, (6,)), (90, 14, (15,)))
    gaps, budget = (Gap(0, 1, 30), Gap(1, 3, 28)), 100
    assert seconds(timeline, gaps, budget) == 320 + 60
    found, queue, _ = best_order(timeline, start_of(timeline, gaps, budget), UNIT, budget, OPTIONS, True)
    assert (found, queue) == (320, gaps[::-1])
    assert seconds(timeline, gaps, budget, queue) == 320


def test_a_copy_may_begin_before_the_last_use():
    # The tensor is made at 0, read at 1 and 8, and to be away before op 9. By its last use its copy leaves from 90 to
    # 130; if it may begin once the tensor is made, from 10 to 50.
    timeline = timeline_of(20, (40, 0, (1, 8, 18)), (80, 9, (10,)))
    gap, budget = Gap(0, 8, 18), 80
    late = place(timeline, (gap,), UNIT, budget, OPTIONS, True, frozenset())
    early = place(timeline, (gap,), UNIT, budget, OPTIONS, True, frozenset(), (gap,))
    assert [move.copy_after for move in (*late, *early)] == [8, 0]
    assert (duration(timeline, late, UNIT)[1], duration(timeline, early, UNIT)[1]) == (40, 0)


def test_a_copy_begins_when_its_content_is_final_and_has_come_back():
    timeline = timeline_of(20, (40, 0, (1, 5, 8, 18)), (80, 9, (10,)))
    written = replace(timeline, buffers=(replace(timeline.buffers[0], written=(0, 5, 18)), timeline.buffers[1]))
    last, before = Gap(0, 8, 18), Gap(0, 1, 5)

    def begins(timeline: Timeline, *gaps: Gap) -> list[int]:
        moves = place(timeline, gaps, UNIT, 80, OPTIONS, True, frozenset(), gaps)
        return [move.copy_after for move in moves if move.gap == last]

    assert begins(timeline, last) == [0]
    assert begins(written, last) == [5]  # an op wrote into it
    assert begins(timeline, before, last) == [5]  # it was away until then


def test_what_a_list_holds_leaves_after_its_last_use():
    timeline = timeline_of(20, (40, 0, (1, 8, 18)), (80, 9, (10,)))
    listed = replace(timeline, buffers=(replace(timeline.buffers[0], element=8), timeline.buffers[1]))
    (move,) = place(listed, (Gap(0, 8, 18),), UNIT, 80, OPTIONS, True, frozenset(), (Gap(0, 8, 18),))
    assert move.copy_after == 8


def test_a_copy_waits_for_those_ahead_only_as_long_as_its_tensor_has_room():
    # c goes first, and is made at 4: a and b could not stay until then without room for them
    budget = SKIPPING.peak
    queue = (GAPS[2], GAPS[0], GAPS[1])
    assert [
        move.copy_after
        for move in in_order(SKIPPING, place(SKIPPING, GAPS, UNIT, budget, OPTIONS, True, frozenset(), queue))
    ] == [4, 4, 4]
    tight = timeline_of(20, (40, 0, (1, 18)), (80, 2, (3,)), (40, 4, (5, 16)))
    moves = place(
        tight, (Gap(0, 1, 18), Gap(2, 5, 16)), UNIT, 80, OPTIONS, True, frozenset(), (Gap(2, 5, 16), Gap(0, 1, 18))
    )
    assert {move.buffer: move.copy_after for move in moves} == {0: 1, 2: 4}


def test_gaps_that_a_queue_does_not_name_keep_their_place_by_use():
    moves = place(SKIPPING, GAPS, UNIT, SKIPPING.peak, OPTIONS, True, frozenset(), (GAPS[0], GAPS[2]))
    begins = {move.buffer: move.copy_after for move in moves}
    assert begins[0] <= begins[1] <= begins[2]


def test_waits_are_told_by_move():
    moves = in_order(SKIPPING, place(SKIPPING, GAPS, UNIT, 160, OPTIONS, True, frozenset()))
    total, stall, waits = run_through(SKIPPING, moves, UNIT)
    assert (total, stall) == duration(SKIPPING, moves, UNIT)
    assert waits
    assert sum(waits.values()) <= stall


@st.composite
def steps(draw):
    length = draw(st.integers(6, 30))
    buffers = []
    for _ in range(draw(st.integers(1, 10))):
        uses = draw(st.sets(st.integers(1, length - 1), min_size=2, max_size=5))
        start = draw(st.integers(0, min(uses) - 1))
        buffers.append((draw(st.integers(1, 50)), start, tuple(sorted(uses))))
    return timeline_of(length, *buffers, seconds=draw(st.sampled_from([1.0, 5.0, 20.0])))


@settings(max_examples=examples(150))
@given(timeline=steps(), chosen=st.data())
def test_no_order_is_slower_than_that_of_the_uses_nor_over_the_budget(timeline, chosen):
    gaps = tuple(gap for gap in timeline.gaps() if chosen.draw(st.booleans()))
    lowest = int((timeline.usage - timeline.within((gap.buffer, gap.last + 1, gap.next) for gap in gaps)).max())
    budget = chosen.draw(st.integers(lowest, max(lowest, timeline.peak)))
    found, queue, _ = best_order(timeline, start_of(timeline, gaps, budget), UNIT, budget, OPTIONS, True)
    assert not queue or sorted(queue, key=gaps.index) == list(gaps)
    assert found == seconds(timeline, gaps, budget, queue) <= seconds(timeline, gaps, budget)
    for move in place(timeline, gaps, UNIT, budget, OPTIONS, True, frozenset(), queue):
        assert timeline.buffers[move.buffer].start <= move.copy_after
        assert max(move.copy_after, move.last) < move.release <= move.prefetch <= move.next


def test_a_small_tensor_leaves_after_its_last_use():
    timeline = timeline_of(20, (40, 0, (1, 8, 18)), (8000, 9, (10,)))
    begins = [
        place(timeline, (Gap(0, 8, 18),), UNIT, budget, OPTIONS, True, frozenset(), (Gap(0, 8, 18),))[0].copy_after
        for budget in (4000, 4001)
    ]
    assert begins == [0, 8]


def step_of(moves: int) -> tuple[Any, Tightest, list[Gap]]:
    """So many buffers that are away one inside the other, and a queue that does not name each third of them."""
    copies = [Move(index, index, index, index + 1, index + 2, 3 * moves - index) for index in range(moves)]
    timeline = SimpleNamespace(buffers=[SimpleNamespace(nbytes=1, holders=(), element=None)] * moves)
    queue = [move.gap for move in copies[::-1] if move.buffer % 3]
    return timeline, Tightest([], copies, np.zeros(0, np.int64), 1 << 40), queue


def test_a_copy_that_a_queue_does_not_name_goes_before_those_that_are_read_later() -> None:
    timeline, start, queue = step_of(9)
    place_of = {gap: place for place, gap in enumerate(queue)}

    def key(move: Move) -> float:
        behind = [place for gap, place in place_of.items() if gap.last > move.last]
        return place_of.get(move.gap, min(behind, default=len(queue)) - 0.5)

    assert [move for move, _ in _queued(timeline, start, queue)] == sorted(start.copies, key=key)


def test_a_queue_takes_time_in_proportion_to_its_moves() -> None:
    """To look at all of it for each move took 50 s of planning 24,000 ops."""

    def seconds(moves: int) -> float:
        given = step_of(moves)
        began = time.process_time()
        for _ in range(3):
            _queued(*given)
        return time.process_time() - began

    assert seconds(16_000) < 16 * max(seconds(2_000), 2e-3)
