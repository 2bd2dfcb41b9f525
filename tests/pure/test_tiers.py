"""The short tests and the five fifths are all tests, and no test is in two fifths."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, settings

from tests.tiers import FIFTHS, Tier, examples, fifth_of, is_sampled

IDS = [f"tests/tf/test_soak.py::test_seeds[{number}]" for number in range(500)]
TAKEN_BY = [Tier.parse(f"{number}/{FIFTHS}") for number in range(1, FIFTHS + 1)]


@pytest.mark.parametrize("kind", [(True, False), (False, True), (True, True)], ids=["long", "examples", "both"])
def test_the_fifths_partition_the_long_tests(kind: tuple[bool, bool]) -> None:
    for test in IDS:
        assert sum(tier.takes(test, *kind) for tier in TAKEN_BY) == 1
        assert Tier.parse("all").takes(test, *kind)
        assert Tier.parse("only").takes(test, *kind)
    sizes = [sum(tier.takes(test, *kind) for test in IDS) for tier in TAKEN_BY]
    assert min(sizes) > len(IDS) / FIFTHS / 2  # none has most of the work


def test_a_fifth_is_the_same_on_every_machine() -> None:
    assert [fifth_of(test) for test in IDS[:6]] == [1, 1, 5, 4, 2, 3]


def test_short_tests_run_without_the_long_ones() -> None:
    short, everything = Tier.parse("none"), Tier.parse("all")
    for test in IDS:
        assert short.takes(test, False, False)
        assert short.takes(test, False, True)
        assert not short.takes(test, True, False)
        assert everything.takes(test, False, False)
        assert not any(tier.takes(test, False, False) for tier in TAKEN_BY)


def test_examples_are_all_tried_where_long_tests_run() -> None:
    assert Tier.parse("none").examples == 25
    assert {tier.examples for tier in (Tier.parse("all"), *TAKEN_BY)} == {100}


def test_no_example_has_a_deadline() -> None:
    """Hypothesis shrinks an example that misses its deadline: on a busy machine a slow one alone took 120 s."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_counts_are_scaled_and_never_none() -> None:
    of_a_hundred = settings().max_examples
    assert examples(400) == 4 * of_a_hundred
    assert examples(1) == 1


@pytest.mark.parametrize("one_in", [2, 3, 4])
def test_a_sample_has_each_value_of_each_parameter(one_in: int) -> None:
    cases = list(itertools.product(range(4), range(5)))
    chosen = [case for case in cases if is_sampled(case, one_in)]
    assert {first for first, _ in chosen} == set(range(4))
    assert {second for _, second in chosen} == set(range(5))
    assert len(chosen) == pytest.approx(len(cases) / one_in, abs=1)


@pytest.mark.parametrize("text", ["", "some", "0/5", "6/5", "1/4", "5"])
def test_another_word_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected one of none, all, only, 1/5, 2/5"):
        Tier.parse(text)
