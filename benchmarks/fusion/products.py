"""Generated products of matrices beside cuBLASLt's, on this machine's GPU: the shapes of `nmt` and `rokid`.

    python -m benchmarks.fusion.products
    python -m benchmarks.fusion.products --only "nmt q" --every

Each is computed in float32 where TF32 is allowed, as TensorFlow's default is. Times are medians of CUDA graphs; the
factors are in as many places as make 64 MB together, so that weights come from device memory, as in a step whose
weights the L2 cache does not hold. cuBLASLt's time is that of the fastest of the 8 algorithms that it ranks best, and,
in brackets, of the first. Results are compared with float64. Returns 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.errors import KernelError
from custom_ops.expr.program import Program
from custom_ops.expr.text import from_text
from custom_ops.fusion.codegen.kernel import make
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.bench import FusionBench, PatternLauncher, candidates, point
from custom_ops.jit.cache import Cache
from custom_ops.jit.cores import usable_cores
from custom_ops.jit.cublas import CublasLt, MatrixProduct
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import Enqueue, LoadedKernel, Module

COLD = 64 << 20  # bytes of all copies of the factors
COPIES = 64  # at most
BANDWIDTH = 3.35e12  # bytes a second of an H100's memory
ALGORITHMS = 8  # of cuBLASLt that are timed
ERROR = 4e-3  # of the largest result: TF32 has 11 bits


@dataclass(frozen=True)
class Case:
    """Products of one shape with the same left factor, and a bias and ReLU if `layer`.

    Attributes:
        form: of each.
        count: how many.
        layer: whether there is a bias and an activation, for which cuBLASLt's time has no kernel.
    """

    form: MatrixProduct
    count: int = 1
    layer: bool = False


def _square(rows: int, columns: int, depth: int, **more: Any) -> Case:
    return Case(MatrixProduct(rows, columns, depth), **more)


CASES: dict[str, Case] = {
    "nmt q": _square(32, 512, 512),
    "nmt q, k, v": _square(32, 512, 512, count=3),
    "nmt inner": _square(32, 2048, 512),
    "nmt inner, bias, relu": _square(32, 2048, 512, layer=True),
    "nmt outer": _square(32, 512, 2048),
    "nmt q of 4 beams": _square(4, 512, 512),
    "nmt q, k, v of 4 beams": _square(4, 512, 512, count=3),
    "nmt inner of 4 beams": _square(4, 2048, 512),
    "nmt outer of 4 beams": _square(4, 512, 2048),
    "nmt scores": Case(MatrixProduct(32, 32, 64, 8, right_transposed=True)),
    "nmt values": Case(MatrixProduct(32, 64, 32, 8)),
    "nmt scores of 4 beams": Case(MatrixProduct(1, 33, 64, 32, right_transposed=True)),
    "nmt values of 4 beams": Case(MatrixProduct(1, 64, 33, 32)),
    "rokid q": _square(49, 256, 256),
    "rokid inner": _square(49, 2048, 256),
    "rokid outer": _square(49, 256, 2048),
    "rokid scores": Case(MatrixProduct(49, 49, 64, 4, right_transposed=True)),
    "rokid values": Case(MatrixProduct(49, 64, 49, 4)),
}


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fusion.products", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="cases (all)")
    parser.add_argument("--every", action="store_true", help="print each configuration, not the best three")
    options = parser.parse_args(arguments)
    wrong = 0
    with DeviceContext() as device, tempfile.TemporaryDirectory() as folder, CublasLt(device) as cublas:
        print(f"{device.name}; microseconds; the best three: rows x columns of a tile (t: tensor cores) / threads")
        print(f"{'case':<24} {'cuBLASLt':>16} {'ours':>7} {'floor':>6}  configurations")
        compiled = {name: compiled_case(CASES[name], device, Cache(Path(folder))) for name in options.only}
        for name in options.only:
            wrong += not timed_case(name, compiled[name], device, cublas, options.every)
    return int(wrong > 0)


@dataclass(frozen=True)
class Compiled:
    """A case with its program, and with all kernels for it."""

    case: Case
    program: Program
    shapes: tuple[tuple[int, ...], ...]
    bench: FusionBench
    cache: Cache
    configurations: tuple[PatternConfiguration, ...]


def program_of(case: Case) -> tuple[Program, tuple[tuple[int, ...], ...]]:
    """The program of a case, and the shapes of its tensors: left, right factors, biases."""
    form = case.form
    batch, left, right = ("a3 ", (form.batch,), (form.batch,)) if form.batch > 1 else ("", (), ())
    lines = [f"tensor float32 {2 + len(left)}"] + [f"tensor float32 {2 + len(right)}"] * case.count
    lines += ["tensor float32 1"] * case.count * case.layer
    nodes, outputs = [f"input 0 {batch}a0 a2"], []
    for number in range(case.count):
        first = len(nodes)
        nodes += [
            f"input {1 + number} {batch}{'a1 a2' if form.right_transposed else 'a2 a1'}",
            f"multiply 0 {first}",
            f"reduce dot {first + 1} 2",
        ]
        if case.layer:
            nodes += [f"input {1 + case.count + number} a1", f"add {first + 2} {first + 3}", f"relu {first + 4}"]
        outputs.append(f"output {len(nodes) - 1} {'3 ' if form.batch > 1 else ''}0 1")
    axes = "axes 0 0 0" + " 0" * (form.batch > 1)
    matrix = (form.columns, form.depth) if form.right_transposed else (form.depth, form.columns)
    shapes = [(*left, form.rows, form.depth)] + [(*right, *matrix)] * case.count
    shapes += [(form.columns,)] * case.count * case.layer
    return from_text("\n".join(["program 1", axes, *lines, *nodes, *outputs]) + "\n"), tuple(shapes)


def compiled_case(case: Case, device: DeviceContext, cache: Cache) -> Compiled:
    """All kernels of a case, compiled."""
    program, shapes = program_of(case)
    pattern = Pattern.of(program, shapes)
    bench = FusionBench(pattern, device, cache)
    found = [configuration for configuration, _ in candidates(pattern, device.processors)(point(shapes))]
    with ThreadPoolExecutor(usable_cores()) as pool:
        for _ in pool.map(lambda each: bench.compile([each]), found):
            pass
    return Compiled(case, program, shapes, bench, cache, tuple(found))


def timed_case(name: str, compiled: Compiled, device: DeviceContext, cublas: CublasLt, every: bool) -> bool:
    """Prints the line of a case; whether all results are right."""
    case, form = compiled.case, compiled.case.form
    rng = np.random.default_rng(0)
    tensors = [rng.normal(size=shape).astype(np.float32) for shape in compiled.shapes]
    results = [(form.batch, form.rows, form.columns)] * case.count
    size = sum(tensor.nbytes for tensor in tensors)
    copies = max(1, min(COPIES, COLD // size))
    given = [[device.upload(tensor) for tensor in tensors] for _ in range(copies)]
    made = [device.allocate(4 * prod(shape)) for shape in results]
    exact = [expected(case, tensors, number) for number in range(case.count)]
    best, first = by_cublas(case, device, cublas, given, made)
    times, errors = [], []
    for configuration in compiled.configurations:
        try:
            seconds, found = by_kernel(compiled, configuration, device, given, made)
        except KernelError as error:
            errors.append(f"{configuration}: {error}")
            continue
        for result, right in zip(found, exact, strict=True):
            off = float(np.abs(result - right).max() / np.abs(right).max())
            if not off < ERROR:
                errors.append(f"{configuration}: wrong by {off:.2e} of the largest result")
        times.append((seconds, configuration))
    times.sort(key=lambda pair: pair[0])
    floor = (size + 4 * sum(map(prod, results))) / BANDWIDTH
    shown = times if every else times[:3]
    text = "  ".join(f"{1e6 * seconds:.2f} {short(compiled, configuration)}" for seconds, configuration in shown)
    ours = f"{1e6 * times[0][0]:.2f}" if times else "-"
    print(f"{name:<24} {1e6 * best:>7.2f} ({1e6 * first:.2f}) {ours:>7} {1e6 * floor:>6.2f}  {text}", flush=True)
    for error in errors:
        print(f"    {error}", flush=True)
    for place in [*made, *(each for tensors_of in given for each in tensors_of)]:
        device.free(place)
    return not errors


def expected(case: Case, tensors: Sequence[NDArray[Any]], number: int) -> NDArray[Any]:
    """A result in float64, `[batch, rows, columns]`."""
    left, right = tensors[0].astype(np.float64), tensors[1 + number].astype(np.float64)
    found = left @ (right.swapaxes(-1, -2) if case.form.right_transposed else right)
    if case.layer:
        found = np.maximum(found + tensors[1 + case.count + number], 0.0)
    return found.reshape(case.form.batch, case.form.rows, case.form.columns)


def by_cublas(
    case: Case, device: DeviceContext, cublas: CublasLt, given: Sequence[Sequence[int]], made: Sequence[int]
) -> tuple[float, float]:
    """Seconds of the fastest algorithm, and of the first, for all products of a case."""
    with ExitStack() as opened:
        found = [
            opened.enter_context(cublas.prepared(case.form, tensors[0], tensors[1 + which], made[which], ALGORITHMS))
            for tensors in given
            for which in range(case.count)
        ]
        times = [_timed(device, calls) / len(given) for calls in zip(*found, strict=True)]
    return min(times), times[0]


def _timed(device: DeviceContext, enqueues: Sequence[Enqueue]) -> float:
    """Seconds of all of them, one after the other."""

    def enqueue_all() -> None:
        for enqueue in enqueues:
            enqueue(device.stream)

    return device.time(enqueue_all) / 1e3


def by_kernel(
    compiled: Compiled,
    configuration: PatternConfiguration,
    device: DeviceContext,
    given: Sequence[Sequence[int]],
    made: Sequence[int],
) -> tuple[float, list[NDArray[Any]]]:
    """Seconds of a generated kernel, and its results."""
    form = compiled.case.form
    kernel = make(Pattern.of(compiled.program, compiled.shapes), configuration)
    image = kernel.image(device.arch, compiled.cache, device.compile_source)
    with closing(Module(image.code, device.driver)) as module:
        loaded = LoadedKernel(image, module)
        if loaded.local:
            print(f"    {configuration.template}: {loaded.local} bytes of local memory a thread")
        with closing(PatternLauncher(kernel, loaded, device)) as launcher:
            enqueues = [launcher.prepare(compiled.shapes, tensors, made) for tensors in given]
            seconds = _timed(device, enqueues) / len(given)
            empty = [np.empty((form.batch, form.rows, form.columns), np.float32) for _ in made]
            results = [device.download(place, array) for place, array in zip(made, empty, strict=True)]
    return seconds, [result.astype(np.float64) for result in results]


def short(compiled: Compiled, configuration: PatternConfiguration) -> str:
    """A tile and the threads of a CTA."""
    (piece, *_) = make(Pattern.of(compiled.program, compiled.shapes), configuration).plan.pieces
    assert piece.tile is not None
    return f"[{piece.tile.rows}x{piece.tile.columns}{'t' * piece.tile.tensor}/{configuration.threads}]"


if __name__ == "__main__":
    sys.exit(main())
