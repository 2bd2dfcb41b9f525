"""How long a step takes under moves: against ops that run one after the other, and how often it is asked."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.memory import simulate
from graph_passes.analysis.memory.fragmentation import Room
from graph_passes.analysis.memory.simulate import Link, Move, duration
from graph_passes.analysis.memory.timeline import Buffer, Chain, ScheduledOp, Timeline
from graph_passes.graph.ir import TensorId
from graph_passes.passes.offload import thin
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import How, plan_offload
from tests.tiers import examples

OPS = 12


@st.composite
def moved(draw: st.DrawFn) -> tuple[Timeline, list[Move]]:
    steps = tuple(ScheduledOp(f"s{i}", draw(st.sampled_from([0.0, 0.1, 0.7, 3.0]))) for i in range(OPS))
    buffers, moves = [], []
    for index in range(draw(st.integers(0, 8))):
        made, last, release, prefetch, following = sorted(draw(st.integers(0, OPS - 1)) for _ in range(5))
        chains = (Chain(last, (made,), (), (1,)),)
        size = draw(st.integers(1, 9))
        buffers.append(Buffer(TensorId(f"b{index}"), size, made, (last, following), chains=chains))
        moves.append(Move(index, last, made, release, prefetch, following, recomputed=draw(st.booleans())))
    return Timeline(steps, tuple(buffers), turn=OPS // 2), moves


def op_by_op(timeline: Timeline, moves: list[Move], link: Link) -> tuple[float, float]:
    now = out_free = in_free = stall = 0.0
    copied, arrived = [0.0] * len(moves), [0.0] * len(moves)
    for position, op in enumerate(timeline.steps):
        for what in ("release", "prefetch", "next"):
            for index, move in enumerate(moves):
                if move.recomputed or getattr(move, what) != position:
                    continue
                if what == "prefetch":
                    size = timeline.buffers[move.buffer].nbytes
                    arrived[index] = in_free = max(now, in_free, copied[index]) + size / link.prefetch
                    continue
                there = copied[index] if what == "release" else arrived[index]
                stall, now = stall + max(0.0, there - now), max(now, there)
        again = [move for move in moves if move.recomputed and move.next == position]
        now += op.seconds + sum(timeline.recomputing(move.gap) for move in again)
        for index, move in enumerate(moves):
            if not move.recomputed and move.copy_after == position:
                copied[index] = out_free = max(now, out_free) + timeline.buffers[move.buffer].nbytes / link.offload
    return now, stall


@settings(max_examples=examples(200))
@given(moved(), st.sampled_from([Link(1.0, 1.0), Link(3.0, 7.0), Link(100.0, 50.0)]))
def test_a_step_takes_what_its_ops_and_waits_take(step, link):
    timeline, moves = step
    assert duration(timeline, moves, link) == pytest.approx(op_by_op(timeline, moves, link))


def test_thinning_times_no_change_twice(monkeypatch):
    numbers = random.Random(0)
    steps = tuple(ScheduledOp(f"s{i}", 1.0) for i in range(60))
    buffers = tuple(
        Buffer(TensorId(f"b{i}"), numbers.randrange(10, 99), i, (i + 1, 59 - i), views=(TensorId(f"b{i}"),))
        for i in range(20)
    )
    timeline = Timeline(steps, buffers, turn=30)
    budget = round(0.6 * timeline.peak)
    options = OffloadOptions(policy="autovm", reuse_distance=1)
    widest = plan_offload(timeline, Link(9.0, 9.0), budget, options, How(widest=True))
    timed = []

    def counted(timeline, moves, link):
        timed.append(tuple(moves))
        return duration(timeline, moves, link)

    monkeypatch.setattr(simulate, "duration", counted)
    monkeypatch.setattr(thin, "duration", counted)
    plan = thin.thinned(timeline, widest, Room(((0, budget),)))
    assert plan.after.seconds < widest.after.seconds
    assert len(timed) > len(widest.moves)
    assert len(timed) == len(set(timed))
