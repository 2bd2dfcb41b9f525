"""Sums of segments on the CPU: threads go through the numbers alone whose id is a position of their CTA's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from custom_ops.expr.program import Program
from custom_ops.expr.reference import numpy_dtype
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.plan.kernel_plan import counted
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.codegen.plan.segment_ids import segments_of
from custom_ops.fusion.search.kernel_model import ranked
from custom_ops.fusion.search.space import kernels, layouts
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import Module
from tests.fusion_kernels import Case, compare, run, varied

pytest_plugins = ("tests.fusion_device",)


def summed(segments: int, dtype: str = "float32", ids: str = "int32") -> Program:
    """`[segments, columns]` of `[numbers, columns]`."""
    return from_text(f"""program 1
axes {segments} 0 0
tensor {dtype} 2
tensor {ids} 1
input 0 a1 a2
input 1 a1
position {ids} 0
equal 1 2
constant {dtype} {"0" if dtype.startswith("int") else "0.0"}
select 3 0 4
reduce sum 5 1
output 6 0 2
""")


def given(segments: int, numbers: int, columns: int, dtype: str = "float32", ids: str = "int32") -> list[Any]:
    """Ids, and such as are no segment's; the first segment is hit often."""
    rng = np.random.default_rng(numbers)
    data = (rng.normal(size=(numbers, columns)) * 4).astype(numpy_dtype(dtype))
    found = rng.integers(-1, segments + 1, numbers)
    return [data, np.where(rng.random(numbers) < 0.2, 0, found).astype(ids)]


def marked(program: Program, tensors: list[Any], threads: int = 64) -> Case:
    row = f"GRID_3-CTA_{threads}"
    return Case(program, tensors, f"reduce_6[{row},THREAD,{row}];output_0[{row},{row}];", threads)


FORMS = [(5, 70, 6), (1, 33, 3), (300, 200, 1), (40, 1, 5), (7, 129, 64), (3, 64, 65)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("segments", "numbers", "columns"), FORMS)
def test_sums_are_in_the_order_of_the_ids(device: DeviceContext, segments: int, numbers: int, columns: int) -> None:
    """To the bit, as TensorFlow's kernel on a CPU adds them up; of known sizes and of any."""
    program, tensors = summed(segments), given(segments, numbers, columns)
    data, ids = tensors
    expected = np.zeros((segments, columns), np.float32)
    for row, number in zip(data, ids, strict=True):
        if 0 <= number < segments:
            expected[number] += row
    case = marked(program, tensors)
    every = [case, Case(program, tensors, case.template, case.threads, shapes=[(None, None), (None,)])]
    made = [each.kernel(f"fusion_{number}") for number, each in enumerate(every)]
    code = device.compile_source("\n".join(kernel.source.text for kernel in made), device.arch, contract=False)
    for kernel in made:
        assert [counted(kernel.plan.pattern, piece, piece.loops[0]) for piece in kernel.plan.pieces] != [None]
        (found,) = run(device, kernel, tensors, Module(code, device.driver), code)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32", "int64"])
@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_other_dtypes(device: DeviceContext, dtype: str, ids: str) -> None:
    tensors = given(9, 90, 5, dtype, ids)
    compare(device, [marked(summed(9, dtype, ids), tensors)])


def test_what_is_no_number_stays_in_its_segment(device: DeviceContext) -> None:
    data, ids = given(6, 80, 4)
    data[3, 0], data[10, 1], data[11, 2], data[12] = np.nan, np.inf, -np.inf, -0.0
    compare(device, [marked(summed(6), [data, ids])])


def test_every_layout(device: DeviceContext) -> None:
    program, tensors = summed(6), given(6, 300, 5)
    pattern, shapes = Pattern.of(program, [t.shape for t in tensors]), [t.shape for t in tensors]
    every = [kernel.plan.configuration for kernel in varied(pattern, shapes)]
    compare(device, [Case(program, tensors, each.template, each.threads, each.vector) for each in every])


def test_many_segments_are_marked() -> None:
    """By the model; a sum of few segments of many numbers is split over CTAs as before."""
    for segments, numbers, columns, expected in ((50_000, 1024, 256, True), (2, 1 << 16, 2, False)):
        pattern, shapes = (
            Pattern.of(summed(segments), [(numbers, columns), (numbers,)]),
            [(numbers, columns), (numbers,)],
        )
        sizes = pattern.program.sizes(pattern.merged(shapes))
        best, _ = ranked(list(kernels(pattern, sizes, layouts(pattern, 132))), shapes)[0]
        loops = [counted(pattern, piece, loop) for piece in best.plan.pieces for loop in piece.loops]
        assert any(loops) == expected


def test_what_is_no_sum_of_segments() -> None:
    assert segments_of(summed(4), 6) is not None
    assert segments_of(summed(4), 5) is None
    assert (
        segments_of(from_text("program 1\naxes 0\ntensor float32 1\ninput 0 a0\nreduce sum 0 0\noutput 1\n"), 1) is None
    )
