"""Plans for steps of several replicas whose collectives tfmem cannot follow: refused, but only where tensors move."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from graph_passes.analysis.memory.observe import Sample
from graph_passes.analysis.memory.simulate import Link, usage_under
from graph_passes.analysis.peers import lanes
from graph_passes.decision import Decision, Missed
from graph_passes.errors import HostMemoryError, InfeasibleBudgetError, ReplicasError
from graph_passes.graph.ir import Function, Graph, Node
from graph_passes.passes.offload.lanes import Pool, plan_lanes
from graph_passes.passes.offload.options import Effort, OffloadOptions
from graph_passes.pipeline import Step
from graph_passes.refusals import Reason, Refusal
from graph_passes.report import Report
from tests.spmd_graphs import Spmd, training_step
from tests.tf.memory_in_use import in_use
from tfmem.api import make_engine
from tfmem.options import Options
from tfmem.runtime.engine import Engine
from tfmem.runtime.estimate import TimedCosts
from tfmem.steps import planning, replicas, splits
from tfmem.steps.lane_trials import LaneTrial, best_of, measured_costs, same, worth_running
from tfmem.steps.replicas import (
    budgets_on_devices,
    describe_replicas,
    estimated,
    in_use_on_devices,
    measured_replicas,
    plan_replicas,
    probes_of,
    replanned,
    timed_lanes,
    undivided,
    usual_replicas,
)
from tfmem.steps.rooms import LaneRooms, room_of
from tfmem.steps.splits import split_under
from tfmem.steps.states import Given

NET = Spmd((2, 3, 1, 2, 4), (0, 0, 0, 1, 2), 2, 2)
AMPLE = 1 << 34


def on_cpus(graph: Graph) -> Graph:
    nodes = [replace(node, device=node.device.replace("GPU", "CPU")) for node in graph]
    return Graph(nodes, graph.specs, graph.constants)


@pytest.fixture(name="engine")
def fixture_engine() -> Engine:
    return make_engine(Options(memory_budget="1GiB", cache_directory=""))


def scarce(step: Step, engine: Engine) -> int:
    plans = plan_replicas(step, engine, {"CPU:0": AMPLE})
    assert not any(each.plan.moves for each in plans)
    return round(0.9 * (sum(each.timeline.peak for each in plans) - in_use())) + in_use()


def test_tensors_move_where_collectives_have_an_order(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    assert all(each.plan.moves for each in plan_replicas(step, engine, {"CPU:0": scarce(step, engine)}))


def test_collectives_without_an_order_are_refused(engine: Engine) -> None:
    graph = on_cpus(training_step(NET))
    graph.remove_control("reduce1/1", "reduce0/1")
    step = Step.read(graph)
    budget = scarce(step, engine)  # where nothing moves, their order does not matter
    with pytest.raises(ReplicasError, match=r"has no order among those of .*; train with a smaller batch"):
        plan_replicas(step, engine, {"CPU:0": budget})


def test_collectives_of_other_processes_are_refused(engine: Engine) -> None:
    graph = on_cpus(training_step(NET))
    step = Step.read(graph)
    graph.constants["size0/1"][...] = 4
    with pytest.raises(ReplicasError, match="waits for devices of other processes"):
        plan_replicas(step, engine, {"CPU:0": scarce(step, engine)})


def test_the_moves_of_all_devices_count_for_the_host_together(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    budgets = {"CPU:0": scarce(step, engine)}
    plans = plan_replicas(step, engine, budgets)
    moved = [sum(each.timeline.buffers[move.buffer].nbytes for move in each.plan.moves) for each in plans]
    assert all(moved)
    for limit, fits in ((sum(moved), True), (sum(moved) - 1, False)):
        assert limit >= max(moved)
        bounded = make_engine(
            replace(engine.settings.options, offload=replace(engine.settings.options.offload, spill_budget=limit))
        )
        with nullcontext() if fits else pytest.raises(HostMemoryError, match="spill_budget"):
            plan_replicas(step, bounded, budgets)


def test_the_report_has_figures_of_each_allocator(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    budgets = {"CPU:0": scarce(step, engine)}
    plans = plan_replicas(step, engine, budgets)
    report = describe_replicas(step, plans, engine, "train")
    (found,) = report.devices
    assert (found.device, found.lanes, found.budget) == ("CPU:0", 2, budgets["CPU:0"])
    assert (found.peak_before, found.peak_predicted) == (report.peak_before, report.peak_predicted)
    assert found.peak_predicted <= budgets["CPU:0"] < found.peak_before
    assert found.peak_measured is None
    assert (found.bytes_out, found.bytes_in, found.transfers) == (
        report.bytes_out_predicted,
        report.bytes_in_predicted,
        len(report.transfers),
    )
    assert found.transfers == sum(len(each.plan.moves) for each in plans) > 0
    assert Report.from_json(report.to_json()) == report
    assert "CPU:0 (2 devices): budget " in str(report)


def test_devices_of_unequal_speed_have_their_own_times(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    budgets = {"CPU:0": scarce(step, engine)}
    plans = plan_replicas(step, engine, budgets)
    first, second = probes_of(plans, run=3)
    assert (first.device, second.device) == ("/device:CPU:0", "/device:CPU:1")
    assert len({3, first.run, second.run}) == 3
    took = {each.device: seconds for each, seconds in zip(plans, (1.0, 3.0), strict=True)}
    samples = [
        [Sample(2 * at + 1, took[each.device] * place, 0, 0) for place, at in enumerate(each.plan.ordered)]
        for each in plans
    ]
    found = timed_lanes(plans, samples)
    for each in plans:
        names = [each.timeline.steps[at].node for at in each.plan.ordered[1:]]
        assert {found[name] for name in names} == {took[each.device]}
    costs = TimedCosts(found, estimated(engine))
    slow, fast = (each.timeline for each in reversed(plan_replicas(step, engine, budgets, costs=costs)))
    assert sum(op.seconds for op in slow.steps) > 2 * sum(op.seconds for op in fast.steps)


@pytest.mark.parametrize("on_gpus", [True, False])
def test_workspace_of_gpus_is_what_their_probes_read(engine: Engine, on_gpus: bool) -> None:
    """Logical devices of a CPU have one allocator, whose peaks say nothing of a lane."""
    graph = training_step(NET) if on_gpus else on_cpus(training_step(NET))
    step, more = Step.read(graph), 12_345
    devices = lanes(graph)
    timeline = step.timeline(estimated(engine))
    pools = [Pool(device, (device,), round(0.95 * timeline.peak)) for device in devices]
    plans = plan_lanes(graph, timeline, pools, devices[0], OffloadOptions(reuse_distance=1))
    taken, samples = plans[0].plan.ordered[1], []
    for each in plans:
        usage = usage_under(each.timeline, each.plan.moves)
        extra = {taken: more} if each is plans[0] else {}
        samples.append(
            [
                Sample(2 * at + 1, float(place), int(usage[at]), int(usage[at]) + extra.get(at, 0))
                for place, at in enumerate(each.plan.ordered)
            ]
        )
    costs = measured_costs(engine, plans, samples)
    node = graph[plans[0].timeline.steps[taken].node]
    others = estimated(engine)
    assert (
        costs.workspace(graph, node) >= more
        if on_gpus
        else costs.workspace(graph, node) == others.workspace(graph, node)
    )
    assert costs.seconds(graph, node) == 1.0


def test_budgets_by_device_are_those_of_the_steps_allocators(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    assert budgets_on_devices(step, engine) == {"CPU:0": 1 << 30}
    by_device = make_engine(Options(memory_budget={"CPU:0": "2GiB"}, cache_directory=""))
    assert budgets_on_devices(step, by_device) == {"CPU:0": 2 << 30}


def test_peaks_that_were_measured_are_in_the_report(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    budget = AMPLE
    report = describe_replicas(step, plan_replicas(step, engine, {"CPU:0": budget}), engine, "train")
    report = replace(report, devices=(replace(report.devices[0], peak_uncounted=7),))
    met = measured_replicas(report, [(50,), (90,), (60,)], last=True)
    assert (met.devices[0].peak_measured, met.peak_measured) == (97, 97)
    assert met.decision is Decision.FITS
    assert not any(isinstance(note, Missed) for note in met.notes)
    missed = measured_replicas(report, [(budget,)], last=True)
    assert missed.decision is Decision.OVER
    assert (missed.devices[0].over, missed.notes[0]) == (7, "OVER BUDGET by 7 bytes on CPU:0")
    assert isinstance(missed.notes[0], Missed)
    assert "OVER BUDGET" in str(missed.devices[0])
    assert not isinstance(measured_replicas(report, [(budget,)], last=False).notes[0], Missed)


def test_a_single_call_over_the_budget_of_a_device_is_told_as_such(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    report = describe_replicas(step, plan_replicas(step, engine, {"CPU:0": AMPLE}), engine, "train")
    devices = tuple(replace(report.devices[0], device=f"GPU:{place}", budget=100) for place in range(2))
    settled = measured_replicas(replace(report, devices=devices), [(90, 80)], last=True)
    found = usual_replicas(settled, [(70, 95), (70, 110), (70, 85)])
    assert [device.peak_measured for device in found.devices] == [90, 95]
    assert found.notes[-1] == "over budget (while plans were tried, not since) by 10 bytes on GPU:1"
    for _ in range(2):  # told once, however often it is measured
        found = usual_replicas(found, [(105, 85), (104, 85), (70, 85)])
    assert [note for note in found.notes if isinstance(note, Missed)] == ["OVER BUDGET by 4 bytes on GPU:0"]


def test_what_is_in_use_while_no_step_runs_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link: a fast one may hide all copies."""
    monkeypatch.setattr(replicas, "links_together", lambda targets, *_: [Link(1e6, 1e6) for _ in targets])
    step = Step.read(on_cpus(training_step(NET)))
    held = AMPLE // 2
    plans = plan_replicas(step, engine, {"CPU:0": AMPLE}, in_use={"CPU:0": held})
    assert {each.pool.in_use for each in plans} == {held}
    budgets = {"CPU:0": scarce(step, engine)}
    room = LaneRooms(0, budgets, in_use_on_devices(step.graph, engine))
    found = room.predicted(mock.Mock(step=step), engine)
    slowest = max(each.plan.after.seconds for each in plan_replicas(step, engine, budgets, effort=Effort.GREEDY))
    assert found.moved == slowest > found.unlimited > 0
    with pytest.raises(InfeasibleBudgetError):
        replace(room, in_use={"CPU:0": budgets["CPU:0"]}).predicted(mock.Mock(step=step), engine)


