"""Every owner of a row, on the CPU: which threads reduce together, and what reductions make of their numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from custom_ops.expr.program import DTYPES, REDUCTIONS, Program
from custom_ops.expr.reference import numpy_dtype
from custom_ops.expr.text import from_text
from custom_ops.jit.device import DeviceContext
from tests.fusion_kernels import Case, compare
from tests.fusion_programs import SOFTMAX

pytest_plugins = ("tests.fusion_device",)

# Attributes of rows and of what lies within them, in CTAs of 64 threads.
OWNERS = {
    "thread": ("GRID_3-CTA_64", "THREAD"),
    "lanes": ("GRID_3-CTA_16", "CTA"),
    "warp": ("GRID_3-WARP_2", "CTA"),
    "cta": ("GRID_3", "CTA"),
    "strided": ("GRID_3-CTA_16-WARP_4", "WARP"),
}
SPLIT = {"cta, split": ("GRID_3", "GRID_2-CTA_64"), "strided, split": ("GRID_3-CTA_16-WARP_4", "GRID_2-WARP_4")}
BOUNDS = {"float64": 1e-14, "float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def template(roots: str, row: str, within: str) -> str:
    return "".join(f"{root}[{row},{within}];" for root in roots.split())


@pytest.mark.parametrize(("columns", "vector"), [(10, 4), (33, 1)])
def test_softmax(device: DeviceContext, columns: int, vector: int) -> None:
    """By every owner of a row; of known sizes and of any."""
    logits = np.random.default_rng(0).normal(size=(37, columns)).astype(np.float32)
    every = [
        Case(from_text(SOFTMAX), [logits], template("reduce_1 reduce_4 output_0", *owner), 64, vector, shapes=shapes)
        for owner in [*OWNERS.values(), *SPLIT.values()]
        for shapes in (None, [(None, None)])
    ]
    compare(device, every)


def test_what_is_no_number_stays_in_its_row(device: DeviceContext) -> None:
    logits = np.random.default_rng(0).normal(size=(8, 40)).astype(np.float32)
    logits[1, 3], logits[2, 39], logits[3, 0], logits[4] = np.nan, np.inf, -np.inf, -np.inf
    roots = "reduce_1 reduce_4 output_0"
    compare(device, [Case(from_text(SOFTMAX), [logits], template(roots, *owner), 64, 4) for owner in OWNERS.values()])


def every_reduction(dtype: str) -> tuple[Program, list[str]]:
    """By rows, and of all, as outputs; and the roots that are reductions."""
    kinds = [kind for kind, dtypes in REDUCTIONS.items() if dtype in dtypes]
    nodes = "".join(f"reduce {kind} 0 1\nreduce {kind} 0 0 1\n" for kind in kinds)
    outputs = "".join(f"output {2 * i + 1} 0\noutput {2 * i + 2}\n" for i in range(len(kinds)))
    return from_text(f"program 1\naxes 0 0\ntensor {dtype} 2\ninput 0 a0 a1\n{nodes}{outputs}"), kinds


def numbers(dtype: str, *shape: int) -> Any:
    random = np.random.default_rng(0)
    if dtype == "bool":
        return random.random(shape) > 0.1
    if dtype.startswith("int"):
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, shape, dtype)  # sums and products wrap
    found = random.normal(size=shape) + 0.2
    return found.astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(device: DeviceContext, dtype: str) -> None:
    """By every owner, each over its rows, too: integers wrap, half types are rounded once."""
    program, kinds = every_reduction(dtype)
    found = []
    every = {**OWNERS, **SPLIT}
    for name in every if dtype in ("float32", "int32") else ("warp", "cta", "strided, split"):
        row, within = every[name]
        over = ("GRID_3-CTA_64", "GRID_3-CTA_64") if "split" in name or name == "strided" else (row, within)
        text = ""
        for i in range(len(kinds)):
            text += f"reduce_{2 * i + 1}[{row},{within}];reduce_{2 * i + 2}[{over[0]},{over[1]}];"
            text += f"output_{2 * i}[{row}];output_{2 * i + 1}[];"
        found.append(Case(program, [numbers(dtype, 21, 9)], text, 64, 1, BOUNDS.get(dtype, 0) * 2))
    compare(device, found)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_number_that_is_no_number_reaches_every_reduction(device: DeviceContext, dtype: str) -> None:
    program, kinds = every_reduction(dtype)
    tensor = numbers(dtype, 70, 5)
    tensor[3, 2], tensor[66, 4], tensor[5, 0] = np.nan, np.inf, -np.inf
    text = "".join(
        f"reduce_{2 * i + 1}[GRID_3-WARP_2,CTA];reduce_{2 * i + 2}[GRID_3-WARP_2,CTA];"
        f"output_{2 * i}[GRID_3-WARP_2];output_{2 * i + 1}[];"
        for i in range(len(kinds))
    )
    compare(device, [Case(program, [tensor], text, 64, 1, BOUNDS[dtype] * 2)])


def test_half_types_are_rounded_as_the_program_says(device: DeviceContext) -> None:
    """After each op, once after a sum, and as what several loops and CTAs keep."""
    source = """program 1
axes 0 0
tensor {0} 2
input 0 a0 a1
multiply 0 0
reduce sum 1 1
divide 1 2
reduce sum 3 0
output 3 0 1
output 4 1
output 2 0
"""
    tensor = np.random.default_rng(0).random((20, 24)).astype(np.float32)
    found = []
    for dtype, bound in (("float16", 2e-3), ("bfloat16", 1.6e-2)):
        program = from_text(source.format(dtype))
        for row, within in (OWNERS["warp"], OWNERS["lanes"], OWNERS["cta"]):
            text = template("reduce_2 output_0 reduce_4", row, within) + f"output_1[GRID_2-CTA_64];output_2[{row}];"
            found += [Case(program, [tensor.astype(numpy_dtype(dtype))], text, 64, v, bound) for v in (1, 8)]
    compare(device, found)
