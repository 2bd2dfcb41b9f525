"""Steps in which tensors move are stitched: within the budget, with the numbers of the step without a budget."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import Decision, Fusion, FusionWhy, Missed
from graph_passes.device_report import DeviceReport
from graph_passes.headline import headline
from graph_passes.passes.fuse.plan import FusionPlan
from graph_passes.passes.fuse.schedule_segments import RegionBounds
from graph_passes.report import TransferRecord
from graph_passes.verdict import Verdict
from tests.tf import composed_steps
from tests.tf.composed_steps import Run, fitted, trained
from tests.tf.memory_in_use import in_use
from tests.tf.optimized_runs import in_a_process
from tfmem.api import make_engine
from tfmem.capture.concrete_function import call_traced
from tfmem.options import Options
from tfmem.steps import comparing, composed, dividing, fuser
from tfmem.steps.fuser import Fuser
from tfmem.steps.phases import Event, Phase
from tfmem.steps.states import Comparing, Composing, Placed
from tfmem.steps.variants import Composition, Variants
from tfmem.timing.ab_timing import Times, Turns

PASSES = ("fusion", "offload")
FULL = tfmem.FusionOptions(tune="full")
NETS = {  # hundredths of what they are predicted to take
    composed_steps.mlp: (65, 54),
    composed_steps.residual: (60, 50),
    composed_steps.transformer: (68, 57),
}

pytestmark = pytest.mark.timeout(600)


def _run(make: Any, steps: int, budget: int, passes: Any, how: dict[str, Any]) -> Run:
    """A run whose ops run one at a time: what runs beside what, and so the peak, would differ with the load."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return trained(make, steps, memory_budget=budget, passes=passes, fusion=FULL, **how)


def both_within(make: Any, budget: int, **how: Any) -> tuple[Run, Run]:
    """A net that trains within a budget with regions, and then, in the same process, as many steps without tfmem."""
    return in_a_process(_both_within, make, budget, how, timeout=500)


def _both_within(make: Any, budget: int, how: dict[str, Any]) -> tuple[Run, Run]:
    found = _run(make, 8, budget, PASSES, how)
    return found, trained(make, len(found.losses))


def part_of(make: Any, share: int) -> int:
    """So many hundredths of a net's memory, in bytes: as predicted, since what is measured differs with the load."""
    unchanged = in_a_process(_run, make, 1, 1 << 34, ("offload",), {}).report
    assert unchanged is not None
    assert unchanged.peak_before
    return unchanged.peak_before * share // 100


def stitched_within(make: Any, share: int) -> tfmem.Report:
    """The report of a net in so many hundredths of its memory: stitched, within the budget, and it trains as plain."""
    budget = part_of(make, share)
    both, plain = both_within(make, budget)
    report = both.report
    assert both.settled
    assert report is not None
    assert report.fusion_state is Fusion.STITCHED, report.fusion
    assert report.running
    assert report.peak_measured is not None
    assert report.peak_measured <= budget
    assert "OVER BUDGET" not in str(report)
    np.testing.assert_allclose(both.losses, plain.losses, rtol=2e-4)
    for found, expected in zip(both.weights, plain.weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4)
    return report


@pytest.mark.timeout(1200)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("scarce", [False, True], ids=["60", "50"])
@pytest.mark.parametrize("make", NETS, ids=lambda make: make.__name__)
def test_a_step_moves_and_is_stitched_within_its_budget(make: Any, scarce: bool) -> None:
    """About 60 and 50 hundredths of what it is measured to take."""
    report = stitched_within(make, NETS[make][scarce])
    assert report.decision == Decision.MOVED
    assert report.transfers


@pytest.mark.long
def test_a_step_that_is_split_along_the_batch_is_stitched_within_its_budget() -> None:
    assert stitched_within(composed_steps.pooled, 21).splits


@pytest.mark.long
def test_the_step_without_regions_stays_where_it_is_faster() -> None:
    make = composed_steps.mlp
    budget = part_of(make, 72)  # its plan leaves 0.9 MB of that free, as measured
    both, plain = both_within(make, budget, regions_win=False)
    report = both.report
    assert report is not None
    assert both.settled
    assert (report.fusion_state, report.decision) == (Fusion.LEFT, Decision.MOVED)
    assert report.fusion.startswith(("left unchanged: stitched it took", "left unchanged: stitched it takes"))
    assert report.peak_measured is not None
    assert report.peak_measured <= budget
    np.testing.assert_allclose(both.losses, plain.losses, rtol=1e-5)


def test_random_streams_go_on() -> None:
    make = composed_steps.drawing
    both, plain = both_within(make, part_of(make, 64))
    assert both.report is not None
    assert both.report.running
    np.testing.assert_allclose(both.losses, plain.losses, rtol=1e-4)


