"""Kernels of regions for a GPU of this machine: chosen by cost model or by timing the best, and cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from custom_ops.errors import KernelError
from custom_ops.fusion.programs import Choose, FusionProgram, build, by_cache, by_model, by_tuner, once
from custom_ops.fusion.region import Region
from custom_ops.fusion.search.ranking import Ranking
from custom_ops.jit import nvrtc
from custom_ops.jit.cache import Cache
from custom_ops.jit.compilers import Compilers
from custom_ops.jit.device import DeviceContext, Quiet
from custom_ops.jit.nvrtc import CompileSource
from graph_passes.passes.fuse.options import Tune
from tfmem.devices import Target, is_deterministic
from tfmem.kernels.recurrent import kernel_folder
from tfmem.options import Options

OLDEST = 70  # compute capability 7.0: kernels of more than 512 words
TIMED: dict[Tune, int | None] = {"fast": 6, "full": 12}  # kernels of each pattern

Programs = Callable[[Region, str], Sequence[FusionProgram]]


def is_timed(options: Options) -> bool:
    """Whether anything about a region on a GPU may be chosen by running it."""
    return options.fusion.tune != "off" and not is_deterministic()


def ranking_of(compile_source: CompileSource) -> Ranking:
    """What ranks kernels: where other processes compile, these do."""
    return Ranking(getattr(compile_source, "run", None))


def gpu_programs(
    target: Target,
    options: Options,
    compile_source: CompileSource | None = None,
    quiet: Quiet | None = None,
    ranking: Ranking | None = None,
    untimed: bool = False,
) -> Programs:
    """What makes the programs of a region that runs on a device, "/job:localhost/.../device:GPU:0"; none for a CPU.

    Args:
        target: the device.
        options: of the pass, and where kernels are kept.
        compile_source: makes code, in several threads at once; None: other processes, for all regions.
        quiet: keeps steps from running while a kernel is timed.
        ranking: ranks kernels; None: in the processes of `compile_source`, if it has any.
        untimed: time nothing now, and take what was timed before from the cache.

    It raises KernelError if the GPU is too old, the compiler is missing or rejects a kernel, or none fits.
    """
    compile_source = compile_source or Compilers()
    ranking = ranking or ranking_of(compile_source)
    others = options.fusion.capabilities

    def programs(region: Region, place: str) -> Sequence[FusionProgram]:
        if "GPU" not in place.rpartition("/")[2].upper():
            return ()
        tune = options.fusion.tune
        with (
            DeviceContext(target.ordinal, compile_source=compile_source, quiet=quiet) as device,
            kernel_folder(options.cache_directory) as folder,
        ):
            if device.arch < OLDEST:
                raise KernelError(
                    f"{device.name} has compute capability {device.arch / 10}; fused kernels need {OLDEST / 10}"
                )
            cache = Cache(folder)
            choose = once(by_model(device.processors, ranking), cache, device.processors)
            if is_timed(options) and untimed:
                choose = by_cache(device, cache, TIMED[tune], ranking)
            elif is_timed(options):
                choose = by_tuner(device, cache, TIMED[tune], ranking)
            made = build(region, device.arch, choose, cache, compile_source, progress=tune == "full")
            more = [arch for arch in others if arch != device.arch]
            return [*made, *exported_regions(region, more, choose, cache, compile_source)]

    return programs


def absent_gpu_programs(options: Options, processors: int, compile_source: CompileSource) -> Programs:
    """What makes the programs of a region for `FusionOptions.architectures`, where there is no GPU.

    Args:
        options: the architectures, and where kernels are kept.
        processors: multiprocessors of the GPU that kernels are chosen for.
        compile_source: as for `gpu_programs`.
    """
    choose = by_model(processors, ranking_of(compile_source))

    def programs(region: Region, place: str) -> Sequence[FusionProgram]:
        if "GPU" not in place.rpartition("/")[2].upper():
            return ()
        with kernel_folder(options.cache_directory) as folder:
            return exported_regions(region, options.fusion.capabilities, choose, Cache(folder), compile_source)

    return programs


def exported_regions(
    region: Region, architectures: Sequence[int], choose: Choose, cache: Cache, compile_source: CompileSource
) -> list[FusionProgram]:
    """The programs of a region for each compute capability, then PTX of the oldest, which all later ones compile.

    The op takes the first capability whose programs all load. Raises what `build` does.
    """
    found: list[FusionProgram] = []
    for arch in architectures:
        found += build(region, arch, choose, cache, compile_source)
    for arch in architectures[:1]:
        portable = build(region, arch, choose, None, nvrtc.compile_ptx)
        found += [replace(each, image=replace(each.image, kind="ptx")) for each in portable]
    return found
