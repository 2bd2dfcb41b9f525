"""GPU programs of a region: for each of its kernels an image, and how it is launched. TfmemFusion takes them in the
order of the region's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias, TypeVar

from tqdm import tqdm

from custom_ops.code_digest import code_digest
from custom_ops.errors import KernelError
from custom_ops.fusion.codegen.description import describe
from custom_ops.fusion.codegen.kernel import NARROW, FusionKernel, make, positions
from custom_ops.fusion.codegen.plan.kernel_plan import PatternConfiguration
from custom_ops.fusion.codegen.plan.pattern import Pattern
from custom_ops.fusion.region import Kernel, Region, Shape
from custom_ops.fusion.search.bench import FusionBench, parse, point
from custom_ops.fusion.search.kernel_model import h200, surely_runs
from custom_ops.fusion.search.ranking import Ranked, Ranking
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.cores import usable_cores
from custom_ops.jit.device import DeviceContext
from custom_ops.jit.image import KernelImage
from custom_ops.jit.nvrtc import CompileSource
from custom_ops.timing.remembered import Remembered
from custom_ops.timing.tuner import TunerTrial, fastest, known, tune

CHOSEN = "chosen kernel 1"  # the form of a file
TYPICAL = 128  # a size that is known when the kernel runs, where one is chosen for it

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
Choose: TypeAlias = Callable[[Pattern, Shapes], PatternConfiguration]

Key = TypeVar("Key")
Given = TypeVar("Given")
Made = TypeVar("Made")


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
    configuration: PatternConfiguration

    def to_text(self) -> str:
        """An element of the op's attribute `programs`."""
        return self.image.to_text(dict(self.description))


def by_model(processors: int, ranking: Ranking | None = None) -> Choose:
    """The best ranked configuration, for a GPU with so many multiprocessors: the same in every process.

    Nothing is launched before the step runs it. So a kernel comes first whose CTAs are sure to run at once.
    """
    ranking, gpu = ranking or Ranking(), replace(h200(), processors=processors)

    def choose(pattern: Pattern, shapes: Shapes) -> PatternConfiguration:
        ranked = ranking(pattern, shapes, processors)
        if not ranked:
            raise KernelError("no template fits it")
        wide = positions(pattern, shapes) >= NARROW
        sure = (found for found, _ in ranked if surely_runs(make(pattern, found, wide=wide), shapes, gpu))
        return next(sure, ranked[0][0])

    return choose


def once(choose: Choose, cache: Cache, processors: int) -> Choose:
    """`choose`, which is asked once about a pattern by all processes with one cache, while tfmem's code is the same:
    ranking takes up to a second for a pattern."""
    chosen = Remembered(CHOSEN, cache, asdict, parse)

    def kept(pattern: Pattern, shapes: Shapes) -> PatternConfiguration:
        key = chosen.key({"processors": processors, "code": code_digest()}, pattern.digest, point(shapes))
        return chosen.get(key, lambda: choose(pattern, shapes))

    return kept


def by_cache(device: DeviceContext, cache: Cache, top: int | None, ranking: Ranking) -> Choose:
    """The fastest of those that were timed before, by `timed`; else the best ranked. Nothing is timed."""
    best_ranked = once(by_model(device.processors, ranking), cache, device.processors)

    def choose(pattern: Pattern, shapes: Shapes) -> PatternConfiguration:
        bench, where = _bench(pattern, shapes, device, cache), point(shapes)
        trials = known(bench, cache, [where], top)
        return fastest(bench, trials, where).configuration if trials else best_ranked(pattern, shapes)

    return choose


def timed(
    device: DeviceContext, cache: Cache, top: int | None, ranking: Ranking | None = None
) -> Callable[[Pattern, Shapes], Sequence[TunerTrial[PatternConfiguration, str]]]:
    """The `top` best ranked, the best one first, with their times on a device, or found in the cache.

    What it gives raises KernelError where no kernel of a pattern compiles and runs.
    """
    ranking = ranking or Ranking()

    def found(pattern: Pattern, shapes: Shapes) -> Sequence[TunerTrial[PatternConfiguration, str]]:
        def ranked(_: str) -> Ranked:
            return ranking(pattern, shapes, device.processors)

        return tune(_bench(pattern, shapes, device, cache), ranked, cache, [point(shapes)], top, progress=False)

    return found