@pytest.mark.long
def test_fit_with_metrics_and_moving_averages() -> None:
    _, unchanged = in_a_process(fitted, 1 << 34, ("offload",), 2, timeout=280)
    budget = unchanged.peak_before * 6 // 10
    history, report = in_a_process(fitted, budget, PASSES, timeout=500)
    train = next(each for each in (report, *report.others) if each.function == "train")
    assert train.running, train.fusion
    assert train.transfers
    assert train.peak_measured <= budget
    plain, _ = in_a_process(fitted, 0, None, len(history["loss"]), timeout=280)
    np.testing.assert_allclose(history["loss"], plain["loss"], rtol=2e-3)
    np.testing.assert_allclose(history["accuracy"], plain["accuracy"], atol=0.02)


def of_kernels_alone(budget: int) -> tfmem.Report | None:
    with mock.patch.object(composed, "SEGMENTATIONS", (RegionBounds(None, calls=False),)):
        return trained(composed_steps.mlp, 8, memory_budget=budget, passes=PASSES, fusion=FULL).report


def test_regions_of_kernels_alone() -> None:
    budget = part_of(composed_steps.mlp, 86)
    found = in_a_process(of_kernels_alone, budget)
    assert found is not None
    assert found.running, found.fusion
    assert {step.kind for region in found.running for step in region.steps} <= {"kernel", "view"}
    assert found.peak_measured is not None
    assert found.peak_measured <= budget


@pytest.mark.long
def test_a_fault_leaves_the_moves() -> None:
    in_a_process(faults_leave_the_moves, part_of(composed_steps.mlp, 86))


def faults_leave_the_moves(budget: int) -> None:
    for name in ("segments", "memory_engine", "with_regions"):
        room = budget + in_use()  # TensorFlow keeps the last net's variables
        broken = mock.patch.object(composed, name, side_effect=KeyError("on purpose"))
        with broken, pytest.warns(tfmem.TfmemWarning, match="on purpose"):
            found = trained(composed_steps.mlp, 8, memory_budget=room, passes=PASSES, fusion=FULL)
        assert found.report is not None
        assert found.report.fusion == FusionWhy.FAILED
        assert found.report.transfers
        assert any("on purpose" in note for note in found.report.notes)


def composing(count: int) -> Composing:
    """A step whose moves are settled at 90 of 100 bytes, with regions in some variants, none of which has run."""
    engine = make_engine(Options(memory_budget=100, passes=PASSES, fusion=FULL, cache_directory=""))
    given = replace(
        engine.settings.unplanned("step"), budget=100, peak_predicted=90, peak_measured=90, step_predicted_ns=10
    )
    fuser = Fuser(engine, mock.Mock(), with_xla=False)
    variants = tuple(Composition(mock.Mock(), FusionPlan()) for _ in range(count))
    return Composing(function="moved", report=given, fuser=fuser, compositions=variants, step=mock.Mock())


def test_regions_that_exceed_the_budget_give_way_to_others_and_at_last_to_none() -> None:
    state = composing(2)
    over = replace(state.report, peak_predicted=80, peak_measured=120)
    move = composed.decided(state, over, "stitched")
    assert (move.event, move.state.phase) == (Event.RAN, Phase.COMPOSING)
    assert isinstance(move.state, Composing)
    assert (move.state.compositions, move.state.step) == (state.compositions[1:], None)
    last = composed.decided(replace(move.state, step=mock.Mock()), over, "stitched")
    assert (last.event, last.state.function) == (Event.STAYS, "moved")
    assert last.state.report.fusion == "left unchanged: stitched it would take 20 bytes more than the budget"
    assert last.state.report.peak_measured == 90


