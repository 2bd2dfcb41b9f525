"""Times fusion kernels on a device, for the tuner (`custom_ops/timing/tuner.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache as remember
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from custom_ops.errors import KernelError
from custom_ops.expr import reference
from custom_ops.expr.reference import numpy_dtype
from custom_ops.expr.table_entry import FLOATS
from custom_ops.fusion.codegen.kernel import NARROW, FusionKernel, make, positions
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.search.kernel_model import Gpu, ranked
from custom_ops.fusion.search.space import kernels, layouts
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache, digest
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.launch import Enqueue, LoadedKernel, Module
from custom_ops.timing.tuner import MeasuredKernel

CHECKED = 1 << 16  # elements of all tensors and outputs, at most, for results to be compared with the definition
EXACT, ROUNDED = 1e-4, 4e-3  # what results may be off by; the latter of products in TF32
SAMPLE = 1 << 20  # numbers that a tensor repeats
HERE = Path(__file__).parent


def point(shapes: Sequence[Sequence[int]]) -> str:
    """The shapes of all tensors as a point of the tuner: "8192x768 768"; a number has shape "."."""
    return " ".join("x".join(map(str, shape)) or "." for shape in shapes)


def shapes_of(text: str) -> list[tuple[int, ...]]:
    """What `point` was given."""
    return [() if word == "." else tuple(map(int, word.split("x"))) for word in text.split()]


def parse(values: Any) -> PatternConfiguration:
    """The configuration that `asdict` made `values` of.

    Raises:
        ValueError, TypeError, AttributeError: there is none.
    """
    configuration = PatternConfiguration(**values)
    if not all(type(value) is type(field) for value, field in zip(values.values(), ("", 0, 0), strict=True)):
        raise ValueError(f"{values}: expected a template and two numbers")
    return configuration


def candidates(
    pattern: Pattern, processors: int, gpu: Gpu | None = None
) -> Callable[[str], Sequence[tuple[PatternConfiguration, float]]]:
    """All configurations for a point, ranked by the model."""

    def of(where: str) -> list[tuple[PatternConfiguration, float]]:
        shapes = shapes_of(where)
        sizes = pattern.program.sizes(pattern.merged(shapes))
        wide = positions(pattern, shapes) >= NARROW
        made = [replace(kernel, wide=wide) for kernel in kernels(pattern, sizes, layouts(pattern, processors))]
        found = ranked(made, shapes, gpu)
        ranked_ones = [(kernel.plan.configuration, nanoseconds) for kernel, nanoseconds in found]
        return _in_turn(ranked_ones) if pattern.tiles else ranked_ones

    return of


def _in_turn(found: Sequence[tuple[PatternConfiguration, float]]) -> list[tuple[PatternConfiguration, float]]:
    """The best of each size of CTAs, then the second best, and so on: the model knows little of what that size does to
    the tiles of products, and only the first few are timed."""
    ranks: dict[int, int] = {}
    keyed = []
    for place, (configuration, nanoseconds) in enumerate(found):
        rank = ranks[configuration.threads] = ranks.get(configuration.threads, -1) + 1
        keyed.append((rank, place, (configuration, nanoseconds)))
    return [each for _, _, each in sorted(keyed, key=lambda key: key[:2])]


class PatternLauncher:
    """A loaded kernel with the memory that it needs beside its tensors."""

    def __init__(self, kernel: FusionKernel, compiled: LoadedKernel, device: DeviceContext) -> None:
        self.kernel, self.compiled, self._device = kernel, compiled, device
        self._blocks: list[int] = []

    def prepare(
        self,
        shapes: Sequence[Sequence[int]],
        tensors: Sequence[int],
        outputs: Sequence[int],
        resident: int = 0,
        tf32: bool = True,
    ) -> Enqueue:
        """One launch for tensors of these shapes, at these addresses.

        Args:
            shapes: of the tensors.
            tensors, outputs: their addresses.
            resident: CTAs that may run at once; 0: what the device says.
            tf32: whether float32 may be multiplied as TensorFloat-32.

        Raises:
            KernelError: the kernel was not made for them, or does not fit the device.
        """
        launch = self.kernel.launch(shapes, resident or self.compiled.resident)
        places = {("tensor", i): place for i, place in enumerate(tensors)} | {("tf32", 0): int(tf32)}
        places |= {("output", i): place for i, place in enumerate(outputs)}
        for buffer, size in zip(self.kernel.buffers, launch.scratch, strict=True):
            places[buffer.kind, buffer.number] = self._allocated(size)
        if self.kernel.plan.cooperative:
            places["barrier", 0] = self._allocated(4)
            self._device.fill(places["barrier", 0], 4, 0)
        words = self.kernel.words(shapes, launch, lambda kind, number: places[kind, number])
        return self.compiled.prepare((launch.ctas, 1), words)

    def close(self) -> None:
        """Give its memory back."""
        for block in self._blocks:
            self._device.free(block)
        self._blocks.clear()

    def _allocated(self, size: int) -> int:
        self._blocks.append(self._device.allocate(size))
        return self._blocks[-1]


class FusionBench:
    """A `tuner.Bench` of one pattern on a device; its points are the shapes of the tensors. Benches in several threads
    take turns on the device.

    Attributes:
        identity: all that a time or a kernel depends on, as one name.
    """

    def __init__(self, pattern: Pattern, device: DeviceContext, cache: Cache, wide: bool = False) -> None:
        """`wide`: whether indices need 64 bits."""
        self._pattern, self._device, self._cache, self._wide = pattern, device, cache, wide
        versions = f"{device.name} {device.arch} {device.driver_version()}"
        self.identity = digest(pattern.digest, versions, _sources())
        self._refused: dict[PatternConfiguration, str] = {}  # what cannot be compiled, with the reason

    def compile(self, configurations: Sequence[PatternConfiguration]) -> None:
        """Compile into the cache; any thread may call."""
        for configuration in configurations:
            try:
                self._image(make(self._pattern, configuration, self._wide))
            except KernelError as error:
                self._refused[configuration] = str(error)

    def measure(self, configuration: PatternConfiguration, where: str) -> MeasuredKernel:
        """Run it, see whether it is right where that takes no time, and time it.

        Raises:
            KernelError: it cannot be compiled or launched, or its results are wrong.
        """
        if configuration in self._refused:
            raise KernelError(self._refused[configuration])
        kernel = make(self._pattern, configuration, self._wide)
        image = self._image(kernel)
        with self._device.turn(), contextlib.closing(Module(image.code, self._device.driver)) as module:
            compiled = LoadedKernel(image, module)
            with contextlib.closing(PatternLauncher(kernel, compiled, self._device)) as launcher:
                milliseconds, found = self._timed(launcher, shapes_of(where))
        if found:  # compared after the turn, for which steps wait
            self._require_right(found, shapes_of(where))
        return MeasuredKernel(1e6 * milliseconds, compiled.registers, compiled.local)

    def kind(self, configuration: PatternConfiguration) -> Hashable:
        """The owners of rows, and how many phases; without the numbers."""
        plan = make(self._pattern, configuration, self._wide).plan
        return plan.phases, tuple((piece.phase, piece.rows, piece.owner.kind) for piece in plan.pieces)

    def parse(self, values: Any) -> PatternConfiguration:
        """See `tuner.Bench`."""
        return parse(values)

    def name(self, where: str) -> str:
        """See `tuner.Bench`."""
        return f"tensors of shapes {where}"

    def _image(self, kernel: FusionKernel) -> Any:
        return kernel.image(self._device.arch, self._cache, self._device.compile_source)

    def _require_right(self, found: Sequence[NDArray[Any]], shapes: Sequence[tuple[int, ...]]) -> None:
        program = self._pattern.original
        dtypes = [tensor.dtype for tensor in program.tensors]
        tensors = [np.resize(_sample(dtype), shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
        _require_right(found, reference.run(program, tensors), ROUNDED if self._pattern.tiles else EXACT)

    def _timed(self, launcher: PatternLauncher, shapes: Sequence[tuple[int, ...]]) -> tuple[float, list[NDArray[Any]]]:
        """Milliseconds, and the results where they are few."""
        program, device = self._pattern.original, self._device
        sizes = program.sizes(shapes)
        dtypes = [tensor.dtype for tensor in program.tensors]
        outputs = [tuple(sizes[axis] for axis in output.axes) for output in program.outputs]
        made_of = [numpy_dtype(program.types[output.node].dtype) for output in program.outputs]
        given = [_uploaded(device, dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
        made = [device.allocate(prod(shape) * dtype.itemsize) for shape, dtype in zip(outputs, made_of, strict=True)]
        try:
            enqueue = launcher.prepare(shapes, given, made)
            enqueue(device.stream)
            found = []
            if sum(map(prod, (*shapes, *outputs))) <= CHECKED:
                empty = [np.empty(shape, dtype) for shape, dtype in zip(outputs, made_of, strict=True)]
                found = [device.download(place, output) for place, output in zip(made, empty, strict=True)]
            return device.time(lambda: enqueue(device.stream)), found
        finally:
            for place in [*given, *made]:
                device.free(place)


def _uploaded(device: DeviceContext, dtype: str, shape: tuple[int, ...]) -> int:
    sample = _sample(dtype)
    size = prod(shape) * sample.itemsize
    return device.upload(sample.view(np.uint8)[:size], size)


@remember
def _sample(dtype: str) -> NDArray[Any]:
    """Numbers between 0 and 1, over and over in a tensor; those that may be indices are 0."""
    if dtype not in FLOATS:
        return np.zeros(1 << 10, numpy_dtype(dtype))
    return np.random.default_rng(0).random(SAMPLE, np.float32).astype(numpy_dtype(dtype))


def _require_right(found: Sequence[NDArray[Any]], expected: Sequence[NDArray[Any]], error: float) -> None:
    for number, (result, exact) in enumerate(zip(found, expected, strict=True)):
        if result.dtype.kind in "ib":
            close = result == exact
        else:
            most = 2e-2 if result.dtype.itemsize == 2 else error
            close = np.isclose(result.astype(np.float64), exact.astype(np.float64), most, most, equal_nan=True)
        if not close.all():
            raise KernelError(f"output {number} is wrong at {int((~close).sum())} of {result.size} places")


@remember
def _sources() -> str:
    """The templates and the code generator, as one name."""
    return digest(*(path.read_text() for path in sorted(HERE.glob("*.py"))), *nvrtc.header_texts())
