"""Kernels are ranked in other processes as in this one, each pattern once."""

from __future__ import annotations

from typing import Any

from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.ranking import Ranking, ranked
from custom_ops.jit.compilers import Compilers
from tests.fusion_programs import SOFTMAX

SHAPES = ((64, 200),)


def test_another_process_ranks_the_same_once() -> None:
    pattern, compilers = Pattern.of(from_text(SOFTMAX), SHAPES), Compilers(1)
    asked: list[Any] = []

    def run(function: Any, *arguments: Any) -> Any:
        asked.append(function)
        return compilers.run(function, *arguments)

    expected = ranked(pattern, SHAPES, 132)
    ranking = Ranking(run)
    assert len(expected) > 10
    assert ranking(pattern, SHAPES, 132) == expected == Ranking()(pattern, SHAPES, 132)
    assert ranking(Pattern.of(from_text(SOFTMAX), SHAPES), SHAPES, 132) == expected
    assert asked == [ranked]
    assert ranking(pattern, SHAPES, 2) != expected
