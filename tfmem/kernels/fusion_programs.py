"""Kernels of regions for a GPU of this machine: chosen by cost model or by timing the best, and cached."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from custom_ops.errors import KernelError
from custom_ops.fusion.programs import FusionProgram, build, by_model, by_tuner
from custom_ops.fusion.region import Region
from custom_ops.jit.cache import Cache
from custom_ops.jit.compilers import Compilers
from custom_ops.jit.device import Device, Quiet
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


def gpu_programs(
    target: Target, options: Options, compile_source: CompileSource | None = None, quiet: Quiet | None = None
) -> Programs:
    """What makes the programs of a region that runs on a device, "/job:localhost/.../device:GPU:0"; none for a CPU.

    Args:
        target: the device.
        options: of the pass, and where kernels are kept.
        compile_source: makes code, in several threads at once; None: other processes, for all regions.
        quiet: keeps steps from running while a kernel is timed.

    It raises KernelError if the GPU is too old, the compiler is missing or rejects a kernel, or none fits.
    """
    compile_source = compile_source or Compilers()

    def programs(region: Region, place: str) -> Sequence[FusionProgram]:
        if "GPU" not in place.rpartition("/")[2].upper():
            return ()
        tune = options.fusion.tune
        with (
            Device(target.ordinal, compile_source=compile_source, quiet=quiet) as device,
            kernel_folder(options.cache_directory) as folder,
        ):
            if device.arch < OLDEST:
                raise KernelError(
                    f"{device.name} has compute capability {device.arch / 10}; fused kernels need {OLDEST / 10}"
                )
            cache = Cache(folder)
            choose = by_model(device.processors)
            if is_timed(options):
                choose = by_tuner(device, cache, TIMED[tune])
            return build(region, device.arch, choose, cache, compile_source, progress=tune == "full")

    return programs