def _bench(pattern: Pattern, shapes: Shapes, device: DeviceContext, cache: Cache) -> FusionBench:
    return FusionBench(pattern, device, cache, positions(pattern, shapes) >= NARROW)


def fastest_trial(trials: Sequence[TunerTrial[PatternConfiguration, str]]) -> TunerTrial[PatternConfiguration, str]:
    """The fastest of trials at one point, of which one ran at least."""
    return min(trials, key=lambda trial: trial.measured)


def by_tuner(device: DeviceContext, cache: Cache, top: int | None, ranking: Ranking | None = None) -> Choose:
    """The fastest that is timed; see `timed`."""
    trials_of = timed(device, cache, top, ranking)
    return lambda pattern, shapes: fastest_trial(trials_of(pattern, shapes)).configuration


def build(
    region: Region,
    arch: int,
    choose: Choose,
    cache: Cache | None = None,
    compile_source: CompileSource = nvrtc.compile_source,
    progress: bool = False,
) -> list[FusionProgram]:
    """What the op takes for a region, on GPUs of compute capability `arch` (90 for 9.0).

    Kernels are chosen and compiled in as many threads as there are cores: `choose` and `compile_source` are called from
    several at once.

    Raises:
        KernelError: the compiler is missing or rejects a source, with its words; or nothing can be chosen.
    """
    found = kernels(region, choose, progress)
    made = _each(
        [(_image_key(kernel), kernel, step.members) for kernel, step in found],
        lambda kernel: kernel.image(arch, cache, compile_source),
    )
    programs: dict[int, FusionProgram] = {}
    for kernel, _ in found:
        if id(kernel) not in programs:
            described = tuple(describe(kernel).items())
            programs[id(kernel)] = FusionProgram(made[_image_key(kernel)], described, kernel.plan.configuration)
    return [programs[id(kernel)] for kernel, _ in found]


def kernels(region: Region, choose: Choose, progress: bool = False) -> list[tuple[FusionKernel, Kernel]]:
    """The kernels of a region, in its order, each with the step that it computes. Equal ones are the same object.

    Raises:
        KernelError: nothing can be chosen.
    """
    steps = [(step, _shapes(region, step)) for step in region.steps if isinstance(step, Kernel)]
    made = _each(
        [((step.program, shapes), (step, shapes), step.members) for step, shapes in steps],
        lambda given: _kernel(*given, choose),
        progress,
    )
    return [(made[step.program, shapes], step) for step, shapes in steps]


def _each(
    wanted: Sequence[tuple[Key, Given, Sequence[str]]], make: Callable[[Given], Made], progress: bool = False
) -> dict[Key, Made]:
    """What `make` makes of each, by its key, once for equal keys; in several threads.

    Args:
        wanted: key, the argument of `make`, and the ops that an error names.
        make: is called from several threads at once.
        progress: whether to show a bar.
    """
    pool = ThreadPoolExecutor(usable_cores())
    try:
        futures: dict[Key, tuple[Future[Made], Sequence[str]]] = {}
        for key, given, members in wanted:
            if key not in futures:
                futures[key] = pool.submit(make, given), members
        found = {}
        for key, (future, members) in tqdm(
            futures.items(), "tuning kernels", unit="kernel", leave=False, disable=not progress
        ):
            with _told_of(members):
                found[key] = future.result()
        return found
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, what has not begun


def _image_key(kernel: FusionKernel) -> tuple[object, ...]:
    """All that an image depends on beside the GPU."""
    source, plan = kernel.source, kernel.plan
    return source.text, source.entry, source.shared, plan.configuration.threads, plan.cooperative


def _shapes(region: Region, step: Kernel) -> tuple[Shape, ...]:
    return tuple(region.values[value].shape for value in step.inputs)


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
