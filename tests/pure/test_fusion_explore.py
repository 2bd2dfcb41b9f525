"""Exploratory patterns of small regions: how far they grow, and what they make of the runs that they touch."""

from __future__ import annotations

import pytest

from graph_passes.analysis.op_pattern import IN_KERNELS
from graph_passes.graph.ir import TensorId
from graph_passes.passes.fuse.partition.candidate import candidate_of
from graph_passes.passes.fuse.partition.explore import Exploration, exploratory
from graph_passes.passes.fuse.partition.score import Candidate, Scorer
from tests.fusion_graphs import UNIT, Nodes

CHAIN = [("Elementwise", (number,)) for number in range(-1, 4)]  # each of five nodes reads the one before


def explored(nodes: list[tuple[str, tuple[int, ...]]], limits: Exploration, *runs: tuple[int, ...]) -> set[object]:
    """The patterns of a region of nodes that read these others, -1 one outside; `runs` are kernels already."""
    made = Nodes()
    outside = made.add("Opaque", size=3000, name="outside")
    names: list[str] = []
    for op, read in nodes:
        names.append(made.add(op, *(names[each] if each >= 0 else outside for each in read), size=3000))
    graph, fetched = made.graph(), [TensorId(names[-1])]
    region = candidate_of(
        graph, made.op_patterns, names, fetched, lambda name: made.op_patterns[name].pattern in IN_KERNELS
    )
    found = [Candidate(members, 1.0, ideal=1.0) for members in runs]
    return {candidate.members for candidate in exploratory(Scorer(region, UNIT), found, limits)}


@pytest.mark.parametrize(
    ("each", "expected"), [(1, {(0, 1), (1, 2)}), (2, {(0, 1), (1, 2), (0, 1, 2)})], ids=["one", "two"]
)
def test_no_more_patterns_grow_from_a_seed_than_shall(each, expected):
    assert explored(CHAIN[:3], Exploration(each=each)) == expected


def test_a_pattern_of_the_first_node_grows_past_a_product_that_does_not_wait_for_it():
    # no pattern grows from a gather, which could take in the first node
    nodes = [("Elementwise", (-1,)), ("Product", (-1,)), ("Gather", (0, 1))]
    assert explored(nodes, Exploration()) == {(0, 2)}


def test_a_run_is_given_without_what_a_pattern_takes_of_it_and_with_all_of_the_pattern():
    assert explored(CHAIN[:4], Exploration(each=1), (0, 1, 2)) == {(2, 3), (0, 1), (0, 1, 2, 3)}


def test_a_run_is_not_given_with_a_pattern_where_a_path_leaves_both_and_comes_back():
    # 0 -> 2 -> 3 by way of a product
    nodes = [("Elementwise", (-1,)), ("Elementwise", (0,)), ("Product", (0,)), ("Elementwise", (1, 2))]
    assert explored(nodes, Exploration(each=1), (0, 1)) == {(1, 3)}


def test_a_run_that_ends_behind_the_window_is_not_given_with_a_pattern():
    """The window around node 0 ends before node 4."""
    assert explored(CHAIN, Exploration(window=2, each=1), (1, 2, 3, 4)) == {(0, 1), (2, 3, 4)}
