"""Programs over as many axes as there can be, on the CPU: no axis is taken for another."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from custom_ops.errors import OpLibraryError, ProgramError
from custom_ops.expr.nodes import AxisTerm, Elementwise, Index, Input, Node, Position, Reduce
from custom_ops.expr.program import MOST_AXES, MOST_FACTOR, MOST_TERMS, Output, Program, Tensor
from custom_ops.expr.reference import run as reference
from custom_ops.expr.text import to_text
from tests.tf.tile_programs import Array, prepare, run
from tests.tiers import examples

PARTS = 2  # of which a position is the quotient and the remainder


def many_axes(count: int, order: Random) -> tuple[Program, list[Array]]:
    """For each axis a vector along it, its sum, and one of two numbers for each of its halves: sums of all sums, and
    each vector times that."""
    axes = order.sample(range(count), count)
    sizes = tuple(PARTS * order.randint(1, 3) for _ in range(count))
    nodes: list[Node] = []
    tensors: list[Array] = []
    kept: list[int] = []
    total = -1
    for axis in axes:
        for term in (AxisTerm(axis), AxisTerm(axis, 1, sizes[axis] // PARTS)):
            nodes.append(Input(len(tensors), (Index(terms=(term,)),)))
            tensors.append(np.array([order.randint(-9, 9) for _ in range(sizes[axis] // term.divisor)], np.int64))
        here = len(nodes)
        nodes += [Position("int64", axis), Elementwise("multiply", (here, here - 1))]
        nodes += [Elementwise("add", (here + 1, here - 2)), Reduce("sum", here + 2, (axis,))]
        kept.append(here + 2)
        if total >= 0:
            nodes.append(Elementwise("add", (total, here + 3)))
        total = len(nodes) - 1
    products = [len(nodes) + number for number in range(count)]
    nodes += [Elementwise("multiply", (place, total)) for place in kept]
    outputs = [Output(place, (axis,)) for place, axis in zip(products, axes, strict=True)]
    declared = tuple(Tensor("int64", 1) for _ in tensors)
    return Program(sizes, declared, tuple(nodes), (Output(total, ()), *outputs)), tensors


@given(st.integers(1, MOST_AXES), st.integers(0, 1 << 20))
@example(31, 0)
@example(32, 0)
@example(33, 0)
@example(MOST_AXES, 0)
@settings(max_examples=examples(30), derandomize=True)
def test_each_of_many_axes_is_itself(count: int, seed: int) -> None:
    program, tensors = many_axes(count, Random(seed))
    expected = reference(program, tensors)
    found = run(to_text(program), program.axes, tensors, *(("int64", each.shape) for each in expected))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_index_is_as_long_as_python_writes() -> None:
    """The largest numbers, and as many terms as there can be: what Python lets through is read here."""
    terms = (AxisTerm(0, MOST_FACTOR), AxisTerm(0, -MOST_FACTOR), AxisTerm(0, 1, MOST_FACTOR, MOST_FACTOR))
    terms += (AxisTerm(0, 1),) * (MOST_TERMS - len(terms))
    program = Program((1,), (Tensor("int64", 1),), (Input(0, (Index(0, terms),)),), (Output(0, (0,)),))
    x = np.array([7], np.int64)
    np.testing.assert_array_equal(run(to_text(program), [1], [x], ("int64", [1]))[0], x)


def test_one_axis_more_is_refused() -> None:
    program, tensors = many_axes(MOST_AXES, Random(0))
    with pytest.raises(ProgramError, match=f"{MOST_AXES + 1} axes; expected at most {MOST_AXES}"):
        many_axes(MOST_AXES + 1, Random(0))
    text = to_text(program).replace("axes ", "axes 2 ")
    with pytest.raises(OpLibraryError, match=r"expected at most .* numbers at line 2 .* in 'axes 2"):
        prepare(text, (2, *program.axes), [tensor.shape for tensor in tensors])
