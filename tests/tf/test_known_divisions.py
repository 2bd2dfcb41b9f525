"""A step that was divided along the batch, or whose loops run in pieces, runs so in a second process from its first
call on; where the file does not serve, the step is planned as if there were none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import tfmem
from graph_passes import splitting
from graph_passes.passes.split.plan import MOST_TRIALS
from graph_passes.passes.split.split_regions import BatchDivision
from graph_passes.report import Report
from tests.tf.loop_nets import TwoLoops
from tests.tf.memory_in_use import in_use
from tests.tf.test_known_moves import TRIED, altered
from tests.tf.test_split import images
from tests.tf.test_step_machine import step_in
from tfmem.steps import dividing, known_moves
from tfmem.steps.phases import Phase

CALLS = 40  # at most
MIB = 1 << 20
ELSEWHERE = 4 * MIB  # more in use than before, by far more than arguments may add


class Run(NamedTuple):
    """Training until the step is settled: losses, phases, the report, and how many divisions were planned."""

    losses: list[float]
    phases: set[Phase]
    report: Report
    trials: int

    @property
    def known(self) -> bool:
        """Whether it ran by a plan that was known."""
        return known_moves.NOTE in self.report.notes


@pytest.fixture(name="trained")
def fixture_trained(library: Any, tmp_path: Path, monkeypatch: Any) -> Callable[..., Run]:
    """Trains a step as a new process would: only what is on disk is known."""
    counted, base = list[int](), in_use()
    given = splitting.plan_step

    def counting(*args: Any, **how: Any) -> Any:
        counted.append(1)
        return given(*args, **how)

    monkeypatch.setattr(splitting, "plan_step", counting)

    def train(step: Any, arguments: Any, budget: int, **options: Any) -> Run:
        counted.clear()
        how = {"passes": ("offload",), "cache_directory": str(tmp_path), "memory_budget": base + budget}
        in_use()  # once what is unreachable is gone
        tf.random.set_seed(3)
        function = tfmem.optimize(tf.function(step), offload=tfmem.OffloadOptions(**options), **how)
        losses, phases = [], set[Phase]()
        for _ in range(CALLS):
            losses.append(float(function(*arguments)))
            phases.add(step_in(function).phase)
            if step_in(function).settled:
                break
            step_in(function).wait()
        assert step_in(function).settled
        return Run(losses, phases, tfmem.report(function), len(counted))

    return train


def not_taken(report: Report) -> list[str]:
    """Why a plan of an earlier process was not taken, in a word or two; that is said once."""
    said = ("in use", "cannot be divided", "names", "measurements", "budget", "moves cannot", "otherwise")
    notes = [note for note in report.notes if note.startswith(known_moves.NOT_TAKEN)]
    return [next(word for word in said if word in note) for note in notes]


def close(found: list[float], expected: list[float]) -> None:
    shared = min(len(found), len(expected))
    np.testing.assert_allclose(found[:shared], expected[:shared], rtol=1e-5)


def plain(step: Any, arguments: Any, count: int) -> list[float]:
    tf.random.set_seed(3)
    function = tf.function(step)
    return [float(function(*arguments)) for _ in range(count)]


class Normalised:
    """Two convolutions and a batch norm, which needs all examples: regions before it and behind it."""

    def __init__(self) -> None:
        shapes = [(3, 3, 2, 16), (3, 3, 16, 16), (16,), (16,), (16, 5)]
        self.variables = [
            tf.Variable(0.2 * tf.random.stateless_normal(shape, [place, 7])) for place, shape in enumerate(shapes)
        ]

    def step(self, x: Any, y: Any) -> Any:
        """Gradient descent."""
        first, second, scale, offset, head = self.variables
        with tf.GradientTape() as tape:
            h = tf.nn.conv2d(tf.nn.relu(tf.nn.conv2d(x, first, 1, "SAME")), second, 1, "SAME")
            mean, variance = tf.nn.moments(h, [0, 1, 2])
            h = tf.nn.relu(tf.nn.batch_normalization(h, mean, variance, offset, scale, 1e-3))
            logits = tf.reduce_mean(h, [1, 2]) @ head
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        for variable, gradient in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss


def noisy(step: Any) -> Any:
    """`step` with dropout: its masks are those of the whole batch, in the order of one stream."""
    return lambda x, y: step(tf.nn.dropout(x, 0.3, seed=5), y)


@pytest.mark.parametrize("wrapped", [lambda step: step, noisy], ids=["plain", "noisy"])
def test_another_process_divides_it_as_the_first_did(trained: Any, new_net: Any, wrapped: Any) -> None:
    def step() -> Any:
        return wrapped(new_net().step)

    first = trained(step(), images(64), 4 * MIB)
    assert first.report.splits
    assert not first.known
    assert TRIED & first.phases
    assert 0 < first.trials <= MOST_TRIALS
    second = trained(step(), images(64), 4 * MIB)
    assert second.known
    assert not TRIED & second.phases
    assert not second.trials
    assert second.report.splits == first.report.splits
    assert second.report.transfers == first.report.transfers
    assert second.report.peak_measured <= second.report.budget
    close(second.losses, plain(step(), images(64), len(second.losses)))


@pytest.mark.parametrize(("kind", "mib"), [("plain", 6), ("normalised", 16)])
def test_a_division_that_a_clock_chose_is_kept(
    trained: Any, new_net: Any, monkeypatch: Any, kind: str, mib: int
) -> None:
    """The second process neither divides nor measures the whole step."""

    def step() -> Any:
        return new_net().step if kind == "plain" else Normalised().step

    monkeypatch.setattr(dividing, "rate_of", lambda *_: 1e-9)
    monkeypatch.setattr(splitting, "CLEARLY", float("inf"))
    monkeypatch.setattr(dividing, "CLEARLY", float("inf"))
    monkeypatch.setattr(dividing, "FASTER", float("inf"))
    first = trained(step(), images(64), mib * MIB, split="faster")
    assert first.report.splits
    assert Phase.DIVIDING in first.phases
    second = trained(step(), images(64), mib * MIB, split="faster")
    assert second.known
    assert second.report.splits == first.report.splits
    assert not {Phase.DIVIDING, *TRIED} & second.phases
    close(second.losses, plain(step(), images(64), len(second.losses)))


def test_where_only_the_moves_do_not_serve_the_division_does(trained: Any, new_net: Any, monkeypatch: Any) -> None:
    """In another room the step is planned again, and adds its sums in the same order."""
    first = trained(new_net().step, images(64), 4 * MIB)
    altered(monkeypatch, lambda known: replace(known, in_use=known.in_use + ELSEWHERE))
    second = trained(new_net().step, images(64), 4 * MIB)
    assert not second.known
    assert not_taken(second.report) == ["in use"]
    assert second.trials == 1  # it meets the budget, so no other is planned
    assert second.report.splits == first.report.splits
    shared = min(len(first.losses), len(second.losses))
    assert second.losses[:shared] == first.losses[:shared]


def test_a_division_that_exceeds_the_budget_now_is_chosen_again(trained: Any, new_net: Any, monkeypatch: Any) -> None:
    first = trained(new_net().step, images(64), 4 * MIB)

    def change(known: known_moves.KnownMoves) -> known_moves.KnownMoves:
        assert known.division is not None
        first_op = known.division.parts[0][0][:1]  # one op in pieces: the others are over
        return replace(
            known, in_use=known.in_use + ELSEWHERE, division=replace(known.division, parts=((first_op, ()),))
        )

    altered(monkeypatch, change)
    second = trained(new_net().step, images(64), 4 * MIB)
    assert second.trials > 1
    assert second.report.splits == first.report.splits
    assert second.report.peak_measured <= second.report.budget


@pytest.mark.parametrize("more", [-1, 1])
def test_arguments_count_as_in_use_or_not(trained: Any, new_net: Any, monkeypatch: Any, more: int) -> None:
    """TensorFlow shares the memory of a NumPy array, where that is aligned."""
    arguments = images(64)  # the same for both, or they might differ by chance as well
    given = sum(each.numpy().nbytes for each in arguments)
    trained(new_net().step, arguments, 4 * MIB)
    altered(monkeypatch, lambda known: replace(known, in_use=max(0, known.in_use + more * given)))
    assert trained(new_net().step, arguments, 4 * MIB).known


def test_a_division_is_kept_for_its_budget_and_options(trained: Any, new_net: Any) -> None:
    trained(new_net().step, images(64), 4 * MIB)
    assert not trained(new_net().step, images(64), 4 * MIB + (1 << 16)).known
    assert not trained(new_net().step, images(62), 4 * MIB).known
    assert not trained(new_net().step, images(64), 4 * MIB, policy="hybrid").known
    with pytest.raises(tfmem.InfeasibleBudgetError):
        trained(new_net().step, images(64), 4 * MIB, split="never")
    assert trained(new_net().step, images(64), 4 * MIB).known


@pytest.mark.sampled(2)
@pytest.mark.parametrize("room", [0, ELSEWHERE], ids=["same room", "another room"])
@pytest.mark.parametrize("kind", ["unknown", "twice", "torn", "again", "behind", "batch", "count", "whole"])
def test_a_division_that_does_not_serve_is_not_taken(
    trained: Any, new_net: Any, monkeypatch: Any, kind: str, room: int
) -> None:
    """In another room the division alone would be taken."""
    first = trained(new_net().step, images(64), 4 * MIB)

    def change(known: known_moves.KnownMoves) -> known_moves.KnownMoves:
        division = known.division
        assert division is not None
        (members, more), *others = division.parts
        changed = {
            "unknown": replace(division, parts=(((*members, "elsewhere"), more), *others)),
            "twice": replace(division, parts=((members, more), *division.parts)),
            "torn": replace(division, parts=((members[:2] + members[-2:], more), *others)),  # a path leads out and in
            "again": replace(division, parts=((members, ("elsewhere",)), *others)),
            "behind": replace(division, parts=((members[:-2], members[-1:]), *others)),  # it makes nothing that is read
            "batch": replace(division, batch=63),
            "count": replace(division, count=division.count * 2),  # other names than those of the moves, or other bytes
            "whole": None,
        }
        return replace(known, division=changed[kind], in_use=known.in_use + room)

    altered(monkeypatch, change)
    second = trained(new_net().step, images(64), 4 * MIB)
    if kind != "count" or room:  # that one may serve: its numbers are as exact
        assert not second.known
        expected = {"whole": "measurements"}.get(kind, "cannot be divided")
        assert not_taken(second.report) == ["in use" if room else expected]
    assert second.report.splits
    assert second.report.peak_measured <= second.report.budget
    close(second.losses, first.losses)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"batch": 4, "count": 2},
        {"batch": 4, "count": 2, "parts": []},
        {"batch": 4, "count": 5, "parts": [[["x"], []]]},
        {"batch": 4, "count": 1, "parts": [[["x"], []]]},
        {"batch": 4.0, "count": 2, "parts": [[["x"], []]]},
        {"batch": 4, "count": True, "parts": [[["x"], []]]},
        {"batch": 4, "count": 2, "parts": [[[1], []]]},
        {"batch": 4, "count": 2, "parts": [[[], []]]},
        {"batch": 4, "count": 2, "parts": [["x"]]},
        {"batch": 4, "count": 2, "parts": 7},
        [],
    ],
    ids=str,
)
def test_a_file_of_other_content_is_no_division(found: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        BatchDivision.read(found)


@pytest.mark.long
def test_loops_in_pieces_are_known_too(trained: Any) -> None:
    x = tf.random.stateless_normal([2048, 64], [3, 4])
    first = trained(TwoLoops().step, (x,), 20 * MIB)
    assert any("piece" in each.tensor for each in first.report.transfers)
    second = trained(TwoLoops().step, (x,), 20 * MIB)
    assert second.known
    assert not TRIED & second.phases
    assert second.report.transfers == first.report.transfers
    assert second.losses == plain(TwoLoops().step, (x,), len(second.losses))
