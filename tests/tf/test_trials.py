"""Which plans are tried, and which is kept; on the unit device, with a stand-in for the engine."""

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

import pytest

from custom_ops.load import Counters
from graph_passes.analysis.memory.fragmentation import Room
from graph_passes.analysis.memory.observe import Observation, corrected, short_at
from graph_passes.analysis.memory.simulate import Link, Move, usage_under
from graph_passes.analysis.memory.timeline import Buffer, Chain, ScheduledOp, Timeline
from graph_passes.errors import BudgetError, HostMemoryError
from graph_passes.graph.ir import TensorId
from graph_passes.passes.offload.options import OffloadOptions
from graph_passes.passes.offload.plan import How, OffloadPlan, plan_offload
from graph_passes.report import ORDERED, ORDERED_OVER, Report
from tfmem.steps.trials import GPU_TRIALS, Plans, Trial, best_trial, checked, judged, less_than

GIB = 1 << 30


@dataclass
class FakeEngine:
    """An engine with a separate region and a host of any size."""

    memory: int
    refuse: bool = False
    target: SimpleNamespace = field(init=False)

    def __post_init__(self):
        self.target = SimpleNamespace(memory=self.memory)

    @property
    def room(self):
        return Room(((0, self.memory),))

    def require_host_room(self, timeline, plan):
        if self.refuse:
            raise HostMemoryError("no room")


def chain(layers: int = 6) -> Timeline:
    """Outputs of 1 GiB, each read by the next layer and by its own gradient op."""
    steps = [ScheduledOp(f"f{i}", 1.0) for i in range(layers)] + [
        ScheduledOp(f"b{i}", 1.0) for i in reversed(range(layers))
    ]
    buffers = [
        Buffer(TensorId(f"f{i}"), GIB, i, tuple(sorted({min(i + 1, layers), 2 * layers - 1 - i})), (TensorId(f"f{i}"),))
        for i in range(layers)
    ]
    return Timeline(tuple(steps), tuple(buffers), turn=layers - 1)


def planner(timeline, policy="autovm"):
    options = OffloadOptions(policy=policy, reuse_distance=1)
    return lambda budget, **how: plan_offload(timeline, Link(GIB, GIB), budget, options, How(timed=True, **how))


def falling(engine, timeline, budget, make):
    return Plans(engine, timeline, budget, make, engine.room).falling(engine.room)


def fallen(engine, timeline):
    return list(falling(engine, timeline, 6 * GIB, planner(timeline)))


def test_falling_shares_move_more_and_more():
    plans = fallen(FakeEngine(64 * GIB), chain())
    moved = [len(plan.moves) for plan in plans]
    assert moved[0] == 0
    assert moved == sorted(moved)
    assert moved[-1] > 0
    assert all(plan.after.peak <= plan.budget for plan in plans)


def test_plans_that_find_no_room_are_left_out():
    timeline = chain()
    engine = FakeEngine(3 * GIB)
    plans = fallen(engine, timeline)
    assert 0 < len(plans) < len(fallen(FakeEngine(64 * GIB), timeline))
    assert all(plan.failure(timeline, engine.room) is None for plan in plans)


def without_workspace(seconds):
    """Plans for a step in which one op, of so many seconds, takes 4 GiB of workspace; and which of them are short."""
    timeline = chain()
    steps = [
        ScheduledOp("b3", seconds, workspace=4 * GIB) if step.node == "b3" else ScheduledOp(step.node, step.seconds)
        for step in timeline.steps
    ]
    timeline = Timeline(tuple(steps), timeline.buffers, timeline.turn)
    engine = FakeEngine(5 * GIB)
    plans = list(falling(engine, timeline, 9 * GIB, planner(timeline)))
    assert all(plan.failure(timeline, engine.room, excused=range(len(timeline.steps))) is None for plan in plans)
    return plans, [plan.failure(timeline, engine.room) is not None for plan in plans]


def test_plans_short_of_workspace_come_later_the_more_it_costs():
    plans, short = without_workspace(seconds=100.0)
    assert any(short)
    assert not all(short)
    assert short == sorted(short)
    plans, short = without_workspace(seconds=0.0)
    assert short[0]
    times = [plan.after.seconds for plan in plans]
    assert times == sorted(times)


def test_what_a_plan_stalls_for_without_need_is_taken_out_before_it_is_tried():
    timeline, engine = chain(), FakeEngine(64 * GIB)
    widest = partial(planner(timeline), widest=True)
    assert widest(budget=64 * GIB).after.stall > 0
    tried = list(falling(engine, timeline, 64 * GIB, widest))
    assert tried
    assert all(plan.after.stall == 0 for plan in tried)


