"""Score by execution (FusionStitching, section 4.3): patterns with products timed on a GPU of this machine, beside the
library's products and kernels of the rest. All is kept in the cache, so that processes with one cache plan alike."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import Any

from custom_ops.errors import KernelError
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.programs import Shapes, fastest_trial, timed, typical
from custom_ops.fusion.search.bench import point
from custom_ops.jit.cache import Cache
from custom_ops.jit.cores import usable_cores
from custom_ops.jit.cublas import SIZES, CublasLt, MatrixProduct
from custom_ops.jit.device import DeviceContext, Quiet
from custom_ops.jit.launch import Enqueue
from custom_ops.jit.nvrtc import CompileSource, compile_source
from custom_ops.timing.remembered import Remembered
from graph_passes.graph.ir import Graph, TensorId, boolean
from graph_passes.lower.lower_nodes import LoweringError, lower_kernel
from graph_passes.lower.shapes import TRANSPOSES
from graph_passes.lower.shapes import Shapes as GraphShapes
from graph_passes.passes.fuse.partition.score import Measure
from graph_passes.passes.fuse.plan import leaving
from tfmem.devices import Target
from tfmem.kernels.fusion_programs import TIMED
from tfmem.kernels.recurrent import kernel_folder
from tfmem.options import Options

ALGORITHMS = 8  # of the library that are timed for a product
FORMAT = "product times 1"


@dataclass(frozen=True)
class PatternTimer:
    """What times patterns and products on a device.

    Attributes:
        target: the device.
        options: how many kernels are timed, and where the times are kept.
        tf32: whether float32 may be multiplied so.
        compile_source: makes code, in several threads at once.
        quiet: keeps steps from running while something is timed.
    """

    target: Target
    options: Options
    tf32: bool
    compile_source: CompileSource = compile_source
    quiet: Quiet | None = None

    def of(self, graph: Graph, shapes: GraphShapes, keep: Collection[str]) -> Measure:
        """Measured times for patterns of a graph; `keep` names the nodes that are fetched."""
        times = _Times(self, graph, shapes, keep)
        return Measure(times.kernel, times.call, times.prepare)

    def beside(self, forms: Sequence[MatrixProduct]) -> float | None:
        """Seconds of the library's products of these forms side by side, each by its fastest algorithm."""
        forms = [replace(form, tf32=self.tf32) for form in forms]
        try:
            with self.device() as (device, cache):
                identity = f"{device.name} {device.arch} {device.driver_version()}"
                known = product_times(cache)
                key = known.key(identity, repr(forms[0] if len(forms) == 1 else forms), str(ALGORITHMS))
                return known.get(key, lambda: _timed(device, forms))
        except KernelError:
            return None

    @contextmanager
    def device(self) -> Iterator[tuple[DeviceContext, Cache]]:
        """The device, and where times are kept."""
        with (
            DeviceContext(self.target.ordinal, compile_source=self.compile_source, quiet=self.quiet) as device,
            kernel_folder(self.options.cache_directory) as folder,
        ):
            yield device, Cache(folder)


