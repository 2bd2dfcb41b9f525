"""Plans on the unit device (1 flop/s, 1 byte/s): every expected number is worked out beside it."""

from dataclasses import replace

import pytest

from graph_passes.analysis.memory.simulate import Link, simulate
from graph_passes.analysis.memory.timeline import Buffer, ScheduledOp, Timeline, turning_point
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import TensorId
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.placement import one_layer_ahead
from graph_passes.passes.offload.plan import How, plan_offload
from graph_passes.passes.offload.selection import reuse_distance_for

UNIT = Link(offload=1.0, prefetch=1.0)


def chain(layers: int = 4, nbytes: int = 10, seconds: float = 10.0) -> Timeline:
    """f0 f1 .. then b.. f1 f0: layer i's output is read by layer i+1 and by its own backward op.

    positions   0 1 2 3 | 4 5 6 7        for 4 layers
    op          f0 f1 f2 f3 | b3 b2 b1 b0
    """
    steps = [ScheduledOp(f"f{i}", seconds) for i in range(layers)]
    steps += [ScheduledOp(f"b{i}", seconds) for i in reversed(range(layers))]
    buffers = []
    for i in range(layers):
        backward = 2 * layers - 1 - i
        uses = sorted({i + 1, backward}) if i + 1 < layers else [backward]
        buffers.append(Buffer(TensorId(f"f{i}"), nbytes, i, tuple(uses)))
    return Timeline(tuple(steps), tuple(buffers), turn=layers - 1)


def options(**values):
    return OffloadOptions(**{"reuse_distance": 1, "policy": "hybrid", **values})


def test_usage_of_a_chain():
    # all four outputs wait at the turn: 40 bytes; then one dies with each backward op
    assert chain().usage.tolist() == [10, 20, 30, 40, 40, 30, 20, 10]
    assert chain().peak == 40


def test_nothing_moves_when_the_step_fits():
    plan = plan_offload(chain(), UNIT, 40, options())
    assert plan.moves == ()
    assert plan.size_threshold == 0
    assert plan.after.stall == 0


def test_moves_no_more_than_the_budget_asks():
    # f0 and f1 have gaps 2..6 and 3..5; f2's gap is 4..4 (used at 3 and 5). 30 bytes need one of them out at 3 and 4.
    # The shortest gaps are dropped first, so f0, which waits longest, is the one that goes.
    plan = plan_offload(chain(), UNIT, 30, options(), How(timed=True))
    assert [move.buffer for move in plan.moves] == [0]
    assert plan.after.peak == 30


def test_copies_hide_behind_compute():
    # f0's copy runs from 20 (f1 done) to 32 with the 1.2 slack, so it is released before position 4 if memory allows;
    # it does not at 3 (40 > 30): released before 3, that is at second 30, exactly when 10 bytes at 1 B/s are out.
    plan = plan_offload(chain(), UNIT, 30, options(), How(timed=True))
    (move,) = plan.moves
    assert (move.last, move.release) == (1, 3)
    # the use is at position 7, second 70; 12 s before is 58: prefetched before position 5, where 10 bytes are free
    assert (move.prefetch, move.next) == (5, 7)
    assert plan.after.stall == 0
    assert plan.after.seconds == 80


def test_stall_is_predicted_when_the_link_is_slow():
    # 20 s a copy: out from 20 to 40, released before position 3 at second 30: 10 s stall; prefetched before position 5
    # (now at 60), arrives at 80 = when position 7 begins.
    plan = plan_offload(chain(), Link(0.5, 0.5), 30, options(), How(timed=True))
    (move,) = plan.moves
    assert move.prefetch == 5
    assert plan.after.stall == 10
    assert plan.after.seconds == 90


def test_early_prefetch_takes_all_the_room_there_is():
    # Listing 3.4 with 30 bytes: room for f0 at 5 and 6 only (30 in use without f0 at 4: f1, f2, f3)
    plan = plan_offload(chain(), UNIT, 30, options(prefetch="early"))
    assert [move.prefetch for move in plan.moves] == [5]


