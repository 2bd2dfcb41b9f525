"""While a first plan runs, a GPU's allocator has the budget alone; an allocator that grows is left alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from tests.tf.memory_in_use import in_use
from tfmem.runtime.device_memory import DeviceMemory
from tfmem.steps.job import Job
from tfmem.steps.measuring import short_of_memory
from tfmem.steps.phases import Event, Phase
from tfmem.steps.states import Observing, PlanSearch, Probed, Warming

MIB = 1 << 20


@dataclass(frozen=True)
class Chunks:
    """What `MemOpChunks` tells: (address, size, in use) of each chunk, and the bytes that the allocator may grow by."""

    rows: tuple[tuple[int, int, int], ...]
    growth: int = 0

    def chunks(self) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.constant(self.rows, tf.int64, (len(self.rows), 3)), tf.constant(self.growth, tf.int64)


@dataclass(frozen=True)
class Device:
    """A CPU that says whether it is a GPU."""

    is_gpu: bool
    name: str = "/device:CPU:0"


@pytest.fixture(name="taken")
def fixture_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the tensors that were made to take memory away."""
    made: list[int] = []
    empty = tf.raw_ops.Empty

    def counted(shape: Any, dtype: Any) -> tf.Tensor:
        made.append(shape[0] * shape[1])
        return empty(shape=shape, dtype=dtype)

    monkeypatch.setattr(tf.raw_ops, "Empty", counted)
    return made


def memory(library: Chunks, is_gpu: bool = True) -> DeviceMemory:
    return DeviceMemory(library, Device(is_gpu))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "budget", "expected"),
    [
        (((0, 10 * MIB, 1), (10 * MIB, 90 * MIB, 0)), 40 * MIB, [60 * MIB]),  # 30 MiB stay free
        (
            ((0, 10 * MIB, 0), (10 * MIB, 60 * MIB, 1), (70 * MIB, 30 * MIB, 0)),
            65 * MIB,
            [30 * MIB],
        ),  # the largest chunk
        (((0, 10 * MIB, 1), (10 * MIB, 90 * MIB, 0)), 100 * MIB, []),  # the budget is all that there is
        ((), 40 * MIB, []),  # the allocator tells nothing
    ],
)
def test_what_is_beyond_the_budget_is_taken(
    rows: tuple[tuple[int, int, int], ...], budget: int, expected: list[int], taken: list[int]
) -> None:
    with memory(Chunks(rows)).within(budget) as held:
        assert held is bool(expected)
    assert taken == expected


@pytest.mark.parametrize("left", ["growing", "cpu"])
def test_an_allocator_that_grows_and_a_cpu_are_left_alone(left: str, taken: list[int]) -> None:
    found = memory(Chunks(((0, 100 * MIB, 0),), MIB if left == "growing" else 0), is_gpu=left != "cpu")
    with found.within(40 * MIB) as held:
        assert not held
    assert not taken


def test_it_is_given_back_after_an_error(taken: list[int]) -> None:
    inside, before = 0, in_use()

    def fails() -> None:
        nonlocal inside
        with memory(Chunks(((0, 100 * MIB, 0),))).within(40 * MIB):
            inside = in_use()
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        fails()
    assert taken == [60 * MIB]
    assert inside >= before + 60 * MIB > in_use()


def probed(kind: type[Probed], roomy: bool = False) -> Probed:
    search = PlanSearch(
        timeline=mock.Mock(),
        first=mock.Mock(),
        firsts=iter(()),
        known=mock.Mock(),
        observed=False,
        dry_run=True,
        seen=None,
        roomy=roomy,
    )
    return kind(function=mock.Mock(), report=mock.Mock(), search=search, plan=mock.Mock())


@pytest.mark.parametrize(
    ("state", "held"), [(probed(Warming), True), (probed(Warming, roomy=True), False), (probed(Observing), False)]
)
def test_only_the_first_call_of_a_first_plan_has_the_budget_alone(state: Probed, held: bool) -> None:
    engine = mock.MagicMock()
    job = Job(engine, mock.Mock(), mock.Mock(), 40 * MIB, 0)
    with job.room(state):
        pass
    assert engine.memory.within.call_args_list == [mock.call(40 * MIB)] * held


def test_a_plan_that_runs_out_of_the_budgets_memory_runs_again_in_all_of_it() -> None:
    job, state = mock.Mock(), probed(Warming)
    job.engine.library.probes.return_value = []
    job.trace.step.first_update = 1
    error = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
    move = short_of_memory(job, state, error, held=True)
    assert (move.event, move.state.phase) == (Event.SHORT, Phase.WARMING)
    assert isinstance(move.state, Warming)
    assert move.state.search.roomy
    assert move.state.plan is state.plan