def test_a_segment_is_a_share_of_the_smallest_budget_of_a_device(engine: Engine) -> None:
    job = mock.Mock(engine=engine)
    job.trace.step = Step.read(on_cpus(training_step(NET)))
    room = room_of(job)
    assert isinstance(room, LaneRooms)
    assert (room.budgets, room.least) == ({"CPU:0": 1 << 30}, 1 << 29)  # two devices take their memory from CPU:0


@pytest.mark.parametrize("must_fit", [False, True])
def test_regions_without_a_plan_are_refused_where_a_step_without_them_is_left(must_fit: bool) -> None:
    """Without regions there is a plan: a step that has them must not run beyond the budget."""
    for regions in (False, True):
        job = mock.MagicMock()
        state = Given(function=None, report=Report("f", "CPU", "optimal", "unchanged: no budget", 8, 8))
        job.trace.step.graph = Graph([Node("fusion_0", "TfmemFusion" if regions else "MatMul")])
        job.engine.settings.must_fit, job.engine.settings.budget, job.waits = must_fit, 1, False
        job.trace.split, job.trace.divide.return_value = None, Reason.SPLIT_AGAIN()
        job.trace.step.shared = "'all' (CollectiveReduceV2) waits for other replicas"
        refused = InfeasibleBudgetError("too small", 9, "op")
        with (
            mock.patch.object(planning, "budgets_on_devices"),
            mock.patch.object(planning, "undivided", return_value=""),
            mock.patch.object(planning, "plan_replicas", side_effect=refused),
            mock.patch.object(planning, "_with_layers", return_value=state),
            mock.patch.object(planning, "left") as left,
            pytest.raises(InfeasibleBudgetError) if must_fit or regions else nullcontext(),
        ):
            planning.start(job)
        assert left.called is not (must_fit or regions)