@dataclass(frozen=True)
class _Times:
    measured: PatternTimer
    graph: Graph
    shapes: GraphShapes
    keep: Collection[str]
    known: dict[tuple[str, str], float | None] = field(default_factory=dict)  # by pattern and shapes

    def kernel(self, members: Sequence[str]) -> float | None:
        """Seconds of the fastest kernel of those that are timed."""
        self.prepare([members])
        found = self._pattern(members)
        return self.known.get((found[0].digest, point(found[1]))) if found else None

    def prepare(self, patterns: Sequence[Sequence[str]]) -> None:
        """Times all patterns that have not been: they are compiled at once, and run one at a time."""
        new: dict[tuple[str, str], tuple[Pattern, Shapes]] = {}
        for members in patterns:
            found = self._pattern(members)
            if found is not None and (key := (found[0].digest, point(found[1]))) not in self.known:
                new[key] = found
        if not new:
            return
        # Without a device the planner uses the cost model, and the code that makes the kernels raises the error.
        with (
            suppress(KernelError),
            self.measured.device() as (device, cache),
            ThreadPoolExecutor(usable_cores()) as pool,
        ):
            trials_of = timed(device, cache, TIMED[self.measured.options.fusion.tune])

            def seconds(pattern: tuple[Pattern, Shapes]) -> float | None:
                try:
                    return fastest_trial(trials_of(*pattern)).measured / 1e9
                except KernelError:
                    return None  # no kernel of this pattern runs

            self.known.update(zip(new, pool.map(seconds, new.values()), strict=True))

    def call(self, name: str) -> float | None:
        """Seconds of the library's product."""
        form = self._form(name)
        return self.measured.beside([form]) if form is not None else None

    def _pattern(self, members: Sequence[str]) -> tuple[Pattern, Shapes] | None:
        try:
            kernel = lower_kernel(self.graph, members, leaving(self.graph, members, self.keep), self.shapes)
        except LoweringError:
            return None
        return Pattern.of(kernel.program, kernel.input_shapes), typical(kernel.input_shapes)

    def _form(self, name: str) -> MatrixProduct | None:
        node = self.graph[name]
        left, right, result = (self.graph.specs[tensor] for tensor in (*node.inputs[:2], TensorId(name)))
        sizes = left.sizes, right.sizes, result.sizes
        if node.op not in TRANSPOSES or None in sizes or result.dtype not in SIZES:
            return None
        left_sizes, right_sizes, made = (each or () for each in sizes)
        flipped = [boolean(node.attrs.get(attribute)) for attribute in TRANSPOSES[node.op]]
        batch = prod(made[:-2])
        batched = [prod(each[:-2]) == batch for each in (left_sizes, right_sizes)]
        if any(not own and prod(each[:-2]) != 1 for own, each in zip(batched, (left_sizes, right_sizes), strict=True)):
            return None  # several launches
        depth = left_sizes[-2] if flipped[0] else left_sizes[-1]
        return MatrixProduct(
            rows=made[-2],
            columns=made[-1],
            depth=depth,
            batch=batch,
            dtype=result.dtype,
            left_transposed=flipped[0],
            right_transposed=flipped[1],
            left_batch=batched[0],
            right_batch=batched[1],
        )


def _timed(device: DeviceContext, forms: Sequence[MatrixProduct]) -> float:
    """Seconds of the fastest algorithms. Steps wait only while these run, not while they are prepared."""
    with ExitStack() as opened:
        found = [opened.enter_context(_prepared(device, form)) for form in forms]
        enqueue = opened.enter_context(device.branches(len(forms)))
        with device.turn():
            best = [_fastest(device, calls, form) for calls, form in zip(found, forms, strict=True)]
            if len(forms) == 1:
                return best[0][0]
            calls = [call for _, call in best]
            return device.time(lambda: enqueue(calls)) / 1e3


@contextmanager
def _prepared(device: DeviceContext, form: MatrixProduct) -> Iterator[list[Enqueue]]:
    """The library's algorithms for a product of zeros."""
    size = SIZES[form.dtype] * form.batch
    with ExitStack() as opened:
        places = []
        for count in (form.rows * form.depth, form.depth * form.columns, form.rows * form.columns):
            places.append(device.allocate(size * count))
            opened.callback(device.free, places[-1])
            device.fill(places[-1], size * count, 0)
        library = opened.enter_context(CublasLt(device))  # each has a workspace
        left, right, result = places
        yield opened.enter_context(library.prepared(form, left, right, result, ALGORITHMS))


def _fastest(device: DeviceContext, calls: Sequence[Enqueue], form: MatrixProduct) -> tuple[float, Enqueue]:
    times = []
    for call in calls:
        with suppress(KernelError):  # the library may refuse what it has found
            times.append((_one(device, call), call))
    if not times:
        raise KernelError(f"cuBLASLt runs none of its algorithms for {form}")
    return min(times, key=lambda each: each[0])


def _one(device: DeviceContext, call: Enqueue) -> float:
    return device.time(lambda: call(device.stream)) / 1e3


def product_times(cache: Cache) -> Remembered[float]:
    """The times of the library's products."""
    return Remembered(FORMAT, cache, float, _seconds)


def _seconds(found: Any) -> float:
    seconds = float(found)
    if not (isfinite(seconds) and seconds > 0):
        raise ValueError("a time that no product can have")
    return seconds