@pytest.mark.parametrize("timed", [False, True])
def test_prefetch_is_early_where_times_are_unknown_and_late_where_they_are_measured(timed):
    # f1 is used at 10, f0 at 11. 40 bytes have room for one of them at 7, and for both from 8 on: early takes that.
    # Late, f0's copy of 12 s with the slack begins with the op at 90, and f1's before 98 - 12, with the op at 80.
    expected = {"early": [(10, 7), (11, 8)], "late": [(10, 8), (11, 9)]}
    expected["auto"] = expected["late" if timed else "early"]
    for prefetch, positions in expected.items():
        plan = plan_offload(chain(6, 10, 10.0), UNIT, 40, options(prefetch=prefetch), How(timed=timed))
        assert sorted((move.next, move.prefetch) for move in plan.moves) == positions


def test_prefetches_keep_the_order_of_uses():
    # Figures 3.4 and 3.5: the copy for the earlier use starts first, though its tensor left last. A copy in takes 20 s,
    # 24 with the slack: f0, used at 110, would start with op 8. f1, used at 100, would start with op 6, where there is
    # no room. It starts with op 7, is there at 90, and f0 at 110. In the other order both start with op 8: the first
    # to come is f0, and f1 is there at 120, 20 s late.
    plan = plan_offload(chain(6, 10, 10.0), Link(1.0, 0.5), 40, options(), How(timed=True))
    assert sorted((move.next, move.prefetch) for move in plan.moves) == [(10, 7), (11, 8)]
    assert plan.after.stall == 0


def test_infeasible_budget_names_the_op_and_the_smallest_budget():
    with pytest.raises(InfeasibleBudgetError, match="at op 'f1'") as caught:
        plan_offload(chain(), UNIT, 15, options())
    # even with f0 gone from 2 on, f1 needs f0 and itself: 20, at position 1
    assert caught.value.smallest_budget == 20
    assert plan_offload(chain(), UNIT, 20, options()).after.peak == 20


def test_fixed_threshold_moves_all_that_is_larger():
    plan = plan_offload(chain(), UNIT, 30, options(size_threshold=10))
    assert len(plan.moves) == 3
    with pytest.raises(InfeasibleBudgetError):
        plan_offload(chain(), UNIT, 30, options(size_threshold=11))


def test_the_automatic_threshold_is_the_largest_that_meets_the_budget():
    # 5, 20, 20 and 20 bytes: 65 at the turn. Without f0 60 would do as well, and it waits longest; but of all sizes
    # whose tensors are enough, the largest is 20. Of f1 and f2, f1 waits longer.
    sizes = (5, 20, 20, 20)
    buffers = tuple(replace(buffer, nbytes=size) for buffer, size in zip(chain().buffers, sizes, strict=True))
    plan = plan_offload(replace(chain(), buffers=buffers), UNIT, 60, options())
    assert plan.size_threshold == 20
    assert [move.buffer for move in plan.moves] == [1]
    # At 40, the 20 bytes of f1 and the 5 of f0 have to go: the threshold is what it takes, and no more.
    plan = plan_offload(replace(chain(), buffers=buffers), UNIT, 40, options())
    assert plan.size_threshold == 5
    assert {move.buffer for move in plan.moves} == {0, 1}


def test_default_reuse_distance_skips_the_last_two_layers():
    # layers at 0..3: f2 and f3 stay; f1's gap 3..5 holds 3 ops, f2's 1
    plan = plan_offload(chain(), UNIT, 20, OffloadOptions(policy="hybrid"), How(layers=(0, 1, 2, 3)))
    assert {move.buffer for move in plan.moves} == {0, 1}


def test_default_reuse_distance_gives_way_to_the_budget():
    # with layers at 0, 1 and 2 alone, the default distance is 8: only f0 could move, and 50 were the least
    assert plan_offload(chain(6), UNIT, 20, OffloadOptions(policy="hybrid"), How(layers=(0, 1, 2))).after.peak == 20
    for fixed in (OffloadOptions(reuse_distance=8), OffloadOptions(policy="hybrid")):
        with pytest.raises(InfeasibleBudgetError) as caught:
            plan_offload(chain(6), UNIT, 20, fixed, How(layers=(0, 1, 2), relax=False))
        assert caught.value.smallest_budget == 50