def test_what_could_be_recomputed_is_also_tried_as_a_copy():
    timeline = chain()
    first = replace(
        timeline.buffers[0], nbytes=3 * GIB, chains=(Chain(timeline.buffers[0].uses[0], (0,), (), (3 * GIB,)),)
    )
    steps = (ScheduledOp("f0", 0.1), *(replace(step, seconds=0.2) for step in timeline.steps[1:]))
    timeline, engine = Timeline(steps, (first, *timeline.buffers[1:]), timeline.turn), FakeEngine(7 * GIB)
    plans = list(falling(engine, timeline, 7 * GIB, planner(timeline, "hybrid")))
    recomputed = [[move.recomputed for move in plan.moves] for plan in plans]
    assert recomputed[0] == [True]
    assert [False] in recomputed
    copying = falling(engine, timeline, 7 * GIB, planner(timeline, "autovm"))
    assert {plan.actions for plan in copying} <= {plan.actions for plan in plans}


def test_no_plan_where_the_host_has_no_room():
    assert not fallen(FakeEngine(64 * GIB, refuse=True), chain())


def firsts(engine, timeline, budget, is_gpu=True):
    plan = planner(timeline)
    plans = Plans(engine, timeline, budget, plan, engine.room if is_gpu else None)
    return list(plans.first(plan(budget=budget)))


def test_the_first_plan_has_the_most_memory_to_spare():
    plans = firsts(FakeEngine(64 * GIB), chain(), 5 * GIB)
    assert len(plans[0].moves) == max(len(plan.moves) for plan in plans)
    assert plans[-1] == planner(chain())(budget=5 * GIB)
    assert len(firsts(FakeEngine(64 * GIB), chain(), 5 * GIB, is_gpu=False)) == 2


def test_where_the_host_has_no_room_the_first_plan_moves_least():
    least = planner(chain())(budget=5 * GIB)
    assert firsts(FakeEngine(64 * GIB, refuse=True), chain(), 5 * GIB)[0] == least


def test_an_error_names_the_memory_in_which_the_step_finds_room():
    timeline = chain()

    def refused(memory):
        engine = FakeEngine(memory)
        return Plans(engine, timeline, 4 * GIB, planner(timeline), engine.room).no_room("op")

    assert refused(64 * GIB) is None
    error = refused(int(1.5 * GIB))
    assert error is not None
    assert error.op == "op"
    assert refused(error.smallest_budget) is None
    assert f"{error.smallest_budget:,}" in str(error)


def trial(budget: int, peak: int, seconds: float) -> Trial:
    after = SimpleNamespace(peak=budget, seconds=0.25)
    plan = OffloadPlan((Move(0, 0, 0, 1, 2, 2),), budget, 0, None, after, None)  # type: ignore[arg-type]
    return Trial(plan, Observation({}, {}, 0, seconds, peak, ()), None)  # type: ignore[arg-type]


def test_the_fastest_within_the_budget_is_kept():
    slow, fast, over = trial(10, 9, 2.0), trial(9, 8, 1.0), trial(11, 11, 0.5)
    best, notes = best_trial([slow, over, fast], 10)
    assert best is fast
    assert "plans tried" in notes[0]


def test_without_any_within_the_budget_the_nearest_is_kept_and_said():
    best, notes = best_trial([trial(10, 13, 1.0), trial(9, 12, 2.0)], 10)
    assert best.seen.peak == 12
    assert "OVER BUDGET by 2 bytes" in notes[0]
    best, _ = best_trial([trial(10, 12, 3.0), trial(9, 12, 2.0)], 10)
    assert best.seen.step_seconds == 2.0


def test_choose_needs_a_trial():
    with pytest.raises(ValueError, match="empty"):
        best_trial([], 10)


def remaining(engine, timeline, budget, trials, room):
    plan = planner(timeline)
    return Plans(engine, timeline, budget, plan, room).untried(trials, plan(budget, widest=True))


def test_a_gpu_tries_plans_until_one_is_no_faster():
    timeline, engine = chain(), FakeEngine(64 * GIB)

    def left(*seconds):
        return list(remaining(engine, timeline, 5 * GIB, [trial(5, 5, each) for each in seconds], engine.room))

    assert left()
    assert left(2.0)
    assert left(2.0, 1.0)
    assert not left(2.0, 2.0)
    assert not left(*(float(GPU_TRIALS - done) for done in range(GPU_TRIALS)))
    assert not left(0.26)  # as predicted


