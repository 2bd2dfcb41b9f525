"""The choice of patterns: the optimum of small problems, never worse than greedy, the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from random import Random

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.dependences import Dependences
from graph_passes.passes.fuse.partition import ilp
from graph_passes.passes.fuse.partition.ilp import Limits, choose_patterns
from graph_passes.passes.fuse.partition.quotient_graph import QuotientGraph
from graph_passes.passes.fuse.partition.score import Candidate
from tests.pure.test_fusion_runs import nets
from tests.tiers import examples

ROOT = Path(__file__).parents[2]


def cyclic(net, candidates, chosen):
    return QuotientGraph(net, [candidates[place].members for place in chosen]).order() is None


@st.composite
def problems(draw):
    net = draw(nets(most=8))
    numbers = st.integers(0, len(net) - 1)
    members = draw(st.lists(st.frozensets(numbers, min_size=1, max_size=4), min_size=1, max_size=8, unique=True))
    scores = draw(st.lists(st.integers(1, 9), min_size=len(members), max_size=len(members)))
    return net, [Candidate(tuple(sorted(one)), score * 1e-6) for one, score in zip(members, scores, strict=True)]


def best(net, candidates):
    """By trying all choices."""
    found = 0.0
    for count in range(1, len(candidates) + 1):
        for chosen in combinations(range(len(candidates)), count):
            held = [number for place in chosen for number in candidates[place].members]
            if len(held) == len(set(held)) and not cyclic(net, candidates, chosen):
                found = max(found, sum(candidates[place].score for place in chosen))
    return found


@settings(max_examples=examples(150))
@given(problems())
def test_the_optimum_of_small_problems(problem):
    net, candidates = problem
    choice = choose_patterns(candidates, net)
    held = [number for place in choice.chosen for number in candidates[place].members]
    assert len(held) == len(set(held))
    assert not cyclic(net, candidates, choice.chosen)
    assert choice.score == pytest.approx(sum(candidates[place].score for place in choice.chosen))
    assert choice.score == pytest.approx(best(net, candidates))
    assert choice.score >= choice.greedy
    assert choice.complete


@settings(max_examples=examples(50))
@given(problems(), st.sampled_from([Limits(seconds=0.0, nodes=1, rounds=1), Limits(work=0), Limits(work=40)]))
def test_any_limit_gives_a_plan_that_is_no_worse_than_greedy(problem, limits):
    net, candidates = problem
    choice = choose_patterns(candidates, net, limits)
    assert not cyclic(net, candidates, choice.chosen)
    assert choice.score >= choice.greedy


def test_greedy_is_improved_upon():
    # the middle one is the best, but the two at its sides are better together
    candidates = [Candidate((0, 1), 3e-6), Candidate((1, 2), 4e-6), Candidate((2, 3), 3e-6)]
    net = Dependences(((), (), (), ()))
    choice = choose_patterns(candidates, net)
    assert choice.chosen == (0, 2)
    assert (choice.score, choice.greedy) == (pytest.approx(6e-6), pytest.approx(4e-6))
    assert choice.solvers == ("HiGHS",)


def test_the_papers_cycle_is_cut():
    """Figure 3: A and C together wait for B, which waits for A; so they are not fused, whatever it would save."""
    net = Dependences(((), (0,), (1,)))
    candidates = [Candidate((0, 2), 9e-6), Candidate((0, 1), 1e-6)]
    choice = choose_patterns(candidates, net)
    assert choice.chosen == (1,)
    assert (choice.rounds, choice.cuts) == (2, 1)


def test_two_patterns_that_wait_for_each_other_are_not_both_chosen():
    net = Dependences(((), (0,), (), (2,)))  # 0 -> 1, 2 -> 3
    candidates = [Candidate((0, 3), 5e-6), Candidate((1, 2), 4e-6)]
    assert choose_patterns(candidates, net).chosen == (0,)


def test_one_cut_forbids_all_patterns_that_close_a_cycle_in_the_same_way():
    """0 -> 1 and 2 -> 3: patterns of 0, 3 and one of eight nodes wait for those of 1 and 2, and they for these."""
    net = Dependences(((), (0,), (), (2,), *((),) * 16))
    first = [Candidate((0, 3, number), 5e-6 + number * 1e-9) for number in range(4, 12)]
    second = [Candidate((1, 2, number), 4e-6 + number * 1e-9) for number in range(12, 20)]
    choice = choose_patterns([*first, *second], net)
    assert choice.chosen == (7,)
    assert (choice.rounds, choice.cuts, choice.complete) == (2, 1, True)


def test_of_three_patterns_on_a_cycle_two_are_chosen():
    net = Dependences(((), (0,), (), (2,), (), (4,), (), (), (), ()))  # 0 -> 1, 2 -> 3, 4 -> 5
    ring = [Candidate((0, 5), 5e-6), Candidate((1, 2), 4e-6), Candidate((3, 4), 3e-6)]
    beside = [Candidate((6, 7), 3e-6), Candidate((7, 8), 4e-6), Candidate((8, 9), 3e-6)]  # greedy takes the middle one
    assert choose_patterns([*ring, *beside], net).chosen == (0, 1, 3, 5)


def test_equal_problems_are_solved_once():
    steps = 50
    net = Dependences(((),) * (4 * steps))
    candidates = []
    for first in range(0, 4 * steps, 4):
        candidates += [
            Candidate((first + at, first + at + 1), score) for at, score in ((0, 3e-6), (1, 4e-6), (2, 3e-6))
        ]
    choice = choose_patterns(candidates, net)
    assert choice.problems == 1
    assert choice.score == pytest.approx(steps * 6e-6)


def test_without_highs_cbc_solves_it_and_without_both_greedy_does(monkeypatch):
    candidates = [Candidate((0, 1), 3e-6), Candidate((1, 2), 4e-6), Candidate((2, 3), 3e-6)]
    net = Dependences(((), (), (), ()))
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    cbc = getattr(pulp, "PULP_CBC_CMD", pulp.COIN_CMD)  # PuLP 4 brings none
    if cbc(msg=False).available():
        choice = choose_patterns(candidates, net)
        assert (choice.chosen, choice.solvers, choice.complete) == ((0, 2), (cbc.__name__,), True)
    monkeypatch.setattr(cbc, "available", lambda self: False)
    choice = choose_patterns(candidates, net)
    assert (choice.chosen, choice.solvers, choice.complete) == ((1,), ("greedy",), False)


def hard() -> tuple[Dependences, list[Candidate]]:
    """Fours of 60 nodes, by scores that make the solver branch for minutes."""
    random = Random(0)
    sets = sorted({tuple(sorted(random.sample(range(60), 4))) for _ in range(300)})
    return Dependences(((),) * 60), [Candidate(each, (100 + random.randrange(10)) * 1e-6) for each in sets]


def test_no_clock_decides(monkeypatch):
    """A process whose clock runs a thousand times as fast, or that waits, plans the same."""
    net, candidates = hard()
    expected = choose_patterns(candidates, net, Limits(gap=0.0, work=10_000))
    assert not expected.complete, "nothing was left to be decided by a limit"
    ticks = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(ilp, "monotonic", lambda: float(next(ticks)))
    assert choose_patterns(candidates, net, Limits(gap=0.0, work=10_000)) == expected


def test_work_that_is_spent_is_left_to_greedy():
    net, candidates = hard()
    choice = choose_patterns(candidates, net, Limits(work=0))
    assert (choice.solvers, choice.complete, choice.score) == (("greedy",), False, choice.greedy)


def test_a_limit_of_nodes_is_no_error():
    # every pair of 12 nodes, by scores that make the solver branch
    pairs = list(combinations(range(13), 2)) + list(combinations(range(13), 3))
    candidates = [Candidate(pair, (100 + 7 * n % 31) * 1e-6 * len(pair)) for n, pair in enumerate(pairs)]
    net = Dependences(((),) * 13)
    choice = choose_patterns(candidates, net, Limits(nodes=0, gap=0.0))
    assert choice.score >= choice.greedy > 0


def plans() -> str:
    from graph_passes.passes.fuse.partition.partition import partition_graph
    from tests.fusion_graphs import UNIT, Nodes

    made = Nodes()
    w = made.add("Handle", name="w", size=400)
    xs = [made.add("Opaque", size=400) for _ in range(3)]
    for step in range(12):
        kind = ("Elementwise", "Columns", "Rows", "Product", "View", "Scalar")[step % 6]
        xs = [made.add(kind, xs[0], xs[1], size=400), xs[2], made.add("Elementwise", xs[0], size=400)]
    value = made.add("Read", w)
    made.add("Update", w, xs[0], control=[value])
    made.add("Elementwise", value, xs[1])
    return repr(partition_graph(made.graph(), made.op_patterns, UNIT).regions)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_plan_depends_on_the_hash_seed(seed):
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import plans; print(plans())"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    assert done.stdout.splitlines()[-1] == plans()  # under PuLP 4 HiGHS says first who it is
