"""One of two workers of a MultiWorkerMirroredStrategy on this machine; says "equal" when all was well.

Called with cases, the worker's number, a directory for spill files and the ports of both workers. A worker that hangs
prints its stacks and ends.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfmem
from tests.tf.in_replicas import AMPLE, BATCH, MIB, Training, optimized
from tfmem.api import make_engine
from tfmem.frontends.function import OptimizedFunction
from tfmem.runtime.workers import Board, Workers

LIMIT = 100  # seconds of a worker
STAYS = 5.0  # seconds
BOUND = 60.0  # seconds until TensorFlow has noticed that a worker is gone


@dataclass
class Worker:
    """This one.

    Attributes:
        index: its number.
        folder: where its spill files go.
        strategy: of both workers.
        board: where both write.
        compared: how many times both compared their weights.
    """

    index: int
    folder: str
    strategy: Any
    board: Board
    compared: int = 0
    scarce: int = field(init=False)

    def __post_init__(self) -> None:
        training = Training(self.strategy)
        step = optimized(training.in_all, AMPLE)
        training.losses(step)
        report = tfmem.report(step)
        assert report.decision.startswith("unchanged: fits"), report
        self.scarce = round(0.8 * report.peak_before)

    def optimized(self, function: Any, budget: int | None, **changes: Any) -> OptimizedFunction:
        """What `tfmem.optimize` gives, with other `Workers`."""
        spill = tfmem.OffloadOptions(spill_directory=self.folder)
        engine = make_engine(tfmem.Options(memory_budget=budget, cache_directory="", offload=spill), called=True)
        return OptimizedFunction(tf.function(function), replace(engine, workers=replace(engine.workers, **changes)))

    def keys(self) -> int:
        """How many instance keys of collectives this worker drew: workers that drew unequal numbers never meet."""
        tables = self.strategy.extended._collective_keys._instance_key_table.values()
        return sum(key for table in tables for key in table.values())

    def both(self, value: str) -> None:
        """That both workers have the same value."""
        self.compared += 1
        key = f"test/{self.compared}"
        self.board.put(f"{key}{self.board.task}", value)
        assert {self.board.get(f"{key}{task}", time.monotonic() + BOUND) for task in self.board.tasks} == {value}

    def trains(self, budget: int | None, moves: bool, warned: str = "", **changes: Any) -> OptimizedFunction:
        """That losses, weights and keys are those of plain TensorFlow and those of the other worker."""
        plain, ours = Training(self.strategy), Training(self.strategy)
        began = self.keys()
        expected = plain.losses()
        between = self.keys()
        step = self.optimized(ours.in_all, budget, **changes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert ours.losses(step) == expected
        assert self.keys() - between == between - began > 0, "a deferred capture was not read once a call"
        told = [str(each.message) for each in caught if issubclass(each.category, tfmem.TfmemWarning)]
        assert (len(told) == 1 and warned in told[0]) if warned else not told, told
        report = tfmem.report(step)
        assert (report.decision == "moved") == moves == bool(report.transfers), report
        assert not warned or any(warned in note for note in report.notes), report.notes
        assert digest(ours) == digest(plain)
        self.both(digest(ours))
        return step


def digest(training: Training) -> str:
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in training.weights)).hexdigest()


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
        worker.trains(worker.scarce, moves=False, warned="/job:worker/task:1 said nothing", patience=2.0)
    else:
        ours = Training(worker.strategy)
        Training(worker.strategy).losses()
        ours.losses()
        worker.both(digest(ours))


def models_of_tf_keras_train(worker: Worker) -> None:
    results = [fitted(worker, None)]
    ample = fitted(worker, AMPLE)
    results += [ample, fitted(worker, round(0.9 * tfmem.report(ample[0]).peak_before))]
    for model, found in results[1:]:
        tf.nest.map_structure(np.testing.assert_array_equal, found, results[0][1])
        assert (tfmem.report(model).decision == "moved") == (model is results[2][0]), tfmem.report(model)
    worker.both(hashlib.sha256(repr(results[2][1][0]).encode()).hexdigest())


class Kill(tf_keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the process in the middle of an epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()


def a_model_is_killed(worker: Worker) -> None:
    """Worker 1 ends in its third epoch; `a_model_goes_on` then trains from where the second ended."""
    budget = round(0.9 * tfmem.report(fitted(worker, AMPLE)[0]).peak_before)
    last = [Kill()] if worker.index == 1 else []
    survives(lambda: fitted(worker, budget, [backup(worker), *last], epochs=1000))


def a_model_goes_on(worker: Worker) -> None:
    """Losses and weights are those of training without a pause."""
    _, (expected, weights) = fitted(worker, None, epochs=6)
    budget = round(0.9 * tfmem.report(fitted(worker, AMPLE)[0]).peak_before)
    model, (history, found) = fitted(worker, budget, [backup(worker)], epochs=6)
    assert tfmem.report(model).decision == "moved"
    done = 6 - len(history["loss"])
    assert done >= 2, history
    tf.nest.map_structure(
        np.testing.assert_array_equal, history, {name: all_[done:] for name, all_ in expected.items()}
    )
    tf.nest.map_structure(np.testing.assert_array_equal, found, weights)


def backup(worker: Worker) -> Any:
    return tf_keras.callbacks.BackupAndRestore(f"{worker.folder}-backup")


def fitted(worker: Worker, budget: int | None, callbacks: Sequence[Any] = (), epochs: int = 3) -> tuple[Any, Any]:
    tf_keras.utils.set_random_seed(1)
    with worker.strategy.scope():
        parts: list[Any] = [tf_keras.Input((128,))]
        for _ in range(5):
            parts += [tf_keras.layers.Dense(256), tf_keras.layers.Activation("gelu")]
        model = tf_keras.Sequential([*parts, tf_keras.layers.Dense(7)])
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf_keras.optimizers.Adam(), loss, metrics=["accuracy"])
    if budget is not None:
        tfmem.optimize(model, memory_budget=budget)
    rows = tf.data.Dataset.from_tensor_slices((BATCH, np.arange(len(BATCH)) % 7)).batch(1024)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    history = model.fit(rows.with_options(options), epochs=epochs, verbose=0, callbacks=list(callbacks)).history
    return model, (history, model.get_weights())


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
    began_at = time.monotonic()
    survives(lambda: step(tf.constant(BATCH)))
    assert time.monotonic() - began_at < STAYS
    if worker.index == 1:
        time.sleep(2 * STAYS)  # it lives on, so that only its report can have told the other
    assert worker.keys() - began == a_call, "the step ran again"
    assert digest(training) == before


def survives(run: Callable[[], Any]) -> None:
    began = time.monotonic()
    with pytest.raises(tf.errors.OpError) as caught:
        run()
    assert time.monotonic() - began < BOUND
    print(type(caught.value).__name__, f"{time.monotonic() - began:.1f} s", caught.value.message[-600:])


AGREEING = (
    tensors_move,
    plans_differ,
    a_worker_starts_late,
    a_budget_is_infeasible,
    a_host_takes_too_little,
    versions_differ,
    a_worker_has_no_budget,
    a_worker_is_plain,
)
ALONE = (
    models_of_tf_keras_train,
    a_model_is_killed,
    a_model_goes_on,
    the_disk_of_a_worker_is_full,
    worker_0_is_killed_in_a_step,
    worker_1_is_killed_in_a_step,
    worker_1_is_killed_before_it_agrees,
)
CASES = {"agreeing": AGREEING, **{case.__name__: (case,) for case in ALONE}}


def main(cases: str, index: str, folder: str, *ports: str) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    workers = [f"localhost:{port}" for port in ports]
    task = {"type": "worker", "index": int(index)}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    assert Workers().board() is None
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == len(workers)
    board = Workers().board()
    assert board is not None
    worker = Worker(int(index), folder, strategy, board)
    for case in CASES[cases]:
        print(case.__name__, flush=True)
        case(worker)
    print("equal", flush=True)
    if "killed" in cases or "full" in cases:
        os._exit(0)  # TensorFlow ends a process whose cluster has failed with an error


if __name__ == "__main__":
    main(*sys.argv[1:])