def test_a_variant_over_the_budget_is_told_only_if_it_stays() -> None:
    state = composing(1)
    over = replace(state.report, notes=(Missed.of(" by 20 bytes"),))
    engine = composed.memory_engine(state.fuser.engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.notices.warn_of_losses(over)
    with pytest.warns(tfmem.TfmemWarning, match="OVER BUDGET by 20 bytes"):
        state.fuser.engine.notices.warn_of_losses(over)


def test_regions_for_which_no_plan_runs_give_way_and_the_user_is_told() -> None:
    error = tfmem.InfeasibleBudgetError("no room", 200, "fusion_0")
    state = composing(2)
    assert composed.gave_up(state, error).state == replace(state, compositions=state.compositions[1:], step=None)
    with pytest.warns(tfmem.TfmemWarning, match=r"was to be stitched, but is left unchanged: no plan"):
        last = composed.gave_up(composing(1), error).state
    assert last.function == "moved"
    assert last.report.fusion == FusionWhy.NO_ROOM
    assert "stitched: no room" in last.report.notes


def test_a_variant_that_runs_out_of_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> Any:
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    step = tfmem.optimize(
        tf.function(lambda x: tf.nn.softmax(tf.tanh(x) * 2.0 + x)), passes=("fusion",), fusion=FULL, cache_directory=""
    )
    x = tf.ones((64, 64))
    monkeypatch.setattr(fuser, "noticed", lambda _: "on purpose")  # so that calls run in turn
    expected = step(x)
    with monkeypatch.context() as patch:
        patch.setattr(comparing, "call_traced", short)
        for _ in range(2):  # the first turn is of the step without regions
            with pytest.raises(tf.errors.ResourceExhaustedError):
                step(x)
            if "memory" in tfmem.report(step).fusion:
                break
            patch.setattr(comparing, "call_traced", call_traced)
            step(x)
            patch.setattr(comparing, "call_traced", short)
    assert tfmem.report(step).fusion == "left unchanged: stitched it ran out of memory"
    np.testing.assert_array_equal(step(x), expected)


@pytest.mark.parametrize(
    ("given_peak", "peak", "faster", "function", "missed"),
    [
        (90, 95, True, "stitched", 0),
        (90, 95, False, "moved", 0),
        (90, 101, True, "moved", 0),  # within the budget comes first
        (103, 95, False, "stitched", 0),
        (103, 104, True, "moved", 3),  # none is within it: the one that is nearer, and the user is told
        (105, 104, False, "stitched", 4),
    ],
)
def test_calls_in_turn_have_to_stay_within_the_budget(
    given_peak: int, peak: int, faster: bool, function: str, missed: int
) -> None:
    state = composing(1)
    variants = Variants("stitched", mock.Mock(), mock.Mock(), "", "key", report=replace(state.report, peak_measured=80))
    compared = Comparing(
        function="moved",
        report=state.report,
        fuser=state.fuser,
        variants=variants,
        turns=Turns(),
        peaks=tuple(
            (regions, (taken,))
            for regions, taken in (
                (False, 70),
                (True, peak),
                (True, peak),
                (False, given_peak),
                (False, given_peak),
                (True, 60),
            )
        ),
    )
    times = Times(given=2.0, stitched=1.0) if faster else Times(given=1.0, stitched=2.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        move = composed.chosen(compared, times)
    assert (move.event, move.state.phase, move.state.function) == (Event.CLEAR, Phase.SETTLED, function)
    report = move.state.report
    assert report.peak_measured == (peak if function == "stitched" else given_peak)
    told = f"OVER BUDGET by {missed} bytes, in calls in turn with the other version"
    assert (told in report.notes) == bool(missed)
    assert any("OVER BUDGET" in str(each.message) for each in caught) == bool(missed)


def test_regions_whose_calls_in_turn_miss_the_budget_give_way_to_others() -> None:
    state = composing(2)
    with mock.patch.object(composed, "is_deterministic", return_value=False), mock.patch.object(composed, "key_of"):
        compared = composed.decided(state, replace(state.report, peak_measured=95), "stitched").state
    assert isinstance(compared, Comparing)
    times = Times(given=2.0, stitched=1.0)
    within = replace(compared, peaks=((False, (90,)), (True, (95,))))
    assert composed.chosen(within, times).state.function == "stitched"
    move = composed.chosen(replace(compared, peaks=((False, (90,)), (True, (101,)))), times)
    assert (move.event, move.state) == (Event.COMPOSED, replace(state, compositions=state.compositions[1:], step=None))


def test_the_rate_of_a_stitched_step_is_of_what_the_step_takes_without_regions() -> None:
    """Else a step that regions make faster than its unlimited rate would look slow, and a split would be looked for."""
    state = composing(1)
    given = replace(state.report, verdict=Verdict(False, seconds_unlimited=2.0, seconds=2.5))
    report = replace(given, verdict=Verdict(False, seconds_unlimited=0.8, seconds=1.1), step_measured_ns=1_100_000_000)
    with mock.patch.object(composed, "is_deterministic", return_value=False), mock.patch.object(composed, "key_of"):
        compared = composed.decided(replace(state, report=given), report, "stitched").state
    assert isinstance(compared, Comparing)
    stays = composed.chosen(compared, Times(given=2.5, stitched=1.1)).state.report
    assert stays.verdict is not None
    assert (stays.verdict.seconds_unlimited, stays.verdict.seconds) == (2.0, 1.1)
    assert dividing.rate_of(stays) > 1
    assert "1.82 times as fast" in headline(replace(stays, transfers=(TransferRecord("t", 1, "a", "b", "c", "d"),)))


def test_budgets_of_several_devices_count_together() -> None:
    def report(*peaks: int) -> tfmem.Report:
        budgets = (100, 50, None)
        devices = (
            DeviceReport(f"GPU:{place}", budget, 500, 0, peak)
            for place, (budget, peak) in enumerate(zip(budgets, peaks, strict=True))
        )
        return replace(composing(1).report, devices=tuple(devices))

    within = report(90, 50, 900)
    assert composed.more_over(within, report(100, 40, 900)) == 0
    assert composed.more_over(within, report(102, 53, 900)) == 5
    assert composed.more_over(report(107, 50, 900), report(102, 53, 900)) == 0
    state = replace(composing(1), report=within)
    stitched = report(80, 60, 900)
    with mock.patch.object(composed, "is_deterministic", return_value=False):
        move = composed.decided(state, stitched, "stitched")
    assert move.state.report.fusion == "left unchanged: stitched it would take 10 bytes more than the budget"
    compared = Comparing(
        function="moved",
        report=within,
        fuser=state.fuser,
        variants=Variants("stitched", mock.Mock(), mock.Mock(), "", "key", report=report(80, 40, 900)),
        peaks=((False, (90, 50, 900)), (True, (95, 51, 900))),
    )
    left = composed.chosen(compared, Times(given=2.0, stitched=1.0)).state
    assert (left.function, left.devices) == ("moved", ("/device:GPU:0", "/device:GPU:1", "/device:GPU:2"))
    assert left.report.fusion == "left unchanged: stitched it takes 1 bytes more than the budget"


def test_calls_in_turn_are_watched_on_every_device() -> None:
    given = composing(1).report
    devices = tuple(DeviceReport(f"GPU:{place}", 100, 500, 0, 90) for place in range(2))
    for several in ((), devices):
        names = ("/device:GPU:0", "/device:GPU:1") if several else ("/device:GPU:0",)
        fuser = mock.Mock()
        fuser.engine.meter.target.name = "/device:GPU:0"
        fuser.engine.meter.watched_on.return_value = "result", (7,) * len(names)
        report = replace(given, devices=several)
        variants = Variants("stitched", mock.Mock(), mock.Mock(), "", "key", report=report)
        state = Comparing(function="moved", report=report, fuser=fuser, variants=variants)
        result, move = comparing.take_turn(state, Turns(), (), {})
        assert fuser.engine.meter.watched_on.call_args.args[0] == names
        assert (result, move.event) == ("result", Event.UNCLEAR)
        assert isinstance(move.state, Comparing)
        assert move.state.peaks == ((False, (7,) * len(names)),)


@pytest.mark.parametrize("workers", [False, True])
def test_replicas_whose_tensors_move_are_left_where_nothing_names_fusion(workers: bool) -> None:
    engine, why = make_engine(Options(memory_budget=100, cache_directory="")), FusionWhy.DISTRIBUTED
    settings = replace(engine.settings, passes=(*engine.settings.passes, "fusion"))  # by default on a GPU
    job = mock.Mock(engine=engine.under(settings))
    job.trace.concrete.graph.name = "step"
    report = replace(engine.settings.unplanned("step"), decision=Decision.MOVED)
    placed = Placed(function="moved", report=report, unchanged=False)
    board = mock.Mock() if workers else None
    with mock.patch.multiple(comparing, board_of=lambda *_: board, decline=mock.DEFAULT):
        move = comparing.fuse(job, placed)
    assert (move.event, move.state.function, move.state.report.fusion) == (Event.STAYS, "moved", why)
    assert f"to have it stitched, {why.cure}" in move.state.report.notes


def test_a_single_call_over_the_budget_is_told() -> None:
    state = composing(1)
    variants = Variants("stitched", mock.Mock(), mock.Mock(), "", "key", report=replace(state.report, peak_measured=80))
    peaks = tuple((regions, (taken,)) for regions, taken in ((True, 81), (True, 107), (True, 80), (False, 90)))
    compared = Comparing(
        function="moved", report=state.report, fuser=state.fuser, variants=variants, turns=Turns(), peaks=peaks
    )
    found = composed.chosen(compared, Times(given=2.0, stitched=1.0)).state
    assert (found.function, found.report.peak_measured) == ("stitched", 81)
    assert found.report.notes[-1].startswith("over budget (while plans were tried, not since) by 7 bytes")


def test_where_both_exceed_the_budget_the_smaller_peak_counts() -> None:
    state = composing(1)
    state = replace(state, report=replace(state.report, peak_measured=130))
    better = replace(state.report, peak_measured=120)
    with mock.patch.object(composed, "is_deterministic", return_value=True), mock.patch.object(composed, "key_of"):
        assert composed.decided(state, better, "stitched").state.function == "stitched"
        worse = replace(state.report, peak_measured=140)
        assert composed.decided(state, worse, "stitched").state.function == "moved"
