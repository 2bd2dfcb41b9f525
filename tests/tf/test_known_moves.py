"""A step runs by the plan that an earlier process settled on: at once, to the bit as without, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tensorflow as tf

import tfmem
from graph_passes.report import Report
from tests.tf.memory_in_use import in_use
from tests.tf.optimized_runs import SPARE
from tests.tf.test_step_machine import step_in
from tfmem.steps import known_moves
from tfmem.steps.known_moves import KnownMoves
from tfmem.steps.phases import Phase

CALLS = 30  # at most
MOVE = {**dict.fromkeys(("tensor", "last", "copy_after", "release", "prefetch", "next"), "x"), "recomputed": False}
TRIED = {Phase.WARMING, Phase.OBSERVING, Phase.TRYING}


class Run(NamedTuple):
    """Training until the step is settled: losses, phases, and the report."""

    losses: list[float]
    phases: list[Phase]
    report: Report

    @property
    def known(self) -> bool:
        """Whether it ran by a plan that was known."""
        return known_moves.NOTE in self.report.notes


@pytest.fixture(name="trained")
def fixture_trained(new_net: Any, batch: Any, flow: Any, smallest: Any, tmp_path: Path) -> Callable[..., Run]:
    """Trains a new net as a new process would: only what is on disk is known."""
    in_use()
    budget = 4 * SPARE + smallest(lambda size: tfmem.optimize(tf.function(new_net().step), memory_budget=size)(*batch))

    def train(more: int = 0, wrapped: Callable[[Any], Any] = lambda net: net.step, **options: Any) -> Run:
        offload = tfmem.OffloadOptions(**{"split": "never", **options})
        how = {"passes": ("offload",), "cache_directory": str(tmp_path), "memory_budget": budget + more}
        in_use()
        tf.random.set_seed(3)
        function = tfmem.optimize(tf.function(wrapped(new_net())), offload=offload, **how)
        losses, phases = [], []
        for _ in range(CALLS):
            losses.append(float(function(*batch)))
            phases.append(step_in(function).phase)
            if step_in(function).settled:
                break
        assert step_in(function).settled
        return Run(losses, phases, tfmem.report(function))

    return train


def plain(step: Any, batch: Any, count: int) -> list[float]:
    tf.random.set_seed(3)
    function = tf.function(step)
    return [float(function(*batch)) for _ in range(count)]


def altered(monkeypatch: pytest.MonkeyPatch, change: Callable[[KnownMoves], KnownMoves]) -> None:
    """Another program changed the file."""
    read = KnownMoves.read
    monkeypatch.setattr(KnownMoves, "read", lambda found: change(read(found)))


def test_another_process_runs_the_plan_at_once(trained: Any, new_net: Any, batch: Any, flow: Any) -> None:
    first = trained()
    assert not first.known
    assert TRIED & set(first.phases)
    moved, second = flow.moved, trained()
    assert second.known
    assert not TRIED & set(second.phases)
    assert flow.moved - moved == len(second.losses) * second.report.bytes_out_predicted
    assert second.report.transfers == first.report.transfers
    assert second.report.peak_measured <= second.report.budget
    assert second.report.step_measured_ns == first.report.step_measured_ns
    assert second.losses == plain(new_net().step, batch, len(second.losses))


def test_random_streams_are_those_of_the_unmodified_step(trained: Any, new_net: Any, batch: Any) -> None:
    def noisy(net: Any) -> Any:
        return lambda x, y: net.step(tf.nn.dropout(x, 0.3, seed=5), y)

    trained(wrapped=noisy)
    second = trained(wrapped=noisy)
    assert second.known
    assert second.losses == plain(noisy(new_net()), batch, len(second.losses))


def test_what_a_plan_depends_on(trained: Any) -> None:
    trained()
    assert not trained(more=SPARE).known
    assert not trained(policy="hybrid").known
    held = tf.ones((1 << 18,))  # 1 MiB beside the step
    assert not trained(more=1 << 20).known
    del held
    assert trained().known


def test_a_plan_for_another_room_is_not_taken(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trained()
    altered(monkeypatch, lambda known: replace(known, in_use=known.in_use + (1 << 20)))
    assert not trained().known


@pytest.mark.parametrize("kind", ["unknown", "no name", "recomputed", "backwards", "twice", "nothing"])
def test_a_plan_that_does_not_serve_is_not_taken(
    trained: Any, new_net: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    how = {"policy": "autovm"}  # copies alone: of these some cannot be recomputed instead
    trained(**how)

    def change(known: KnownMoves) -> KnownMoves:
        move, *others = known.moves
        changed: dict[str, list[Any]] = {
            "unknown": [replace(move, last="elsewhere"), *others],
            "no name": [replace(move, last=["a list"]), *others],  # type: ignore[arg-type]
            "recomputed": [replace(each, recomputed=not each.recomputed) for each in known.moves],
            "backwards": [replace(move, release=move.next, prefetch=move.last), *others],
            "twice": [move, move, *others],
            "nothing": [],  # over the budget
        }
        return replace(known, moves=tuple(changed[kind]))

    altered(monkeypatch, change)
    second = trained(**how)
    assert not second.known
    assert second.losses == plain(new_net().step, batch, len(second.losses))


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"moves": [], "in_use": -1},
        {"moves": [], "in_use": True},
        {"moves": [], "in_use": 1, "step_ns": 0.5},
        {"moves": [], "in_use": 1, "least": "fast"},
        {"moves": [{"tensor": "x"}], "in_use": 1},
        {"moves": [{**MOVE, "tensor": 5}], "in_use": 1},
        {"moves": [{**MOVE, "last": ["a list"]}], "in_use": 1},
        {"moves": [{**MOVE, "recomputed": None}], "in_use": 1},
        {"moves": [], "in_use": 1, "least": float("nan")},
        {"moves": [], "in_use": 1, "least": -1.0},
        {"moves": [], "in_use": 1, "more": 1},
    ],
    ids=str,
)
def test_a_file_of_other_content_is_no_plan(found: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        KnownMoves.read(found)


def test_a_file_of_a_plan_is_one() -> None:
    assert KnownMoves.read({"moves": [MOVE], "in_use": 1, "least": 0.5}).moves[0].tensor == "x"
