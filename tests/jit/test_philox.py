"""Random numbers in kernels, on the CPU: those of the definition to the bit, however many a thread draws at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from custom_ops.expr import reference
from custom_ops.expr.program import Program
from custom_ops.expr.reference import numpy_dtype
from custom_ops.expr.table_entry import FLOATS, INTEGERS
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.space import RowLayout, kernels
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import Module
from tests.fusion_kernels import Case, compare, normal, run, varied

pytest_plugins = ("tests.fusion_device",)

# The counter's lower half overflows within the tensor.
STATE = [np.array([2**63 + 5], np.uint64), np.array([2**64 - 3, 2**32 - 1], np.uint64)]
FORMS = {
    "rows": "a0 a1|{}*a0+a1",
    "transposed": "a0 a1|a0+37*a1",
    "offset": "a0 a1|3+{}*a0+a1",
    "reversed": "a0 a1|{}*a0+-1*a1+{}",
    "one word": "a0 a1|4*a1+8*a0",
}


def drawn(dtype: str, form: str, columns: int) -> Program:
    """A tensor of `[37, columns]`, times 1, beside numbers; integers are drawn next to it."""
    read, number = FORMS[form].format(columns, columns - 1).split("|")
    text = f"program 1\naxes 37 {columns}\ntensor {dtype} 2\ntensor uint64 1\ntensor uint64 1\n"
    text += f"input 0 {read}\nrandom {dtype} 1 2 {number}\nadd 0 1\nreduce max 1 1\n"
    return from_text(text + "output 2 0 1\noutput 1 0 1\noutput 3 0\n")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_numbers_to_the_bit(device: DeviceContext, dtype: str) -> None:
    cases = []
    for form in FORMS:
        for columns in (32, 33):
            program = drawn(dtype, form, columns)
            tensors: list[Any] = [np.zeros((37, columns)).astype(numpy_dtype(dtype)), *STATE]
            found = varied(Pattern.of(program, [t.shape for t in tensors]), [t.shape for t in tensors], 4)
            chosen = [kernel.plan.configuration for kernel in found]
            cases += [Case(program, tensors, each.template, 64, each.vector, 0.0) for each in chosen]
    made = compare(device, cases)
    assert any("drawn<" in kernel.source.text and ", 4>(" in kernel.source.text for kernel in made)


def test_a_thread_draws_a_group_for_neighbours_alone() -> None:
    """A group serves as many neighbours as it has numbers, where they begin at a multiple of these."""
    for form, width in (("rows", 4), ("transposed", 0), ("offset", 0), ("reversed", 0), ("one word", 0)):
        program = drawn("float32", form, 32)
        shapes = [(37, 32), (1,), (2,)]
        texts = [kernel.source.text for kernel in varied(Pattern.of(program, shapes), shapes)]
        shared = [text for text in texts if "drawn<float, 4>(" in text]
        assert bool(shared) == bool(width), form


# A layer whose features are dropped before it, and its results behind it.
LAYER = """program 1
axes 37 24 48
tensor float32 2
tensor float32 2
tensor uint64 1
tensor uint64 1
input 0 a0 a2
random float32 2 3 48*a0+a2
constant float32 0.25
greater_equal 1 2
constant float32 0.0
select 3 0 4
input 1 a2 a1
multiply 5 6
reduce dot 7 2
random float32 2 3 {}*a0+{}*a1
greater_equal 9 2
select 10 8 4
output 11 0 1
"""


@pytest.mark.parametrize("behind", [(24, 1), (1, 37)])
def test_beside_a_product(device: DeviceContext, behind: tuple[int, int]) -> None:
    """Masks of the factor, which several tiles compute, and of the result are equal, and sums nearly so."""
    program = from_text(LAYER.format(*behind))
    tensors = [normal(37, 48), normal(48, 24, seed=1), *STATE]
    shapes = [tensor.shape for tensor in tensors]
    pattern = Pattern.of(program, shapes)
    layouts = [RowLayout(128, 4, 4, 6, split=False, cache=False), RowLayout(64, 4, 4, 3, split=False, cache=False)]
    found = list(kernels(pattern, pattern.program.sizes(pattern.merged(shapes)), layouts))
    assert any(piece.tile is not None for kernel in found for piece in kernel.plan.pieces)
    (expected,) = reference.run(program, tensors)
    for kernel in found:
        code = device.compile_source(kernel.source.text, device.arch, contract=False)
        (result,) = run(device, kernel, tensors, Module(code, device.driver), code, resident=5)
        np.testing.assert_array_equal(result == 0, expected == 0)
        np.testing.assert_allclose(result, expected, 1e-4, 1e-4)
