"""The products of the matmul benchmark as data, their floors, and a table of what was measured; without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.recurrent.cases import Chip

PRODUCTS = 3  # of pairs of float16, for one of float32
FLOPS_OF_HALF = 989e12  # of an H200's tensor cores, dense, float16
KINDS = ("tfmem", "float32", "tf32")


@dataclass(frozen=True)
class Case:
    """One product; `transposed`: the left operand lies as `[depth, rows]`. `gradient`: without a bias, for which cuBLAS
    then has other kernels."""

    rows: int
    depth: int
    columns: int
    transposed: bool = False
    gradient: bool = False

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.depth}x{self.columns}{'t' if self.transposed else ''}"


CASES = [
    Case(100 * batch, hidden, gates * hidden)
    for hidden in (128, 256, 512, 1024, 2048)
    for gates in (3, 4)
    for batch in (1, 10, 20, 64)
]
CASES += [Case(rows, hidden, 4 * hidden) for hidden in (512, 1024, 2048) for rows in (10, 32, 64)]
CASES += [Case(100 * batch, 4 * hidden, hidden, gradient=True) for hidden in (256, 512, 1024) for batch in (1, 10, 64)]
CASES += [
    Case(hidden, 100 * batch, 4 * hidden, transposed=True, gradient=True)
    for hidden in (256, 512, 1024)
    for batch in (1, 10, 20, 64)
]


def floor(case: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds of three products in float16, and of reading operands and writing the result once."""
    rows, depth, columns = (case[name] for name in ("rows", "depth", "columns"))
    flops = 2.0 * PRODUCTS * rows * depth * columns
    size = 4.0 * (rows * depth + depth * columns + rows * columns)
    return 1e3 * flops / FLOPS_OF_HALF, 1e3 * size / Chip().bytes_per_second


def table(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table in Markdown."""
    heads = ["rows", "depth", "columns", "tiles", "tfmem, us", "TFLOPS", "cuBLAS float32, us", "TFLOPS", "speed-up"]
    heads += ["cuBLAS TF32, us", "floor: products / bytes, us", "error of tfmem", "of float32", "of TF32"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for case in cases.values():
        ours, plain, short = (case[kind] for kind in KINDS)
        flops = 2e-9 * case["rows"] * case["depth"] * case["columns"]
        rates = [f"{1e3 * each['ms']:.1f} | {flops / each['ms']:.0f}" for each in (ours, plain)]
        errors = " | ".join(f"{each['error']:.1e}" for each in (ours, plain, short))
        tiles = case["tiles"] + (f", {case['parts']} parts" if case["parts"] > 1 else "")
        lines.append(
            f"| {case['rows']}{' (transposed)' if case['transposed'] else ''} | {case['depth']} | {case['columns']} | "
            f"{tiles} | {rates[0]} | {rates[1]} | {plain['ms'] / ours['ms']:.2f} | {1e3 * short['ms']:.1f} | "
            f"{' / '.join(f'{1e3 * part:.1f}' for part in floor(case))} | {errors} |"
        )
    return lines