def test_a_report_is_about_the_device_that_is_furthest_over_its_budget(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    report = describe_replicas(step, plan_replicas(step, engine, {"CPU:0": AMPLE}), engine, "train")
    devices = tuple(
        replace(report.devices[0], device=f"GPU:{place}", budget=budget, peak_before=peak)
        for place, (budget, peak) in enumerate([(100, 90), (80, 70), (None, 999)])
    )
    report = replace(report, devices=devices)
    assert measured_replicas(report, [(100, 80, 5000)], last=True).peak_before == 90
    found = measured_replicas(report, [(101, 99, 5000)], last=True)
    assert (found.budget, found.peak_before, found.peak_measured) == (80, 70, 99)
    assert found.notes[0] == "OVER BUDGET by 1 bytes on GPU:0 and by 19 bytes on GPU:1"


def test_what_took_more_than_planned_is_planned_again_for_less(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    budgets = {"CPU:0": scarce(step, engine)}
    plans = plan_replicas(step, engine, budgets)
    report = describe_replicas(step, plans, engine, "train")
    planned = report.peak_predicted

    def again(over: int) -> Any:
        devices = (replace(report.devices[0], peak_measured=budgets["CPU:0"] + over),)
        return replanned(step, engine, plans, replace(report, devices=devices))

    found = again(200_000)
    assert sum(each.plan.after.peak for each in found) <= planned - 200_000
    assert [each.pool.budget for each in found] == [budgets["CPU:0"]] * 2
    assert again(1 << 40) is None  # no plan takes so little
    assert again(0) is None


def test_trials_are_of_plans_that_differ_and_may_be_faster(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    budgets = {"CPU:0": scarce(step, engine)}
    first, costs = plan_replicas(step, engine, budgets), estimated(engine)
    (spare,) = worth_running(step, engine, first, first, budgets, costs)
    assert not same(spare, first)
    assert sum(each.plan.after.peak for each in spare) <= 0.95 * budgets["CPU:0"]
    found = worth_running(step, engine, first, spare, budgets, costs)
    assert len(found) == 1  # the same plans run once
    least = sum(each.plan.after.peak for each in spare)
    with pytest.raises(InfeasibleBudgetError):
        plan_replicas(step, engine, {"CPU:0": least // 4})
    assert worth_running(step, engine, first, spare, {"CPU:0": least // 4}, costs) == (spare,)


def test_the_fastest_trial_within_all_budgets_is_the_best(engine: Engine) -> None:
    step = Step.read(on_cpus(training_step(NET)))
    plans = plan_replicas(step, engine, {"CPU:0": scarce(step, engine)})
    report = describe_replicas(step, plans, engine, "train")

    def trial(seconds: float, over: int) -> LaneTrial:
        peak = (report.devices[0].budget or 0) + over
        devices = (replace(report.devices[0], peak_measured=peak),)
        return LaneTrial(plans, None, replace(report, devices=devices), ((peak,),), seconds)

    slow, fast, faster, least = trial(3.0, 0), trial(2.0, -5), trial(1.0, 7), trial(4.0, 6)
    assert best_of([slow, fast, faster]) is fast
    assert best_of([faster, least]) is least
    assert not faster.as_predicted
    assert trial(0.0, 0).as_predicted
    assert not trial(0.0, 1).as_predicted
    assert str(faster).startswith("1000.0 ms, peak ")


def calling(outside: list[str], inside: list[str]) -> Graph:
    body = Graph([Node(f"b{at}", "MatMul", device=device) for at, device in enumerate(inside)])
    nodes = [Node(f"a{at}", "MatMul", device=device) for at, device in enumerate(outside)]
    return Graph([*nodes, Node("loop", "While")], functions={("loop", "body"): Function(body, (), ())})


@pytest.mark.parametrize(
    ("outside", "inside", "kind", "found"),
    [
        ([], ["CPU:0", "CPU:1"], "CPU", "CPU:0"),
        (["CPU:0"], ["CPU:0", "CPU:1"], "CPU", "CPU:1"),
        (["CPU:0", "CPU:1"], ["CPU:0", "CPU:1"], "CPU", ""),
        (["GPU:0", "GPU:1"], ["GPU:0", "CPU:0"], "GPU", ""),  # the condition of a loop
        (["CPU:0"], ["GPU:0"], "GPU", "GPU:0"),
    ],
)
def test_devices_whose_ops_are_all_in_a_loop_are_not_planned_one_by_one(
    outside: list[str], inside: list[str], kind: str, found: str
) -> None:
    whole = "/job:localhost/replica:0/task:0/device:{}".format
    why = undivided(calling([*map(whole, outside)], [*map(whole, inside)]), kind)
    assert why == (f"all that runs on {whole(found)} is inside of functions that the step calls" if found else "")


@pytest.mark.parametrize("waits", ["", "'reduce0/0' (CollectiveReduceV2)"])
def test_a_step_of_workers_that_cannot_agree_is_not_split(waits: str) -> None:
    engine, step = (
        make_engine(Options(memory_budget="1GiB", cache_directory="")),
        Step.read(on_cpus(training_step(NET))),
    )
    with mock.patch.object(splits, "waits_for_others", return_value=waits):
        found = split_under(step, engine, 1 << 30)
    assert isinstance(found, Refusal)
    assert (found.reason is Reason.SPLIT_SHARED) is bool(waits)


@pytest.mark.parametrize("waits", ["", "'reduce0/0' (CollectiveReduceV2)"])
def test_slow_moves_of_several_workers_say_why_no_split_is_looked_for(waits: str) -> None:
    """A step of one process is divided to see whether that is faster; workers would have to try it together."""
    options = Options(memory_budget="1GiB", cache_directory="", offload=OffloadOptions(split="faster"))
    engine, step = make_engine(options), Step.read(on_cpus(training_step(NET)))
    plans = plan_replicas(step, engine, {"CPU:0": scarce(step, engine)})
    with (
        mock.patch.object(replicas, "CLEARLY", float("inf")),
        mock.patch.object(replicas, "waits_for_others", return_value=waits),
    ):
        notes = describe_replicas(step, plans, engine, "train").notes
    said = [note for note in notes if str(note).startswith("not split along the batch: workers run pieces only where")]
    assert len(said) == bool(waits)
