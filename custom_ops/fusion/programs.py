"""GPU programs of a region: for each of its kernels an image, and how it is launched. TfmemFusion takes them in the
order of the region's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from custom_ops.errors import KernelError
from custom_ops.fusion.codegen.bench import FusionBench, candidates, point
from custom_ops.fusion.codegen.description import describe
from custom_ops.fusion.codegen.kernel import NARROW, FusionKernel, make, positions
from custom_ops.fusion.codegen.pattern import Pattern
from custom_ops.fusion.codegen.plan import Configuration
from custom_ops.fusion.region import Kernel, Region, Shape
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.device import Device
from custom_ops.jit.image import KernelImage
from custom_ops.jit.nvrtc import CompileSource
from custom_ops.jit.tune import fastest, tune

TYPICAL = 128  # a size that is known when the kernel runs, where one is chosen for it

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Choose: TypeAlias = Callable[[Pattern, Shapes], Configuration]


@dataclass(frozen=True)
class FusionProgram:
    """A kernel of a region, compiled.

    Attributes:
        image: its code.
        description: how it is launched (`codegen/description.py`).
        configuration: what was chosen.
    """

    image: KernelImage
    description: tuple[tuple[str, int | str], ...]
    configuration: Configuration

    def to_text(self) -> str:
        """An element of the op's attribute `programs`."""
        return self.image.to_text(dict(self.description))


def by_model(processors: int) -> Choose:
    """The best ranked configuration, for a GPU with so many multiprocessors: the same in every process."""

    def choose(pattern: Pattern, shapes: Shapes) -> Configuration:
        ranked = candidates(pattern, processors)(point(shapes))
        if not ranked:
            raise KernelError("no template fits it")
        return ranked[0][0]

    return choose


def by_tuner(device: Device, cache: Cache, top: int | None, progress: bool = False) -> Choose:
    """The fastest of the `top` best ranked, timed on a device whose context is current, or found in the cache."""

    def choose(pattern: Pattern, shapes: Shapes) -> Configuration:
        bench, where = FusionBench(pattern, device, cache, positions(pattern, shapes) >= NARROW), point(shapes)
        trials = tune(bench, candidates(pattern, device.processors), cache, [where], top, progress)
        return fastest(bench, trials, where).configuration

    return choose


def build(
    region: Region,
    arch: int,
    choose: Choose,
    cache: Cache | None = None,
    compile_source: CompileSource = nvrtc.compile_source,
) -> list[FusionProgram]:
    """What the op takes for a region, on GPUs of compute capability `arch` (90 for 9.0).

    Raises:
        KernelError: the compiler is missing or rejects a source, with its words; or nothing can be chosen.
    """
    made: dict[int, FusionProgram] = {}
    found = []
    for kernel, step in kernels(region, choose):
        if id(kernel) not in made:
            with _told_of(step.members):
                image = kernel.image(arch, cache, compile_source)
            made[id(kernel)] = FusionProgram(image, tuple(describe(kernel).items()), kernel.plan.configuration)
        found.append(made[id(kernel)])
    return found


def kernels(region: Region, choose: Choose) -> list[tuple[FusionKernel, Kernel]]:
    """The kernels of a region, in its order, each with the step that it computes. Equal ones are the same object.

    Raises:
        KernelError: nothing can be chosen.
    """
    made: dict[tuple[object, ...], FusionKernel] = {}
    found = []
    for step in region.steps:
        if not isinstance(step, Kernel):
            continue
        shapes = tuple(region.values[value].shape for value in step.inputs)
        key = (step.program, shapes)
        if key not in made:
            with _told_of(step.members):
                made[key] = _kernel(step, shapes, choose)
        found.append((made[key], step))
    return found


def typical(shapes: Sequence[Shape]) -> Shapes:
    """The shapes that a kernel is chosen for: some number in place of a size that is known only when it runs."""
    return tuple(tuple(TYPICAL if size is None else size for size in shape) for shape in shapes)


def _kernel(step: Kernel, shapes: Sequence[Shape], choose: Choose) -> FusionKernel:
    pattern, known = Pattern.of(step.program, shapes), typical(shapes)
    return make(pattern, choose(pattern, known), wide=positions(pattern, known) >= NARROW)


@contextmanager
def _told_of(members: Sequence[str]) -> Iterator[None]:
    """An error within says which ops it is about."""
    try:
        yield
    except KernelError as error:
        raise KernelError(f"a kernel of {', '.join(members) or 'a region'}: {error}") from error
