"""When ops and copies of a plan run, against the planner's own replay; and what is in memory at the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.memory.simulate import Link, Move, simulate
from graph_passes.analysis.memory.timeline import Buffer, ScheduledOp, Timeline
from graph_passes.graph.ir import Graph, TensorId
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.report import Span
from graph_passes.step_picture import MOST_SPANS, alive_at, longest, pictured, schedule, slowest
from tests.chain_nets import nets
from tests.pure.test_optimal import planned, read
from tests.tiers import examples


def chain() -> Timeline:
    """Three ops of 10 s; the first's 10 bytes are read by the last."""
    steps = tuple(ScheduledOp(name, 10.0) for name in "abc")
    return Timeline(steps, (Buffer(TensorId("a"), 10, 0, (2,)), Buffer(TensorId("b"), 4, 1, (2,))), turn=0)


MOVE = Move(0, 0, 0, 1, 1, 2)
S = 1_000_000_000


def test_copies_and_waits_have_their_times() -> None:
    # out from 10 to 20, for which the release at 10 waits; back from 20 to 30, while b runs until 30
    found = schedule(chain(), [MOVE], Link(1, 1))
    assert found.spans == [
        Span("compute", "a", 0, 10 * S),
        Span("out", "a:0", 10 * S, 20 * S),
        Span("wait", "a:0", 10 * S, 20 * S),
        Span("in", "a:0", 20 * S, 30 * S),
        Span("compute", "b", 20 * S, 30 * S),
        Span("compute", "c", 30 * S, 40 * S),
    ]
    assert slowest(chain(), [MOVE], found) == (("a:0", 10 * S),)


def test_what_is_alive_at_the_peak() -> None:
    assert alive_at(chain(), 1) == (("a:0", 10), ("b:0", 4))
    away = replace(MOVE, prefetch=2)
    assert alive_at(chain(), 1, [away]) == (("b:0", 4),)
    assert alive_at(chain(), 2, [away]) == (("a:0", 10), ("b:0", 4))


def test_all_copies_and_the_longest_ops_are_kept() -> None:
    ops = [Span("compute", str(i), i, i + 1 + i % 7) for i in range(2 * MOST_SPANS)]
    copies = [Span("out", "t", 3, 4)]
    kept = longest([*ops, *copies])
    assert len(kept) == MOST_SPANS + 1
    assert copies[0] in kept
    shortest = min(span.end - span.begin for span in kept if span.lane == "compute")
    assert shortest >= max(span.end - span.begin for span in ops if span not in kept)
    assert list(kept) == sorted(kept, key=lambda span: (span.begin, span.lane))


def test_a_step_without_ops_has_no_picture() -> None:
    assert pictured(Timeline((), (), turn=0), (), Link(1, 1), (0, 0)) == {}


@settings(max_examples=examples(60))
@given(graph=nets(), share=st.floats(0.4, 1.0), speed=st.sampled_from([1e3, 1e5, 1e7]))
def test_the_schedule_is_the_planners(graph: Graph, share: float, speed: float) -> None:
    link, timeline = Link(speed, 2 * speed), read(graph)[1]
    plan = planned(graph, share, link, OffloadOptions(policy="hybrid"))
    if plan is None:
        return
    found, expected = schedule(timeline, plan.moves, link), simulate(timeline, plan.moves, link)
    assert sum(found.waits.values()) == pytest.approx(expected.stall, abs=1e-9)
    end = max((span.end for span in found.spans if span.lane in ("compute", "wait")), default=0)
    assert end == pytest.approx(1e9 * expected.seconds, rel=1e-6, abs=2)
