"""Steps of two workers in pieces of the batch; see `tests.tf.in_workers`, which runs these cases."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import replace
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes.graph import ops
from graph_passes.refusals import Reason
from tests.tf.in_replicas import AMPLE
from tests.tf.one_worker import Worker, gives_up, taking
from tfmem.capture.set_shapes import traced_graphs
from tfmem.steps import agreed_peaks, agreed_pieces, agreement, splits, worker_records

ROWS, STEPS = 64, 12  # examples of a replica; the last steps run what is settled
TOLERANCE = 1e-4
SHARES = (0.35, 0.6)  # of the bytes of a step: 8 pieces, and fewer
BELOW_ALL = 64 << 10  # bytes beyond what is in use, in which no pieces fit


class Net:
    """Smooth ops, whose results are large: with ReLU, a changed last bit would move weights by more than rounding."""

    def __init__(self, strategy: Any, order: int = 1) -> None:
        """`order`: of the factors of the gates, 1 or -1; the two nets have the same collectives, and other ops."""
        tf.random.set_seed(1)
        self.strategy, self.order = strategy, order
        with strategy.scope():
            self.weights = [
                tf.Variable(tf.random.stateless_normal(shape, [place, 2], stddev=0.5))
                for place, shape in enumerate([(3, 3, 2, 16), (3, 3, 16, 16), (16, 5)])
            ]

    def loss(self, x: Any, y: Any) -> Any:
        first, second, head = self.weights
        h = tf.tanh(tf.nn.conv2d(x, first, 1, "SAME"))
        gates = [h, tf.sigmoid(tf.nn.conv2d(h, second, 1, "SAME"))]
        h = tf.multiply(*gates) if self.order == 1 else tf.tanh(gates[0]) * gates[1]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.reduce_mean(h, [1, 2]) @ head)
        return tf.nn.compute_average_loss(losses, global_batch_size=ROWS * self.strategy.num_replicas_in_sync)

    def step(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(x, y)
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, self.weights))
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.assign_sub(0.5 * gradient)
        return loss

    def in_all(self, x: Any, y: Any) -> Any:
        return self.strategy.reduce("SUM", self.strategy.run(self.step, (x, y)), axis=None)

    def values(self) -> list[Any]:
        return [weight.numpy() for weight in self.weights]


def examples(worker: Worker) -> tuple[Any, Any]:
    """Other ones for each replica; classes that images tell."""
    strategy = worker.strategy
    draw = np.random.default_rng(worker.index)

    def one(_: Any) -> tuple[Any, Any]:
        labels = draw.integers(0, 5, ROWS)
        images = draw.normal(size=(ROWS, 32, 32, 2)) * 0.3 + labels[:, None, None, None] / 2 - 1
        return tf.constant(images, tf.float32), tf.constant(labels)

    pairs = [one(number) for number in range(strategy.extended._num_replicas_in_sync // 2)]
    deal = strategy.experimental_distribute_values_from_function
    first = strategy.extended._num_replicas_in_sync // 2 * worker.index

    def part(at: int) -> Any:
        return deal(lambda context: pairs[context.replica_id_in_sync_group - first][at])

    return part(0), part(1)


def trained(function: Any, batch: tuple[Any, Any]) -> list[float]:
    return [float(function(*batch)) for _ in range(STEPS)]


def peak(worker: Worker) -> int:
    """Bytes of a step with nothing split, of the devices of a worker."""
    step = worker.optimized(Net(worker.strategy).in_all, AMPLE)
    step(*examples(worker))
    return int(tfmem.report(step).peak_before)


def collectives(concrete: Any) -> list[tuple[str, Any]]:
    """The collectives of a function, with what each sums."""
    found = [op for graph in traced_graphs(concrete.graph).values() for op in graph.get_operations()]
    return sorted((op.type, str(op.inputs[0].shape)) for op in found if op.type in ops.COLLECTIVES)


def divisions(step: Any) -> list[Any]:
    """The parts, their ops and their pieces, on all devices of a worker."""
    return [
        (record.first, record.last, record.ops, record.again, record.pieces) for record in tfmem.report(step).splits
    ]


def require_pieces(worker: Worker, budget: int) -> Any:
    """The report of a step that runs in pieces within a budget: what it computes is that of plain TensorFlow to
    rounding, and equal to the bit on both workers."""
    plain, ours, batch = Net(worker.strategy), Net(worker.strategy), examples(worker)
    given, began = tf.function(plain.in_all), worker.keys()
    expected = trained(given, batch)
    between = worker.keys()
    step = worker.optimized(ours.in_all, budget)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfmem.TfmemWarning)
        found = trained(step, batch)
    assert worker.keys() - between == between - began > 0, "collectives ran more or less than once"
    assert expected[-1] < 0.8 * expected[0], expected  # else gradients hardly matter
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    for one, other in zip(ours.values(), plain.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
    ((managed,),) = [list(each.values()) for each in step._steps.values()]
    assert collectives(managed.running) == collectives(given.get_concrete_function(*batch))
    report = tfmem.report(step)
    require_within(report, budget)
    worker.both(repr(divisions(step)))
    worker.both(hashlib.sha256(b"".join(value.tobytes() for value in ours.values())).hexdigest())
    return report


def require_within(report: Any, budget: int) -> None:
    assert report.splits, report
    (found,) = report.devices
    assert found.peak_predicted <= budget, report
    assert found.peak_measured is not None, report
    assert found.peak_measured <= budget, report


def require_asked(report: Any, task: int) -> None:
    """That a report says which worker needs the pieces."""
    assert any(f"/job:worker/task:{task} has no other plan" in str(note) for note in report.notes), report


def equal_workers(worker: Worker) -> None:
    report = require_pieces(worker, int(SHARES[0] * peak(worker)))
    require_asked(report, 0)


def more_pieces_are_taken(worker: Worker) -> None:
    """Each worker has to divide its step, and one into more pieces than the other."""
    whole = peak(worker)
    few = len(require_pieces(worker, int(SHARES[1] * whole)).splits[0].pieces)
    many = len(require_pieces(worker, int(SHARES[0] * whole)).splits[0].pieces)
    assert few < many, (few, many)
    for first in range(2):
        share = SHARES[(worker.index + first) % 2]
        report = require_pieces(worker, int(share * whole))
        assert len(report.splits[0].pieces) == many, report
        require_asked(report, first)


def one_worker_has_room(worker: Worker) -> None:
    """It runs the pieces of the other, too."""
    budget = (AMPLE, int(SHARES[0] * peak(worker)))[worker.index]
    report = require_pieces(worker, budget)
    require_asked(report, 1)


def refused(worker: Worker, budget: int, words: str, order: int = 1, **options: Any) -> None:
    """That both workers raise the same error before anything runs."""
    net, batch = Net(worker.strategy, order), examples(worker)
    before = net.values()
    step = worker.optimized(net.in_all, budget, offload=tfmem.OffloadOptions(**options))
    with pytest.raises(tfmem.InfeasibleBudgetError, match=words) as caught:
        step(*batch)
    for one, other in zip(net.values(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    worker.both(str(caught.value))


def one_worker_may_not_be_split(worker: Worker) -> None:
    """It has room for the whole step, but then the other has none."""
    budgets = (AMPLE, int(SHARES[0] * peak(worker)))
    words = r"^/job:worker/task:1 cannot run .* not split along the batch: /job:worker/task:0: split='never' was passed"
    refused(worker, budgets[worker.index], words, split=("never", "auto")[worker.index])
    words = r"^/job:worker/task:0 cannot run .* not split along the batch: split='never' was passed"
    refused(worker, budgets[1], words, split=("never", "auto")[worker.index])


def no_pieces_are_small_enough(worker: Worker) -> None:
    """On one worker, although the other could run pieces: none proposes any."""
    budgets = (int(SHARES[0] * peak(worker)), BELOW_ALL)
    words = r"^/job:worker/task:1 cannot run .* it was not split along the batch: "
    refused(worker, budgets[worker.index], words)


def steps_have_other_ops(worker: Worker) -> None:
    budgets = (AMPLE, int(SHARES[0] * peak(worker)))
    words = (
        r"not split along the batch: /job:worker/task:0: .*its ops cannot run in the \d+ pieces that another process"
    )
    refused(worker, budgets[worker.index], words, order=(-1, 1)[worker.index])


def a_worker_fails_to_split(worker: Worker) -> None:
    """A bug on one worker: no worker runs pieces, and none waits for the others."""

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError(168)

    budgets = (AMPLE, int(SHARES[0] * peak(worker)))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if worker.index == 0:
            patch.setattr(splits, "split_lanes", fail)
        refused(worker, budgets[worker.index], "not split along the batch: /job:worker/task:0: KeyError: 168")
    told = [str(each.message) for each in caught if issubclass(each.category, tfmem.TfmemWarning)]
    assert ["splitting the batch failed with KeyError" in each for each in told] == [True] * (1 - worker.index), told


def a_worker_is_late_to_split(worker: Worker) -> None:
    """So late that the other has given up: then both raise."""
    budgets = (AMPLE, int(SHARES[0] * peak(worker)))
    with pytest.MonkeyPatch.context() as patch:
        pause, tried = gives_up(worker, patch, worker_records, 1), agreed_pieces.in_pieces

        def late(*given: Any) -> Any:
            pause()
            return tried(*given)

        patch.setattr(agreement, "in_pieces", late)
        refused(worker, budgets[worker.index], "/job:worker/task:1 published nothing on the step within ")


def fewer_pieces_are_taken(worker: Worker) -> None:
    """Where a worker cannot run the larger number; what it tried in vain leaves nothing behind."""
    proposed, split_lanes = agreed_pieces._proposed, splits.split_lanes

    def twice(job: Any) -> Any:
        found = proposed(job)
        assert isinstance(found, worker_records.ProposedPieces)
        return found.of(tuple(replace(each, count=2 * each.count) for each in found.read()))

    def refusing(*given: Any) -> Any:
        *_, known = given
        return Reason.SPLIT_NEVER() if known and known[0].count > few else split_lanes(*given)

    budget = int(SHARES[1] * peak(worker))
    few = len(require_pieces(worker, budget).splits[0].pieces)
    with pytest.MonkeyPatch.context() as patch:
        if worker.index == 1:
            patch.setattr(agreed_pieces, "_proposed", twice)
        else:
            patch.setattr(splits, "split_lanes", refusing)
        report = require_pieces(worker, budget)
    assert len(report.splits[0].pieces) == few, report
    require_asked(report, 0)


def no_budget_is_the_users(worker: Worker) -> None:
    """Then pieces run as well; where one worker may not be split, all run the unmodified step."""
    budget, batch = int(SHARES[0] * peak(worker)), examples(worker)
    for split, words in (("auto", ""), ("never", "not split along the batch: split='never' was passed")):
        plain, ours = Net(worker.strategy), Net(worker.strategy)
        expected = trained(tf.function(plain.in_all), batch)
        options = tfmem.OffloadOptions(split=split if worker.index == 1 else "auto")
        step = worker.optimized(ours.in_all, budget, options)
        step._engine = step._engine.under(replace(step._engine.settings, must_fit=False))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = trained(step, batch)
        told = [str(each.message) for each in caught if issubclass(each.category, tfmem.TfmemWarning)]
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE if not words else 0)
        assert [words in each for each in told] == [True] * bool(words), told
        assert bool(tfmem.report(step).splits) is not bool(words), tfmem.report(step)
        worker.both(hashlib.sha256(b"".join(value.tobytes() for value in ours.values())).hexdigest())


def pieces_stay_where_a_worker_cannot_plan_again(worker: Worker) -> None:
    """A bug after calls of which a peak exceeds a budget: no tensor moves any more, and pieces run as before."""

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError(168)

    budget, batch = int(SHARES[0] * peak(worker)), examples(worker)
    plain, ours = Net(worker.strategy), Net(worker.strategy)
    expected = trained(tf.function(plain.in_all), batch)
    step = worker.optimized(ours.in_all, budget)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(agreed_peaks, "replanned", fail)
        taking(patch, lambda _: 2 * budget if worker.index == 1 else 1)
        found = trained(step, batch)
    told = [str(each.message) for each in caught if issubclass(each.category, tfmem.TfmemWarning)]
    assert any("runs in pieces and without moves on all workers; /job:worker/task:1 cannot" in each for each in told), (
        told
    )
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    report = tfmem.report(step)
    assert report.decision == "split along the batch", report
    assert report.peak_predicted <= budget < report.peak_before, report
    worker.both(repr(divisions(step)))
    worker.both(hashlib.sha256(b"".join(value.tobytes() for value in ours.values())).hexdigest())


def pieces_are_stitched(worker: Worker) -> None:
    """Regions of the divided step run on both workers."""
    budget, batch = int(SHARES[0] * peak(worker)), examples(worker)
    plain, ours = Net(worker.strategy), Net(worker.strategy)
    expected = trained(tf.function(plain.in_all), batch)
    step = tfmem.optimize(
        tf.function(ours.in_all),
        passes=("recurrent", "fusion", "offload"),
        memory_budget=budget,
        cache_directory="",
        fusion=tfmem.FusionOptions(tune="off"),
    )
    found = [loss for _ in range(3) for loss in trained(step, batch)]
    np.testing.assert_allclose(found[:STEPS], expected, rtol=TOLERANCE, atol=TOLERANCE)
    report = tfmem.report(step)
    assert report.regions, report
    require_within(report, budget)
    require_asked(report, 0)
    worker.both(repr(divisions(step)))
    worker.both(hashlib.sha256(b"".join(value.tobytes() for value in ours.values())).hexdigest())


SPLITS = (equal_workers, one_worker_has_room, one_worker_may_not_be_split)
OTHER_SPLITS = (
    more_pieces_are_taken,
    fewer_pieces_are_taken,
    no_budget_is_the_users,
    no_pieces_are_small_enough,
    steps_have_other_ops,
    pieces_stay_where_a_worker_cannot_plan_again,
    pieces_are_stitched,
    a_worker_fails_to_split,
    a_worker_is_late_to_split,
)
