"""The allocator's replay in C++ against the one in Python, on random steps, plans and rooms: equal to the byte."""

import random
from itertools import pairwise

import pytest

from graph_passes.analysis.memory.fragmentation import Room, replay, without_workspace
from graph_passes.analysis.memory.simulate import Move, Padding
from graph_passes.analysis.memory.timeline import Buffer, Chain, ScheduledOp, Timeline
from graph_passes.graph.ir import TensorId
from tests.allocator_reference import replayed

MIB = 1 << 20


def drawn_size(draw: random.Random) -> int:
    return draw.choice([draw.randrange(1, 1 << 17), draw.randrange(1 << 16, 1 << 24), draw.randrange(1, 300) * MIB])


def drawn_buffer(draw: random.Random, index: int, ops: int) -> Buffer:
    start = draw.randrange(ops)
    uses = tuple(sorted({draw.randrange(start, ops) for _ in range(draw.randrange(4))} - {start}))
    nbytes, kind = drawn_size(draw), draw.random()
    element = draw.randrange(1, nbytes + 2) if kind < 0.1 else 0
    twice = kind > 0.7
    between = drawn_size(draw) if twice and kind > 0.85 else 0
    return Buffer(
        TensorId(f"op{index}", 0),
        nbytes,
        start,
        uses,
        fetched=kind > 0.97,
        twice=twice,
        between=between,
        element=element,
        chains=drawn_chains(draw, nbytes, start),
    )


def drawn_chains(draw: random.Random, nbytes: int, start: int) -> tuple[Chain, ...]:
    """One way to make the buffer again in all of its gaps, by up to four ops with tensors between them."""
    chosen = tuple(sorted(draw.randrange(start + 1) for _ in range(draw.randrange(1, 5))))
    held = tuple(nbytes + draw.choice([0, drawn_size(draw)]) for _ in chosen)
    return (Chain(start, chosen, (), held),)


def drawn_moves(draw: random.Random, buffers: tuple[Buffer, ...]) -> list[Move]:
    found = []
    for index, buffer in enumerate(buffers):
        for last, following in pairwise((buffer.start, *buffer.uses)):
            if following - last > 1 and draw.random() < 0.5:
                release = draw.randrange(last + 1, following + 1)
                prefetch = draw.randrange(release, following + 1)
                recomputed = draw.random() < 0.3
                found.append(Move(index, last, last, release, prefetch, following, recomputed))
    draw.shuffle(found)
    return sorted(found, key=lambda move: (move.release, move.prefetch))


def drawn_room(draw: random.Random) -> Room:
    chunks, address = [], 0
    for _ in range(draw.randrange(1, 6)):
        size = draw.randrange(1, 5000) * draw.choice([256, MIB // 8])
        chunks.append((address, size))
        address += size + draw.choice([0, 256, MIB])
    return Room(tuple(chunks), draw.choice([1.0, 1.03, 1.5]))


@pytest.mark.parametrize("seed", range(400))
def test_both_replays_agree(seed):
    draw = random.Random(seed)
    ops = draw.randrange(1, 80)
    buffers = tuple(drawn_buffer(draw, index, ops) for index in range(draw.randrange(1, 100)))
    steps = tuple(ScheduledOp(f"op{index}", 0.0, draw.choice([0, drawn_size(draw) * 2])) for index in range(ops))
    timeline = Timeline(steps, buffers, ops // 2)
    moves, room = drawn_moves(draw, buffers), drawn_room(draw)
    paddings = tuple(Padding(draw.randrange(ops), drawn_size(draw)) for _ in range(draw.randrange(3)))
    for excused in ((), range(ops), {draw.randrange(ops) for _ in range(5)}):
        for until in (None, draw.randrange(ops)):
            failure, held, _ = replayed(timeline, moves, room, paddings, excused=excused, until=until)
            found = replay(timeline, moves, room, paddings, excused=excused, until=until)
            assert found == (failure, held)
    failure, _, missed = replayed(timeline, moves, room, paddings, excused=range(ops))
    assert without_workspace(timeline, moves, room, paddings) == (missed if failure is None else None)


def test_a_move_of_a_buffer_that_is_not_in_memory_is_named():
    timeline = Timeline(tuple(ScheduledOp(f"op{i}") for i in range(6)), (Buffer(TensorId("op3", 0), MIB, 3, (5,)),), 3)
    with pytest.raises(ValueError, match="buffer 0 is to be freed at position 1"):
        replay(timeline, [Move(0, 0, 0, 1, 2, 2)], Room(((0, 4 * MIB),)))


def test_a_move_of_no_buffer_is_refused():
    timeline = Timeline((ScheduledOp("op0"),), (), 0)
    with pytest.raises(ValueError, match="does not have"):
        replay(timeline, [Move(7, 0, 0, 0, 0, 0)], Room(((0, MIB),)))