def test_the_default_reuse_distance_is_halved_as_often_as_the_budget_asks():
    # Over their gaps lie 9, 7, 5, 3 and 1 ops. The default is 8, which leaves 50 bytes; at 4 the tensors of f0, f1 and
    # f2 may move, which leaves 30, at the turn. f3 stays: of the candidates a fixed threshold moves all.
    plan = plan_offload(chain(6), UNIT, 30, OffloadOptions(policy="hybrid", size_threshold=10), How(layers=(0, 1, 2)))
    assert {move.buffer for move in plan.moves} == {0, 1, 2}


@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_the_default_reuse_distance_of_few_layers_is_the_least(layers):
    assert reuse_distance_for(chain(), layers) == 1


def test_a_weights_gradient_is_no_activation_of_the_last_layers():
    # as if b3 were before the turn: what it makes waits for the update, a hundred ops later; f2's gap holds one op
    steps = (*chain().steps, *(ScheduledOp(f"u{i}", 10.0) for i in range(100)))
    gradient = Buffer(TensorId("b3"), 10, 4, (107,))
    timeline = Timeline(steps, (*chain().buffers, gradient), turn=4, updates=frozenset(range(8, 108)))
    assert reuse_distance_for(timeline, (0, 1, 2, 3)) == 2
    assert not any(timeline.crosses_turn(gap) for gap in timeline.gaps() if gap.next == 107)


def test_the_widest_plan_adds_what_the_budget_needs():
    # s1 is used within the forward pass only, but 20 bytes are too few for it to stay
    steps = tuple(ScheduledOp(f"s{i}", 10.0) for i in range(8))
    waits, stays = Buffer(TensorId("s0"), 10, 0, (1, 7)), Buffer(TensorId("s1"), 10, 1, (2, 4))
    room = Buffer(TensorId("s3"), 20, 3, (3,))
    timeline = Timeline(steps, (waits, stays, room), turn=4)
    plan = plan_offload(timeline, UNIT, 20, options(), How(widest=True))
    assert {move.buffer for move in plan.moves} == {0, 1}
    assert plan.after.peak == 20
    assert len(plan_offload(timeline, UNIT, 30, options(), How(widest=True)).moves) == 1


def test_two_gaps_of_one_buffer():
    # a skip connection: used at 1, at 4 (forward) and at 8 (backward); 10 others fill the device in between
    steps = tuple(ScheduledOp(f"s{i}", 10.0) for i in range(10))
    skip = Buffer(TensorId("s0"), 10, 0, (1, 4, 8))
    others = tuple(Buffer(TensorId(f"s{i}"), 10, i, (i + 1,)) for i in (1, 2, 5, 6))
    timeline = Timeline(steps, (skip, *others), turn=5)
    plan = plan_offload(timeline, UNIT, 20, options())
    assert [(move.last, move.next) for move in plan.moves] == [(1, 4), (4, 8)]
    assert plan.after.peak == 20


def test_turning_point_is_where_most_tensors_wait():
    assert turning_point([(1, 7), (2, 6), (3, 5)], 8) == 3
    assert turning_point([], 0) == 0


def test_vdnn_moves_all_or_convolution_inputs():
    everything = plan_offload(chain(), UNIT, 30, options(policy="vdnn_all"))
    assert len(everything.moves) == 3
    convolutions = plan_offload(chain(), UNIT, 30, options(policy="vdnn_conv"), How(convolution_inputs={0}))
    assert [move.buffer for move in convolutions.moves] == [0]


def test_vdnn_brings_nothing_back_before_it_has_left():
    # the layer at 2 runs backward at about 4; f2, last read at 3 and next at 5, is released there, so that it has to
    # come back at 5
    timeline = chain()
    (gap,) = (gap for gap in timeline.gaps() if gap.buffer == 2)
    move = one_layer_ahead(timeline, gap, [2])
    assert (move.last, move.release, move.prefetch, move.next) == (3, 4, 5, 5)


def test_simulation_counts_both_directions_separately():
    timeline = chain()
    moves = plan_offload(timeline, UNIT, 20, options(), How(timed=True)).moves
    fast_out = simulate(timeline, moves, Link(1e9, 1.0))
    fast_in = simulate(timeline, moves, Link(1.0, 1e9))
    both = simulate(timeline, moves, UNIT)
    assert both.seconds >= max(fast_out.seconds, fast_in.seconds)
