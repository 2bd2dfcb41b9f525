"""The allocator's replay, on regions small enough to follow by hand."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from graph_passes import pipeline
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.memory.fragmentation import Failure, Room, first_failure, without_workspace
from graph_passes.analysis.memory.observe import Sample, observe
from graph_passes.analysis.memory.simulate import Link, Move, Padding, usage_under
from graph_passes.analysis.memory.timeline import Buffer, Chain, ScheduledOp, Timeline
from graph_passes.graph.ir import Graph, Node, TensorId, TensorSpec
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import How, plan_offload
from graph_passes.passes.offload.thin import thinned
from graph_passes.refusals import Reason
from tests.allocator_reference import Region

MIB = 1 << 20
GIB = 1 << 30
CHAIN = {"a": (), "b": ("a",), "c": ("b",)}


def room(size: int, spare: float = 1.0) -> Room:
    return Room(((0, size),), spare)


def failed(timeline: Timeline, moves: tuple[Move, ...], where: Room) -> tuple[int, int] | None:
    """Position, and bytes that were missing."""
    failure = first_failure(timeline, moves, where)
    return failure and (failure.position, failure.short)


def test_best_fit_and_coalescing():
    region = Region([(0, 1000 * MIB)])
    a, b, c = (region.allocate(size * MIB) for size in (200, 300, 400))
    assert (a[0], b[0], c[0]) == (0, 200 * MIB, 500 * MIB)
    region.free(a)
    assert region.allocate(250 * MIB) is None  # 300 MiB are free, but not in one piece
    region.free(b)
    assert region.allocate(500 * MIB) == (0, 500 * MIB)  # neighbours were joined


def test_a_chunk_is_not_split_for_little():
    region = Region([(0, 300 * MIB)])
    # 100 MiB would be left over: less than 128, and 300 is less than twice 200, so the whole chunk goes out
    assert region.allocate(200 * MIB) == (0, 300 * MIB)


def test_everything_freed_is_one_chunk_again():
    region, chunks = Region([(0, GIB)]), []
    draw = random.Random(3)
    for _ in range(2000):
        if chunks and draw.random() < 0.5:
            region.free(chunks.pop(draw.randrange(len(chunks))))
        else:
            chunk = region.allocate(draw.randrange(1, 64 * MIB))
            if chunk:
                chunks.append(chunk)
    spans = sorted(chunks)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
    for chunk in chunks:
        region.free(chunk)
    assert region.allocate(GIB) == (0, GIB)


def test_a_step_may_fail_by_fragmentation_alone():
    # 2, 1 and 2 GiB alive side by side; the 2s die; 4 of 5 GiB are free, but no 3 in one piece
    buffers = (
        Buffer(TensorId("a"), 2 * GIB, 0, (3,)),
        Buffer(TensorId("b"), 1 * GIB, 1, (5,)),
        Buffer(TensorId("c"), 2 * GIB - 256, 2, (3,)),
        Buffer(TensorId("d"), 3 * GIB, 4, (5,)),
    )
    timeline = Timeline(tuple(ScheduledOp(f"s{i}") for i in range(6)), buffers, turn=2)
    assert timeline.peak <= 5 * GIB
    assert failed(timeline, (), room(5 * GIB)) == (4, GIB)
    # with b out in between, it fits
    assert first_failure(timeline, (Move(1, 1, 1, 2, 5, 5),), room(6 * GIB)) is None


def test_workspace_needs_one_piece_too_but_a_convolution_gets_by_without():
    steps = (ScheduledOp("a"), ScheduledOp("b", workspace=3 * GIB))
    timeline = Timeline(steps, (Buffer(TensorId("a"), 2 * GIB, 0, (1,)),), turn=0)
    assert failed(timeline, (), room(5 * GIB)) is None
    assert failed(timeline, (), room(5 * GIB - MIB)) == (1, MIB)
    assert first_failure(timeline, (), room(5 * GIB, spare=1.1)).position == 1
    assert first_failure(timeline, (), room(5 * GIB - MIB), excused={1}) is None


def test_what_lies_between_the_free_chunks_is_not_moved():
    timeline = Timeline((ScheduledOp("a"),), (Buffer(TensorId("a"), 3 * GIB, 0, ()),), turn=0)
    assert failed(timeline, (), Room(((0, 2 * GIB), (3 * GIB, 2 * GIB)))) == (0, GIB)
    assert first_failure(timeline, (), Room(((0, 2 * GIB), (3 * GIB, 2 * GIB))).grown(GIB)) is None


def test_a_tensor_made_twice_needs_two_pieces_and_stays_in_the_second():
    steps = tuple(ScheduledOp(f"s{i}", workspace=2 * GIB if i == 0 else 0) for i in range(3))
    x = Buffer(TensorId("x"), 2 * GIB, 0, (2,), twice=True)
    y = Buffer(TensorId("y"), 3 * GIB, 1, (2,))
    timeline = Timeline(steps, (x, y), turn=0)
    assert failed(timeline, (), room(3 * GIB)) == (0, GIB)
    assert failed(timeline, (), room(6 * GIB)) == (1, GIB)  # 2 GiB before x and 2 behind it
    assert first_failure(timeline, (), room(7 * GIB)) is None


def test_what_is_recomputed_takes_its_workspace_again():
    steps = tuple(ScheduledOp(f"s{i}", workspace=2 * GIB if i == 0 else 0) for i in range(4))
    x = Buffer(TensorId("x"), GIB, 0, (1, 3), chains=(Chain(1, (0,), (), (GIB,)),))
    y = Buffer(TensorId("y"), GIB, 2, (3,))
    timeline = Timeline(steps, (x, y), turn=1)
    move = Move(0, 1, 1, 2, 3, 3, recomputed=True)
    assert failed(timeline, (move,), room(4 * GIB)) is None
    assert failed(timeline, (move,), room(3 * GIB)) == (3, GIB)


def test_what_is_allocated_between_the_two_moves_the_second():
    # x at 0 to 2, the filter at 2 to 3, x again at 3 to 5 GiB: y finds the 3 before it; behind x alone it would find 2
    steps = tuple(ScheduledOp(f"s{i}", workspace=3 * GIB if i == 0 else 0) for i in range(3))
    y = Buffer(TensorId("y"), 3 * GIB, 1, (2,))
    x = Buffer(TensorId("x"), 2 * GIB, 0, (2,), twice=True, between=GIB)
    assert failed(Timeline(steps, (x, y), turn=1), (), room(5 * GIB)) is None
    assert failed(Timeline(steps, (replace(x, between=0), y), turn=1), (), room(5 * GIB)) == (1, GIB)


def test_the_gradient_of_a_softmax_is_written_over_the_logits():
    nodes = [
        Node("x", "Relu6", [], outputs=1),
        Node("logits", "MatMul", [TensorId("x"), TensorId("x")], outputs=1),
        Node("loss", "SparseSoftmaxCrossEntropyWithLogits", [TensorId("logits"), TensorId("x")], outputs=2),
        Node("end", "MatMul", [TensorId("loss"), TensorId("loss", 1)], outputs=1),
    ]
    large, small = TensorSpec("float32", 4, (256, 1024)), TensorSpec("float32", 4, (256,))
    specs = {TensorId(node.name): large for node in nodes} | {TensorId("loss"): small, TensorId("loss", 1): large}
    timeline = pipeline.Step.read(Graph(nodes, specs)).timeline(Roofline(load("unit")))
    views = {str(buffer.tensor): [str(view) for view in buffer.views] for buffer in timeline.buffers}
    assert views["logits:0"] == ["logits:0", "loss:1"]
    assert "loss:1" not in views


def test_a_failure_further_on_or_by_less_is_later():
    first = Failure(position=2, wanted=9, short=5, made=1)
    assert first._replace(position=3, short=9).is_after(first)
    assert first._replace(made=2, short=9).is_after(first)
    assert first._replace(short=4).is_after(first)
    assert not first.is_after(first)


def test_a_tensor_is_brought_back_earlier_to_a_better_place():
    # x comes back at 5, behind y (address 0 to 1), and splits the room once y is gone: z finds 4 GiB in one piece
    steps = tuple(ScheduledOp(f"s{i}") for i in range(8))
    x = Buffer(TensorId("x"), 2 * GIB, 0, (1, 5, 6))
    y = Buffer(TensorId("y"), GIB, 3, (5,))
    z = Buffer(TensorId("z"), 9 * GIB // 2, 6, (7,))
    timeline = Timeline(steps, (x, y, z), turn=2)
    options = OffloadOptions(policy="autovm", reuse_distance=1)
    tight = plan_offload(timeline, Link(1.0, 1.0), 7 * GIB, options, How(widest=True))
    assert [move.prefetch for move in tight.moves] == [5]
    assert first_failure(timeline, tight.moves, room(7 * GIB)).position == 6
    repaired = plan_offload(timeline, Link(1.0, 1.0), 7 * GIB, options, How(widest=True, room=room(7 * GIB)))
    assert repaired.failure(timeline, room(7 * GIB)) is None


def behind_a_short_life(last: int) -> Timeline:
    """2 GiB that end soon, 1 GiB that stay, then `last` bytes."""
    steps = tuple(ScheduledOp(f"s{i}") for i in range(5))
    x = Buffer(TensorId("x"), 2 * GIB, 0, (2,))
    y = Buffer(TensorId("y"), GIB, 1, (4,), pinned_by=Reason.RETURNED())
    z = Buffer(TensorId("z"), last, 3, (4,))
    return Timeline(steps, (x, y, z), turn=2)


def test_a_tensor_is_put_to_the_end_of_the_room_that_a_later_one_needs():
    # y, which lives long, would lie right behind x; once x is gone, z finds no 7 GiB before or behind it
    timeline = behind_a_short_life(7 * GIB)
    assert failed(timeline, (), room(8 * GIB)) == (3, 2 * GIB)
    plan = plan_offload(timeline, Link(1.0, 1.0), 8 * GIB, OffloadOptions(policy="autovm"), How(room=room(8 * GIB)))
    assert plan.moves == ()
    assert plan.paddings == (Padding(1, 5 * GIB),)
    assert plan.failure(timeline, room(8 * GIB)) is None


def test_an_op_that_cannot_have_its_workspace_does_not_keep_a_later_one_from_its_own():
    steps = (
        ScheduledOp("s0"),
        ScheduledOp("s1"),
        ScheduledOp("s2", workspace=20 * GIB),
        ScheduledOp("s3", workspace=7 * GIB),
        ScheduledOp("s4"),
    )
    x = Buffer(TensorId("x"), 2 * GIB, 0, (2,))
    y = Buffer(TensorId("y"), GIB, 1, (4,), pinned_by=Reason.RETURNED())
    timeline = Timeline(steps, (x, y), turn=2)
    assert without_workspace(timeline, (), room(8 * GIB)) == [2, 3]
    plan = plan_offload(timeline, Link(1.0, 1.0), 23 * GIB, OffloadOptions(policy="autovm"), How(room=room(8 * GIB)))
    assert without_workspace(timeline, plan.moves, room(8 * GIB), plan.paddings) == [2]
    assert plan.failure(timeline, room(8 * GIB)) == Failure(2, 20 * GIB, 15 * GIB, 0, workspace=True)
    assert plan.failure(timeline, room(8 * GIB), excused={2}) is None


def test_a_padding_leaves_its_op_the_workspace_it_needs():
    # y at the end of 8 GiB would leave its op no workspace; 1 GiB before the end it does, and z finds 6 GiB
    timeline = behind_a_short_life(6 * GIB)
    steps = tuple(replace(step, workspace=GIB) if step.node == "s1" else step for step in timeline.steps)
    timeline = replace(timeline, steps=steps)
    plan = plan_offload(timeline, Link(1.0, 1.0), 8 * GIB, OffloadOptions(policy="autovm"), How(room=room(8 * GIB)))
    assert plan.paddings == (Padding(1, 4 * GIB),)
    assert plan.failure(timeline, room(8 * GIB)) is None


def test_a_padding_may_take_what_the_room_allows_and_is_part_of_the_peak():
    timeline = behind_a_short_life(3 * GIB)
    options = OffloadOptions(policy="autovm")
    allowed = replace(room(5 * GIB), limit=5 * GIB)
    plan = plan_offload(timeline, Link(1.0, 1.0), 4 * GIB, options, How(room=allowed))
    assert plan.paddings == (Padding(1, 2 * GIB),)
    assert plan.after.peak == 5 * GIB


def test_no_padding_takes_more_than_the_budget_leaves():
    timeline = behind_a_short_life(3 * GIB)
    plan = plan_offload(timeline, Link(1.0, 1.0), 4 * GIB, OffloadOptions(policy="autovm"), How(room=room(5 * GIB)))
    usage = timeline.usage
    assert all(usage[padding.position] + padding.nbytes <= 4 * GIB for padding in plan.paddings)


def test_a_padding_is_taken_before_its_op_and_let_go_after():
    nodes = [Node(name, "Relu6", [TensorId(each) for each in reads], outputs=1) for name, reads in CHAIN.items()]
    graph = Graph(nodes, {TensorId(name): TensorSpec("float32", 4, (MIB,)) for name in CHAIN})
    step = pipeline.Step.read(graph)
    timeline = step.timeline(Roofline(load("unit")))
    plan = plan_offload(timeline, Link(1.0, 1.0), GIB, OffloadOptions(), How(unmoved=True))
    filled = replace(plan, paddings=(Padding(step.order.index("b"), 512),))
    edited = pipeline.edit_step(step, timeline, filled, OffloadOptions())
    padding = edited["tfmem/MemOpFill/b"]
    assert padding.attrs["bytes"] == 512
    assert padding.control == ["a"]
    assert edited["b"].control == [padding.name]
    emptied = edited["tfmem/MemOpFill/b/Emptied"]
    assert (emptied.inputs, emptied.control) == ([TensorId(padding.name)], ["b"])
    assert edited["c"].control == [emptied.name]


def test_a_padding_is_not_taken_for_workspace():
    # 2 bytes at 0, 5 at 1 of which 2 are a padding's; it is there for position 1, where a probe comes next
    steps = tuple(ScheduledOp(f"s{i}") for i in range(3))
    timeline = Timeline(steps, (Buffer(TensorId("s0"), 2, 0, (1, 2)),), turn=1)
    samples = [Sample(1, 0.0, 2, 2), Sample(3, 1.0, 2, 5), Sample(5, 2.0, 2, 2)]
    assert observe(timeline, (), samples).workspace == {"s0": 0, "s1": 3, "s2": 0}
    assert observe(timeline, (), samples, [Padding(1, 2)]).workspace == {"s0": 0, "s1": 1, "s2": 0}


def test_a_buffer_that_is_shared_is_not_taken_for_workspace_of_all_other_ops():
    # s2 writes its 4 bytes over what s1 made, which the timeline counts as two buffers; 10 bytes are there all along
    steps = tuple(ScheduledOp(f"s{i}") for i in range(5))
    made = (Buffer(TensorId("s1"), 4, 1, (2,)), Buffer(TensorId("s2"), 4, 2, (3,)))
    samples = [Sample(1, 0, 10, 10), Sample(3, 0, 14, 17), Sample(5, 0, 14, 14), Sample(7, 0, 10, 14)]
    seen = observe(Timeline(steps, made, turn=3), (), [*samples, Sample(9, 0, 10, 10)])
    assert seen.base == 10
    assert seen.workspace == {"s0": 0, "s1": 3, "s2": -4, "s3": 0, "s4": 0}


def test_a_plan_that_runs_is_thinned_as_far_as_there_is_room():
    # x and y wait for 3 and 4 while z, at 2, needs 5 of 7 GiB: x may stay, but not y, which lies behind x and leaves 4
    steps = tuple(ScheduledOp(f"s{i}", 1.0) for i in range(5))
    x = Buffer(TensorId("x"), GIB, 0, (1, 4))
    y = Buffer(TensorId("y"), 2 * GIB, 0, (1, 3))
    z = Buffer(TensorId("z"), 5 * GIB, 2, ())
    timeline = Timeline(steps, (x, y, z), turn=2)
    options = OffloadOptions(policy="autovm", reuse_distance=1)
    widest = plan_offload(timeline, Link(GIB, GIB), 7 * GIB, options, How(widest=True))
    assert sorted(move.buffer for move in widest.moves) == [0, 1]
    plan = thinned(timeline, widest, room(7 * GIB))
    assert [move.buffer for move in plan.moves] == [1]
    assert plan.after.seconds < widest.after.seconds
    assert plan.failure(timeline, room(7 * GIB)) is None
    assert thinned(timeline, widest, room(6 * GIB)).after.seconds <= widest.after.seconds


@pytest.mark.parametrize("again", [False, True])
def test_what_has_no_copy_to_hide_keeps_none_from_being_hidden(again):
    # x, the larger, stays, or is made again and not copied. y must be out at 5, so that 6 is the earliest for its copy,
    # which takes an op's second; of the numbers of ops that are tried, 2 is the first that the room allows.
    steps = tuple(ScheduledOp(f"s{i}", 1.0) for i in range(9))
    chains = (Chain(1, (0,), (), (3 * GIB,)),)
    x, y = Buffer(TensorId("x"), 3 * GIB, 0, (1, 3), chains=chains), Buffer(TensorId("y"), GIB, 0, (1, 8))
    timeline = Timeline(steps, (x, y, Buffer(TensorId("z"), 13 * GIB // 2, 5, ())), turn=2)
    options = OffloadOptions(policy="autovm", reuse_distance=1)
    widest = plan_offload(timeline, Link(GIB, GIB), 7 * GIB, options, How(widest=True))
    moves = tuple(replace(move, recomputed=again and move.buffer == 0) for move in widest.moves)
    assert [(move.buffer, move.prefetch) for move in moves] == [(0, 3), (1, 8)]
    plan = thinned(timeline, replace(widest, moves=moves), room(7 * GIB))
    assert [(move.buffer, move.prefetch) for move in plan.moves] == ([(0, 3)] if again else []) + [(1, 6)]


def test_the_peak_counts_the_workspace_of_what_is_made_again():
    steps = (ScheduledOp("a", workspace=4 * GIB), ScheduledOp("b"), ScheduledOp("c"), ScheduledOp("d", workspace=GIB))
    a = Buffer(TensorId("a"), GIB, 0, (1, 3), chains=(Chain(1, (0,), (), (GIB,)),))
    timeline = Timeline(steps, (a, Buffer(TensorId("d"), GIB, 3, ())), turn=1)
    move = Move(0, 1, 1, 2, 3, 3, recomputed=True)
    assert usage_under(timeline, [move]).tolist() == [5 * GIB, GIB, 0, 5 * GIB]
