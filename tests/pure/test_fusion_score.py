"""What patterns take and save by model: one byte takes a second to move, a launch a hundred, a barrier ten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph_passes.analysis.op_pattern import IN_KERNELS
from graph_passes.graph.ir import TensorId
from graph_passes.graph.order import topological
from graph_passes.passes.fuse.partition.candidate import candidate_of
from graph_passes.passes.fuse.partition.score import Candidate, Scorer
from tests.fusion_graphs import UNIT, Nodes


def scorer(made: Nodes, *results: str, packed: float = 0.0) -> Scorer:
    """A scorer of all nodes that can be in a kernel."""
    graph, known = made.graph(), made.op_patterns
    inside = [name for name in topological(graph) if known[name].pattern in IN_KERNELS]
    given = candidate_of(graph, known, inside, {TensorId(name) for name in results}, lambda name: True)
    return Scorer(given, replace(UNIT, packed=packed))


def in_three_passes(size: int) -> Nodes:
    """The sums of columns twice, each scaled by them: of 4 bytes each."""
    made = Nodes()
    x = made.add("Opaque", size=size)
    first = made.add("Elementwise", x, made.add("Columns", x, size=4), size=size)
    made.add("Elementwise", first, made.add("Columns", first, size=4), size=size, name="result")
    return made


def test_a_pattern_waits_between_its_passes():
    # In one kernel: 100 bytes in, 100 out, and two barriers. Alone: two sums move 104, and two scales 204.
    found = scorer(in_three_passes(100), "result")
    apart = 2 * 104 + 2 * 204 + 3 * 100
    assert found.candidate(range(4)) == Candidate((0, 1, 2, 3), apart - 220, 220, apart - 200)


@pytest.mark.parametrize(("size", "barriers"), [(64, 0), (65, 2)])
def test_what_one_block_can_work_on_needs_no_barrier(size, barriers):
    assert scorer(in_three_passes(size), "result").seconds(range(4)) == 2 * size + barriers * 10


@pytest.mark.parametrize(
    ("op", "sizes", "lost"),
    [
        ("Columns", (100, 100), 104 / 2),
        ("Columns", (300, 100), 104 / 2),  # the largest part loses nothing
        ("Columns", (28, 28), 0),  # 64 bytes in all, on which one block works by itself
        ("Rows", (100, 100), 0),  # one pass, in which no part waits for another
        ("Columns", (100,), 0),
    ],
)
def test_parts_of_several_passes_lose_half_of_their_time(op, sizes, lost):
    made = Nodes()
    results = [made.add(op, made.add("Opaque", size=size), size=4) for size in sizes]
    seconds = scorer(made, *results, packed=0.5).seconds(range(len(sizes)))
    assert seconds == sum(sizes) + 4 * len(sizes) + lost
