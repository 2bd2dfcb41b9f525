"""Products of one operand (queries, keys, values) by cuBLASLt on this machine's GPU: one after the other, side by side
in a CUDA graph, and as one product of weights that lie side by side; and what it takes to copy these together.

    python -m benchmarks.fusion.merged_products --output merged_products.json

Forward, of the gradient of the operand (as one product its sum is part of it; apart it is not counted), and of the
gradient of the weights. Each takes the fastest of the 8 algorithms that cuBLASLt ranks best, and operands that no cache
holds, in TF32."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from benchmarks.records import begun, save
from custom_ops.jit.cublas import CublasLt, MatrixProduct
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import Enqueue, checked

COLD = 128 << 20  # bytes of all copies of the operands
ALGORITHMS = 8
COUNT = 3  # queries, keys, values


@dataclass(frozen=True)
class Case:
    """Products of one operand.

    Attributes:
        apart, merged: each of the three, and the one.
    """

    name: str
    apart: MatrixProduct
    merged: MatrixProduct


def _cases(name: str, rows: int, size: int) -> Iterator[Case]:
    yield Case(f"{name}, forward", MatrixProduct(rows, size, size), MatrixProduct(rows, COUNT * size, size))
    if rows < 1024:  # inference
        return
    apart = MatrixProduct(rows, size, size, right_transposed=True)
    yield Case(f"{name}, operand", apart, MatrixProduct(rows, size, COUNT * size, right_transposed=True))
    apart = MatrixProduct(size, size, rows, left_transposed=True)
    yield Case(f"{name}, weights", apart, MatrixProduct(size, COUNT * size, rows, left_transposed=True))


CASES = (*_cases("nmt", 32, 512), *_cases("rokid", 49, 256), *_cases("bert_base", 4096, 768))


def main(arguments: list[str] | None = None) -> int:
    """A line for each case, in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("merged_products.json"), help="results (JSON)")
    parser.add_argument("--resume", type=Path, help="earlier results to start from")
    options = parser.parse_args(arguments)
    results = begun(options)
    with DeviceContext() as device, ExitStack() as opened:
        libraries = [opened.enter_context(CublasLt(device)) for _ in range(COUNT)]  # each with a workspace
        print(f"{device.name}; microseconds: in turn, side by side, merged, copy of the weights")
        for case in CASES:
            results["cases"][case.name] = found = measured(case, device, libraries)
            save(results, options.output)
            print(f"{case.name:<22}", *(f"{value:8.2f}" for value in found.values()), flush=True)
    return 0


def measured(case: Case, device: DeviceContext, libraries: Sequence[CublasLt]) -> dict[str, float]:
    """Microseconds."""
    sizes = [_bytes(case.merged, which) for which in range(3)]
    copies = max(1, min(32, COLD // sum(sizes)))
    with ExitStack() as opened:
        memory = [[opened.enter_context(filled(device, size)) for size in sizes] for _ in range(copies)]
        apart = [list[list[Enqueue]]() for _ in range(COUNT)]
        merged = list[list[Enqueue]]()
        for left, right, result in memory:
            merged.append(opened.enter_context(libraries[0].prepared(case.merged, left, right, result, ALGORITHMS)))
            for number in range(COUNT):
                places = [
                    place + (size // COUNT * number if size != _bytes(case.apart, which) else 0)
                    for which, (place, size) in enumerate(zip((left, right, result), sizes, strict=True))
                ]
                found = opened.enter_context(libraries[number].prepared(case.apart, *places, ALGORITHMS))
                apart[number].append(found)
        weights = COUNT * case.apart.columns * case.apart.depth * 4 if not case.apart.left_transposed else 0
        return {
            "in_turn": best(device, [_each_in_turn(of) for of in _by_algorithm(apart)]),
            "side_by_side": best(device, [_side_by_side(device, opened, of) for of in _by_algorithm(apart)]),
            "merged": best(device, [_each_in_turn([of]) for of in zip(*merged, strict=False)]),
            "copy": best(device, [_copies(device, memory, weights)]) if weights else 0.0,
        }


def _bytes(form: MatrixProduct, which: int) -> int:
    sides = ((form.rows, form.depth), (form.depth, form.columns), (form.rows, form.columns))
    return 4 * prod(sides[which])


@contextmanager
def filled(device: DeviceContext, size: int) -> Iterator[int]:
    """Memory of normal numbers."""
    place = device.upload(np.random.default_rng(0).standard_normal(size // 4, np.float32))
    yield place
    device.free(place)


def _by_algorithm(apart: Sequence[Sequence[Sequence[Enqueue]]]) -> list[list[tuple[Enqueue, ...]]]:
    """The calls of each algorithm and product for all copies of the operands."""
    algorithms = min(len(found) for of in apart for found in of)
    return [[tuple(found[number] for found in of) for of in apart] for number in range(algorithms)]


Steps = tuple[int, Callable[[int], None]]  # how many, and what enqueues all on a stream


def best(device: DeviceContext, ways: Sequence[Steps]) -> float:
    """Microseconds of one."""
    times = []
    for count, enqueue in ways:
        times.append(1e3 * device.time(lambda enqueue=enqueue: enqueue(device.stream)) / count)  # type: ignore[misc]
    return min(times)


def _each_in_turn(of: Sequence[Sequence[Enqueue]]) -> Steps:
    def enqueue(stream: int) -> None:
        for calls in zip(*of, strict=True):
            for call in calls:
                call(stream)

    return len(of[0]), enqueue


def _side_by_side(device: DeviceContext, opened: ExitStack, of: Sequence[Sequence[Enqueue]]) -> Steps:
    """Steps that run all products of one copy of the operands at once, and then those of the next copy."""
    together = opened.enter_context(device.branches(len(of)))

    def enqueue(stream: int) -> None:
        for calls in zip(*of, strict=True):
            together(calls)

    return len(of[0]), enqueue


def _copies(device: DeviceContext, memory: Sequence[Sequence[int]], size: int) -> Steps:
    """Steps that copy so many bytes from one place to the place of the next copy of the operands."""

    def enqueue(stream: int) -> None:
        for (_, right, _), (_, other, _) in zip(memory, [*memory[1:], memory[0]], strict=True):
            checked(device.driver, device.driver.cuMemcpyDtoDAsync(other, right, size, stream), "copy")

    return len(memory), enqueue


if __name__ == "__main__":
    sys.exit(main())
