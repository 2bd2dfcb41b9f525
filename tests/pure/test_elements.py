"""Elements of lists that move: how long each is in memory, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph_passes.analysis.memory.simulate import Move, uncounted_under, usage_under
from graph_passes.analysis.memory.timeline import Buffer, Chain, Holder, ScheduledOp, Timeline
from graph_passes.graph.ir import TensorId

FIRST, SECOND = TensorId("loop1", 3), TensorId("loop2", 3)
LIST = 40  # bytes that each list counts
STATE = 10  # of h between two loops, and behind the second: both lists hold the first, the second list the other


def timeline(*, sources: tuple[int, ...] = (1,), counted: int = 0) -> Timeline:
    """h0 -> loop1 -> h1 -> loop2 -> h2 -> loss -> back2 -> back1; h0 lives outside of the step."""
    chains = (Chain(0, (0,), (), (LIST + STATE,)),), (Chain(1, (1,), sources, (LIST + STATE,)),)
    held = (Holder(FIRST, made=True), Holder(SECOND, made=False)), (Holder(SECOND, made=True),)
    buffers = (
        Buffer(FIRST, LIST, 0, (4,), chains=chains[0], element=STATE),
        Buffer(TensorId("loop1", 2), STATE, 0, (1, 3, 4), holders=held[0], read=1),
        Buffer(SECOND, LIST, 1, (3,), chains=chains[1], element=STATE),
        Buffer(TensorId("loop2", 2), STATE, 1, (2, 3), holders=held[1], read=2),
    )
    steps = tuple(ScheduledOp(name) for name in ("loop1", "loop2", "loss", "back2", "back1"))
    return Timeline(steps, buffers, turn=2, counted=counted)


FIRST_AWAY, SECOND_AWAY = Move(0, 0, 0, 1, 4, 4), Move(2, 1, 1, 2, 3, 3)
FIRST_AGAIN, SECOND_AGAIN = replace(FIRST_AWAY, recomputed=True), replace(SECOND_AWAY, recomputed=True)
LATE = replace(FIRST_AWAY, release=2)


@pytest.mark.parametrize(
    ("moves", "usage"),
    [
        ([], [50, 100, 100, 100, 50]),
        ([FIRST_AWAY], [50, 60, 60, 60, 50]),  # h1 stays: the first list is its owner while it is away, too
        ([SECOND_AWAY], [50, 100, 60, 100, 50]),
        ([FIRST_AWAY, SECOND_AWAY], [50, 60, 20, 60, 50]),
        ([FIRST_AGAIN], [50, 60, 60, 60, 50]),  # at last there is another h1, as large
        ([FIRST_AGAIN, SECOND_AWAY], [50, 60, 10, 60, 50]),  # the second list takes h1 along
        ([LATE, SECOND_AWAY], [50, 100, 20, 60, 50]),
        ([FIRST_AGAIN, SECOND_AGAIN], [50, 60, 20, 60, 50]),  # h1 stays, for the second run of loop2 reads it
    ],
)
def test_an_element_stays_for_its_holders(moves: list[Move], usage: list[int]) -> None:
    assert usage_under(timeline(), moves).tolist() == usage


def test_what_reads_an_element_besides_keeps_it() -> None:
    found = timeline()
    read = replace(found.buffers[1], read=2)
    found = replace(found, buffers=(found.buffers[0], read, *found.buffers[2:]))
    assert usage_under(found, [FIRST_AGAIN, SECOND_AWAY]).tolist() == [50, 60, 20, 60, 50]
    fetched = replace(found, buffers=(found.buffers[0], replace(read, fetched=True), *found.buffers[2:]))
    assert usage_under(fetched, [FIRST_AGAIN, SECOND_AWAY]).tolist() == [50, 60, 20, 60, 60]  # beside another h1


def test_a_chain_that_makes_the_element_again() -> None:
    """The second run of loop2 begins with another h1 if it does not read this one."""
    usage = usage_under(timeline(sources=()), [FIRST_AGAIN, SECOND_AGAIN])
    assert usage.tolist() == [50, 60, 10, 60, 50]


def test_elements_that_the_allocator_does_not_count() -> None:
    """Lists are as large as all their elements, of which each is allocated alone."""
    found = timeline(counted=STATE + 1)
    for moves in ([], [FIRST_AWAY, SECOND_AWAY], [FIRST_AGAIN, SECOND_AWAY], [FIRST_AGAIN, SECOND_AGAIN]):
        assert uncounted_under(found, moves).tolist() == usage_under(found, moves).tolist()
    assert not uncounted_under(timeline(counted=STATE), [FIRST_AGAIN, SECOND_AWAY]).any()
