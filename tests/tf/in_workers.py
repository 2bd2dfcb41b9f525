"""One of two workers of a MultiWorkerMirroredStrategy on this machine; says "equal" when all was well.

A worker that hangs prints its stacks and ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import pytest
import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

import tfmem
from tests.tf.in_replicas import AMPLE, BATCH, MIB, Training
from tests.tf.in_workers_of_keras import (
    a_model_goes_on,
    a_model_is_killed,
    a_model_is_stitched,
    models_of_tf_keras_train,
    plans_of_models_differ,
)
from tests.tf.in_workers_over_budget import OVER_BUDGET
from tests.tf.in_workers_split_models import MODELS
from tests.tf.in_workers_splits import OTHER_SPLITS, SPLITS
from tests.tf.in_workers_stitched import (
    LEFT,
    NO_ROOM,
    STITCHED,
    kernels_differ,
    one_worker_stitches,
    regions_beside_the_moves_of_a_worker,
)
from tests.tf.in_workers_trials import TRIALS, a_trial_of_a_worker_fails, plans_are_tried_on_both
from tests.tf.one_worker import Worker, digest, survives, tells
from tests.tf.python_server import Ended, forked
from tfmem.runtime.workers import Workers

LIMIT = 400  # seconds of a case, beside others that keep the machine busy; what takes longer hangs


def tensors_move(worker: Worker) -> None:
    worker.trains(worker.scarce, moves=True)
    worker.trains(AMPLE, moves=False)


def plans_differ(worker: Worker) -> None:
    worker.trains((AMPLE, worker.scarce)[worker.index], moves=worker.index == 1)


def a_worker_starts_late(worker: Worker) -> None:
    if worker.index == 1:
        time.sleep(3)
    worker.trains(worker.scarce, moves=True)


def a_budget_is_infeasible(worker: Worker) -> None:
    training = Training(worker.strategy)
    before = digest(training)
    step = worker.optimized(training.in_all, (worker.scarce, MIB)[worker.index])
    with pytest.raises(tfmem.InfeasibleBudgetError, match=r"^/job:worker/task:1 .*none of the workers") as caught:
        step(tf.constant(BATCH))
    assert caught.value.smallest_budget > MIB
    assert digest(training) == before
    worker.both(str(caught.value))


def a_host_takes_too_little(worker: Worker) -> None:
    training = Training(worker.strategy)
    bounded = tfmem.OffloadOptions(spill_budget=1) if worker.index == 0 else tfmem.OffloadOptions()
    options = tfmem.Options(memory_budget=worker.scarce, cache_directory="", offload=bounded)
    with pytest.raises(tfmem.HostMemoryError, match=r"^/job:worker/task:0 .*spill_budget") as caught:
        tfmem.optimize(tf.function(training.in_all), options=options)(tf.constant(BATCH))
    worker.both(str(caught.value))


def workers_meet_in_a_branch(worker: Worker) -> None:
    """Such a branch is an op of the plan, and has its turn among the collectives of the step."""

    def branching(training: Training) -> Any:
        def gradients(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = training.loss(x)
            return loss, tape.gradient(loss, training.weights)

        def step(x: Any) -> Any:
            losses, found = training.strategy.run(gradients, (x,))
            loss = training.strategy.reduce("SUM", losses, axis=None)
            tf.cond(tf.math.is_finite(loss), lambda: training.strategy.run(training.apply, (found,)), lambda: None)
            return training.strategy.reduce("MEAN", losses, axis=None)

        return step

    plain, fitting, moving = (Training(worker.strategy) for _ in range(3))
    expected = plain.losses(tf.function(branching(plain)))
    step = worker.optimized(branching(fitting), AMPLE)
    assert fitting.losses(step) == expected
    step = worker.optimized(branching(moving), round(0.9 * tfmem.report(step).peak_before))
    assert moving.losses(step) == expected
    assert tfmem.report(step).decision == "moved", tfmem.report(step)
    for each in (fitting, moving):
        assert digest(each) == digest(plain)
    worker.both(digest(moving))


def versions_differ(worker: Worker) -> None:
    version = ("tfmem 7", "tfmem 8")[worker.index]
    worker.trains(worker.scarce, moves=False, warned="/job:worker/task:1 has tfmem 8", version=version)


def a_worker_has_no_budget(worker: Worker) -> None:
    if worker.index == 0:
        worker.trains(worker.scarce, moves=False, warned="/job:worker/task:1 has no budget")
    else:
        worker.trains(None, moves=False)


def a_worker_is_plain(worker: Worker) -> None:
    """The last case: workers that optimised a step of a name unequally often have nothing to agree on."""
    if worker.index == 0:
        worker.trains(worker.scarce, moves=False, warned="/job:worker/task:1 published nothing", patience=2.0)
    else:
        ours = Training(worker.strategy)
        Training(worker.strategy).losses()
        ours.losses()
        worker.both(digest(ours))


def worker_1_is_killed_in_a_step(worker: Worker) -> None:
    killed(worker, 1)


def worker_0_is_killed_in_a_step(worker: Worker) -> None:
    killed(worker, 0)


def killed(worker: Worker, victim: int) -> None:
    training = Training(worker.strategy)
    step = worker.optimized(training.in_all, worker.scarce)
    training.losses(step)
    assert tfmem.report(step).decision == "moved"
    if worker.index == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    survives(lambda: [training.losses(step) for _ in range(10_000)])


def worker_1_is_killed_before_it_agrees(worker: Worker) -> None:
    training = Training(worker.strategy)
    if worker.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    survives(lambda: worker.optimized(training.in_all, worker.scarce)(tf.constant(BATCH)))


def the_disk_of_a_worker_is_full(worker: Worker) -> None:
    """The error of one ends the steps of both; none runs again."""
    training = Training(worker.strategy)
    step = worker.optimized(training.in_all, worker.scarce)
    training.losses(step)
    assert tfmem.report(step).decision == "moved"
    began = worker.keys()
    step(tf.constant(BATCH))
    a_call, began, before = worker.keys() - began, worker.keys(), digest(training)
    if worker.index == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    survives(lambda: step(tf.constant(BATCH)))
    tells(worker)
    assert worker.keys() - began == a_call, "the step ran again"
    assert digest(training) == before


AGREEING = (tensors_move, plans_differ, a_budget_is_infeasible, one_worker_stitches, a_worker_is_plain)
MORE_AGREEING = (
    a_worker_starts_late,
    a_host_takes_too_little,
    workers_meet_in_a_branch,
    versions_differ,
    kernels_differ,
    plans_are_tried_on_both,
    regions_beside_the_moves_of_a_worker,
    a_worker_has_no_budget,
)
ALONE = (
    models_of_tf_keras_train,
    plans_of_models_differ,
    a_model_is_killed,
    a_model_goes_on,
    the_disk_of_a_worker_is_full,
    a_trial_of_a_worker_fails,
    worker_0_is_killed_in_a_step,
    worker_1_is_killed_in_a_step,
    worker_1_is_killed_before_it_agrees,
)
TWO_DEVICES = (tensors_move, plans_differ, a_budget_is_infeasible, a_host_takes_too_little, workers_meet_in_a_branch)
CASES = {
    "agreeing": AGREEING,
    "more_agreeing": MORE_AGREEING,
    "over_budget": OVER_BUDGET,
    "stitched": (*STITCHED, a_model_is_stitched),
    "trials": TRIALS,
    "splits": SPLITS,
    "other_splits": OTHER_SPLITS,
    "models_in_pieces": MODELS,
    "two_devices_in_pieces": SPLITS[:2],
    "regions_are_left": LEFT,
    "regions_have_no_room": NO_ROOM,
    "two_devices": TWO_DEVICES,
    **{case.__name__: (case,) for case in ALONE},
}


class TwoDevices(CollectiveAllReduceExtended):  # type: ignore[misc]
    """Two devices of a worker's CPU. TensorFlow itself takes several only if they are GPUs."""

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:CPU:{number}" for number in range(2)), "CPU"


