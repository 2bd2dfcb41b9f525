"""Repairs of random steps in random free memory: what holds of every plan, whether it finds room or not."""

from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.memory.fragmentation import Room, without_workspace
from graph_passes.analysis.memory.simulate import Link, usage_under
from graph_passes.analysis.memory.timeline import Buffer, ScheduledOp, Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.graph.ir import TensorId
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import How, plan_offload
from graph_passes.passes.offload.thin import thinned
from graph_passes.refusals import Reason
from tests.tiers import examples

MIB = 1 << 20
GAP = 1 << 12  # between free chunks
OPS = 24


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    workspaces = draw(st.lists(st.integers(-50, 900), min_size=OPS, max_size=OPS))
    steps = tuple(ScheduledOp(f"s{i}", 1e-3, workspace=size * MIB) for i, size in enumerate(workspaces))
    made = st.tuples(st.integers(1, 700 * MIB), st.integers(0, OPS - 2), st.sets(st.integers(1, OPS - 1), max_size=3))
    buffers = [
        Buffer(
            TensorId(f"b{i}"),
            nbytes,
            start,
            tuple(sorted({min(OPS - 1, start + use) for use in uses})),
            views=(TensorId(f"b{i}"),),
            pinned_by=draw(st.sampled_from([None, None, None, Reason.RETURNED()])),
            twice=draw(st.booleans()),
        )
        for i, (nbytes, start, uses) in enumerate(draw(st.lists(made, min_size=3, max_size=20)))
    ]
    return Timeline(steps, tuple(buffers), turn=OPS // 2)


@settings(max_examples=examples(40))
@given(timelines(), st.floats(0.6, 1.1), st.lists(st.floats(0.1, 1.0), min_size=1, max_size=3), st.booleans())
def test_a_plan_keeps_its_budget_and_is_no_worse_thinned(timeline, share, parts, again):
    budget = int(timeline.peak * share)
    sizes = [int(budget * part / sum(parts)) // 256 * 256 for part in parts]
    room = Room(tuple((sum(sizes[:i]) + i * GAP, size) for i, size in enumerate(sizes)), limit=budget)
    options = OffloadOptions(policy="hybrid" if again else "autovm", reuse_distance=1)
    try:
        plan = plan_offload(timeline, Link(1e10, 1e10), budget, options, How(timed=True, room=room))
    except InfeasibleBudgetError:
        return
    assert usage_under(timeline, plan.moves, plan.paddings).max() == plan.after.peak <= budget
    missed = without_workspace(timeline, plan.moves, room, plan.paddings)
    less = thinned(timeline, plan, room)
    assert less.after.seconds <= plan.after.seconds
    assert less.after.peak <= budget
    if missed is not None:
        missed_then = without_workspace(timeline, less.moves, room, less.paddings)
        assert missed_then is not None
        assert set(missed_then) <= set(missed)


def test_a_step_whose_bytes_fit_in_pieces_that_do_not_and_that_nothing_can_leave():
    steps = tuple(ScheduledOp(f"s{i}") for i in range(3))
    timeline = Timeline(steps, (Buffer(TensorId("x"), 3 * MIB, 0, (1, 2), pinned_by=Reason.RETURNED()),), turn=1)
    room = Room(((0, 2 * MIB), (4 * MIB, 2 * MIB)), limit=4 * MIB)
    plan = plan_offload(timeline, Link(1e10, 1e10), 4 * MIB, OffloadOptions(), How(room=room))
    assert (plan.moves, plan.paddings) == ((), ())
    assert plan.failure(timeline, room).short == MIB


def test_a_tensor_too_small_to_be_replayed_may_move():
    steps = tuple(ScheduledOp(f"s{i}", 1e-3) for i in range(4))
    small = Buffer(TensorId("x"), 64, 0, (3,), (TensorId("x"),))
    large = Buffer(TensorId("y"), MIB, 2, (), (TensorId("y"),))
    timeline = Timeline(steps, (small, large), turn=1)
    options = OffloadOptions(policy="autovm", reuse_distance=1)
    room = Room(((0, 2 * MIB),), limit=MIB)
    plan = plan_offload(timeline, Link(1e10, 1e10), MIB, options, How(room=room))
    assert [move.buffer for move in plan.moves] == [0]
    assert plan.failure(timeline, room) is None


def test_one_repair_after_the_other_moves_what_is_in_the_way_where_room_is_short():
    """In 4 and 1 MiB, of which the 1 is taken. Both times 3 MiB find no more than 2 in one piece, 1 too few.

    The smallest that could be enough, of 1 MiB, lies elsewhere; the next one is in the way: it leaves for a while.
    What waits at another time is no help. No repair alone is enough, but each lets the step come further.
    """
    life = {"aside": (0, 7), "early": (0, 3), "late": (4, 7)}
    sizes = {"aside": MIB, "early": 2 * MIB, "late": 2 * MIB}
    waiting = [Buffer(TensorId(name), sizes[name], start, (start + 1, end)) for name, (start, end) in life.items()]
    short = [Buffer(TensorId(f"wanted{position}"), 3 * MIB, position, ()) for position in (2, 6)]
    steps = tuple(ScheduledOp(f"s{i}", 1e-3) for i in range(8))
    timeline = Timeline(steps, (*waiting, *short), turn=3)
    options = OffloadOptions(policy="autovm", reuse_distance=1)
    room = Room(((0, 4 * MIB), (5 * MIB, MIB)), limit=6 * MIB)
    plan = plan_offload(timeline, Link(1e10, 1e10), 6 * MIB, options, How(room=room, padded=False))
    assert sorted(timeline.buffers[move.buffer].tensor.node for move in plan.moves) == ["early", "late"]
    assert plan.failure(timeline, room) is None
