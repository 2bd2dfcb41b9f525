"""A large step trains by the plan of `hybrid` while a thread solves the integer program; then the better plan runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import tfmem
from graph_passes.analysis import linear_program
from graph_passes.decision import FusionWhy
from tests.tf.memory_in_use import in_use
from tests.tf.optimized_runs import SPARE, bits
from tests.tf.test_composed import composing
from tests.tf.test_step_machine import step_in
from tfmem.steps import job, solving
from tfmem.steps.fuser import shared
from tfmem.steps.phases import Phase
from tfmem.steps.so_far import so_far
from tfmem.steps.states import Solving
from tfmem.steps.trials import Trial
from tfmem.steps.work import Work

CALLS = 30  # at most


@pytest.fixture(name="large", autouse=True)
def fixture_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is large."""
    monkeypatch.setattr(job, "LARGE", 0)


@pytest.fixture(name="trained")
def fixture_trained(new_net: Any, batch: Any, flow: Any, smallest: Any) -> Callable[[], tuple[Any, list[Phase]]]:
    """Trains within a little more than the smallest budget, to the bit as without; gives the step and its phases."""

    def train() -> tuple[Any, list[Phase]]:
        in_use()
        least = smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))
        budget = least + 4 * SPARE
        plain, net = tf.function(new_net().step), new_net()
        function = tfmem.optimize(tf.function(net.step), memory_budget=budget, cache_directory="")
        phases = []
        for _ in range(CALLS):
            assert bits(function(*batch)) == bits(plain(*batch))
            step = step_in(function)
            phases += [step.phase] if step.phase not in phases[-1:] else []
            assert tfmem.report(function).decided is step.settled
            if step.settled:
                break
            if step.phase is Phase.SOLVING or (step.phase is Phase.CHECKING and Phase.SOLVING not in phases):
                assert solving.MEANWHILE in tfmem.report(function).notes
                step.wait()
        assert step.settled
        assert solving.MEANWHILE not in tfmem.report(function).notes
        assert tfmem.report(function).peak_measured <= budget
        return step, phases

    return train


def forced(monkeypatch: pytest.MonkeyPatch, tolerated: float) -> None:
    """A solver whose plan moves more and promises to take no time, and trials that may be slower by so much."""

    def work(of: Any, search: Any, budget: int) -> Work[Any]:
        def make() -> Any:
            plan = of.trace.plan(search.timeline, budget - 3 * SPARE, timed=True)
            return replace(plan, after=replace(plan.after, seconds=0.0))

        return Work(make, "test")

    monkeypatch.setattr(solving, "_work", work)
    monkeypatch.setattr(solving, "AS_PREDICTED", tolerated)


def test_a_plan_is_solved_beside_the_training(trained: Any) -> None:
    step, phases = trained()
    assert Phase.SOLVING in phases
    assert step.report.verdict.least is not None


def test_the_plan_of_the_solver_runs_if_its_trial_was_as_fast(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, float("inf"))
    step, phases = trained()
    found = phases.index(Phase.SOLVING)
    assert phases[found:] == [Phase.SOLVING, Phase.CHECKING, Phase.SETTLED]
    forced(monkeypatch, 0.0)
    other, phases = trained()
    assert phases[phases.index(Phase.SOLVING) :] == [Phase.SOLVING, Phase.SETTLED]
    assert len(other.report.transfers) < len(step.report.transfers)


def test_without_a_solver_a_plan_of_hybrid_runs(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_program, "solver", lambda *_: None)
    step, phases = trained()
    assert Phase.SOLVING in phases  # then another plan of `hybrid` is tried where measured costs make it faster
    assert step.report.verdict.least is None
    assert any("planned without the solver: no solver is installed" in str(note) for note in step.report.notes)


def test_after_a_fault_of_the_thread_the_first_plan_stays(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Work[Any]:
        return Work(lambda: {}[168], "test")

    monkeypatch.setattr(solving, "_work", broken)
    with pytest.warns(tfmem.TfmemWarning, match="solving the integer program failed with KeyError"):
        step, phases = trained()
    assert phases[-2:] == [Phase.SOLVING, Phase.SETTLED]
    assert any("the plan of `hybrid` stays" in str(note) for note in step.report.notes)


@dataclass(frozen=True)
class State:
    """What `solving` reads of a state."""

    search: Any
    work: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Search:
    """What `solving` reads of a search."""

    trials: tuple[Trial, ...]
    solved: int = 1


@pytest.mark.parametrize(
    ("is_gpu", "solved", "expected"), [(True, 1, 85), (True, 2, 85), (False, 1, 90), (False, 2, 85)]
)
def test_after_a_trial_over_the_budget_less_is_solved_for(
    is_gpu: bool, solved: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU no op is known to have taken more, so the same budget would give the same plan."""
    monkeypatch.setattr(solving, "_work", lambda _, search, budget: budget)
    of: Any = SimpleNamespace(is_gpu=is_gpu, limit=100)
    plan: Any = SimpleNamespace(budget=90)
    over: Any = SimpleNamespace(plan=plan, seen=SimpleNamespace(peak=105, step_seconds=1.0))
    state: Any = State(Search((over,), solved))
    assert solving.judged(of, state, state).state.work == expected


@pytest.mark.parametrize(("peaks", "expected"), [((), 98), ((103, 110), 97), ((99,), 98)])
def test_a_gpu_solves_for_what_trials_left(
    peaks: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solving, "_work", lambda _, search, budget: budget)
    monkeypatch.setattr(solving, "Solving", SimpleNamespace)
    of: Any = SimpleNamespace(is_gpu=True, limit=100)
    trials: Any = tuple(SimpleNamespace(plan=SimpleNamespace(budget=100), seen=SimpleNamespace(peak=p)) for p in peaks)
    state: Any = SimpleNamespace(function=None, report=None, notes=(), kept=())
    plan: Any = SimpleNamespace(budget=98)
    found: Any = solving.begun(of, state, Search(trials), plan).state  # type: ignore[arg-type]
    assert found.work == expected


def test_a_step_that_is_not_observed_trains_at_once_too(new_net: Any, batch: Any, smallest: Any) -> None:
    """Its plan and the solver's are made by estimates; the second takes over without a trial."""
    least = smallest(
        lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size, observe=False)(*batch)
    )
    plain, net = tf.function(new_net().step), new_net()
    function = tfmem.optimize(tf.function(net.step), memory_budget=least, observe=False, cache_directory="")
    assert bits(function(*batch)) == bits(plain(*batch))
    step, first = step_in(function), tfmem.report(function)
    assert step.phase is Phase.SOLVING
    assert solving.MEANWHILE in first.notes
    assert first.verdict.least is None  # no program was solved in the call
    step.wait()
    assert bits(function(*batch)) == bits(plain(*batch))
    assert step.settled
    report = tfmem.report(function)
    assert report.step_predicted_ns <= first.step_predicted_ns
    assert report.verdict.least is not None
    assert solving.MEANWHILE not in report.notes
    assert report.notes.count("op times and memory are estimates: nothing was observed") == 1


def test_a_report_says_that_regions_are_undecided_while_a_program_is_solved() -> None:
    given: Any = composing(1)
    state = Solving(**shared(given), search=None, plan=None, work=None)  # type: ignore[arg-type]
    report = so_far(state, stitches=True)
    assert report.fusion == FusionWhy.UNDECIDED
    assert solving.MEANWHILE in report.notes
    assert so_far(state, stitches=False).fusion == given.report.fusion
