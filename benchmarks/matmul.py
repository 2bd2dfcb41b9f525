"""Float32 products on tensor cores against cuBLAS's, in float32 and in TF32, each held against float64.

    python -m benchmarks.matmul --output benchmarks/results/matmul_h200.json
    python -m benchmarks.matmul --table benchmarks/results/matmul_h200.json

The shapes are those of recurrent layers' products with their inputs over 100 steps, [steps * batch, hidden] by [hidden,
gates * hidden], and of the gradients of both. Times are of CUDA graphs of ten calls, medians of many. It needs PyTorch,
cuda.bindings and NVRTC."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.products import multiplier
from benchmarks.records import begun, load, save
from benchmarks.recurrent_cases import Chip
from benchmarks.recurrent_peers import captured, median_milliseconds, settings
from benchmarks.runs import command_line, named
from custom_ops.jit.matmul import Shape

REPEATS = 10  # in one graph
PRODUCTS = 3  # of pairs of float16, for one of float32
FLOPS_OF_HALF = 989e12  # of an H200's tensor cores, dense, float16
KINDS = ("tfmem", "float32", "tf32")


@dataclass(frozen=True)
class Case:
    """One product; `transposed`: the left operand lies as `[depth, rows]`."""

    rows: int
    depth: int
    columns: int
    transposed: bool = False

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
CASES += [Case(100 * batch, 4 * hidden, hidden) for hidden in (256, 512, 1024) for batch in (1, 10, 64)]
CASES += [
    Case(hidden, 100 * batch, 4 * hidden, transposed=True) for hidden in (256, 512, 1024) for batch in (1, 10, 20, 64)
]


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for, or print the table of results."""
    parser = command_line("matmul", __doc__, "matmul.json")
    parser.add_argument("--table", type=Path, help="results to make a table of, and run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print("\n".join(table((load(options.table) or {"cases": {}})["cases"])))
        return 0
    cases = named(CASES, options.only)
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    results = begun(options, torch=torch.__version__, cuda=str(torch.version.cuda))
    deadline = time.monotonic() + options.total_seconds
    for case in cases:
        if time.monotonic() > deadline or (case.name in results["cases"] and not options.again):
            continue
        results["cases"][case.name] = {**asdict(case), **run(case)}
        save(results, options.output)
        print(table({case.name: results["cases"][case.name]})[-1], flush=True)
    return 0


def run(case: Case) -> dict[str, Any]:
    """Milliseconds of each, the largest error and the root of the mean square, relative to the largest result's."""
    torch.manual_seed(1)
    left = torch.randn(case.rows, case.depth, device="cuda")
    right = torch.randn(case.depth, case.columns, device="cuda")
    if case.transposed:
        left = left.t().contiguous().t()
    bias = torch.randn(case.columns, device="cuda")
    wanted = left.double() @ right.double() + bias.double()
    found = torch.empty(case.rows, case.columns, device="cuda")
    shape = Shape(case.rows, case.depth, case.columns, transpose_left=case.transposed)
    memory = torch.empty(shape.memory_bytes, device="cuda", dtype=torch.uint8)
    places = [tensor.data_ptr() for tensor in (left, right, bias, found, memory)]
    enqueues = {small: multiplier().prepare(shape, *places, small=small) for small in (False, True)}
    chosen = multiplier().prefers_small(shape)

    def ours(small: bool) -> None:
        for _ in range(REPEATS):
            enqueues[small](torch.cuda.current_stream().cuda_stream)

    def cublas() -> None:
        for _ in range(REPEATS):
            torch.addmm(bias, left, right, out=found)

    outcome: dict[str, Any] = {"tiles": "small" if chosen else "large"}
    for kind in KINDS:
        with settings(tf32=kind == "tf32"):
            outcome[kind] = timed((lambda: ours(chosen)) if kind == "tfmem" else cublas, found, wanted)
    outcome["tfmem, other tiles"] = timed(lambda: ours(not chosen), found, wanted)
    return outcome


def timed(enqueue: Any, found: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Of one call."""
    found.fill_(float("nan"))
    enqueue()
    error = found.double() - wanted
    largest = wanted.abs().max()
    milliseconds = median_milliseconds(captured(lambda: (enqueue(), (found,))[1]))["ms"] / REPEATS
    return {"ms": milliseconds, "error": float(error.abs().max() / largest), "rms": float(error.square().mean().sqrt())}


def floor(case: Mapping[str, Any]) -> tuple[float, float]:
    """Milliseconds of three products in float16, and of reading operands and writing the result once."""
    rows, depth, columns = (case[name] for name in ("rows", "depth", "columns"))
    flops = 2.0 * PRODUCTS * rows * depth * columns
    size = 4.0 * (rows * depth + depth * columns + rows * columns)
    return 1e3 * flops / FLOPS_OF_HALF, 1e3 * size / Chip().bytes_per_second


def table(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """In Markdown."""
    heads = ["rows", "depth", "columns", "tiles", "tfmem, us", "TFLOPS", "cuBLAS float32, us", "TFLOPS", "speed-up"]
    heads += ["cuBLAS TF32, us", "floor: products / bytes, us", "error of tfmem", "of float32", "of TF32"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for case in cases.values():
        ours, plain, short = (case[kind] for kind in KINDS)
        flops = 2e-9 * case["rows"] * case["depth"] * case["columns"]
        rates = [f"{1e3 * each['ms']:.1f} | {flops / each['ms']:.0f}" for each in (ours, plain)]
        errors = " | ".join(f"{each['error']:.1e}" for each in (ours, plain, short))
        lines.append(
            f"| {case['rows']}{' (transposed)' if case['transposed'] else ''} | {case['depth']} | {case['columns']} | "
            f"{case['tiles']} | {rates[0]} | {rates[1]} | {plain['ms'] / ours['ms']:.2f} | {1e3 * short['ms']:.1f} | "
            f"{' / '.join(f'{1e3 * part:.1f}' for part in floor(case))} | {errors} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
