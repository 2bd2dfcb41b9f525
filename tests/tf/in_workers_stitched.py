"""Steps of two workers that are stitched, beside moves or without; `tests.tf.in_workers` runs these cases."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest import mock

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.decision import Fusion, FusionWhy
from graph_passes.errors import InfeasibleBudgetError
from tests.tf.fused_replicas import Gelus
from tests.tf.in_replicas import AMPLE, BATCH, Training
from tests.tf.one_worker import Worker, digest, taking
from tfmem.api import make_engine
from tfmem.frontends.function import OptimizedFunction
from tfmem.steps import composed, trace
from tfmem.steps.rooms import LaneRooms, Predicted
from tfmem.timing import ab_timing

MOST = 90  # calls until a step has settled


def fused(worker: Worker, training: Training, tune: Any, budget: int | None = None, **changes: Any) -> Any:
    """The step, to be stitched."""
    options = tfmem.Options(
        passes=("recurrent", "fusion", "offload"),
        fusion=tfmem.FusionOptions(tune=tune),
        memory_budget=budget,
        cache_directory="",
        offload=tfmem.OffloadOptions(spill_directory=worker.folder),
    )
    engine = make_engine(options, called=True)
    engine = replace(engine, workers=replace(engine.workers, **changes))
    return OptimizedFunction(tf.function(training.in_all), engine)


def steps_are_stitched(worker: Worker) -> None:
    """By equal kernels on both, at once or after calls of both versions in turn; variables stay equal to the bit."""
    plain = Training(worker.strategy, 0.2)
    reference = tf.function(plain.in_all)
    expected = [loss for _ in range(8) for loss in plain.losses(reference)]
    for tune in ("off", "fast"):
        ours = Training(worker.strategy, 0.2)
        step = fused(worker, ours, tune)
        losses = [loss for _ in range(8) for loss in ours.losses(step)]
        np.testing.assert_allclose(losses, expected, rtol=1e-3)
        report = tfmem.report(step)
        assert report.regions, report
        assert (report.fusion_state == "stitched") or tune == "fast", report
        assert (", in turn" in report.fusion) == (tune == "fast"), report.fusion
        worker.both(f"{report.fusion} {digest(ours)}")


def kernels_differ(worker: Worker) -> None:
    """Then neither worker stitches, and both warn once."""
    plain, ours = Training(worker.strategy), Training(worker.strategy)
    step = fused(worker, ours, "off", version=("tfmem 7", "tfmem 8")[worker.index])
    with pytest.warns(tfmem.TfmemWarning, match="task:1 has tfmem=tfmem 8, and .* has tfmem=tfmem 7") as told:
        assert ours.losses(step) == plain.losses()
    assert len(told) == 1
    assert "equal machines" in tfmem.report(step).fusion


def one_worker_stitches(worker: Worker) -> None:
    """If the other was not asked to, none does."""
    plain, ours = Training(worker.strategy), Training(worker.strategy)
    step = fused(worker, ours, "fast") if worker.index == 0 else worker.optimized(ours.in_all, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ours.losses(step) == plain.losses()
    assert worker.index or "it was not asked to" in tfmem.report(step).fusion
    worker.both(digest(ours))


def gelus(worker: Worker) -> Gelus:
    """A net with dropout of which regions take much."""
    return Gelus(worker.strategy, 0.2, tf.distribute.experimental.CommunicationOptions())


def beside_moves(
    worker: Worker,
    moves: tuple[bool, bool],
    tune: str = "full",
    regions_win: bool = True,
    before: Callable[[], Any] = lambda: None,
) -> tfmem.Report:
    """The report of a net that trains as one without tfmem, to rounding, and on both workers to the same bits.

    Args:
        worker: this one.
        moves: whether the budget of each worker makes tensors move.
        tune: see `FusionOptions`.
        regions_win: what the times of calls in turn say.
        before: what is faked once the budget is known.
    """
    measured, plain, ours = (gelus(worker) for _ in range(3))
    step = worker.optimized(measured.in_all, AMPLE)
    measured.losses(step)
    scarce = round(0.8 * tfmem.report(step).peak_before)
    step, batch = fused(worker, ours, tune, scarce if moves[worker.index] else AMPLE), tf.constant(BATCH)
    tf.random.set_seed(1)
    found: list[float] = []
    began = worker.keys()
    with (
        mock.patch.object(ab_timing, "ROUNDS", 2),
        mock.patch.object(ab_timing.Times, "is_faster", property(lambda _: regions_win)),
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        taking(patch, lambda _: 1)  # which ops run at the same time, and so the peak, depends on the load
        before()
        while not found or (not settled(step) and len(found) < MOST):
            found.append(float(step(batch)))
        assert settled(step)
        found += [float(step(batch)) for _ in range(3)]
    drawn, began = worker.keys() - began, worker.keys()
    tf.random.set_seed(1)
    reference = tf.function(plain.in_all)
    np.testing.assert_allclose(found, [float(reference(batch)) for _ in found], rtol=1e-4)
    assert worker.keys() - began == drawn, "a deferred capture was not read once a call"
    for weight, given in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), given.numpy(), atol=1e-5)
    report = tfmem.report(step)
    assert (report.decision == "moved") == moves[worker.index], report
    worker.both(f"{len(found)} calls, {report.fusion}, {digest(ours)}")
    return report


def settled(step: OptimizedFunction) -> bool:
    ((managed,),) = [list(found.values()) for found in step._steps.values()]
    return bool(managed.settled)


def regions_beside_the_moves_of_a_worker(worker: Worker) -> None:
    """The other one has room for all of the step; both run equal regions, within their budgets."""
    report = beside_moves(worker, (False, True))
    require_both(report)


def regions_beside_moves(worker: Worker) -> None:
    """The regions of both workers, timed in turn."""
    report = beside_moves(worker, (True, True))
    require_both(report)
    assert ", in turn" in report.fusion, report.fusion


def regions_are_slower(worker: Worker) -> None:
    report = beside_moves(worker, (True, True), regions_win=False)
    assert report.fusion_state == Fusion.LEFT, report.fusion
    assert report.fusion.startswith("left unchanged: stitched it t"), report.fusion


def the_cost_model_chooses(worker: Worker) -> None:
    report = beside_moves(worker, (True, True), tune="off")
    assert report.fusion in (FusionWhy.REPLICAS, FusionWhy.SLOWER), report.fusion


def require_both(report: tfmem.Report) -> None:
    assert report.fusion_state == Fusion.STITCHED, report.fusion
    assert report.running, report


def regions_of_a_worker_fail(worker: Worker) -> None:
    """Because of a bug in tfmem: then no worker runs regions, and none waits for the other."""

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError(42)

    with pytest.MonkeyPatch.context() as patch:
        faked = (lambda: None, lambda: patch.setattr(composed, "segments", fail))[worker.index]
        report = beside_moves_apart(worker, faked)
    assert report.fusion == FusionWhy.FAILED, report.fusion


def regions_of_a_worker_differ(worker: Worker) -> None:
    """Then variables would differ, so no worker runs them."""
    with pytest.MonkeyPatch.context() as patch:
        digest_here = str(worker.index)

        def differ() -> None:
            patch.setattr(composed.Fuser, "digest", lambda *_: digest_here)

        report = beside_moves_apart(worker, differ)
    assert "/job:worker/task:1 would run other kernels than /job:worker/task:0" in report.fusion, report.fusion


def a_worker_has_no_plan_with_regions(worker: Worker) -> None:
    """Whichever regions: neither runs them."""

    def infeasible(*_: Any, **__: Any) -> None:
        raise InfeasibleBudgetError("too small", 1 << 30, "x", 1 << 30)

    with pytest.MonkeyPatch.context() as patch:
        given = trace.Trace.prepared

        def prepared(own: trace.Trace) -> trace.Trace:
            found = given(own)
            patch.setattr(type(found), "build_lanes", infeasible)
            return found

        faked = (lambda: None, lambda: patch.setattr(trace.Trace, "prepared", prepared))[worker.index]
        report = beside_moves_apart(worker, faked)
    assert report.fusion == FusionWhy.NO_ROOM, report.fusion
    assert any("/job:worker/task:1 cannot run the step" in note for note in report.notes), report.notes


def a_worker_cannot_make_a_step_with_regions(worker: Worker) -> None:
    """Because of a bug in tfmem: the other one does not wait for it."""

    def fail(*_: Any) -> None:
        raise KeyError(43)

    with pytest.MonkeyPatch.context() as patch:
        faked = (lambda: None, lambda: patch.setattr(trace.Trace, "prepared", fail))[worker.index]
        report = beside_moves_apart(worker, faked)
    assert report.fusion == FusionWhy.FAILED, report.fusion


def regions_of_a_worker_exceed_its_budget(worker: Worker) -> None:
    """As calls in turn show: no worker keeps them."""
    with pytest.MonkeyPatch.context() as patch:
        given = composed._watched

        with_regions = cycle((False, True))  # a choice is between both

        def over(report: tfmem.Report, peaks: Any) -> tfmem.Report:
            found = given(report, peaks)
            (device,) = found.devices
            taken = (device.budget or 0) + (7 if next(with_regions) and worker.index else 0)
            return replace(found, devices=(replace(device, peak_measured=taken),))

        report = beside_moves_apart(worker, lambda: patch.setattr(composed, "_watched", over))
    assert report.fusion.endswith("stitched it takes 7 bytes more than the budget"), report.fusion


def regions_of_a_worker_would_exceed_its_budget(worker: Worker) -> None:
    """As calls with regions alone show: all try others, and in the end none runs any."""
    found = cycle((0, 7))  # without regions, and with them

    with pytest.MonkeyPatch.context() as patch:
        faked = (lambda: None, lambda: patch.setattr(composed, "total_over", lambda _: next(found)))[worker.index]
        report = beside_moves_apart(worker, faked)
    assert report.fusion.endswith("stitched it would take 7 bytes more than the budget"), report.fusion


def a_worker_predicts_other_times(worker: Worker) -> None:
    """All try first what is predicted to be the fastest on the slowest worker."""
    tried: list[list[tuple[str, ...]]] = []
    predicted, prepared = LaneRooms.predicted, composed.prepared

    def slower(*given: Any) -> Predicted:  # the fewer moves there are
        found = predicted(*given)
        return Predicted(1.0 - found.moved, found.unlimited) if worker.index else found

    def noted(state: Any) -> Any:
        tried.extend(sorted(region.schedule.members for region in each.done.regions) for each in state.compositions)
        return prepared(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneRooms, "predicted", slower)
        patch.setattr(composed, "prepared", noted)
        require_both(beside_moves(worker, (True, True)))
    assert len(tried) > 1
    worker.both(hashlib.sha256(repr(tried).encode()).hexdigest())


def beside_moves_apart(worker: Worker, before: Callable[[], Any]) -> tfmem.Report:
    """`beside_moves` of a step that is not stitched."""
    report = beside_moves(worker, (True, True), before=before)
    assert report.fusion_state == Fusion.LEFT, report.fusion
    return report


STITCHED = (
    steps_are_stitched,
    regions_beside_moves,
    regions_are_slower,
    the_cost_model_chooses,
    a_worker_predicts_other_times,
)
LEFT = (regions_of_a_worker_fail, regions_of_a_worker_differ, a_worker_cannot_make_a_step_with_regions)
NO_ROOM = (
    a_worker_has_no_plan_with_regions,
    regions_of_a_worker_exceed_its_budget,
    regions_of_a_worker_would_exceed_its_budget,
)
