"""Policy `optimal`: its bound, its promise, and what becomes of a step where no solver runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes import pipeline
from graph_passes.analysis import linear_program
from graph_passes.analysis.cost.device_costs import load
from graph_passes.analysis.cost.model import Roofline
from graph_passes.analysis.linear_program import LinearProgram, UnsolvedError, expression, solved
from graph_passes.analysis.memory.simulate import Link
from graph_passes.analysis.memory.timeline import Timeline
from graph_passes.errors import InfeasibleBudgetError
from graph_passes.passes.offload import optimal
from graph_passes.passes.offload.check import faults
from graph_passes.passes.offload.copy_order import GAIN
from graph_passes.passes.offload.joint import Joint, JointProgram
from graph_passes.passes.offload.options import Effort, OffloadOptions
from graph_passes.passes.offload.plan import How, OffloadPlan, movable
from graph_passes.passes.offload.selection import Selection
from graph_passes.report import Report
from graph_passes.step_report import describe
from tests.chain_nets import nets
from tests.tiers import examples

LINKS = (Link(0.01, 0.01), Link(1.0, 1.0), Link(1e4, 1e4), Link(1e6, 1e6))  # to the unit device
OPTIMAL, HYBRID = OffloadOptions(reuse_distance=1), OffloadOptions(reuse_distance=1, policy="hybrid")


def read(graph) -> tuple[pipeline.Step, Timeline]:
    step = pipeline.Step.read(graph)
    return step, step.timeline(Roofline(load("unit")))


def planned(graph, share: float, link: Link, options: OffloadOptions = OPTIMAL, **how) -> OffloadPlan | None:
    step, timeline = read(graph)
    try:
        return pipeline.plan_step(step, timeline, link, int(share * timeline.peak), options, timed=True, **how)
    except InfeasibleBudgetError:
        return None


def assert_chosen_as(plan: OffloadPlan, greedy: OffloadPlan) -> None:
    """The plan moves what the greedy one does; its copies may leave in a better order."""
    assert {(move.gap, move.recomputed) for move in plan.moves} == {
        (move.gap, move.recomputed) for move in greedy.moves
    }
    assert plan.after.seconds <= greedy.after.seconds


@settings(max_examples=examples(60))
@given(graph=nets(), share=st.floats(0.3, 0.95), link=st.sampled_from(LINKS))
def test_no_plan_is_faster_than_the_bound_and_none_slower_than_greedys(graph, share, link):
    plan, greedy = planned(graph, share, link), planned(graph, share, link, HYBRID)
    assert (plan is None) == (greedy is None)
    if plan is None or not plan.moves:
        return
    assert faults(read(graph)[1], plan) == []
    assert plan.after.peak <= plan.budget
    assert plan.verdict.note == ""
    assert plan.verdict.least <= min(plan.after.seconds, greedy.after.seconds) * (1 + 1e-9)
    assert plan.after.seconds <= greedy.after.seconds * (1 + 1e-9)
    assert plan.verdict.smallest_budget <= plan.budget


@settings(max_examples=examples(25))
@given(graph=nets(), shares=st.lists(st.floats(0.3, 1.0), min_size=2, max_size=5), link=st.sampled_from(LINKS))
def test_a_larger_budget_never_predicts_a_slower_step(graph, shares, link):
    step, timeline = read(graph)
    known: list[OffloadPlan] = []
    times: list[float] = []
    for share in sorted(shares):
        budget = int(share * timeline.peak)
        try:
            plan = pipeline.plan_step(step, timeline, link, budget, OPTIMAL, timed=True, known=tuple(known))
        except InfeasibleBudgetError:
            assert not known
            continue
        assert plan.after.peak <= budget
        assert plan.budget == budget
        assert faults(timeline, plan) == []
        known.append(plan)
        times.append(plan.after.seconds)
    assert times == sorted(times, reverse=True)


@settings(max_examples=examples(60))
@given(graph=nets(), share=st.floats(0.3, 0.95), link=st.sampled_from(LINKS))
def test_no_chain_is_left_in_place_of_which_a_copy_takes_less_time(graph, share, link):
    timeline = read(graph)[1]
    gaps = tuple(movable(timeline, OPTIMAL, How()))
    search = optimal._Search(timeline, gaps, link, int(share * timeline.peak), OPTIMAL, True)
    chains = frozenset(gap for gap in gaps if timeline.chain(gap) is not None)
    found = search.copying(search.ordered(Selection(gaps, chains))).selection
    seconds = search.ordered(found).seconds
    assert all(
        search.ordered(replace(found, again=found.again - {gap})).seconds >= seconds - GAIN * timeline.moments[-1]
        for gap in found.again
    )


@settings(max_examples=examples(20))
@given(graph=nets(), share=st.floats(0.3, 0.95))
def test_the_search_for_copies_counts_the_orders_that_it_tries(graph, share):
    _, timeline = read(graph)
    gaps = tuple(movable(timeline, OPTIMAL, How()))
    chains = frozenset(gap for gap in gaps if timeline.chain(gap) is not None)
    search = optimal._Search(timeline, gaps, LINKS[0], int(share * timeline.peak), OPTIMAL, True)
    start = search.ordered(Selection(gaps, chains))
    with (
        mock.patch.object(optimal, "COPYING_MOVES", 0),
        mock.patch.object(optimal, "best_order", wraps=optimal.best_order) as tried,
    ):
        search.copying(start)
    assert tried.call_count <= 1


@settings(max_examples=examples(20))
@given(graph=nets(), share=st.floats(0.3, 0.95))
def test_a_plan_is_the_same_each_time(graph, share):
    first, second = (planned(graph, share, LINKS[2]) for _ in range(2))  # of two timelines: nothing is remembered
    assert (first is None) == (second is None)
    assert first is None or (first.moves, first.verdict) == (second.moves, second.verdict)


@settings(max_examples=examples(60))
@given(graph=nets(), share=st.floats(0.3, 0.95), link=st.sampled_from(LINKS))
def test_the_relaxed_program_has_a_solution_wherever_a_plan_has_room(graph, share, link):
    plan = planned(graph, share, link, HYBRID)
    _, timeline = read(graph)
    joint = Joint.of(timeline, link, int(share * timeline.peak), timeline.gaps())
    if plan is not None:
        assert solved(JointProgram(joint).program, relaxed=True).cost >= -1e-6


@settings(max_examples=examples(60))
@given(graph=nets(), share=st.floats(0.3, 0.95), link=st.sampled_from(LINKS))
def test_no_time_is_so_large_that_a_solvers_absolute_error_hides_it(graph, share, link):
    _, timeline = read(graph)
    joint = Joint.of(timeline, link, int(share * timeline.peak), timeline.gaps())
    assert max(JointProgram(joint).program.costs) <= 1e3
    assert all(rate * joint.unit * 1e3 >= mib * 2**20 for mib in joint.mib for rate in (link.offload, link.prefetch))


@pytest.fixture
def chain_graph():
    from tests.pure.test_chains import block

    return block("norm", "relu", "product", "norm", "relu", "product", "norm", "relu")[0].graph


def test_without_a_solver_the_greedy_plan_stays_and_a_note_says_so(chain_graph, monkeypatch):
    greedy = planned(chain_graph, 0.7, LINKS[1], HYBRID)
    assert greedy is not None
    assert greedy.moves
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    cbc = getattr(pulp, "PULP_CBC_CMD", pulp.COIN_CMD)
    monkeypatch.setattr(cbc, "available", lambda self: False)
    plan = planned(chain_graph, 0.7, LINKS[1])
    assert plan is not None
    assert_chosen_as(plan, greedy)
    assert plan.verdict.least is None
    assert "no solver is installed" in plan.verdict.note


def test_an_expression_is_what_pulp_sums_and_makes_no_object_for_a_term(monkeypatch):
    program = pulp.LpProblem("sums", pulp.LpMinimize)
    x = [program.add_variable(f"x{number}") for number in range(3)]
    terms = [(x[2], 1.5), (x[0], 0.0), (x[1], -2.0), (x[2], 0.25)]
    expected = pulp.lpSum(factor * variable for variable, factor in terms)
    monkeypatch.setattr(pulp.LpVariable, "__mul__", None)
    monkeypatch.setattr(pulp.LpVariable, "__rmul__", None)
    assert list(expression(terms).items()) == list(expected.items())
    assert not list(expression([]).items())


def test_a_solver_that_fails_or_is_killed_leaves_the_greedy_plan(chain_graph, monkeypatch):
    greedy = planned(chain_graph, 0.7, LINKS[1], HYBRID)

    def killed(self, lp):
        raise pulp.PulpSolverError("killed")

    monkeypatch.setattr(pulp.HiGHS, "actualSolve", killed)
    plan = planned(chain_graph, 0.7, LINKS[1])
    assert_chosen_as(plan, greedy)
    assert "the solver failed" in plan.verdict.note


def test_a_greedy_plan_asks_no_solver(chain_graph, monkeypatch):
    monkeypatch.setattr(pulp.HiGHS, "actualSolve", None)
    plan = planned(chain_graph, 0.7, LINKS[1], effort=Effort.GREEDY)
    assert plan.verdict.least is None
    assert plan.verdict.note == ""


def test_the_report_says_what_is_predicted_and_what_is_possible(chain_graph):
    step, timeline = read(chain_graph)
    plan = pipeline.plan_step(step, timeline, LINKS[2], int(0.7 * timeline.peak), OPTIMAL, timed=True)
    report = describe(step, timeline, plan, "optimal", graph="g", device="d")
    verdict = report.verdict
    assert verdict == plan.verdict
    assert not verdict.fits
    assert 0 < verdict.rate <= verdict.best_rate <= 1
    assert f"predicted {verdict.rate:.3f} of the unlimited rate, at most {verdict.best_rate:.3f} possible" in str(
        report
    )
    assert verdict.op in step.order
    assert Report.from_json(report.to_json()) == report
    with pytest.raises(InfeasibleBudgetError) as caught:
        pipeline.plan_step(step, timeline, LINKS[2], verdict.smallest_budget - 1, OPTIMAL, timed=True)
    assert caught.value.least == verdict.smallest_budget
    assert caught.value.op == verdict.op


def test_a_program_without_a_solution_is_unsolved():
    program = LinearProgram()
    x = program.variable(1.0, 0.0, 1.0, whole=True)
    program.equal([(x, 1.0)], 0.5)
    assert solved(program, relaxed=True).values == (0.5,)
    with pytest.raises(UnsolvedError, match="found no solution"):
        solved(program)


def test_large_programs_without_integers_have_the_same_optimum(monkeypatch):
    """Interior points find it; with integers the program is solved as any other."""
    numbers = np.random.default_rng(0)
    program = LinearProgram()
    variables = [program.variable(cost, 0.0, 1.0, whole=True) for cost in numbers.normal(size=60)]
    for _ in range(30):
        program.at_most(list(zip(variables, numbers.random(60), strict=True)), 8.0)
    edges, whole = solved(program, relaxed=True), solved(program)
    monkeypatch.setattr(linear_program, "LARGE", 0)
    asked = mock.patch.object(linear_program, "solver", wraps=linear_program.solver)
    with asked as solver:
        interior, again = solved(program, relaxed=True), solved(program)
    assert [call.args[-1] for call in solver.call_args_list] == [True, False]
    assert interior.optimal
    assert interior.cost == pytest.approx(edges.cost)
    assert again == whole


def test_the_solver_prints_nothing():
    """In a new process, since a C++ library may print once, and passes by `sys.stdout`."""
    code = (
        "from graph_passes.analysis.linear_program import LinearProgram, solved\n"
        "program = LinearProgram()\n"
        "program.at_most([(program.variable(1.0, 0.0, 4.0, whole=True), -1.0)], -1.5)\n"
        "solved(program)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert (found.stdout, found.stderr) == ("", "")


def test_a_solver_that_is_out_of_time_leaves_the_greedy_plan(chain_graph, monkeypatch):
    greedy = planned(chain_graph, 0.7, LINKS[1], HYBRID)
    monkeypatch.setattr(optimal, "LONGEST_SOLVE", 0.0)
    optimal.select.cache_clear()
    plan = planned(chain_graph, 0.7, LINKS[1])
    assert_chosen_as(plan, greedy)
    assert plan.verdict.least is None
    assert "planned without the solver: HiGHS found no" in plan.verdict.note
