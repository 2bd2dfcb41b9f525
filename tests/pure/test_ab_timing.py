"""Which of two runs is the faster one, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tfmem.timing.ab_timing import LEAST, MOST, ROUNDS, Slices, Times, Turns


@dataclass
class Clock:
    """Time passes in runs alone."""

    now: float = 0.0
    ran: list[str] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def run(self, name: str, *seconds: float) -> Callable[[], object]:
        """Takes these seconds in its first calls, and the last ones in all others."""
        left = list(seconds)

        def step() -> None:
            self.ran.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return step


def test_the_least_time_counts_and_the_first_run_does_not() -> None:
    clock = Clock()
    given = clock.run("given", 9.0, 0.02, 0.02, 0.03, 0.02)
    stitched = clock.run("stitched", 0.001, 0.5, 0.016, 0.9, 0.016)
    times = Slices(clock).go_on(given, stitched, 60.0)
    assert times == Times(pytest.approx(0.02), pytest.approx(0.016))
    assert times.is_faster
    assert clock.ran.count("given") == clock.ran.count("stitched") == LEAST * ROUNDS + 2


def test_a_large_difference_is_believed_early() -> None:
    clock = Clock()
    times = Slices(clock).go_on(clock.run("given", 0.01), clock.run("stitched", 0.04), 60.0)
    assert times is not None
    assert not times.is_faster
    assert clock.ran.count("given") < ROUNDS


def test_of_two_that_take_as_long_the_given_one_runs() -> None:
    """The least times say that stitching is faster, by less than they differ between two halves of the rounds."""
    even, odd = [0.0100] * LEAST + [0.0104] * LEAST, [0.0099] * LEAST + [0.0104] * LEAST
    clock = Clock()
    stitched = clock.run("s", *[0.01] * 2, *odd * ROUNDS)
    times = Slices(clock).go_on(clock.run("g", *[0.01] * 2, *even * ROUNDS), stitched, 60.0)
    assert times is not None
    assert times.stitched < times.given
    assert times.noise == pytest.approx(0.0005)
    assert not times.is_faster
    assert not Times(0.01, 0.01).is_faster
    assert Times(0.01, 0.0098, noise=0.0001).is_faster


def test_short_steps_run_several_times_in_a_row() -> None:
    clock = Clock()
    assert Slices(clock).go_on(clock.run("g", 1e-5), clock.run("s", 0.9e-5), 60.0) is not None
    assert "".join(clock.ran).count("g" * MOST + "s" * MOST) == ROUNDS


def test_a_run_behind_the_other_step_does_not_decide() -> None:
    """The stitched step captures its library calls again if other tensors lay in its memory meanwhile, as they do not
    while one step trains."""
    clock = Clock()
    given = clock.run("given", 0.03)

    def stitched() -> None:
        clock.now += 0.04 if clock.ran[-1] == "given" else 0.01
        clock.ran.append("stitched")

    times = Slices(clock).go_on(given, stitched, 1.0)
    assert times == Times(pytest.approx(0.03), pytest.approx(0.01))
    assert times.is_faster


def test_a_slice_ends_in_time_and_the_next_one_goes_on() -> None:
    clock = Clock()
    timing, given, stitched = Slices(clock), clock.run("given", 0.2), clock.run("stitched", 0.19)
    slices = 0
    while (times := timing.go_on(given, stitched, 1.0)) is None:
        slices += 1
        assert clock.now <= slices * 1.0 + 0.8  # at most the first two rounds end late
    assert slices > 5
    assert times.stitched == pytest.approx(0.19)


def test_a_step_longer_than_a_slice_has_one_round_in_each() -> None:
    clock = Clock()
    timing, given, stitched = Slices(clock), clock.run("given", 1.5), clock.run("stitched", 1.4)
    slices = 1
    while (times := timing.go_on(given, stitched, 1.0)) is None:
        assert clock.ran.count("given") == slices + 1  # the first slice has two, which do not count
        slices += 1
    assert times == Times(pytest.approx(1.5), pytest.approx(1.4))


def test_calls_in_turn() -> None:
    """Both run equally often, in pairs whose order changes; the first of each makes kernels and does not count."""
    turns, ran, times = Turns(), [], None
    takes = {False: iter([9.0, *[0.02] * ROUNDS]), True: iter([0.001, 0.9, *[0.016] * (ROUNDS - 1)])}
    while times is None:
        ran.append(turns.stitched)
        times = turns.add(next(takes[turns.stitched]))
    assert ran[:6] == [False, True, True, False, False, True]
    assert ran.count(True) == ran.count(False) == ROUNDS + 1
    assert times == Times(0.02, 0.016)
