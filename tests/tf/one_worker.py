"""One of two workers of a MultiWorkerMirroredStrategy: what its cases ask of it."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

import pytest
import tensorflow as tf

import tfmem
from tests.tf.in_replicas import AMPLE, Training, optimized
from tfmem.api import make_engine
from tfmem.frontends.function import OptimizedFunction
from tfmem.runtime.measured_call import Meter
from tfmem.runtime.workers import Board

BOUND = 60.0  # seconds until TensorFlow has noticed that a worker is gone
PATIENCE = 2.0  # seconds that a worker waits in vain


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

    def optimized(
        self, function: Any, budget: int | None, offload: tfmem.OffloadOptions | None = None, **changes: Any
    ) -> OptimizedFunction:
        """What `tfmem.optimize` gives, with other `Workers`."""
        spill = replace(offload or tfmem.OffloadOptions(), spill_directory=self.folder)
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


def until(holds: Callable[[], bool]) -> None:
    """Waits for what the other worker does."""
    end = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def gives_up(worker: Worker, patch: pytest.MonkeyPatch, module: Any, at: int) -> Callable[[], None]:
    """Makes worker 0 wait in vain in the exchange of a number of `module`; what worker 1 calls before to be late."""
    exchange, gave_up, numbers = module.exchange, Path(worker.folder, "gave up"), count()

    def hurried(board: Any, workers: Any, *given: Any) -> Any:
        hurries = next(numbers) == at and worker.index == 0
        found = exchange(board, replace(workers, patience=PATIENCE if hurries else BOUND), *given)
        if hurries:
            gave_up.touch()
        return found

    def pause() -> None:
        if worker.index == 1:
            until(gave_up.exists)
            gave_up.unlink()

    patch.setattr(module, "exchange", hurried)
    return pause


def taking(patch: pytest.MonkeyPatch, peaks: Callable[[int], int]) -> None:
    """`peaks` gives the bytes that the allocator shows of each call that is watched, by its number."""
    watched, calls = Meter.watched_on, count()

    def fake(meter: Meter, devices: Any, function: Any, waits: Any) -> Any:
        result, found = watched(meter, devices, function, waits)
        return result, None if found is None else (peaks(next(calls)),)

    patch.setattr(Meter, "watched_on", fake)


def tells(worker: Worker) -> None:
    """Worker 0 tells that it raised; worker 1 lives on until then, so that only its report can have told the other."""
    told = Path(worker.folder, "told")
    if worker.index == 0:
        told.touch()
    else:
        until(told.exists)
        told.unlink()


def survives(run: Callable[[], Any]) -> None:
    began = time.monotonic()
    with pytest.raises(tf.errors.OpError) as caught:
        run()
    assert time.monotonic() - began < BOUND
    print(type(caught.value).__name__, f"{time.monotonic() - began:.1f} s", caught.value.message[-600:])