def of_two_devices() -> Any:
    """A `MultiWorkerMirroredStrategy` with two devices for each worker."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = object.__new__(tf.distribute.MultiWorkerMirroredStrategy)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    options = tf.distribute.experimental.CommunicationOptions()
    extended = TwoDevices(strategy, cluster_resolver=resolver, communication_options=options)
    tf.distribute.Strategy.__init__(strategy, extended)
    return strategy


def main(cases: str, index: str, folder: str, *ports: str) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)  # what comes before the first
    workers = [f"localhost:{port}" for port in ports]
    task = {"type": "worker", "index": int(index)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    assert Workers().board() is None
    strategy = of_two_devices() if cases.startswith("two_devices") else tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(workers) * (2 if cases.startswith("two_devices") else 1)
    board = Workers().board()
    assert board is not None
    worker = Worker(int(index), folder, strategy, board)
    for case in CASES[cases]:
        print(case.__name__, flush=True)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        case(worker)
    faulthandler.dump_traceback_later(LIMIT, exit=True)  # what comes after the last
    print("equal", flush=True)
    if any(word in cases for word in ("killed", "full", "fails")):
        os._exit(0)  # TensorFlow ends a process whose cluster has failed with an error


def both(cases: str, folder: str, ports: Sequence[str]) -> list[Ended]:
    """Both workers, each in a process; `ports` are those that both listen to."""
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    return forked(*(partial(main, cases, str(index), folder, *ports) for index in range(len(ports))))
