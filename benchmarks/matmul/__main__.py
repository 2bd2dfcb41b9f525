"""Float32 products on tensor cores against cuBLAS's, in float32 and in TF32, each held against float64.

    python -m benchmarks.matmul --output benchmarks/results/matmul_h200.json
    python -m benchmarks.matmul --table benchmarks/results/matmul_h200.json

The shapes are those of recurrent layers' products with their inputs over 100 steps, [steps * batch, hidden] by [hidden,
gates * hidden], and of the gradients of both. Times are of CUDA graphs of ten calls, medians of many. It needs PyTorch,
cuda.bindings and NVRTC."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.matmul.cases import CASES, KINDS, Case, table
from benchmarks.matmul.multiplier import Shape, Tiling
from benchmarks.matmul.products import multiplier
from benchmarks.records import begun, save
from benchmarks.recurrent.peers import captured, median_milliseconds, settings
from benchmarks.runs import asked, command_line, waiting

REPEATS = 10  # in one graph


def main(arguments: list[str] | None = None) -> int:
    """Run the cases asked for, or print the table of results."""
    options, cases = asked(command_line("matmul", __doc__, "matmul.json"), arguments, CASES, table)
    if not cases:
        return 0
    results = begun(options, torch=torch.__version__, cuda=str(torch.version.cuda))
    for case in waiting(cases, results, options):
        results["cases"][case.name] = {**asdict(case), **run(case)}
        save(results, options.output)
        print(table({case.name: results["cases"][case.name]})[-1], flush=True)
    return 0


def run(case: Case) -> dict[str, Any]:
    """What `timed` says of each, with the tiles that are chosen and with the others, whole."""
    torch.manual_seed(1)
    left = torch.randn(case.rows, case.depth, device="cuda")
    right = torch.randn(case.depth, case.columns, device="cuda")
    if case.transposed:
        left = left.t().contiguous().t()
    bias = None if case.gradient else torch.randn(case.columns, device="cuda")
    wanted = left.double() @ right.double()
    if bias is not None:
        wanted += bias.double()
    found = torch.empty(case.rows, case.columns, device="cuda")
    shape = Shape(case.rows, case.depth, case.columns, transpose_left=case.transposed)
    places = [0 if tensor is None else tensor.data_ptr() for tensor in (left, right, bias, found)]

    def ours(tiling: Tiling) -> Callable[[], None]:
        memory = torch.empty(tiling.memory_bytes(shape), device="cuda", dtype=torch.uint8)
        enqueue = multiplier().prepare(shape, tiling, *places, memory.data_ptr())

        def several(_memory: object = memory) -> None:
            for _ in range(REPEATS):
                enqueue(torch.cuda.current_stream().cuda_stream)

        return several

    def cublas() -> None:
        for _ in range(REPEATS):
            if bias is None:
                torch.mm(left, right, out=found)
            else:
                torch.addmm(bias, left, right, out=found)

    tiling = multiplier().tiling(shape)
    outcome: dict[str, Any] = {"tiles": "small" if tiling.small else "large", "parts": tiling.split_k}
    for kind in KINDS:
        with settings(tf32=kind == "tf32"):
            outcome[kind] = timed(ours(tiling) if kind == "tfmem" else cublas, found, wanted)
    outcome["tfmem, other tiles"] = timed(ours(Tiling(not tiling.small, split_k=1)), found, wanted)
    return outcome


def timed(enqueue: Any, found: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Milliseconds of one call, the largest error relative to the largest result, and the root of the mean square of
    all errors."""
    found.fill_(float("nan"))
    enqueue()
    error = found.double() - wanted
    largest = wanted.abs().max()
    milliseconds = median_milliseconds(captured(lambda: (enqueue(), (found,))[1]))["ms"] / REPEATS
    return {"ms": milliseconds, "error": float(error.abs().max() / largest), "rms": float(error.square().mean().sqrt())}


if __name__ == "__main__":
    sys.exit(main())
