"""What kernels load, draw and store several elements at a time, and along which axis."""

from __future__ import annotations

import pytest

from custom_ops.expr.nodes import AxisTerm, Index, Random
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.kernel import make
from custom_ops.fusion.codegen.plan.addresses import in_step, vector_width
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern

SUM = "program 1\naxes 0 0\ntensor float32 2\ninput 0 {}\nreduce sum 0 1\noutput 1 0\n"


@pytest.mark.parametrize(
    ("index", "shape", "width"),
    [
        ("a0 a1", (None, 1000), 4),
        ("a0 a1", (None, 1002), 2),
        ("a0 a1", (None, 1001), 1),
        ("a0 a1", (None, None), 1),
        ("a1 a0", (1000, None), 1),  # nothing lies along what is reduced
    ],
)
def test_a_reduction_loads_as_many_neighbours_as_fit_its_rows(
    index: str, shape: tuple[int | None, ...], width: int
) -> None:
    pattern = Pattern.of(from_text(SUM.format(index)), [shape])
    assert vector_width(pattern, pattern.roots[:1], (0, 1), 4) == width


@pytest.mark.parametrize(
    ("offset", "factors", "expected"),
    [
        (0, (20, 1), True),
        (8, (20, 1), True),
        (0, (18, 1), False),  # the second row begins within a group
        (2, (20, 1), False),
        (0, (20, 2), False),  # every second number
        (0, (1, 20), False),  # neighbours are 20 apart
    ],
)
def test_random_numbers_of_one_group_are_drawn_at_once(offset: int, factors: tuple[int, int], expected: bool) -> None:
    """Four neighbours along axis 1."""
    terms = tuple(AxisTerm(axis, factor) for axis, factor in enumerate(factors))
    assert in_step(Random("float32", 0, 1, Index(offset, terms)), 1, 4) == expected


@pytest.mark.parametrize(("index", "last"), [("a0 a1", 1), ("a1 a0", 0)])
def test_loops_end_with_the_axis_along_which_tensors_lie(index: str, last: int) -> None:
    pattern = Pattern.of(from_text(SUM.format(index)))
    assert pattern.in_order((0, 1)) == (1 - last, last)


def test_whole_vectors_are_loaded_without_a_check() -> None:
    """Vectors of four leave no rest along an axis of 8192 elements, a known size."""

    def text(size: int) -> str:
        program = from_text(f"program 1\naxes {size}\ntensor float32 1\ninput 0 a0\nexp 0\noutput 1 0\n")
        return make(Pattern.of(program, [(9000,)]), PatternConfiguration("output_0[GRID_4-CTA_64];", 64, 4)).source.text

    assert "load<4>(tensor_0 + begin);" in text(8192)
    assert "load<4>(tensor_0 + begin, size - i);" in text(8191)