def test_a_gpu_plans_for_less_by_what_a_trial_was_over():
    """Also after a trial that was slower, for none may stay."""
    timeline, engine, budget = chain(), FakeEngine(64 * GIB), 5 * GIB
    over = GIB + GIB // 2
    for seconds in ((2.0,), (2.0, 3.0)):
        trials = [trial(budget, budget + over, each) for each in seconds]
        plans = list(remaining(engine, timeline, budget, trials, engine.room))
        assert plans
        assert all(plan.after.peak <= budget - over for plan in plans)
    assert less_than(trial(budget - GIB, budget + over, 1.0), budget) == budget - GIB - over
    assert less_than(trial(budget - GIB, budget - GIB, 1.0), budget) == budget - GIB
    assert less_than(trial(budget + GIB, budget - GIB, 1.0), budget) == budget


def test_where_no_plan_finds_room_the_one_that_ran_is_made_faster():
    timeline = chain()
    engine = FakeEngine(timeline.peak // 2)
    roomy = Room(((0, 64 * GIB),))
    widest = planner(timeline)(timeline.peak, widest=True)
    found = list(Plans(engine, timeline, GIB, planner(timeline), roomy).untried([], widest))
    assert len({plan.actions for plan in found}) == 1
    assert found[0].after.seconds < widest.after.seconds


def test_the_plan_that_ran_is_tried_first_where_others_stall_more():
    timeline, engine = chain(), FakeEngine(64 * GIB)
    best = planner(timeline)(5 * GIB)

    def worse(budget, **how):
        return planner(timeline)(min(budget, 3 * GIB), widest=True, **how)

    room = Room(((0, 5 * GIB),))
    plans = list(Plans(engine, timeline, 5 * GIB, worse, room).falling(room, [best]))
    assert len(plans) > 1
    assert plans[0].actions == best.actions
    assert [plan.after.seconds for plan in plans] == sorted(plan.after.seconds for plan in plans)


def test_a_plan_of_the_solvers_finds_room_on_a_gpu():
    timeline, engine = chain(), FakeEngine(3 * GIB)
    found = Plans(engine, timeline, 6 * GIB, planner(timeline, "optimal"), engine.room).by_program()
    assert found.failure(timeline, engine.room) is None
    assert planner(timeline, "optimal")(6 * GIB).failure(timeline, engine.room) is not None
    with pytest.raises(BudgetError, match="finds room in the GPU's memory"):
        Plans(engine, timeline, 6 * GIB, planner(timeline), Room(((0, GIB // 8),))).by_program()


def test_a_gpu_tries_to_move_nothing_last_if_only_workspace_is_in_the_way():
    timeline, engine = chain(), FakeEngine(64 * GIB)
    slower = [trial(5, 5, 1.0), trial(5, 5, 1.0)]
    assert not list(remaining(engine, timeline, 5 * GIB, slower, engine.room))
    (last,) = remaining(engine, timeline, timeline.peak, slower, engine.room)
    assert last.moves == ()
    steps = tuple(ScheduledOp(step.node, step.seconds, workspace=GIB) for step in timeline.steps)
    greedy = Timeline(steps, timeline.buffers, timeline.turn)
    (last,) = remaining(engine, greedy, timeline.peak, slower, engine.room)
    assert last.moves == ()


def test_a_cpu_plans_for_less_by_what_it_was_over():
    timeline, engine = chain(), FakeEngine(64 * GIB)
    first = next(remaining(engine, timeline, 5 * GIB, [], None))
    assert first.budget == 5 * GIB
    over = Trial(first, Observation({}, {}, 0, 1.0, 6 * GIB, ()), None)  # type: ignore[arg-type]
    assert next(remaining(engine, timeline, 5 * GIB, [over], None)).budget == 4 * GIB
    assert not list(remaining(engine, timeline, 5 * GIB, [trial(5 * GIB, 4 * GIB, 1.0)], None))


def test_where_a_cpu_took_more_is_where_the_next_plan_has_less_room():
    timeline, engine, budget = chain(), FakeEngine(64 * GIB), 5 * GIB
    first = planner(timeline)(budget)
    at = first.after.peak_at
    name = timeline.steps[at].node
    taken = Observation({name: 0.5, "f0": 2.0}, {name: GIB}, 0, 1.0, first.after.peak + GIB, ())
    learned = corrected(timeline, taken)
    steps = {step.node: step for step in learned.steps}
    assert (steps[name].workspace, steps[name].seconds) == (GIB, 0.5)
    assert (steps["f0"].workspace, steps["f0"].seconds) == (0, 1.0)  # what ran slower says nothing
    assert sum(step.workspace for step in learned.steps) == GIB
    over = Trial(first, taken, None)  # type: ignore[arg-type]
    second = next(Plans(engine, learned, budget, planner(learned), None).untried([over], first))
    assert second.budget == budget  # no margin anywhere else
    assert second.actions != first.actions
    assert second.after.peak <= budget
    again = first.under(learned)
    assert again.after.peak == first.after.peak + GIB
    assert again.after.seconds == first.after.seconds - 0.5


def test_an_op_that_found_no_memory_gets_more_room_in_the_next_plan():
    timeline, budget = chain(), 5 * GIB
    first = planner(timeline)(budget)
    at = first.after.peak_at
    usage = usage_under(timeline, first.moves).tolist()
    learned = short_at(timeline, timeline.steps[at].node, usage, budget)
    assert [step.workspace for step in learned.steps if step.workspace] == [budget - usage[at] + budget // 64]
    second = planner(learned)(budget)
    assert second.actions != first.actions
    assert usage_under(timeline, second.moves)[at] < usage[at]
    assert short_at(timeline, "no op of the step", usage, budget).steps == timeline.steps


def test_a_plan_that_ran_over_though_it_should_not_have_is_not_made_again():
    """Its own peak was predicted well within its budget: a budget that is lower by what it was over changes nothing."""
    timeline, engine, budget = chain(), FakeEngine(64 * GIB), 11 * GIB // 2
    make = planner(timeline)
    first = make(budget=budget)
    over = GIB // 4
    assert first.after.peak == 5 * GIB
    assert make(budget=budget - over).actions == first.actions
    seen = Trial(first, Observation({}, {}, 0, 1.0, budget + over, ()), None)
    (second, *_) = Plans(engine, timeline, budget, make, None).untried([seen], first)
    assert second.budget == first.after.peak - over
    assert second.actions != first.actions


def test_what_steps_took_is_reported():
    planned = Report("f", "GPU", "autovm", "moved", peak_before=20, peak_predicted=10, notes=("a",))
    report = checked(planned, [9, 11, 10], 12, planned=True)
    assert (report.peak_predicted, report.peak_measured, report.notes) == (10, 11, ("a",))
    over = checked(planned, [9, 14, 10], 12, planned=True)
    assert over.notes == ("OVER BUDGET by 2 bytes, in steps that were not profiled", "a")


def test_the_peak_of_a_step_without_a_plan_is_learned_from_one():
    left_alone = Report("f", "GPU", "autovm", "unchanged: fits", peak_before=8, peak_predicted=8)
    report = checked(left_alone, [30, 11, 12], 99, planned=False)  # the first tried algorithms
    assert (report.peak_before, report.peak_predicted, report.peak_measured) == (8, 11, 12)
    assert report.notes == ("8 bytes were estimated; the peak is as seen in one step",)


@pytest.mark.parametrize(
    ("expected", "found"), [("unchanged: fits", "unchanged: over budget"), (ORDERED, ORDERED_OVER)]
)
def test_a_step_that_took_too_much_does_not_fit(expected, found):
    report = Report("f", "CPU", "autovm", expected, peak_before=8, peak_predicted=8, budget=10)
    for planned in (False, True):
        over = checked(report, [8, 9, 12], 10, planned)
        assert over.decision == found
        assert "OVER BUDGET by 2 bytes, in steps that were not profiled" in over.notes
        assert "OVER BUDGET" in over.to_text()
        assert checked(report, [8, 9, 10], 10, planned).decision == expected


def test_a_step_that_took_too_much_once_may_fit_after_all():
    """What probes add does not count once they are gone."""
    timeline = chain()
    plan = planner(timeline)(budget=timeline.peak)
    report = Report("f", "CPU", "autovm", ORDERED, peak_before=8, peak_predicted=8, budget=10)
    nothing = Counters(*[0] * len(Counters._fields))
    tried = judged(plan, report, Observation({}, {}, 0, 1.0, 12, ()), (nothing, nothing))
    assert tried.report.decision == ORDERED_OVER
    _, notes = best_trial([tried], 10)
    settled = checked(replace(tried.report, notes=tuple(notes)), [9, 9, 10], 10, planned=True)
    assert settled.decision == ORDERED
    assert "OVER BUDGET" not in settled.to_text()
    assert settled.notes[0].startswith("over budget (while plans were tried, not since) by 2 bytes: no plan")
